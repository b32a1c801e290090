"""rrd.messages: what one side says arrives at the other bit for bit, however it is cut up; nothing else is heard."""

from __future__ import annotations

import json
import math
import struct
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from rrd import messages
from rrd.errors import ProtocolError
from rrd.job import JobSpec
from rrd.messages import (
    MAX_FRAME,
    ORDERS,
    REPORTS,
    CommitFailed,
    Decoder,
    Failed,
    Load,
    Loaded,
    Message,
    Progress,
    Run,
    Step,
    Stop,
    VisitDone,
    Yield,
    encode,
)

SPEC = JobSpec(model="/m", data="/d", lr=1 / 3)
FULL_SPEC = JobSpec(
    model="/m", data="/d", output="/o", die=3, tokenizer="/t", lora_alpha=2 / 3, lora_targets=("q_proj", "v_proj"),
    lora_ranks={"q_proj": 64}, max_steps=7, betas=(0.8, 0.99), quantize="int8", steps_per_visit=5,
    checkpoint_every=100, eval_data="/e", eval_every=10, export_every=20, resume="compatible", on_nan="skip")
FLOATS = st.floats(width=64)
FINITE = st.floats(min_value=0, max_value=10, exclude_min=True)
SPECS = st.builds(JobSpec, model=st.just("/m"), data=st.just("/d"), lr=FINITE, weight_decay=FINITE,
                  betas=st.tuples(st.floats(0, 0.9999999), st.floats(0, 0.9999999)), seed=st.integers(0, 2**63 - 1))


def kinds(union: Any) -> tuple[type[Message], ...]:
    return get_args(get_args(union)[0])


ALL = kinds(messages.Order) + kinds(messages.Report)


def any_message(kind: type[Message]) -> st.SearchStrategy[Message]:
    """Messages of ``kind`` with every float there is, and every text."""
    fields: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if name == "kind":
            continue
        if field.annotation in (float, float | None):
            fields[name] = FLOATS if field.annotation is float else FLOATS | st.none()
        elif field.annotation is JobSpec:
            fields[name] = SPECS
        else:
            fields[name] = st.from_type(field.annotation)  # type: ignore[arg-type]
    return st.builds(kind, **fields)


ANY = st.one_of([any_message(kind) for kind in ALL])
ANY_REPORT = st.one_of([any_message(kind) for kind in kinds(messages.Report)])


def bits(value: object) -> object:
    """``value`` with its floats as bits, so that NaN equals NaN and 0.0 is not -0.0."""
    if isinstance(value, BaseModel):
        return type(value), {name: bits(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else struct.pack("d", value)
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    return value


def decoder_for(message: Message) -> Decoder:
    return Decoder(ORDERS if type(message) in kinds(messages.Order) else REPORTS)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


STEP = Step(job="a", step=1, loss=2.5, lr=1e-4, grad_norm=0.5, tokens=12, seconds=0.15)


@settings(max_examples=400, deadline=None)
@given(ANY)
def test_every_message_arrives_with_every_bit(message: Message) -> None:
    (heard,) = decoder_for(message).feed(encode(message))
    assert bits(heard) == bits(message)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1.7976931348623157e308, 0.1 + 0.2])
def test_the_odd_floats_arrive(loss: float) -> None:
    step = STEP.model_copy(update={"loss": loss, "grad_norm": loss})
    (heard,) = Decoder(REPORTS).feed(encode(step))
    assert isinstance(heard, Step)
    assert bits(heard.loss) == bits(heard.grad_norm) == bits(loss)


def test_every_key_of_a_job_arrives() -> None:
    for spec in (SPEC, FULL_SPEC, JobSpec(model="/m", data="/d", die="0000:03:00.0", quantize=True)):
        (heard,) = Decoder(ORDERS).feed(encode(Load(job="a", spec=spec, expect_step=7)))
        assert isinstance(heard, Load) and heard.spec == spec


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY_REPORT, max_size=5), st.data())
def test_it_does_not_matter_where_the_stream_is_cut(said: list[Message], data: st.DataObject) -> None:
    stream = b"".join(map(encode, said))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    decoder, heard = Decoder(REPORTS), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        heard += decoder.feed(stream[start:end])
    assert [bits(m) for m in heard] == [bits(m) for m in said]


def test_byte_by_byte() -> None:
    stream, decoder = encode(STEP) + encode(Progress(job="a", what="x", share=0.5)), Decoder(REPORTS)
    heard = [m for byte in stream for m in decoder.feed(bytes([byte]))]
    assert [type(m) for m in heard] == [Step, Progress]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_no_message_and_nothing_worse(garbage: bytes) -> None:
    for stream in (garbage, framed(garbage)):
        decoder = Decoder(REPORTS)
        try:
            assert list(decoder.feed(stream)) == []
        except ProtocolError as e:
            assert "\n" not in e.message and len(e.message) < 300  # noqa: PT017


@pytest.mark.parametrize("body", [
    b"", b"{}", b"null", b"[]", b'{"kind":"step"}', b'{"kind":"dance"}', encode(STEP)[4:-1], b"\xff" * 10,
    b"[" * 100_000, encode(Stop())[4:], encode(STEP)[4:].replace(b'"step":1', b'"step":1.5'),
    encode(STEP)[4:].replace(b'"job"', b'"extra":1,"job"')], ids=lambda b: repr(b[:30]))
def test_a_frame_that_is_no_report_ends_the_conversation(body: bytes) -> None:
    heard = Decoder(REPORTS).feed(encode(STEP) + framed(body) + encode(STEP))
    assert next(heard) == STEP  # what came before counts
    with pytest.raises(ProtocolError, match="not a message"):
        next(heard)


def test_the_directions_do_not_mix() -> None:
    for message in (Stop(), Yield(), Run(job="a", steps=1, total=2), Load(job="a", spec=SPEC)):
        with pytest.raises(ProtocolError):
            list(Decoder(REPORTS).feed(encode(message)))
    for message in (STEP, VisitDone(job="a", step=1, steps=1, seconds=1.0), Failed(job="a", blame="job", message="x")):
        with pytest.raises(ProtocolError):
            list(Decoder(ORDERS).feed(encode(message)))


def test_a_frame_too_large_is_refused_by_its_length_alone() -> None:
    with pytest.raises(ProtocolError, match=f"a frame of {MAX_FRAME + 1} bytes is no message"):
        list(Decoder(REPORTS).feed((MAX_FRAME + 1).to_bytes(4, "big")))
    with pytest.raises(ProtocolError):
        list(Decoder(REPORTS).feed(b"HTTP/1.1 400 Bad Request"))
    with pytest.raises(AssertionError):
        encode(STEP.model_copy(update={"job": "x" * MAX_FRAME}))


def test_the_largest_job_file_fits() -> None:
    spec = SPEC.model_copy(update={"lora_targets": tuple(f"module_{i}" for i in range(5_000))})
    (heard,) = Decoder(ORDERS).feed(encode(Load(job="a", spec=spec)))
    assert isinstance(heard, Load) and heard.spec == spec


def test_a_sentence_is_one_safe_line_whatever_it_quotes() -> None:
    """A file's name may be no text at all, a library's message many lines: a worker must not die of saying so."""
    said = Failed(job="a", blame="job", message="no such file: \udcff\nsee \x1b[31m\u202e", hint="x" * 5_000_000)
    (heard,) = Decoder(REPORTS).feed(encode(said))
    assert isinstance(heard, Failed)
    assert heard.message == "no such file: \\udcff see \\u001b[31m\\u202e"
    assert len(heard.hint) == 1001
    loaded = Loaded(job="a", step=0, tokens=0, samples=1, seconds=0.0, notes=["\ud800"], fallbacks=["a\nb"])
    assert (loaded.notes, loaded.fallbacks) == (["\\ud800"], ["a b"])
    assert CommitFailed(job="a", step=1, message="\0").message == "\\u0000"


def test_a_frame_is_a_length_and_json() -> None:
    frame = encode(STEP)
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert json.loads(frame[4:]) == {"kind": "step", "job": "a", "step": 1, "loss": 2.5, "lr": 0.0001, "grad_norm": 0.5,
                                     "tokens": 12, "seconds": 0.15, "applied": True, "skipped": 0}
