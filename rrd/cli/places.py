"""Which daemon a command means: the path options that every command has, and where they lead."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rrd.config import Config

F = TypeVar("F", bound=Callable[..., Any])
STATUS = Path("status/snapshot.json")
"""Below the runtime directory: the last snapshot, for when the daemon is down."""

_ENVIRONMENT = ("RRD_CONFIG", "RRD_STATE_DIR", "RRD_CACHE_DIR", "RRD_RUN_DIR", "RRD_JOBS_DIR")


@dataclass(frozen=True)
class Where:
    """The path options as given."""

    config_file: str | None = None
    state: str | None = None
    jobs_dir: str | None = None
    cache_dir: str | None = None
    run_dir: str | None = None

    @property
    def file(self) -> Path | None:
        """The configuration file that was named."""
        return Path(self.config_file).absolute() if self.config_file else None

    def overrides(self) -> dict[str, str | None]:
        """Settings for ``Config.load``; ``--state DIR`` stands for all directories, below DIR."""
        own = {"state_dir": self.state, "jobs_dir": self.jobs_dir, "cache_dir": self.cache_dir, "run_dir": self.run_dir}
        if self.state is None:
            return own
        below = {"jobs_dir": "jobs.d", "cache_dir": "cache", "run_dir": "run"}
        return {k: v if v is not None else os.path.join(self.state, below[k]) for k, v in own.items()}

    def load(self, *, service: bool | None = None, **more: object) -> Config:
        """The configuration these options lead to. Raises BadConfig."""
        from rrd.config import Config

        return Config.load(self.config_file, {**self.overrides(), **more}, service=service)

    def find(self) -> Config:
        """The configuration of the daemon that a command is for.

        Without an option or variable that says which: one's own or, where only that one is there, the machine's.
        """
        if any(vars(self).values()) or any(os.environ.get(v) for v in _ENVIRONMENT):
            return self.load()
        return self._one_that_is_there()

    def _one_that_is_there(self) -> Config:
        from rrd.client import alive
        from rrd.config import is_service
        from rrd.errors import BadConfig

        first = self.load()
        try:
            other = self.load(service=not is_service(os.environ))
        except BadConfig:  # somebody else's file
            return first
        if alive(first.run_dir) or not (alive(other.run_dir) or os.path.exists(other.run_dir)):
            return first
        return first if os.path.exists(first.run_dir / STATUS) and not alive(other.run_dir) else other


def where(command: F) -> F:
    """Give ``command`` the path options, as one argument ``where``."""
    return _options(command, hidden=True)


def where_all(command: F) -> F:
    """The same, with every option in the command's help."""
    return _options(command, hidden=False)


def _named(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    if value == "":
        raise click.BadParameter("is empty; a variable that is not set?")
    return value


def _options(command: F, *, hidden: bool) -> F:
    import functools

    @functools.wraps(command)
    def collected(*args: Any, **kwargs: Any) -> Any:
        given = {k: kwargs.pop(k) for k in Where.__dataclass_fields__}
        return command(*args, where=Where(**given), **kwargs)

    def path(*names: str, what: str, metavar: str = "DIR", hidden: bool = hidden) -> Any:
        return click.option(*names, metavar=metavar, callback=_named, hidden=hidden, help=what)

    options = [
        path("-c", "--config-file", metavar="FILE", hidden=False, what="rrd.toml to use."),
        path("--state", hidden=False, what="A state directory of one's own, with all else below it."),
        path("--jobs-dir", what="Directory of the job files."),
        path("--cache-dir", what="Directory of what may be deleted any time."),
        path("--run-dir", what="Directory of the control socket."),
    ]
    decorated: Any = collected
    for option in reversed(options):
        decorated = option(decorated)
    result: F = decorated
    return result


def job_dir(config: Config, job: str) -> Path:
    """The directory of ``job``. Raises NoSuchJob, naming the nearest one, when there is none."""
    from rrd.job import JOB_ID

    path = config.state_dir / "jobs" / job
    if JOB_ID.fullmatch(job) and path.is_dir():
        return path
    root = config.state_dir / "jobs"
    raise no_such_job(job, (p.name for p in root.iterdir()) if root.is_dir() else ())


def no_such_job(job: str, known: Any) -> Exception:
    """The error for an unknown job, with the nearest known one as the hint."""
    import difflib

    from rrd.errors import NoSuchJob
    from rrd.text import one_line

    near = difflib.get_close_matches(job[:64], [k for k in known if not k.startswith(".")], n=1)
    hint = f"did you mean {one_line(near[0], 64)}?" if near else "`rrd status` lists the jobs"
    return NoSuchJob(f"there is no job {one_line(job, 64)}", hint=hint)
