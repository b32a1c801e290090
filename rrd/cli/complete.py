"""Completion on the tab key: click's own scripts, with the jobs that there are."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from rrd.cli.places import STATUS, Where


class JobName(click.types.StringParamType):
    """The id of a job. Completion offers those of the last status and of the spool."""

    name = "job"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        taken = ctx.params.get(param.name or "") or ()
        try:
            known = sorted(set(_jobs(Where(**{k: ctx.params.get(k) for k in Where.__dataclass_fields__}))))
        except Exception:  # whatever it is, a tab key is no place to say it
            return []
        return [CompletionItem(job) for job in known if job.startswith(incomplete) and job not in taken]


JOB = JobName()



def _jobs(where: Where) -> Iterator[str]:
    from rrd.job import JOB_ID, id_of

    config = where.find()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        listed: Any = json.loads((config.run_dir / STATUS).read_bytes())["jobs"]
        yield from (j["id"] for j in listed if JOB_ID.fullmatch(j["id"]))
    with contextlib.suppress(OSError):
        yield from filter(None, map(id_of, os.listdir(config.jobs_dir)))


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash:  rrd completion bash > ~/.local/share/bash-completion/completions/rrd
    zsh:   rrd completion zsh > "${fpath[1]}/_rrd"
    fish:  rrd completion fish > ~/.config/fish/completions/rrd.fish
    """
    script = get_completion_class(shell)
    assert script is not None
    click.echo(script(ctx.find_root().command, {}, "rrd", "_RRD_COMPLETE").source())
