"""What the daemon and a worker say to each other: typed messages in length-prefixed JSON frames on a socketpair.

A frame is a 4-byte big-endian length and that many bytes of JSON with a ``kind``. Floats travel as their shortest
repr, so a loss arrives with the bits it left with. Anything else on the wire is a :class:`ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo

from rrd.errors import ProtocolError
from rrd.job import JobSpec
from rrd.savings import Rung
from rrd.text import one_line

MAX_FRAME = 1 << 20


def _said(text: object, info: ValidationInfo) -> object:
    return one_line(text, 1000) if isinstance(text, str) and info.mode == "python" else text


Sentence = Annotated[str, BeforeValidator(_said)]
"""What a person will read. It may quote a file, a path or a library, so it is made one safe, short line when said."""


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")


# --- daemon to worker -------------------------------------------------------------------------------------------------


class Prepare(Message):
    """Check what can be checked without a die and tokenize the job's data into the cache. Answer: Prepared."""

    kind: Literal["prepare"] = "prepare"
    job: str
    spec: JobSpec
    output: str


class Load(Message):
    """Make the job resident: base, adapter, optimizer, newest valid checkpoint. Answer: Loaded.

    ``expect_step``: the newest announced checkpoint; with none on disk the load fails instead of starting at step 0.
    """

    kind: Literal["load"] = "load"
    job: str
    spec: JobSpec
    expect_step: int = 0


class Run(Message):
    """One visit: up to ``steps`` steps or ``seconds``, whichever is first. Answers: Step each, then VisitDone.

    With ``checkpoint`` the state is copied aside before VisitDone, and written to disk after it (Committed).
    """

    kind: Literal["run"] = "run"
    job: str
    steps: int
    seconds: float | None = None
    total: int
    round: int = 0
    checkpoint: bool = False
    keep: int = 3
    eval_every: int | None = None
    on_nan: Literal["stop", "skip"] = "stop"
    rungs: tuple[Rung, ...] = ()
    """How to hold less memory, and from which step on."""


class Export(Message):
    """Write the adapter as it stands to ``output``, checked. Answer: Exported."""

    kind: Literal["export"] = "export"
    job: str
    output: str


class Evict(Message):
    """Forget the job, after its writes have ended. Answer: Evicted."""

    kind: Literal["evict"] = "evict"
    job: str


class Probe(Message):
    """Compute something small on the die whose result is known. Answer: Probed."""

    kind: Literal["probe"] = "probe"


class Yield(Message):
    """End the visit in progress after its step, and an evaluation after its batch. No answer of its own.

    ``urgency`` 1: also give up a load or an export in progress; 2: also the step, at its next sign of life.
    """

    kind: Literal["yield"] = "yield"
    urgency: int = 0


class Stop(Message):
    """Finish the step, finish the writes, exit 0."""

    kind: Literal["stop"] = "stop"


# --- worker to daemon -------------------------------------------------------------------------------------------------


class Ready(Message):
    """The worker is up. ``model`` and ``memory_bytes`` describe the die; empty for a CPU die's unknowns."""

    kind: Literal["ready"] = "ready"
    pid: int
    torch: str
    preloaded: bool
    model: str = ""
    uuid: str = ""
    pci_bus_id: str = ""
    memory_bytes: int | None = None


class Progress(Message):
    """A heartbeat of long work: ``share`` done, 0 to 1."""

    kind: Literal["progress"] = "progress"
    job: str
    what: Sentence
    share: float


class Prepared(Message):
    """``needs_bytes`` of a die's memory, ``base_bytes`` of them for weights that jobs on one die share; estimates.
    ``saved_bytes``: of one checkpoint."""

    kind: Literal["prepared"] = "prepared"
    job: str
    samples: int
    tokens: int
    bad_lines: int
    needs_bytes: int = 0
    base_bytes: int = 0
    saved_bytes: int = 0
    notes: list[Sentence] = Field(default_factory=list)


class Loaded(Message):
    """``resumed`` is the checkpoint's step, None for a fresh start; ``fallbacks`` says which were damaged.

    ``memory_bytes``: what the worker now holds on its die, all jobs together.
    """

    kind: Literal["loaded"] = "loaded"
    job: str
    step: int
    tokens: int
    samples: int
    seconds: float
    resumed: int | None = None
    fallbacks: list[Sentence] = Field(default_factory=list)
    notes: list[Sentence] = Field(default_factory=list)
    memory_bytes: int | None = None
    skipped: int = 0
    evaluated: int | None = None
    """The step of the newest held-out loss, -1 for none yet; None without held-out data."""
    without_kernels: Sentence = ""
    """Why torch computes what there are compiled kernels for; empty where it does not."""
    rungs: tuple[Rung, ...] = ()
    """With which the checkpoint's steps were run."""
    recomputes: bool = False
    most_parts: int = 1
    """What the job can do about a want of memory: see ``rrd.savings.climb``."""


class Step(Message):
    """``applied`` is False for a step without labels, and for one that was left out because it is no number; of the
    latter kind the job has had ``skipped``."""

    kind: Literal["step"] = "step"
    job: str
    step: int
    loss: float | None
    lr: float
    grad_norm: float
    tokens: int
    seconds: float
    applied: bool = True
    skipped: int = 0


class Evaluated(Message):
    kind: Literal["evaluated"] = "evaluated"
    job: str
    step: int
    loss: float


class VisitDone(Message):
    """The die is idle and may be released. ``seconds`` is the time inside steps; ``memory_bytes`` as in Loaded."""

    kind: Literal["visit_done"] = "visit_done"
    job: str
    step: int
    steps: int
    seconds: float
    copied: bool = False
    copy_seconds: float = 0.0
    evaluated: int | None = None
    memory_bytes: int | None = None


class Committed(Message):
    """A checkpoint is durable."""

    kind: Literal["committed"] = "committed"
    job: str
    step: int
    bytes: int
    seconds: float


class CommitFailed(Message):
    kind: Literal["commit_failed"] = "commit_failed"
    job: str
    step: int
    message: Sentence
    hint: Sentence = ""


class Exported(Message):
    kind: Literal["exported"] = "exported"
    job: str
    output: str
    notes: list[Sentence] = Field(default_factory=list)


class Evicted(Message):
    kind: Literal["evicted"] = "evicted"
    job: str


class Probed(Message):
    """The die computes, and right."""

    kind: Literal["probed"] = "probed"


class GaveUp(Message):
    """What was asked was given up because something more urgent came. ``resident``: whether the job still is."""

    kind: Literal["gave_up"] = "gave_up"
    job: str
    resident: bool


class OutOfMemory(Message):
    """The die's memory did not suffice for ``what``, and everything that can be let go has been. ``resident``: the job
    is as it was before, and the same can be tried again. ``step``: the step that was being run, or is next.

    ``needed``: bytes that were asked for in one piece; ``free``: bytes that were left.
    """

    kind: Literal["out_of_memory"] = "out_of_memory"
    job: str
    step: int
    what: Literal["load", "training", "evaluating", "export"]
    resident: bool
    needed: int | None = None
    free: int | None = None


class LastWords(Message):
    """Why the worker ends, which it does now."""

    kind: Literal["last_words"] = "last_words"
    message: Sentence
    die_failed: bool = False
    """It is the die that cannot be used; no job is to blame."""


class Failed(Message):
    """What was asked could not be done, and the worker is fit to go on. ``blame``: job, disk, plan, worker or die; or
    busy, where somebody else holds what is needed.

    ``resident``: the job still is, for it was only its export that the disk did not take.
    """

    kind: Literal["failed"] = "failed"
    job: str
    resident: bool = False
    blame: Literal["job", "disk", "plan", "worker", "die", "busy"]
    message: Sentence
    hint: Sentence = ""


Order = Annotated[Prepare | Load | Run | Export | Evict | Probe | Yield | Stop, Field(discriminator="kind")]
Report = Annotated[
    Ready | Progress | Prepared | Loaded | Step | Evaluated | VisitDone | Committed | CommitFailed | Exported
    | Evicted | Probed | GaveUp | OutOfMemory | LastWords | Failed, Field(discriminator="kind")]
ORDERS: TypeAdapter[Order] = TypeAdapter(Order)
REPORTS: TypeAdapter[Report] = TypeAdapter(Report)


def encode(message: Message) -> bytes:
    body = message.model_dump_json().encode()
    assert len(body) <= MAX_FRAME
    return len(body).to_bytes(4, "big") + body


class Decoder:
    """Turns a stream of bytes into messages of one direction. Feed it what was read, take what is whole."""

    def __init__(self, adapter: TypeAdapter[Order] | TypeAdapter[Report]) -> None:
        self.adapter, self.buffer = adapter, bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the whole messages. Raises ProtocolError at the first byte that is none of ours."""
        self.buffer += data
        while len(self.buffer) >= 4:
            size = int.from_bytes(self.buffer[:4], "big")
            if size > MAX_FRAME:
                raise ProtocolError(f"a frame of {size} bytes is no message")
            if len(self.buffer) < 4 + size:
                return
            body = bytes(self.buffer[4 : 4 + size])
            del self.buffer[: 4 + size]
            try:
                yield self.adapter.validate_json(body)
            except ValidationError as e:
                raise ProtocolError(f"not a message: {one_line(e.errors()[0]['msg'], 200)}") from e
