"""Files from elsewhere: whatever is in them is one sentence, soon, with little memory; and their paths lead nowhere."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzz_targets import TARGETS, one, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toys import make_data, make_model

from rrd import checkpoint, roots
from rrd.errors import BadJob, Damaged, RrdError
from rrd.job import JobSpec
from rrd.models import load_base
from rrd.train.publish import Publication
from rrd.worker import resident

# Inputs that once took too long, too much memory, or were no sentence; and their kin.
LONG: dict[str, list[bytes]] = {
    "job": [b"\n".join(b"a%d=1" % i for i in range(7000)), b"a" + b".a" * 32000 + b"=1", b"[" * 60000,
            b"a = " + b"9" * 60000, b"[[a]]\n" * 10000, b'x="""' + b'"' * 60000],
    "config": [b"[[" * 30000, b"[[lane]]\ndies=['cpu']\n" * 3000, b'metrics="' + b":" * 10000 + b'"'],
    "long_header": [b"{" + b",".join(b'"k%d":1' % i for i in range(90000)) + b',"k89999":1}', b"[" * 1_000_000,
                    b'{"a":{"dtype":"F32","shape":[' + b",".join([b"1"] * 100_000) + b'],"data_offsets":[0,4]}}',
                    b'{"a":{"dtype":"F32","shape":[281474976710655,281474976710655],"data_offsets":[0,4]}}'],
    "index": [b'{"weight_map":{"a":"../x.safetensors"}}', b'{"weight_map":{"a":"\\u0000.safetensors"}}'],
    "sealed_manifest": [
        b'{"format":1,"job":5,"step":"x","identity":null,"files":{"../../etc/passwd":{"bytes":-1,"sha256":5}},"time":0}',
        b'{"format":1,"job":"a","step":7,"identity":"i","files":{"a":{"bytes":1152921504606846976,"sha256":""}},'
        b'"time":1}', b'{"format":"x"}', b'{"format":2}'],
    "record": [b"[" * 1_000_000, b'{"format":1,"id":"a","submitted_at":1e999}'],
    "reports": [b"[" * 1_000_000, b"9" * 1_000_000, b'{"kind":' * 100_000],
    "lines": [b'{"text":' * 50_000, b"[" * 1_000_000, b"\xff" * 1_000_000, b'{"text":"\\ud800"}\n'],
    "tokenizer": [b'{"version":"1.0","model":{"type":"WordLevel","vocab":{},"unk_token":"x"}}', b'{"model":' * 1000,
                  b'{"version":"1.0","model":{"type":"Unigram","unk_id":7,"vocab":[]}}',
                  b'{"version":"1.0","model":{"type":"WordPiece","vocab":{},"unk_token":"x",'
                  b'"continuing_subword_prefix":"","max_input_chars_per_word":0}}'],
    "vocabulary": [b"1 {" + b"1:1," * 200_000 + b"} 1", b"1 " + b"(" * 60000 + b" 1", b"1 'a'*999999999 1"],
}


@pytest.mark.parametrize("name", TARGETS)
def test_whole_and_overlong_inputs_end_in_a_sentence(name: str) -> None:
    for data in [*seeds().get(name, ()), *LONG.get(name, ()), b"", b"\0" * 1000, b"\xff" * 1000]:
        one(TARGETS[name], data)


def _mangled(name: str) -> st.SearchStrategy[bytes]:
    """Any bytes, or something whole with a part of it replaced, repeated or left out."""
    whole = st.sampled_from(seeds().get(name, [b""]))
    places = st.integers(0, 400)
    changed = st.tuples(whole, places, places, st.binary(max_size=40) | st.sampled_from(
        [b"", b'"', b"{", b"[" * 50, b"1e999", b"-1", b"null", b"\\u0000", b"\n", b"'''", b"9" * 30])).map(
            lambda t: t[0][: t[1]] + t[3] + t[0][t[2] :])
    return st.binary(max_size=300) | changed


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything_at_all_ends_in_a_sentence(name: str, data: st.DataObject) -> None:
    one(TARGETS[name], data.draw(_mangled(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_anything_at_all_for_long(name: str, data: st.DataObject) -> None:
    one(TARGETS[name], data.draw(_mangled(name)))


# --- paths ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fenced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``models/toy`` and ``data/d.jsonl`` below the roots; ``secret`` beside them, with the same in it."""
    monkeypatch.setenv("RRD_WORKER_ROOTS", "{}")
    for place in ("models/toy", "secret/toy"):
        make_model(tmp_path / place)
    for place in ("data", "secret"):
        (tmp_path / place).mkdir(exist_ok=True)
        make_data(tmp_path / place / "d.jsonl")
    roots.confine(model=[tmp_path / "models"], data=[tmp_path / "data"])
    return tmp_path


def use(root: Path, model: str = "models/toy", data: str = "data/d.jsonl", output: str = "out", **more: Path) -> None:
    """What a worker does with what a job names, up to training."""
    spec = JobSpec(model=str(root / model), data=str(root / data), seq_len=64, **{k: str(p) for k, p in more.items()})
    resident.check(spec, root / output)
    resident.prepare(spec, root / "cache", lambda what, share: None)
    load_base(spec.model)


def test_below_the_roots_all_is_well(fenced: Path) -> None:
    use(fenced)
    (fenced / "models" / "alias").symlink_to("toy")  # links that stay inside are fine
    use(fenced, model="models/alias")


SWAPS = {
    "data": "data/d.jsonl", "data's directory": "data", "model": "models/toy",
    "weights": "models/toy/model.safetensors", "config": "models/toy/config.json",
    "tokenizer": "models/toy/tokenizer.json",
}


@pytest.mark.parametrize("step", SWAPS)
def test_a_link_put_in_the_place_of_any_step_of_a_path_leads_nowhere(fenced: Path, step: str) -> None:
    """Between the moment when the job was accepted, and that when its files are opened."""
    place = fenced / SWAPS[step]
    inside = {"data": "secret/d.jsonl", "data's directory": "secret", "model": "secret/toy"}.get(
        step, "secret/toy/" + place.name)
    place.rename(fenced / "aside")
    place.symlink_to(fenced / inside)
    with pytest.raises(BadJob, match=r"lies outside (model|data)_roots"):
        use(fenced)


@pytest.mark.parametrize("key", ["eval_data", "tokenizer"])
def test_so_do_links_in_the_place_of_what_else_a_job_names(fenced: Path, key: str) -> None:
    place = fenced / {"eval_data": "data/held-out.jsonl", "tokenizer": "models/own"}[key]
    place.symlink_to(fenced / {"eval_data": "secret/d.jsonl", "tokenizer": "secret/toy"}[key])
    with pytest.raises(BadJob, match=r"lies outside (model|data)_roots"):
        use(fenced, **{key: place})


@pytest.mark.parametrize("what", ["data/d.jsonl", "models/toy/config.json", "models/toy/model.safetensors",
                                  "models/toy/tokenizer.json"])
@pytest.mark.parametrize("odd", ["pipe", "device", "directory", "loop", "dangling"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(fenced: Path, what: str, odd: str) -> None:
    place = fenced / what
    place.unlink()
    if odd == "pipe":
        os.mkfifo(place)
    elif odd == "directory":
        place.mkdir()
    else:
        place.symlink_to({"device": "/dev/zero", "loop": place.name, "dangling": "/no/such/file"}[odd])
    with pytest.raises(RrdError) as e:
        use(fenced)
    assert "\n" not in e.value.message


def test_a_checkpoint_with_a_pipe_or_a_link_in_it_is_damaged(tmp_path: Path) -> None:
    checkpoint.commit(tmp_path, job="a", step=7, identity="i", files={"state.json": [b"{}"]})
    (_, path), = checkpoint.listing(tmp_path)
    file = path / "state.json"
    for make in (os.mkfifo, lambda f: f.symlink_to(tmp_path / "same"), lambda f: f.mkdir()):
        (tmp_path / "same").write_bytes(b"{}")
        file.unlink() if file.is_symlink() or file.is_file() or file.is_fifo() else None
        make(file)
        with pytest.raises(Damaged):
            checkpoint.verify(path)
        file.rmdir() if file.is_dir() and not file.is_symlink() else None


OUTPUTS: dict[str, Callable[[Path], None]] = {
    "somebody's directory": lambda out: (out.mkdir(), (out / "thesis.tex").write_text("all of it")),  # type: ignore[dict-item]
    "a file": lambda out: out.write_text("x"),  # type: ignore[dict-item]
    "a link to somebody's directory": lambda out: (  # type: ignore[dict-item]
        (out.parent / "home").mkdir(), (out.parent / "home" / "thesis.tex").write_text("all of it"),
        out.symlink_to("home")),
    "a forged manifest that names another's file": lambda out: (  # type: ignore[dict-item]
        out.mkdir(), (out / "MANIFEST.json").write_text('{"kind": "rrd export 1", "files": {"thesis.tex": {}}}'),
        (out / "thesis.tex").write_text("all of it"), (out / "more.tex").write_text("x")),
    "a pipe": os.mkfifo,
    "a dangling link": lambda out: out.symlink_to("/no/such/directory/x"),
}


@pytest.mark.parametrize("kind", OUTPUTS)
def test_an_output_that_is_not_ours_keeps_every_byte(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    OUTPUTS[kind](out)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink()}
    with contextlib.suppress(RrdError), Publication(out) as new:
        new.add("adapter_model.safetensors", [b"x"])
        new.publish({})
    for path, data in before.items():  # in its place, or put aside whole
        kept = [p for p in tmp_path.rglob(path.name) if p.is_file() and p.read_bytes() == data]
        assert kept, f"{path} is gone"


def write(out: Path, meanwhile: Callable[[], object] = lambda: None) -> None:
    with Publication(out) as new:
        new.add("adapter_model.safetensors", [b"x"])
        meanwhile()
        new.publish({})


def test_a_link_above_an_output_does_not_lead_it_out_of_its_root(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put there while its job trains, or while the output is being written."""
    monkeypatch.setenv("RRD_WORKER_ROOTS", "{}")
    sub, elsewhere = tmp_path / "root" / "sub", tmp_path / "elsewhere"
    for place in (sub, elsewhere):
        place.mkdir(parents=True)
    roots.confine(model=[], data=[], output=[sub.parent])

    def swap() -> None:
        sub.rename(sub.with_name("aside"))
        sub.symlink_to(elsewhere)

    write(sub / "a", swap)
    assert (sub.with_name("aside") / "a" / "adapter_model.safetensors").exists()  # the directory that was looked at
    with pytest.raises(BadJob, match=f"outside output_root: {elsewhere}/a"):
        write(sub / "a")
    assert list(elsewhere.iterdir()) == []
    write(sub.parent / "b")


@pytest.mark.parametrize("what", ["a link to it", "itself"])
def test_what_takes_the_place_of_an_output_while_it_is_written_keeps_every_byte(tmp_path: Path, what: str) -> None:
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    (home / "thesis.tex").write_text("all of it")
    write(out)

    def swap() -> None:
        out.rename(tmp_path / "old")
        out.symlink_to(home) if what == "a link to it" else home.rename(out)

    write(out, swap)
    assert (out / "adapter_model.safetensors").exists() and not out.is_symlink()
    assert [p.read_text() for p in tmp_path.rglob("thesis.tex")] == ["all of it"]
