"""The job file: what to train, on what, how. Every rule about it is here; nothing here touches the disk but by name.

A job file is flat TOML named ``<id>.toml``. Keys fall into three kinds (``docs/job-file.md``): *live* keys apply to a
running job at its next step, *restart* keys at ``rrd restart JOB``, which carries on from the checkpoint, and
*identity* keys say which numbers come out, so that changing one means training from step 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator

from rrd import toml
from rrd.errors import BadJob
from rrd.text import one_line
from rrd.toml import Fault, show

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
"""A job's id, by ``fullmatch`` only: it becomes a directory name and a metric label."""

MAX_BYTES = 64 * 1024
"""A larger job file is refused unread."""

MAX_STEPS = 10**9

LIVE_KEYS = frozenset({"steps_per_visit", "visit_seconds", "weight", "max_steps", "epochs", "checkpoint_every", "keep",
                       "on_nan", "paused", "eval_every", "export_every"})
"""Keys whose new value a running job takes over at its next step."""

PLACE_KEYS = frozenset({"die"})
"""Keys whose new value counts when the job is next given a place."""

RESTART_KEYS = frozenset({"output", "eval_data", "export_merged", "resume"})
"""Keys that ``rrd restart`` takes over while carrying on from the checkpoint: no training step depends on them."""

PATH_KEYS = ("model", "data", "output", "tokenizer", "eval_data")

_UNITS = {"s": 1, "sec": 1, "second": 1, "min": 60, "m": 60, "minute": 60, "h": 3600, "hour": 3600, "d": 86400,
          "day": 86400}


def parse_duration(text: str) -> float:
    """Seconds in ``"90s"``, ``"10min"``, ``"1.5h"``. Raises ``Fault``."""
    m = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([a-z]+?)s?\s*", text.lower())
    if not m or m[2] not in _UNITS:
        raise Fault(f'must be a duration such as "10min", "90s" or "2h", not {show(text)}')
    return float(m[1]) * _UNITS[m[2]]


# ---- types of keys: each a function from what stands in the file to what is meant ------------------------------


def _path(value: object) -> object:
    if not isinstance(value, str):
        return value  # pydantic says that it must be text
    if not value or len(value.encode()) > 4096 or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise Fault(f"is no path: {show(value)}", hint="give the full path of a file or directory")
    if not value.startswith("/"):
        raise Fault(f"must be a full path, not {show(value)}", hint="the service has no current directory: "
                    "start with `/`, or use `rrd submit`, which fills it in")
    return os.path.normpath(value)


def _die(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000:
        return value
    if isinstance(value, str):
        if value.isascii() and value.isdigit() and len(value) < 5:
            return int(value)
        if value == "auto" or re.fullmatch(r"GPU-[0-9a-fA-F-]{8,40}", value):
            return value
        if re.fullmatch(r"([0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", value):
            return value.lower()
    raise Fault(f'must be "auto", a die\'s number, a UUID or a PCI address, not {show(value)}',
                hint="`rrd dies` lists them")


def _steps_or_auto(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1_000_000:
        return value
    raise Fault(f'must be "auto" or a number of steps from 1 to 1,000,000, not {show(value)}')


def _cadence(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_STEPS:
        return value
    if isinstance(value, str):
        if not 1 <= parse_duration(value) <= 7 * 86400:
            raise Fault(f"must be between 1 second and 7 days, not {show(value)}")
        return value.strip()
    raise Fault(f'must be a number of steps (at least 1) or a duration such as "10min", not {show(value)}')


def _quantize(value: object) -> bool | Literal["int8"]:
    if value is False:
        return False
    if value is True or value == "int8":
        return "int8"
    raise Fault(f'must be true, false or "int8", not {show(value)}')


def _names(value: object) -> object:
    """Lists of module names; JSON and TOML know no tuples."""
    if not isinstance(value, (list, tuple)):
        return value
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_]{1,100}", name):
            raise Fault(f'must list names of linear modules such as "q_proj", not {show(name)}')
    if not value or len(set(value)) < len(value):
        raise Fault("must name each module once, and at least one", hint="leave it out for the family's default")
    return tuple(value)


def _ranks(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    for name, rank in value.items():
        _names([name])
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= 4096:
            raise Fault(f"must give a rank from 1 to 4096 for each module, not {show(rank)} for {show(name)}")
    return dict(value)


def _betas(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        return value
    numbers = [float(b) for b in value if isinstance(b, (int, float)) and not isinstance(b, bool) and 0 <= b < 1]
    if len(numbers) != 2 or len(value) != 2:
        raise Fault("must be two numbers from 0 up to, not including, 1", hint="the usual ones are [0.9, 0.999]")
    return tuple(numbers)


def _schema(*kinds: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(kinds)} if len(kinds) > 1 else kinds[0])


AbsPath = Annotated[str, BeforeValidator(_path)]
Die = Annotated["int | str", PlainValidator(_die), _schema({"type": "integer", "minimum": 0}, {"type": "string"})]
StepsOrAuto = Annotated["int | Literal['auto']", PlainValidator(_steps_or_auto),
                        _schema({"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": 1_000_000})]
Cadence = Annotated["int | str", PlainValidator(_cadence),
                    _schema({"type": "integer", "minimum": 1}, {"type": "string", "examples": ["10min", "90s"]})]
Quantize = Annotated["bool | Literal['int8']", PlainValidator(_quantize),
                     _schema({"type": "boolean"}, {"const": "int8"})]
Names = Annotated["tuple[str, ...]", BeforeValidator(_names)]
Ranks = Annotated[dict[str, int], BeforeValidator(_ranks)]
Betas = Annotated["tuple[float, float]", BeforeValidator(_betas)]
Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]


class JobSpec(BaseModel):
    """One job, checked. The description of a key is what users read in the schema and in ``docs/job-file.md``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)

    model: AbsPath
    """Directory of the base model: `config.json` and safetensors files."""
    data: AbsPath
    """Training data: a `.jsonl` or `.txt` file."""
    output: AbsPath | None = None
    """Directory for the finished adapter; left out: `adapters/<job>` below rrd's state directory."""
    die: Die = "auto"
    """Where to train: "auto", a die's number, a UUID or a PCI address."""
    tokenizer: AbsPath | None = None
    """Tokenizer file, if not the one beside the model."""

    method: Literal["lora", "full"] = "lora"
    """"lora" trains a small adapter, "full" all weights."""
    lora_rank: int = Field(default=32, ge=1, le=4096)
    """Rank of the adapter's matrices."""
    lora_alpha: float | None = Field(default=None, gt=0, le=1e6)
    """Scale of the adapter; left out: twice `lora_rank`."""
    lora_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapter's inputs dropped in each step."""
    lora_targets: Names | None = None
    """Names of the linear modules to adapt; left out: all linears of the blocks."""
    lora_ranks: Ranks = {}
    """Another rank for some modules, such as `{q_proj = 64}`."""
    lora_rs: bool = False
    """Rank-stabilized LoRA: scale by alpha / sqrt(rank) in place of alpha / rank."""

    lr: float = Field(default=2e-4, gt=0, le=10)
    """Learning rate after warm-up."""
    epochs: float = Field(default=1.0, gt=0, le=1e6)
    """Passes over the data; may be a fraction. Not used when `max_steps` is given."""
    max_steps: Steps | None = None
    """Optimizer steps to train; wins over `epochs`."""
    batch_size: int = Field(default=1, ge=1, le=65536)
    """Samples in a micro-step."""
    grad_accum: int = Field(default=1, ge=1, le=65536)
    """Micro-steps whose gradients make one step."""
    seq_len: int = Field(default=512, ge=2, le=1_048_576)
    """Longest sample, in tokens."""
    too_long: Literal["truncate", "split"] = "truncate"
    """What to do with a longer sample: cut off its end, or make several of it."""
    max_bad_lines: int = Field(default=100, ge=0, le=MAX_STEPS)
    """Damaged lines of data to skip before the job is refused."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after warm-up."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEPS)
    """Steps over which the learning rate rises from 0."""
    min_lr: float = Field(default=0.0, ge=0, le=10)
    """Learning rate at the end of the schedule."""
    weight_decay: float = Field(default=0.0, ge=0, le=10)
    """AdamW's decay of the weights."""
    betas: Betas = (0.9, 0.999)
    """AdamW's averaging of gradients and of their squares."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's guard against division by zero."""
    clip_norm: float = Field(default=1.0, ge=0, le=1e6)
    """Longest gradient, all parameters together; 0 does not clip."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Decides initial adapter, order of samples and dropout."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of the frozen weights and of the arithmetic; "auto" takes what the die is good at."""
    quantize: Quantize = False
    """Hold the frozen weights as 8-bit integers: true, false or "int8"."""
    gradient_checkpointing: bool = False
    """Compute activations twice in place of keeping them: less memory, slower."""

    steps_per_visit: StepsOrAuto = "auto"
    """Steps a turn on the die; "auto" takes as many as fill `visit_seconds`."""
    visit_seconds: float = Field(default=10.0, ge=0.01, le=3600)
    """Length of a turn when `steps_per_visit` is "auto"."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Share of the turns, against the other jobs' weights."""
    paused: bool = False
    """Keep the job, take no turns."""

    checkpoint_every: Cadence = "10min"
    """How often to save: a duration such as "10min", or a number of steps."""
    keep: int = Field(default=3, ge=1, le=10_000)
    """Checkpoints to keep."""
    eval_data: AbsPath | None = None
    """Held-out data whose loss is measured."""
    eval_every: Steps | None = None
    """Steps between measurements on `eval_data`; left out: only at the end."""
    export_every: Steps | None = None
    """Steps between exports of the unfinished adapter; left out: only at the end."""
    export_merged: bool = False
    """Write the whole model with the adapter merged in, too."""
    resume: Literal["exact", "compatible"] = "exact"
    """"exact" refuses to go on where another torch, die or thread count could change numbers; "compatible" goes on."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A loss that is no number: stop the job, or skip that step."""

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if self.min_lr > self.lr:
            raise Fault(f"must not be above `lr` ({self.lr:g}), not {self.min_lr:g}", key="min_lr")
        if self.max_steps is not None and self.warmup_steps > self.max_steps:
            raise Fault(f"must not be above `max_steps` ({self.max_steps}), not {self.warmup_steps}",
                        key="warmup_steps")
        if self.method == "full" and self.quantize:
            raise Fault('needs frozen weights, which method = "full" has not', key="quantize",
                        hint='use method = "lora", or leave quantize out')
        if self.eval_every is not None and self.eval_data is None:
            raise Fault("needs `eval_data`", key="eval_every", hint="name a held-out data file, or leave it out")
        return self

    @property
    def alpha(self) -> float:
        """LoRA's alpha, with the default filled in."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def checkpoint_seconds(self) -> float | None:
        """The cadence in seconds, or None where it is given in steps."""
        return parse_duration(self.checkpoint_every) if isinstance(self.checkpoint_every, str) else None

    @property
    def checkpoint_steps(self) -> int | None:
        """The cadence in steps, or None where it is given as a duration."""
        return self.checkpoint_every if isinstance(self.checkpoint_every, int) else None


# ---- from bytes -------------------------------------------------------------------------------------------------


def id_of(name: str) -> str | None:
    """The job's id in a file name such as ``code.toml``; None for every other name."""
    stem = name[: -len(".toml")] if name.endswith(".toml") else ""
    return stem if JOB_ID.fullmatch(stem) else None


def parse_job(name: str, data: bytes, *, base: Path | None = None) -> JobSpec:
    """The job in ``data``, the contents of the file ``name``. Raises only ``BadJob``, whatever the bytes are.

    ``base`` is the directory from which relative paths count (and ``~`` is the home); without it they are refused.
    """
    try:
        if len(data) > MAX_BYTES:
            raise Fault(f"the file is larger than {MAX_BYTES // 1024} KiB", hint="is this a job file?")
        if not data.strip():
            raise Fault("the file is empty", hint="a job needs at least `model = …` and `data = …`")
        values = toml.read(data)
        return toml.check(JobSpec, _absolute(values, base) if base else values, data.decode())
    except Fault as e:
        raise BadJob(e.message, hint=e.hint, file=one_line(name, 100), line=e.line, key=e.key) from None


def _absolute(values: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """``values`` with relative paths counted from ``base``."""
    given = {k: values[k] for k in PATH_KEYS if isinstance(values.get(k), str) and values[k]}
    return {**values, **{k: os.path.normpath(base / os.path.expanduser(v)) for k, v in given.items()}}


def to_toml(job: JobSpec | Mapping[str, object]) -> str:
    """``job`` as a job file. A ``JobSpec`` is written with every key, so that later defaults do not change it."""
    return toml.dump(job.model_dump() if isinstance(job, JobSpec) else job)


# ---- identity and edits -----------------------------------------------------------------------------------------


def identity_keys(spec: JobSpec) -> dict[str, Any]:
    """The keys that decide which numbers training produces, normalized: what means the same is the same.

    Keys at their default are left out, so that a key added by a later rrd does not orphan older checkpoints (and
    therefore a default, once released, never changes).
    """
    kept = spec.model_dump(mode="json", exclude=set(LIVE_KEYS | PLACE_KEYS | RESTART_KEYS), exclude_defaults=True)
    if spec.method == "full":
        return {k: v for k, v in kept.items() if not k.startswith("lora_")}
    targets = {"lora_targets": sorted(spec.lora_targets)} if spec.lora_targets else {}
    return {**kept, "lora_alpha": spec.alpha, **targets}


def identity(spec: JobSpec) -> str:
    """sha256, in hex, of ``identity_keys``: a checkpoint of another identity is never silently continued."""
    text = json.dumps(identity_keys(spec), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def changes(old: JobSpec, new: JobSpec) -> tuple[set[str], set[str]]:
    """Keys that differ: those a running job takes over by itself (live, and ``die``), and those it refuses.

    The second set needs ``rrd restart``; it starts from step 0 where ``identity`` differs.
    """
    a, b = old.model_dump(), new.model_dump()
    differ = {k for k in a if a[k] != b[k]}
    differ -= {"lora_alpha"} if old.alpha == new.alpha else set()
    taken = differ & (LIVE_KEYS | PLACE_KEYS)
    return taken, differ - taken


def with_live(old: JobSpec, new: JobSpec) -> JobSpec:
    """``old`` with the live keys (and ``die``) of ``new``: what a running job becomes after an edit."""
    return old.model_copy(update={k: getattr(new, k) for k in LIVE_KEYS | PLACE_KEYS})


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, for editors."""
    schema = JobSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "rrd job file"}
