"""A job resident on this worker's die: how it gets there, and what is saved of it."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from rrd import adapter, checkpoint, durable, inputs, lora
from rrd.durable import Bytes
from rrd.edits import identity
from rrd.errors import BadJob, Damaged, DiskTrouble
from rrd.job import INPUT_KEYS, JobSpec
from rrd.messages import Load
from rrd.models import Base, dtypes, int8, load_base
from rrd.models.base import check_whole
from rrd.models.files import ModelFiles, inspect
from rrd.models.registry import lora_targets_of
from rrd.ops import choice
from rrd.safetensors_header import home_of
from rrd.train import data
from rrd.train.memory import Needs, estimate
from rrd.train.publish import check_output
from rrd.train.state import FORMAT, STATE, TENSORS, Staging, differences, restore
from rrd.train.trainer import Evaluation, Trainer
from rrd.worker.tensorboard import EventFile

COMPATIBLE = '`resume = "compatible"` in the job file goes on all the same'

Alive = Callable[[str, float], None]
"""Called during long work with what it is and the share done: the heartbeat."""

LOCK_SECONDS = 1.0
"""How long a load waits for the job's lock, which holds up the lane: a worker of a daemon that was killed may still be
on its way out. Then it is to be tried later."""


@dataclass(frozen=True)
class Saved:
    """One checkpoint on its way to disk; the tensors are in the resident's staging buffer."""

    step: int
    identity: str
    files: Mapping[str, Sequence[Bytes]]


@dataclass
class Resident:
    """A loaded job, the only writer of its directory's checkpoints and history for as long as it holds the lock."""

    job: str
    dir: Path
    lock: IO[bytes]
    trainer: Trainer
    history: durable.Log
    staging: Staging
    resumed: int | None = None
    committed_step: int = 0
    fallbacks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    events: EventFile | None = None
    """TensorBoard's copy of the history, where the job asks for one."""
    evaluation: Evaluation | None = None
    """One that has begun."""
    written: threading.Event = field(default_factory=threading.Event)
    """Set while no write uses the staging buffer."""

    def save(self, total: int) -> Saved:
        """Copy the state aside. Call it within a visit, and only while ``written`` is set."""
        assert self.written.is_set()
        self.staging.fill(self.trainer.optimizer)
        state = json.dumps(self.trainer.state(total, self.history.length), indent=1).encode()
        return Saved(self.trainer.step, identity(self.trainer.spec),
                     {TENSORS: [self.staging.chunk()], STATE: [state]})

    def log(self, **line: Any) -> None:
        """One line of history. A number that is none is written as null: JSON has no NaN."""
        safe = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
        self.history.append(json.dumps(safe, allow_nan=False).encode() + b"\n")
        if self.events is not None:
            self.events.add(line)

    def close(self) -> None:
        self.written.wait()
        if self.events is not None:
            self.events.close()
        self.history.close()
        self.lock.close()


def check(spec: JobSpec, output: Path) -> Needs:
    """Look at what would stop the job only later, on a die or at its end; says how much memory it will need.

    Raises BadJob.
    """
    files = inspect(Path(spec.model))
    check_output(output)
    inputs.look(spec)
    _check_model(spec, files)
    stored = dtypes.OF_NAME.get(spec.dtype, torch.float32)  # "auto" is the die's to choose; assume the larger
    return estimate(spec, files, stored, cuda=torch.version.cuda is not None)


def _check_model(spec: JobSpec, files: ModelFiles) -> None:
    """Whether the model can be trained as the job says. Raises BadJob."""
    with torch.device("meta"):
        model = files.family.skeleton(files.config, compute=torch.float32)
    if spec.chunk_len is not None and model.longest is None:
        raise inputs.no_pieces(files.family.name)
    if spec.method == "full":
        check_whole(files)
        return
    targets = spec.lora_targets or lora_targets_of(files.family, files.config)
    found = lora.find(model, targets, (*spec.lora_ranks, *spec.lora_alphas))
    if spec.init_adapter:
        linears = {name: tuple(module.weight.shape) for name, module in found}
        adapter.check(Path(spec.init_adapter), spec, targets, linears)


def prepare(spec: JobSpec, cache_dir: Path, alive: Alive, *, processes: int = 1
            ) -> tuple[data.Prepared, data.Prepared | None]:
    """Tokenize the job's data, and the held-out data if it has any, into the cache; quick when done before.

    ``processes``: so many at the most do it side by side.
    """

    def one(path: str, what: str) -> data.Prepared:
        tokenizer = spec.tokenizer or str(home_of(Path(spec.model)))
        return data.prepare(path, tokenizer, seq_len=spec.seq_len, too_long=spec.too_long,
                            max_bad_lines=spec.max_bad_lines, cache_dir=cache_dir / "data", processes=processes,
                            progress=lambda share: alive(what, share))

    return (one(spec.data, "tokenizing the data"),
            one(spec.eval_data, "tokenizing the held-out data") if spec.eval_data else None)


def load(order: Load, *, device: str, threads: int, job_dir: Path, cache_dir: Path, bases: dict[str, Base],
         alive: Alive) -> Resident:
    """Make a job resident: its lock, data, base, adapter, and the newest valid checkpoint.

    ``bases`` holds the frozen bases that other jobs of this die use; the same base is shared.
    """
    spec = order.spec
    lock = _take_lock(job_dir, alive)
    try:
        durable.sweep_dirs(job_dir)
        train, held_out = prepare(spec, cache_dir, alive)
        notes: list[str] = []
        base = _base(spec, torch.device(device), job_dir, cache_dir, bases, notes, alive)
        _check_vocabulary(base, train, held_out)
        if spec.quantize and (note := int8.note(base.tensors)):
            notes.append(note)
        trainer = Trainer(spec, base, data.Dataset.open(train.path),
                          data.Dataset.open(held_out.path) if held_out else None, threads=threads)
        _make_ready(trainer, job_dir, cache_dir, notes, partial(alive, "building the kernels", 0.0))
        staging = Staging(trainer.optimizer)
        state, fallbacks = _newest_valid(job_dir, trainer, staging, notes)
        if state is None and (fallbacks or order.expect_step):
            raise BadJob(f"no checkpoint of this job can be used any more, though step {order.expect_step} was saved",
                         hint=f"look at {job_dir}; `rrd restart --fresh {order.job}` begins again at step 0")
        history = durable.Log(job_dir / "history.jsonl", state["history_bytes"] if state else 0)
    except BaseException:
        lock.close()
        raise
    resident = Resident(order.job, job_dir, lock, trainer, history, staging, fallbacks=fallbacks, notes=notes)
    if spec.tensorboard:
        resident.events = EventFile(job_dir, lambda: alive("writing TensorBoard's files", 0.0))
    if state:
        resident.resumed = resident.committed_step = trainer.step
    resident.written.set()
    return resident


def _take_lock(job_dir: Path, alive: Alive) -> IO[bytes]:
    try:
        durable.make_dir(job_dir)
    except OSError as e:
        raise durable.trouble(e, job_dir) from e
    return durable.lock_when_free(job_dir / "lock", what=f"the job's directory {job_dir}", seconds=LOCK_SECONDS,
                                  alive=lambda: alive("waiting for the job's lock", 0.0))


def _base(spec: JobSpec, device: torch.device, job_dir: Path, cache_dir: Path, bases: dict[str, Base],
          notes: list[str], alive: Alive) -> Base:
    """The job's base: one that is here already where it is frozen, or loaded now."""
    trainable = spec.method == "full"
    stored, compute = _dtypes_of(spec, device, job_dir)
    key = f"{spec.model} {stored} {compute} {spec.quantize}"
    if not trainable and key in bases:
        return bases[key]
    load = partial(load_base, spec.model, device=device, dtype=stored, compute=compute, trainable=trainable,
                   quantize=spec.quantize,
                   progress=lambda done, total: alive("loading the model", done / max(1, total)))
    try:
        base = load(store_dir=cache_dir / "bases")
    except DiskTrouble as e:
        base = load()
        notes.append(f"it holds the model in memory of its own, for the shared copy cannot be written: {e.message}")
    if not trainable:
        bases[key] = base
    return base


def _check_vocabulary(base: Base, *prepared: data.Prepared | None) -> None:
    """Raises BadJob where the tokenizer has words that the model does not know."""
    known: int = base.config.n_vocab
    highest = max(p.max_id for p in prepared if p is not None)
    if highest >= known:
        raise BadJob(f"the data has token {highest}, and the model knows {known} tokens",
                     hint="is this the model's own tokenizer?", key="tokenizer")


def _dtypes_of(spec: JobSpec, device: torch.device, job_dir: Path) -> tuple[torch.dtype, torch.dtype]:
    """(stored, compute). What the die is good at is measured once, when the job begins; then its checkpoints say it."""
    if spec.dtype != "float32" and (saved := _saved_identity(job_dir)):
        with contextlib.suppress(KeyError):
            return dtypes.OF_NAME[saved["dtype"]], dtypes.OF_NAME[saved["compute"]]
    return dtypes.choose(spec.dtype, device, trainable=spec.method == "full")


def _saved_identity(job_dir: Path) -> dict[str, Any]:
    """What the newest readable checkpoint says of the machine and the choices it was made with; empty for a new job."""
    for _, path in checkpoint.listing(job_dir):
        with contextlib.suppress(Damaged, ValueError, KeyError):  # damage is dealt with when it is restored
            found: dict[str, Any] = json.loads(
                checkpoint.read_bytes(path, checkpoint.read_manifest(path), STATE))["identity"]
            return found
    return {}


def _make_ready(trainer: Trainer, job_dir: Path, cache_dir: Path, notes: list[str], alive: Callable[[], None]) -> None:
    """Have the kernels that the job computes with, built if need be; or note why it does without."""
    if note := trainer.model.make_ready(cache_dir, _saved_identity(job_dir).get("kernels"), alive):
        notes.append(note)
    if note := choice.make_ready(trainer.device, cache_dir, alive):
        notes.append(note)
        trainer.model.without_kernels = note
    _go_on_as_begun(job_dir, trainer, notes)


def _go_on_as_begun(job_dir: Path, trainer: Trainer, notes: list[str]) -> None:
    """A job that began by torch alone goes on so when there are kernels by now: with them it would give other bits."""
    saved = _saved_identity(job_dir)
    if not saved or trainer.spec.resume != "exact":
        return
    trainer.by_torch = choice.begun_without(saved.get("ops", {}), trainer.device)
    if trainer.by_torch:
        notes.append(f"it goes on without the kernels for {', '.join(trainer.by_torch)}, as it began; "
                     '`resume = "compatible"` uses them from here on: faster, and not bit for bit')


def _newest_valid(job_dir: Path, trainer: Trainer, staging: Staging, notes: list[str]
                  ) -> tuple[dict[str, Any] | None, list[str]]:
    """Restore the newest checkpoint whose every byte holds; those that do not are put aside.

    Returns its state (None: there is none) and a sentence for each damaged one.
    """
    fallbacks: list[str] = []
    for _, path in checkpoint.listing(job_dir):
        try:
            return _restore(path, trainer, staging, notes), fallbacks
        except checkpoint.FutureFormat:
            raise
        except Damaged as e:
            checkpoint.quarantine(path)
            fallbacks.append(e.message)
    return None, fallbacks


def _restore(path: Path, trainer: Trainer, staging: Staging, notes: list[str]) -> dict[str, Any]:
    manifest = checkpoint.read_manifest(path)
    state: dict[str, Any] = json.loads(checkpoint.read_bytes(path, manifest, STATE))
    if state["format"] > FORMAT:
        raise checkpoint.FutureFormat(f"{path} holds state of format {state['format']}, and this rrd knows {FORMAT}",
                                      hint="install the rrd that wrote it, or a newer one")
    _check_identity(path.name, state["identity"], trainer, notes)
    buffer: list[memoryview] = []

    def into(size: int) -> memoryview:
        buffer.append(staging.room(size))
        return buffer[0]

    checkpoint.read_file(path, manifest, TENSORS, into)
    # From here on every byte is known to be as it was written: what does not fit is no damage, and stays where it is.
    restore(trainer.optimizer, buffer[0], str(path / TENSORS))
    if note := trainer.resume(state):
        if trainer.spec.resume == "exact":
            raise BadJob(f"{path.name} cannot be continued exactly: {note}", hint=COMPATIBLE)
        notes.append(f"{path.name} is continued, but not bit for bit: {note}")
    return state


def _check_identity(name: str, saved: dict[str, Any], trainer: Trainer, notes: list[str]) -> None:
    """Raises BadJob where going on would give other numbers than the job would have had; or notes what was given up."""
    now = trainer.identity()
    was, wanted = {k: v for k, v in saved["job"].items() if k not in INPUT_KEYS}, now["job"]  # once, paths were in it
    if was != wanted:
        raise BadJob(f"{name} is of another job: {'; '.join(differences(was, wanted))}",
                     hint="change the job file back, or `rrd restart --fresh` to begin again at step 0")
    if saved["base"] != now["base"]:
        raise BadJob(f"{name} was trained on other weights than are in {trainer.spec.model} now",
                     hint="put those back, or `rrd restart --fresh` to begin again at step 0")
    if saved["data"] != now["data"] and trainer.spec.resume == "exact":
        raise BadJob(f"{name} was trained on other text than {trainer.spec.data} gives now",
                     hint=f"put the data and its tokenizer back, or `rrd restart --fresh`; {COMPATIBLE}")
    changed = differences({**saved, "job": {}, "ops": {}}, {**now, "job": {}, "ops": {}})
    if (was_by := saved.get("ops", {})) != (now_by := now.get("ops", {})):
        changed.append(_other_kernels(was_by, now_by, trainer.device))
    if changed and trainer.spec.resume == "exact":
        raise BadJob(f"{name} cannot be continued exactly: {'; '.join(changed)}",
                     hint=COMPATIBLE)
    if changed:
        notes.append(f"{name} is continued, but not bit for bit: {'; '.join(changed)}")


def _other_kernels(saved: Mapping[str, str], now: Mapping[str, str], device: torch.device) -> str:
    """How the kernels that a checkpoint was computed with differ from those here, as half a sentence."""
    if gone := [op for op in saved if op not in now]:
        return f"its kernels for {', '.join(gone)} are not to be had: {choice.why_not(gone[0], device) or 'RRD_OPS'}"
    if new := [op for op in now if op not in saved]:
        return f"it began without kernels for {', '.join(new)}"
    other = [op for op in saved if saved[op] != now[op]]
    were, here = saved[other[0]], now[other[0]]
    return f"its kernels for {', '.join(other)} were another build ({were}) than those here ({here})"
