"""The daemon's configuration: ``rrd.toml``, checked completely before any work.

A setting comes from the command line, else the environment (paths only), else the file, else the default. The
defaults of the paths are those of a system service for root and under systemd, and XDG directories for everybody else.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from rrd import toml
from rrd.errors import BadConfig
from rrd.text import one_line
from rrd.toml import Fault, show

SYSTEM_CONFIG = Path("/etc/rrd/rrd.toml")

PATHS = {"state_dir": "RRD_STATE_DIR", "cache_dir": "RRD_CACHE_DIR", "run_dir": "RRD_RUN_DIR",
         "jobs_dir": "RRD_JOBS_DIR"}
"""The paths that the environment may set, and by which variable."""

MIN_CPU_DIES = 6
"""Dies of a box without configuration, however few its cores: jobs side by side are what rrd is for."""


def parse_size(text: str) -> int:
    """Bytes in ``"11GiB"``, ``"800 MB"``. Raises ``Fault``."""
    m = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if not m or (m[3] and not m[2]):
        raise Fault(f'must be a size such as "11GiB", not {show(text)}')
    return int(float(m[1]) * (1024 if m[3] else 1000) ** " kmgt".index(m[2] or " "))


# ---- types of keys ----------------------------------------------------------------------------------------------


def _path(value: object) -> Path:
    text = os.fspath(value) if isinstance(value, (str, Path)) else None
    if text is None or not text.startswith("/") or len(os.fsencode(text)) > 4096 or "\0" in text:
        raise Fault(f"must be a full path, not {show(text if text is not None else value)}",
                    hint="start it with `/`")
    return Path(os.path.normpath(text))


def _device(value: object) -> str:
    if isinstance(value, str) and re.fullmatch(r"cpu|cuda:[0-9]{1,3}", value):
        return value
    raise Fault(f'must list devices such as "cpu" or "cuda:0", not {show(value)}')


def _size(value: object) -> int | None:
    if isinstance(value, str):
        value = parse_size(value)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and 2**20 <= value < 2**50):
        return value
    raise Fault(f'must be a size such as "11GiB", not {show(value)}')


def _address(value: object) -> str:
    host_port = r"(\[[0-9a-fA-F:]+\]|[^\s:\[\]/]+):[0-9]{1,5}"
    if not isinstance(value, str) or (value and not re.fullmatch(host_port, value)):
        raise Fault(f'must be "host:port", or "" for none, not {show(value)}')
    if value and int(value.rpartition(":")[2]) > 65535:
        raise Fault(f"must have a port up to 65535, not {show(value)}")
    return value


def _user(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**32 - 1:
        return value
    try:
        return pwd.getpwnam(value).pw_uid if isinstance(value, str) and "\0" not in value else int("no")
    except (KeyError, ValueError):
        raise Fault(f"must list users of this machine, not {show(value)}", hint="`id NAME` shows whether one exists"
                    ) from None


def _tuple(value: object) -> object:
    """TOML has lists only."""
    return tuple(value) if isinstance(value, list) else value


def _hook(value: object) -> object:
    """A URL, or a program by its full path with arguments."""
    if isinstance(value, str) and value:
        value = [value]
        if not value[0].startswith(("http://", "https://")):
            raise Fault(f"must be a list of a program and its arguments, or a URL, not {show(value[0])}",
                        hint='for example ["/usr/local/bin/tell", "me"] or "https://example.org/hook"')
    elif isinstance(value, list) and value and not (isinstance(value[0], str) and value[0].startswith("/")):
        raise Fault(f"must begin with the full path of a program, not {show(value[0])}")
    return _tuple(value or [])


AbsPath = Annotated[Path, PlainValidator(_path), WithJsonSchema({"type": "string", "pattern": "^/"})]
Paths = Annotated["tuple[AbsPath, ...]", BeforeValidator(_tuple)]
Device = Annotated[str, PlainValidator(_device), WithJsonSchema({"type": "string", "pattern": "^(cpu|cuda:[0-9]+)$"})]
Size = Annotated["int | None", PlainValidator(_size), WithJsonSchema({"type": "string", "examples": ["11GiB"]})]
Address = Annotated[str, PlainValidator(_address), WithJsonSchema({"type": "string"})]
User = Annotated[int, PlainValidator(_user),
                 WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}]})]
Argv = Annotated["tuple[str, ...]", BeforeValidator(_tuple)]
Hook = Annotated["tuple[str, ...]", BeforeValidator(_hook), WithJsonSchema({"anyOf": [
    {"type": "string", "format": "uri", "pattern": "^https?://"}, {"type": "array", "items": {"type": "string"}}]})]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _Table(_Strict, use_attribute_docstrings=True):
    """A table of the file: the docstrings of its keys are their descriptions."""


class GateConfig(_Table):
    """What grants and takes back a lane's dies."""

    kind: Literal["none", "command", "socket", "simulated"] = "none"
    """"none": every die is always there; "command": run programs; "socket": ask a helper; "simulated": for tests."""
    acquire: Argv = ()
    """Program and arguments that grant a die; `{die}` stands for its name, exit status 75 means try later."""
    release: Argv = ()
    """Program and arguments that take the die back."""
    socket: str = ""
    """Unix socket of the helper, for "socket"."""
    timeout: float = Field(default=10.0, gt=0, le=600)
    """Seconds after which an answer no longer counts."""

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> GateConfig:
        if self.kind == "command":
            for key in ("acquire", "release"):
                if not getattr(self, key) or not getattr(self, key)[0]:
                    raise Fault('must name a program for kind = "command"', key=key)
        if self.kind == "socket" and not self.socket.startswith("/"):
            raise Fault('must be the full path of the helper\'s socket for kind = "socket"', key="socket")
        return self


class LaneConfig(_Table):
    """Dies of which only one computes at a time."""

    name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,31}$")
    """Name to show; left out: its number, from 0."""
    dies: Annotated[tuple[Device, ...], BeforeValidator(_tuple)] = Field(min_length=1, max_length=1024)
    """The devices of the lane's dies, in order: "cpu" or "cuda:0"."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads that a die of this lane computes with; left out: the file's `threads`."""
    gate: GateConfig = GateConfig()
    """What grants a die before a visit."""


class DieSpec(_Strict):
    """One die, as the rest of rrd sees it."""

    index: int
    """Its number over all lanes, from 0."""
    name: str
    """How it is shown and named to the gate: its number as text."""
    device: str
    """For torch: "cpu" or "cuda:0"."""
    lane: str
    """Name of its lane."""
    threads: int
    """Threads it computes with."""


class LaneSpec(_Strict):
    """One lane with its dies numbered."""

    name: str
    dies: tuple[DieSpec, ...]
    gate: GateConfig


class Config(_Table):
    """The daemon's settings. The description of a key is what users read in the schema and in ``etc/rrd.toml``."""

    state_dir: AbsPath = Path("/var/lib/rrd")
    """Where jobs, ledgers and checkpoints live."""
    cache_dir: AbsPath = Path("/var/cache/rrd")
    """Tokenized data and the like: may be deleted at any time."""
    run_dir: AbsPath = Path("/run/rrd")
    """Control socket and status files."""
    jobs_dir: AbsPath = Path("/etc/rrd/jobs.d")
    """The spool: one job file per job."""
    output_root: AbsPath | None = None
    """Directory below which adapters may be written; left out: wherever the daemon may write."""
    model_roots: Paths = ()
    """Directories below which models may lie; empty: anywhere."""
    data_roots: Paths = ()
    """Directories below which data may lie; empty: anywhere."""

    metrics: Address = "127.0.0.1:9477"
    """Where Prometheus scrapes: "host:port"; "" for nowhere."""
    group: str = Field(default="rrd", pattern=r"^[a-z_][a-z0-9_-]{0,31}$")
    """Members of this group may use the control socket, and their job files count."""
    spool_uids: Annotated[tuple[User, ...], BeforeValidator(_tuple)] = ()
    """Users, besides root, the daemon's own and members of `group`, whose job files count: names or numbers."""
    rescan_seconds: float = Field(default=30.0, ge=1, le=3600)
    """How often the spool is read even if nothing was reported to have changed."""

    cpu_dies: int | None = Field(default=None, ge=1, le=1024)
    """CPU dies when no [[lane]] is given; left out: as many as cores, but at least 6."""
    threads: int = Field(default=1, ge=1, le=1024)
    """Threads that a die computes with. Results are the same bytes only at the same number."""
    jobs_per_die: int = Field(default=4, ge=1, le=10_000)
    """Jobs that may be resident on one die."""
    die_memory: Size = None
    """Memory of a die that rrd may use, such as "11GiB"; left out: what the die has."""
    hang_seconds: float = Field(default=60.0, ge=1, le=86400)
    """Seconds without progress after which a worker counts as hung, at the least."""

    on_done: Hook = ()
    """Whom to tell that a job is done: a program and its arguments, or a URL that gets a POST."""
    on_failed: Hook = ()
    """The same for a job that failed."""

    lane: Annotated[tuple[LaneConfig, ...], BeforeValidator(_tuple)] = ()
    """Lanes of dies; left out: a lane for each core, CPU dies spread over them."""

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if len(os.fsencode(self.run_dir / "control.sock")) > 107:
            raise Fault("is too long for a unix socket (95 bytes)", key="run_dir", hint="choose a shorter directory")
        for key in ("run_dir", "cache_dir", "jobs_dir"):
            if self.state_dir == getattr(self, key):
                raise Fault(f"must not be `state_dir` ({self.state_dir})", key=key)
        if self.state_dir.is_relative_to(self.cache_dir):
            raise Fault("must not lie below `cache_dir`, which may be deleted at any time", key="state_dir")
        _check_lanes(self.lane)
        return self

    @property
    def adapters_dir(self) -> Path:
        """Where the adapters of jobs that name no output go."""
        return self.output_root or self.state_dir / "adapters"

    @property
    def control_socket(self) -> Path:
        return self.run_dir / "control.sock"

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port to serve metrics on, or None."""
        host, _, port = self.metrics.rpartition(":")
        return (host.strip("[]"), int(port)) if self.metrics else None

    @property
    def spool_owners(self) -> frozenset[int]:
        """The user ids whose job files count, whatever groups they are in."""
        return frozenset({0, os.geteuid(), *self.spool_uids})

    @property
    def lanes(self) -> tuple[LaneSpec, ...]:
        """The lanes with their dies, on this machine."""
        return expand(self, cores())

    @property
    def dies(self) -> tuple[DieSpec, ...]:
        """All dies, by number."""
        return tuple(sorted((d for lane in self.lanes for d in lane.dies), key=lambda d: d.index))

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Mapping[str, Any] | None = None, *,
             environ: Mapping[str, str] = os.environ, service: bool | None = None) -> Config:
        """The configuration in force. ``overrides`` are flags, by key; those that are None were not given.

        ``service`` chooses between the system's paths and one's own; None finds out by ``is_service``.
        Raises ``BadConfig``: one sentence, with the file, the line and the key.
        """
        service = is_service(environ) if service is None else service
        named = path or environ.get("RRD_CONFIG")
        file = Path(named) if named else default_file(environ, service)
        given = _outside_the_file(environ, overrides or {})
        try:
            text, values = _read(file, must_exist=bool(named))
            outer = {key: value for key, (_, value) in given.items()}
            return toml.check(cls, {**default_dirs(environ, service), **values, **outer}, text)
        except Fault as e:
            key = re.split(r"[.\[]", e.key)[0]
            line = f":{e.line}" if e.line else ""
            where = given[key][0] if key in given else f"{one_line(str(file), 200)}{line}"
            raise BadConfig(f"{where}: {e.message}", hint=e.hint) from None


def _read(file: Path, *, must_exist: bool) -> tuple[str, dict[str, Any]]:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        if must_exist:
            raise Fault("there is no such file", hint="name a configuration file, or leave it out for the defaults"
                        ) from None
        return "", {}
    except OSError as e:
        raise Fault(f"cannot be read: {e.strerror}") from None
    return data.decode(errors="replace"), toml.read(data)


def _outside_the_file(environ: Mapping[str, str], overrides: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Settings from the environment and, stronger, from flags: key -> (the name to blame, value)."""
    found: dict[str, tuple[str, Any]] = {
        key: (variable, os.path.abspath(environ[variable])) for key, variable in PATHS.items() if environ.get(variable)}
    for key, value in overrides.items():
        if value is not None:
            given = os.path.abspath(value) if key in PATHS or key == "output_root" else value
            found[key] = (f"--{key.replace('_', '-')}", given)
    return found


def default_file(environ: Mapping[str, str], service: bool) -> Path:
    """The configuration file when none is named."""
    return SYSTEM_CONFIG if service else _xdg(environ, "XDG_CONFIG_HOME", ".config") / "rrd.toml"


def default_dirs(environ: Mapping[str, str], service: bool) -> dict[str, str]:
    """The paths that neither flag, environment nor file set: the system's, or one's own."""
    if service:
        # systemd names the directories it made for the unit, several joined by colons
        named = {"state_dir": "STATE_DIRECTORY", "cache_dir": "CACHE_DIRECTORY", "run_dir": "RUNTIME_DIRECTORY"}
        return {key: environ[v].split(":")[0] for key, v in named.items() if environ.get(v)}
    state = _xdg(environ, "XDG_STATE_HOME", ".local/state")
    run = environ.get("XDG_RUNTIME_DIR", "")
    return {"state_dir": str(state), "cache_dir": str(_xdg(environ, "XDG_CACHE_HOME", ".cache")),
            "run_dir": f"{run}/rrd" if run.startswith("/") else f"{state}/run",
            "jobs_dir": str(_xdg(environ, "XDG_CONFIG_HOME", ".config") / "jobs.d")}


def is_service(environ: Mapping[str, str]) -> bool:
    """Whether the system's paths are meant: for root, and for a unit whose directories systemd made."""
    return os.getuid() == 0 or "STATE_DIRECTORY" in environ


def _xdg(environ: Mapping[str, str], variable: str, below_home: str) -> Path:
    base = environ.get(variable, "")
    home = environ.get("HOME") or os.path.expanduser("~")
    return (Path(base) if base.startswith("/") else Path(home) / below_home) / "rrd"


# ---- lanes and dies ---------------------------------------------------------------------------------------------


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def _check_lanes(lanes: tuple[LaneConfig, ...]) -> None:
    names = [lane.name or str(i) for i, lane in enumerate(lanes)]
    for name in names:
        if names.count(name) > 1:
            raise Fault(f"names two lanes {show(name)}", key="lane")
    cards = [device for lane in lanes for device in lane.dies if device != "cpu"]
    for card in cards:
        if cards.count(card) > 1:
            raise Fault(f"lists {show(card)} twice", key="lane", hint="a die belongs to one lane, once")


def expand(config: Config, cores: int) -> tuple[LaneSpec, ...]:
    """The lanes of ``config`` with numbered dies.

    Without [[lane]] there are as many lanes as sets of ``threads`` cores, and dies take turns over them, so that
    the first dies lie in different lanes.
    """
    if config.lane:
        return _numbered(config)
    n_dies = config.cpu_dies or max(MIN_CPU_DIES, cores)
    n_lanes = min(n_dies, max(1, cores // config.threads))
    dies = [DieSpec(index=i, name=str(i), device="cpu", lane=str(i % n_lanes), threads=config.threads)
            for i in range(n_dies)]
    return tuple(LaneSpec(name=str(k), dies=tuple(dies[k::n_lanes]), gate=GateConfig()) for k in range(n_lanes))


def _numbered(config: Config) -> tuple[LaneSpec, ...]:
    lanes: list[LaneSpec] = []
    first = 0
    for number, lane in enumerate(config.lane):
        name, threads = lane.name or str(number), lane.threads or config.threads
        dies = tuple(DieSpec(index=i, name=str(i), device=device, lane=name, threads=threads)
                     for i, device in enumerate(lane.dies, first))
        lanes.append(LaneSpec(name=name, dies=dies, gate=lane.gate))
        first += len(dies)
    return tuple(lanes)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of ``rrd.toml``, for editors."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "rrd.toml"}
