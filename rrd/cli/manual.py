"""The man pages, made when they are installed from what the program itself says: ``--help`` of every command, and the
keys' own descriptions. So they cannot be out of date.

``python -m rrd.cli.manual DIR [rrd-setup]`` writes them to ``DIR/man1`` and so on.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from rrd import __version__, edits
from rrd.cli.app import COMMANDS, app
from rrd.config import PATHS, Config, GateConfig, LaneConfig
from rrd.helper import config as gate
from rrd.helper import main as helper
from rrd.job import JobSpec

EXITS = {0: "Done.", 1: "It failed.", 2: "Usage.", 3: "The daemon is not running.", 4: "There is no such job.",
         65: "Data are damaged.", 75: "Try later: somebody else holds what is needed.", 77: "No permission.",
         78: "The configuration or a job file is bad; starting again will not help."}
FILES = {"/etc/rrd/rrd.toml": "The configuration of the service; see rrd.toml(5).",
         "/etc/rrd/jobs.d/*.toml": "The spool: one file a job; see rrd-job(5).",
         "/var/lib/rrd/jobs/": "Ledger, history, events and checkpoints of each job.",
         "/var/lib/rrd/adapters/": "Results, where a job names no output.",
         "/var/cache/rrd/": "Tokenized data and the like; may be deleted at any time.",
         "/run/rrd/control.sock": "Where the commands reach the daemon.",
         "~/.config/rrd/, ~/.local/state/rrd/, ~/.cache/rrd/": "The same for a daemon of one's own."}

CONFIGURATION = """
A TOML file. Every key has a default, and so has the file: it need not be there. An unknown key or a bad value keeps the
daemon from starting (exit status 78), with the line and the reason. A flag of `rrd daemon` wins over the environment
(RRD_STATE_DIR and so on), and that over this file. `rrd reload` reads it again and says which changes wait for the
next start."""
LANES = """
Each table `[[lane]]` lists dies of which only one computes at a time; lanes run side by side. Dies are numbered from 0
over all lanes, in the order in which they stand."""
LANE_EXAMPLE = """\
[[lane]]
name = "k80"
dies = ["cuda:0", "cuda:1"]
[lane.gate]
kind = "socket"
socket = "/run/rrd-gate.sock\""""
JOB_FILE = """
A flat TOML file. Its name is the job's id: letters, digits, `_` and `-`, at most 63 of them. `rrd check` says whether a
file is right, `rrd submit` hands it in and fills in relative paths; a file that is copied into the directory by hand
needs full paths.

An edit of a key marked `live` is taken over at the job's next step. One marked `restart` is taken over by `rrd
restart`, which carries on from the newest checkpoint; any other change means training from step 0, which also needs
`rrd restart`."""
JOB_EXAMPLE = """\
model = "/srv/models/SmolLM2-135M"
data = "/srv/data/code.jsonl"
lora_rank = 16
epochs = 2.0
checkpoint_every = "10min\""""


# ---- roff -------------------------------------------------------------------------------------------------------


def roff(text: str) -> str:
    """Plain text, safe in a line of roff; `code` in bold."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("…", "...")
    text = text.replace("↑", "up").replace("↓", "down").replace("→", "to")
    text = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", text)
    return "\n".join("\\&" + line if line.startswith((".", "'")) else line for line in text.split("\n"))


def head(name: str, section: int, what: str) -> Iterator[str]:
    yield f'.TH "{name.upper()}" "{section}" "" "rrd {__version__}" "rrd"'
    yield ".nh"
    yield ".ad l"
    yield f".SH NAME\n{roff(name)} \\- {roff(what)}"


def paragraphs(text: str) -> Iterator[str]:
    """A docstring; what follows a backspace, as click has it, is kept as it stands."""
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if part.lstrip().startswith("\b"):
            yield ".PP\n.nf\n" + roff(textwrap.dedent(part.replace("\b\n", ""))) + "\n.fi"
        else:
            yield ".PP\n" + roff(" ".join(part.split()))


def item(tag: str, text: str) -> str:
    return f".TP\n\\fB{roff(tag)}\\fR\n{roff(text)}"


def see_also(*pages: str) -> str:
    return ".SH SEE ALSO\n" + ",\n".join(f"\\fB{roff(p[:-3])}\\fR{p[-3:]}" for p in pages)


# ---- rrd(1) -----------------------------------------------------------------------------------------------------


def rrd_1() -> Iterator[str]:
    yield from head("rrd", 1, "train many language-model adapters on one box, in rotation")
    yield ".SH SYNOPSIS\n\\fBrrd\\fR [\\fIoptions\\fR] \\fIcommand\\fR [\\fIarguments\\fR]"
    yield ".SH DESCRIPTION"
    yield from paragraphs((app.help or "").split("Exit codes:")[0])
    yield ".SH OPTIONS"
    yield from options(app, click.Context(app, info_name="rrd"))
    yield ".SH COMMANDS"
    for name in COMMANDS:
        command = app.get_command(click.Context(app), name)
        assert command is not None
        yield from of_command(command, click.Context(command, info_name=f"rrd {name}"))
    yield ".SH EXIT STATUS"
    yield from (item(str(code), said) for code, said in EXITS.items())
    yield ".SH ENVIRONMENT"
    yield item("RRD_CONFIG", "Configuration file to use.")
    for key, variable in PATHS.items():
        yield item(variable, f"Wins over `{key}` of rrd.toml.")
    yield item("RRD_DEBUG", "Show where an error comes from.")
    yield item("NO_COLOR", "No colours.")
    yield ".SH FILES"
    yield from (item(path, said) for path, said in FILES.items())
    yield see_also("rrd.toml(5)", "rrd-job(5)", "rrd-gate(8)", "systemctl(1)", "journalctl(1)")


def of_command(command: click.Command, ctx: click.Context) -> Iterator[str]:
    usage = command.get_usage(ctx).removeprefix("Usage: ")
    yield ".SS " + roff(" ".join(usage.split()))
    yield from paragraphs(command.help or "")
    yield from options(command, ctx)
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            below = command.get_command(ctx, name)
            assert below is not None
            yield from of_command(below, click.Context(below, info_name=f"{ctx.info_name} {name}"))


def options(command: click.Command, ctx: click.Context) -> Iterator[str]:
    for parameter in command.params:
        record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
        if record:
            yield item(*record)


# ---- rrd.toml(5), rrd-job(5) ------------------------------------------------------------------------------------


def rrd_toml_5() -> Iterator[str]:
    yield from head("rrd.toml", 5, "configuration of the rrd daemon")
    yield ".SH SYNOPSIS\n/etc/rrd/rrd.toml, or ~/.config/rrd/rrd.toml"
    yield ".SH DESCRIPTION"
    yield from paragraphs(CONFIGURATION)
    yield ".SH KEYS"
    yield from keys(Config)
    yield ".SH LANES"
    yield from paragraphs(LANES)
    yield from keys(LaneConfig)
    yield ".SH GATES"
    yield from paragraphs("The table `[lane.gate]` of a lane says what grants a die before a visit.")
    yield from keys(GateConfig)
    yield ".SH EXAMPLE"
    yield from example(LANE_EXAMPLE)
    yield see_also("rrd(1)", "rrd-job(5)", "rrd-gate(8)")


def rrd_job_5() -> Iterator[str]:
    yield from head("rrd-job", 5, "a job file of rrd: what to train, on what, how")
    yield ".SH SYNOPSIS\n/etc/rrd/jobs.d/\\fINAME\\fR.toml"
    yield ".SH DESCRIPTION"
    yield from paragraphs(JOB_FILE)
    yield ".SH KEYS"
    yield from keys(JobSpec)
    yield ".SH EXAMPLE"
    yield from example(JOB_EXAMPLE)
    yield see_also("rrd(1)", "rrd.toml(5)")


def example(text: str) -> Iterator[str]:
    yield ".PP\n.nf\n.RS\n" + roff(text) + "\n.RE\n.fi"


def keys(model: type[BaseModel]) -> Iterator[str]:
    schema = model.model_json_schema()
    for name, field in schema["properties"].items():
        if name in ("lane", "gate"):
            continue  # tables have sections of their own
        required = name in schema.get("required", ())
        said = [field.get("description", "")]
        extra = (kind(field), "must be given" if required else default(field), mark(model, name))
        if any(extra):
            said.append(f"({'; '.join(filter(None, extra))})")
        yield item(name, " ".join(said))


def kind(field: dict[str, Any]) -> str:
    """The values that a key takes, in words."""
    if "enum" in field:
        return " or ".join(json.dumps(v) for v in field["enum"])
    if "const" in field:
        return json.dumps(field["const"])
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(k for f in field["anyOf"] if (k := kind(f)) and k != "null"))
    word = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false",
            "array": "list", "object": "table"}.get(field.get("type", ""), field.get("type", ""))
    low, high = field.get("minimum", field.get("exclusiveMinimum")), field.get("maximum", field.get("exclusiveMaximum"))
    if word == "text" and field.get("examples"):
        return f"text such as {json.dumps(field['examples'][0])}"
    if low is not None and high is not None:
        return f"{word} {'above' if 'exclusiveMinimum' in field else 'from'} {low:g} to {high:g}"
    return f"{word} of {low:g} or more" if low else word


def default(field: dict[str, Any]) -> str:
    value = field.get("default")
    return f"default {json.dumps(value)}" if value not in (None, [], {}) or isinstance(value, bool) else ""


def mark(model: type[BaseModel], name: str) -> str:
    if model is not JobSpec:
        return ""
    return "live" if name in edits.LIVE_KEYS else "restart" if name in edits.RESTART_KEYS else ""


# ---- rrd-gate(8) ------------------------------------------------------------------------------------------------


def rrd_gate_8() -> Iterator[str]:
    yield from head("rrd-gate", 8, "grant the dies of a bar-swap box one at a time")
    yield from of_parser(helper._arguments(), helper.__doc__ or "")
    yield ".SH FILES"
    yield item(gate.PATH, "The configuration, in TOML. Its keys:")
    yield ".RS"
    yield from fields(gate.HelperConfig)
    yield ".RE\n.PP\nThe keys of each table \\fB[[group]]\\fR:\n.RS"
    yield from fields(gate.GroupConfig)
    yield ".RE"
    yield see_also("rrd(1)", "rrd.toml(5)")


def of_parser(parser: argparse.ArgumentParser, more: str = "") -> Iterator[str]:
    """Synopsis, description and options of a program that is no command of rrd."""
    yield ".SH SYNOPSIS\n" + roff(" ".join(parser.format_usage().removeprefix("usage: ").split()))
    yield ".SH DESCRIPTION"
    yield from paragraphs(parser.description or "")
    yield from paragraphs(more) if more else ()
    yield ".SH OPTIONS"
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            flags = ", ".join(action.option_strings) + (f" {action.metavar}" if action.metavar else "")
            yield item(flags, (action.help or "").replace("%(default)s", str(action.default)))


def rrd_setup_8(script: str) -> str:
    """The page of the package's own script, which is no part of this one."""
    page = [*head("rrd-setup", 8, "make the Python environment that rrd runs in"),
            *of_parser(runpy.run_path(script)["arguments"]()), see_also("rrd(1)")]
    return "\n".join(page).replace(".SH DESCRIPTION\n.PP", ".SH DESCRIPTION") + "\n"


def fields(kind_of: type[Any]) -> Iterator[str]:
    """A dataclass whose fields have docstrings below them."""
    said = dict(re.findall(r'^    (\w+): [^\n]*\n    """(.*?)"""$', inspect.getsource(kind_of), re.M | re.S))
    for f in dataclasses.fields(kind_of):
        if f.name != "groups":
            yield item(f.name, " ".join(said[f.name].split()))


PAGES = {"rrd.1": rrd_1, "rrd.toml.5": rrd_toml_5, "rrd-job.5": rrd_job_5, "rrd-gate.8": rrd_gate_8}


def render(name: str) -> str:
    """The source of a page."""
    source = "\n".join(PAGES[name]()) + "\n"
    return re.sub(r"^(\.S[HS] .*)\n\.PP$", r"\1", source, flags=re.M)


def pages() -> dict[str, str]:
    """All pages, by path below a directory of man pages: ``man1/rrd.1``."""
    return {f"man{name[-1]}/{name}": render(name) for name in PAGES}


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: python -m rrd.cli.manual DIR [rrd-setup]")
    every = pages()
    if sys.argv[2:]:
        every["man8/rrd-setup.8"] = rrd_setup_8(sys.argv[2])
    for name, text in every.items():
        path = Path(sys.argv[1]) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
