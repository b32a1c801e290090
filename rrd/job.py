"""The job file: what to train, on what, how. Every rule about it is here; nothing here touches the disk but by name.

A job file is flat TOML named ``<id>.toml``. What an edit of it may change is ``rrd.edits``'.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rrd import job_keys, toml
from rrd.errors import BadJob
from rrd.job_keys import MAX_STEPS, AbsPath, Alphas, Betas, Cadence, Die, Names, Quantize, Ranks, StepsOrAuto
from rrd.text import one_line
from rrd.toml import Fault, show

if TYPE_CHECKING:
    from rrd.config import Config

JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
"""A job's id, by ``fullmatch`` only: it becomes a directory name and a metric label."""

JOB_FILE = "job.toml"
"""In a job's state directory: its job file as accepted."""

MAX_BYTES = 64 * 1024
"""A larger job file is refused unread."""

INPUT_KEYS = ("model", "data", "tokenizer", "eval_data", "init_adapter")
"""Keys that name what a job reads. Not the path but the content is part of its identity, which its worker checks: what
is read may move, to another directory or box."""
PATH_KEYS = (*INPUT_KEYS, "output")

Steps = Annotated[int, Field(ge=1, le=MAX_STEPS)]


class JobSpec(BaseModel):
    """One job, checked. The description of a key is what users read in the schema and in ``docs/job-file.md``."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False,
                              use_attribute_docstrings=True)
    ALIASES: ClassVar[Mapping[str, str]] = job_keys.ALIASES

    model: AbsPath
    """Base model: a directory with safetensors files, and `config.json` where the family has one; or one such file."""
    data: AbsPath
    """Training data: a `.jsonl`, `.txt` or `.parquet` file."""
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
    lora_alphas: Alphas = {}
    """Another alpha for some modules, such as `{q_proj = 32}`."""
    lora_rs: bool = False
    """Rank-stabilized LoRA: scale by alpha / sqrt(rank) in place of alpha / rank."""
    init_adapter: AbsPath | None = None
    """Directory of an adapter in PEFT's layout to start from, with the targets, ranks and alphas of this job."""

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
    chunk_len: int | None = Field(default=None, ge=16, le=1_048_576)
    """RWKV models: tokens of a sample in memory at once, the rest follows exactly, piece by piece; left out: 2048."""
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
    betas: Betas | None = None
    """AdamW's averaging of gradients and of their squares; left out: [0.9, 0.999], or the family's own for "full"."""
    eps: float | None = Field(default=None, gt=0, le=1)
    """AdamW's guard against division by zero; left out: 1e-8, or the family's own for "full"."""
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
    tensorboard: bool = False
    """Write the job's curves as TensorBoard event files, too, into its state directory."""
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
        if self.method == "full" and self.init_adapter:
            raise Fault('needs method = "lora"', key="init_adapter", hint="leave it out, or merge it into the model")
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
        return job_keys.parse_duration(self.checkpoint_every) if isinstance(self.checkpoint_every, str) else None

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
    """``values`` with relative paths counted from ``base``; what is no path stays as it is."""
    given = {k: v for k in PATH_KEYS if isinstance(v := values.get(k), str) and v and not _elsewhere(k, v, base)}
    return {**values, **{k: os.path.normpath(base / os.path.expanduser(v)) for k, v in given.items()}}


def _elsewhere(key: str, value: str, base: Path) -> bool:
    """Whether ``value`` is no path of this machine, which is then said: a URL, or the name of something on a hub."""
    on_hub = key in INPUT_KEYS and job_keys.may_be_on_a_hub(value) and not (base / value).parent.exists()
    return "://" in value or on_hub


def to_toml(job: JobSpec | Mapping[str, object]) -> str:
    """``job`` as a job file. A ``JobSpec`` is written with every key, so that later defaults do not change it."""
    return toml.dump(job.model_dump() if isinstance(job, JobSpec) else job)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a job file, for editors."""
    schema = JobSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "rrd job file"}


# ---- where a job may reach --------------------------------------------------------------------------------------


def output_of(job_id: str, spec: JobSpec, config: Config) -> Path:
    """The directory that the finished adapter of the job goes to."""
    return Path(spec.output) if spec.output else config.adapters_dir / job_id


def check_paths(job_id: str, spec: JobSpec, config: Config) -> None:
    """Whether the job's paths, with every symbolic link followed, lie where ``config`` allows. Raises ``BadJob``.

    Whether they exist is not asked: a model may come later, and the job waits for it.
    """
    for key in INPUT_KEYS:
        if path := getattr(spec, key):
            _check_input(key, path, config.data_roots if key.endswith("data") else config.model_roots)
    _check_output(job_id, spec, config)


def _check_input(key: str, path: str, roots: tuple[Path, ...]) -> None:
    real = _real(key, path)
    if real.suffix.lower() in {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npy"}:
        raise BadJob(f"`{key}` is a {real.suffix} file, which may run code when it is opened: {show(path)}", key=key,
                     hint=_CONVERT if key == "model" else "give text: a .jsonl or .txt file")
    if key == "model" and real.suffix.lower() in {".gguf", ".json"}:
        raise BadJob(f"`model` must be a directory or a .safetensors file, not {show(path)}", key=key,
                     hint="name the directory with config.json and *.safetensors")
    if roots and not any(real.is_relative_to(os.path.realpath(root)) for root in roots):
        which = "data_roots" if key.endswith("data") else "model_roots"
        raise BadJob(f"`{key}` lies outside {which}: {show(str(real))}", key=key,
                     hint="move it below one of " + ", ".join(map(str, roots)) + ", or have rrd.toml changed")


_CONVERT = ("convert it: python -c 'from transformers import AutoModelForCausalLM as M; "
            'M.from_pretrained("DIR").save_pretrained("NEW")\'')


def _check_output(job_id: str, spec: JobSpec, config: Config) -> None:
    """The export replaces its directory, so that must not hold anything else."""
    out = _real("output", str(output_of(job_id, spec, config)))
    shown = show(str(out))
    if config.output_root and not out.is_relative_to(os.path.realpath(config.output_root)):
        raise BadJob(f"`output` lies outside output_root: {shown}", key="output",
                     hint=f"choose a directory below {config.output_root}, or have rrd.toml changed")
    held = [p for key in INPUT_KEYS if (p := getattr(spec, key))] + [str(config.adapters_dir)]
    own = (config.state_dir, config.cache_dir, config.run_dir, config.jobs_dir)
    if any(_real("output", str(p)).is_relative_to(out) for p in (*held, *own)):
        raise BadJob(f"`output` holds other things that the export would replace: {shown}", key="output",
                     hint="choose a new directory for this job alone")
    if inside := [k for k in INPUT_KEYS if (p := getattr(spec, k)) and out.is_relative_to(_real(k, p))]:
        raise BadJob(f"`output` lies in the directory of `{inside[0]}`, which is only read: {shown}", key="output",
                     hint="choose a directory of its own, or leave `output` out")
    adapters = os.path.realpath(config.adapters_dir)
    if not out.is_relative_to(adapters) and any(out.is_relative_to(os.path.realpath(p)) for p in own):
        raise BadJob(f"`output` lies in one of rrd's own directories: {shown}", key="output",
                     hint="choose another directory, or leave `output` out")


def _real(key: str, path: str) -> Path:
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError) as e:
        raise BadJob(f"`{key}` cannot be followed: {show(path)}: {e}", key=key) from None


# ---- the older tool's list --------------------------------------------------------------------------------------


def parse_legacy(data: bytes, *, name: str = "jobs.json", base: Path | None = None) -> list[tuple[str, JobSpec]]:
    """The jobs in the older tool's file: a JSON array of tables with the keys of a job file, and no ids.

    A job is named after its output, else after its data. Raises ``BadJob``.
    """
    jobs: list[tuple[str, JobSpec]] = []
    ids: set[str] = set()
    for number, values in enumerate(_json_tables(name, data), 1):
        try:
            spec = toml.check(JobSpec, _absolute(values, base) if base else values)
        except Fault as e:
            raise BadJob(f"job {number}: {e.message}", hint=e.hint, file=name, key=e.key) from None
        job_id = _unique(_legacy_id(spec), ids)
        ids.add(job_id.lower())
        jobs.append((job_id, spec))
    return jobs


def _json_tables(name: str, data: bytes) -> list[dict[str, Any]]:
    hint = "it should be a JSON array: [{\"model\": …, \"data\": …}, …]"
    try:
        jobs = json.loads(toml.decode(data))
    except Fault as e:
        said = e.message.replace("TOML", "JSON")
        raise BadJob(said, hint="save the file as UTF-8 without BOM", file=name, line=e.line) from None
    except json.JSONDecodeError as e:
        raise BadJob(f"not JSON: {e.msg}", hint=hint, file=name, line=e.lineno) from None
    except (ValueError, RecursionError):  # thousands of digits, thousands of brackets
        raise BadJob("not a list of jobs", hint=hint, file=name) from None
    if not isinstance(jobs, list) or not jobs or not all(isinstance(job, dict) for job in jobs):
        raise BadJob("not a list of jobs", hint=hint, file=name)
    return jobs


def _legacy_id(spec: JobSpec) -> str:
    stem = Path(spec.output or spec.data).stem
    return re.sub(r"[^A-Za-z0-9_-]+", "-", stem).lstrip("-_")[:56].rstrip("-") or "job"


def _unique(wanted: str, taken: set[str]) -> str:
    """``wanted``, or with the first number from 2 that makes it new; names that differ in case only are not new."""
    n, job_id = 1, wanted
    while job_id.lower() in taken:
        n += 1
        job_id = f"{wanted}-{n}"
    return job_id
