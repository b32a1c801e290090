"""``rrd build-kernels``: CUDA kernels made before a die asks for them. Needs no GPU, and no daemon."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from rrd.cli.places import Where, where
from rrd.errors import RrdError
from rrd.text import count, one_line


def _archs(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    archs = list(dict.fromkeys(part.strip() for part in value.split(",")))
    for arch in archs:
        if not re.fullmatch(r"sm_[1-9]\d{1,2}", arch):
            raise click.BadParameter(f"{one_line(arch, 20)!r} is none; a K80 is sm_37, a P40 sm_61")
    return archs


@click.command("build-kernels")
@click.option("--arch", "archs", required=True, metavar="SM,…", callback=_archs,
              help="Of which dies: sm_37 (K80), sm_61 (P40), sm_70, sm_75, sm_80, sm_90, …")
@click.option("--into", metavar="DIR", type=click.Path(file_okay=False),
              help="Where to; without it, the cache in which the daemon looks for them.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@where
def build_kernels(archs: list[str], into: str | None, as_json: bool, where: Where) -> None:
    """Compile the CUDA kernels for dies of these architectures.

    A die's worker does it by itself when it first needs them, in seconds. Ahead of that is for packages, and for
    machines without NVRTC: what lies in `kernels/cubins` of the installed package is used before the cache.
    """
    from rrd.cli import show

    place = into or str(where.find().cache_dir / "kernels" / "cuda")
    made = []
    for m in _built(place, archs):
        made.append(m)
        if not as_json:
            click.echo(f"{m['op']:<6} {m['arch']}  {m['bytes'] / 1024:7.1f} KiB  by {one_line(m['by'], 40)}")
    if into:  # nobody waits for it there, as workers do in the cache
        (Path(into) / "lock").unlink(missing_ok=True)
    if as_json:
        show.as_json({"directory": place, "made": made})
    else:
        show.say(f"{count(len(made), 'cubin')} in {one_line(place, 200)}")


def _built(place: str, archs: list[str]) -> Iterator[dict[str, Any]]:
    """Each cubin as it is made, by a process that imports what this one must not."""
    command = [sys.executable, "-m", "rrd.ops.cuda.build", place, *archs]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stderr
        for line in process.stdout:
            yield json.loads(line)
        said = process.stderr.read().strip().splitlines()
    if process.returncode:
        try:
            error = json.loads(said[-1])
        except (IndexError, ValueError):
            error = {"error": said[-1] if said else f"the compiler ended with {process.returncode}", "hint": ""}
        raise RrdError(error["error"], hint=error["hint"])
