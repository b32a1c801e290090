"""rrd check and submit: what gets into the spool, and what does not."""

from __future__ import annotations

import json
import os
import stat
import tempfile
from pathlib import Path

import headers
import pytest
from conftest import Rrd
from fake_daemon import FakeDaemon, snapshot

from rrd.cli.intake import with_full_paths
from rrd.job import parse_job

LEGACY = [{"die": 0, "model": "models/small", "data": "/data/code.jsonl", "output": "out/code", "lora_rank": 8,
           "lr": 1e-4, "epochs": 2, "seq_len": 128, "steps_per_visit": 5, "quantize": False},
          {"die": 1, "model": "models/small", "data": "/data/prose.txt", "output": "out/prose"}]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and data in it."""
    here = tmp_path / "here"
    headers.model(here / "models/small")
    (here / "data.txt").write_text("hello")
    monkeypatch.chdir(here)
    return here


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


GOOD = 'model = "models/small"  # the little one\ndata = "data.txt"\n\nlr = 1e-3 # brave\nlora_ranks = {q_proj = 64}\n'


# ---- check -------------------------------------------------------------------------------------------------------


def test_check_says_what_a_good_job_will_do(rrd: Rrd, here: Path) -> None:
    result = rrd("check", write(here / "a.toml", GOOD + "max_steps = 1\n"))
    assert result.exit_code == 0
    assert result.stdout == (f"{here}/a.toml: ok, job a: lora r=32 of {here}/models/small on {here}/data.txt, 1 step\n")
    assert result.stderr == ""


def test_check_goes_on_after_a_bad_one_and_blames_it(rrd: Rrd, here: Path) -> None:
    write(here / "good.toml", GOOD)
    write(here / "typo.toml", GOOD + "lora_rang = 8\n")
    write(here / "my job.toml", GOOD)
    (here / "latin.toml").write_bytes(b'model = "\xe9"\n')
    result = rrd("check", "typo.toml", "my job.toml", "latin.toml", "none.toml", "models", "good.toml")
    assert result.exit_code == 78
    assert result.stdout.startswith("good.toml: ok")
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0] == "error: typo.toml:6: unknown key `lora_rang`"
    assert "hint: did you mean `lora_rank`?" in result.stderr
    assert "my job.toml cannot be the name of a job file" in errors[1]
    assert "not UTF-8" in errors[2]
    assert errors[3:] == ["error: there is no file none.toml", "error: models is a directory"]
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["check", "submit", "run"])
def test_a_pipe_is_refused_and_nobody_waits_for_its_writer(rrd: Rrd, here: Path, command: str) -> None:
    os.mkfifo("f.toml")
    result = rrd(command, "f.toml")
    assert result.exit_code == 78
    assert result.stderr == "error: f.toml is not a regular file\nhint: a job is a text file\n"


def test_a_pipe_in_the_spool_is_refused_too(rrd: Rrd, here: Path, state: Path) -> None:
    (state / "jobs.d").mkdir(parents=True)
    os.mkfifo(state / "jobs.d/a.toml")
    result = rrd("submit", write(here / "a.toml", GOOD))
    assert (result.exit_code, result.stderr.splitlines()[0]) == (
        78, f"error: {state}/jobs.d/a.toml is not a regular file")


def test_check_as_json(rrd: Rrd, here: Path) -> None:
    write(here / "good.toml", GOOD.replace("data.txt", "later.txt"))
    write(here / "bad.toml", GOOD + "lr = 2\n")
    result = rrd("check", "--json", "good.toml", "bad.toml")
    good, bad = json.loads(result.stdout)
    assert (good["ok"], good["job"], good["spec"]["lr"]) == (True, "good", 1e-3)
    assert good["missing"] == [f"good: `data` is not there yet: {here}/later.txt"]
    assert (bad["ok"], bad["file"], bad["line"]) == (False, "bad.toml", 6)
    assert result.stderr == ""


def test_check_knows_where_the_configuration_allows_models(rrd: Rrd, here: Path) -> None:
    write(here / "a.toml", GOOD)
    config = write(here / "rrd.toml", 'model_roots = ["/srv/models"]\n')
    result = rrd("check", "a.toml", "-c", config)
    assert result.exit_code == 78
    assert "a.toml: `model` lies outside model_roots" in result.stderr


@pytest.mark.parametrize("command", ["check", "submit", "run"])
@pytest.mark.parametrize(("line", "said"), [
    ('data = "models"', "/models: `data` is a directory, and data is one file"),
    ("die = 99", "`die`: there is no die 99; the dies are 0, 1, 2, 3, 4, 5"),
    ('model = "org/name"', '`model` must be a full path, not "org/name"'),
    ('model = "https://hub/org/name"', '`model` must be a path on this machine, not "https://hub/org/name"'),
    ('output = "models/small/out"', "`output` lies in the directory of `model`, which is only read"),
])
def test_what_would_only_be_found_out_on_a_die_is_said_at_once(rrd: Rrd, here: Path, state: Path, line: str, said: str,
                                                               command: str) -> None:
    key = line.split()[0]
    kept = "".join(text + "\n" for text in GOOD.splitlines() if not text.startswith(key))
    config = write(here / "rrd.toml", "cpu_dies = 6\n")
    result = rrd(command, write(here / "a.toml", kept + line + "\n"), "-c", config)
    assert result.exit_code == 78 and "a.toml" in result.stderr and said in result.stderr
    assert "hint: " in result.stderr and not (state / "jobs.d/a.toml").exists()


def test_the_dies_are_those_of_the_running_daemon(rrd: Rrd, here: Path, daemon: FakeDaemon) -> None:
    there = snapshot()
    daemon.show(there)
    write(here / "a.toml", GOOD + f"die = {there.dies[-1].name}\n")
    write(here / "b.toml", GOOD + "die = 77\n")
    assert rrd("check", "a.toml").exit_code == 0
    assert "there is no die 77; the dies are 0, 1, 2, 3, 4, 5\n" in rrd("check", "b.toml").stderr


def test_what_is_odd_is_a_warning(rrd: Rrd, here: Path) -> None:
    result = rrd("check", write(here / "a.toml", GOOD + "eval_data = 'data.txt'\nseq_len = 2049\n"))
    assert result.exit_code == 0 and result.stdout.startswith(f"{here}/a.toml: ok")
    assert result.stderr.splitlines() == [
        "warning: a: `eval_data` is the text that it trains on, so its loss says nothing about other text",
        "warning: a: `seq_len` is 2049, and the model was made for up to 2048 tokens"]


# ---- submit ------------------------------------------------------------------------------------------------------


def test_submit_writes_full_paths_and_keeps_the_comments(rrd: Rrd, here: Path, state: Path) -> None:
    result = rrd("submit", write(here / "a.toml", GOOD))
    assert result.exit_code == 0, result.output
    file = state / "jobs.d/a.toml"
    assert file.read_text() == GOOD.replace('"models/small"', f'"{here}/models/small"').replace(
        '"data.txt"', f'"{here}/data.txt"')
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert os.listdir(state / "jobs.d") == ["a.toml"]
    assert result.stderr == ("a: submitted\n"
                             f"rrd is not running; it takes up what lies in {state}/jobs.d when it starts.\n")
    assert result.stdout == ""


def test_submit_under_any_umask_leaves_a_file_that_the_daemon_can_read(rrd: Rrd, here: Path, state: Path) -> None:
    before = os.umask(0o077)
    try:
        assert rrd("submit", write(here / "a.toml", GOOD)).exit_code == 0
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE((state / "jobs.d/a.toml").stat().st_mode) == 0o640


def test_submit_goes_where_the_running_daemon_looks(rrd: Rrd, here: Path, daemon: FakeDaemon) -> None:
    daemon.show(snapshot(jobs_dir=str(here / "spool")))
    result = rrd("submit", write(here / "a.toml", GOOD))
    assert (here / "spool/a.toml").exists()
    assert "`rrd status a` shows how it goes" in result.stderr
    assert rrd("submit", "a.toml", "--jobs-dir", here / "mine").exit_code == 0
    assert (here / "mine/a.toml").exists()


def test_again_is_harmless_and_another_job_of_that_name_is_refused(rrd: Rrd, here: Path, state: Path) -> None:
    write(here / "a.toml", GOOD)
    write(here / "b.toml", GOOD)
    assert rrd("submit", "a.toml").exit_code == 0
    inode = (state / "jobs.d/a.toml").stat().st_ino
    again = rrd("submit", "a.toml")
    assert again.exit_code == 0
    assert again.stderr.startswith("a: already there\n")
    assert (state / "jobs.d/a.toml").stat().st_ino == inode

    write(here / "a.toml", GOOD.replace("1e-3", "2e-3"))
    refused = rrd("submit", "b.toml", "a.toml")
    assert refused.exit_code == 1
    assert "there is another job called a in" in refused.stderr
    assert "--replace" in refused.stderr
    assert not (state / "jobs.d/b.toml").exists()
    assert "1e-3" in (state / "jobs.d/a.toml").read_text()

    replaced = rrd("submit", "--replace", "--json", "b.toml", "a.toml")
    assert [j["done"] for j in json.loads(replaced.stdout)] == ["submitted", "replaced"]
    assert "2e-3" in (state / "jobs.d/a.toml").read_text()


def test_nothing_is_written_when_one_of_several_is_bad(rrd: Rrd, here: Path, state: Path) -> None:
    write(here / "a.toml", GOOD)
    write(here / "b.toml", "model = 3\n")
    result = rrd("submit", "a.toml", "b.toml")
    assert result.exit_code == 78
    assert not (state / "jobs.d").exists()


def test_the_older_tools_array(rrd: Rrd, here: Path, state: Path) -> None:
    result = rrd("submit", write(here / "jobs.json", json.dumps(LEGACY)))
    assert result.exit_code == 0, result.output
    spec = parse_job("code.toml", (state / "jobs.d/code.toml").read_bytes())
    assert (spec.model, spec.output, spec.die, spec.lora_rank, spec.epochs) == (
        f"{here}/models/small", f"{here}/out/code", 0, 8, 2.0)
    assert set(os.listdir(state / "jobs.d")) == {"code.toml", "prose.toml"}
    assert "warning: code: `data` is not there yet: /data/code.jsonl" in result.stderr


def test_two_jobs_of_one_name(rrd: Rrd, here: Path) -> None:
    (here / "sub").mkdir()
    write(here / "a.toml", GOOD)
    write(here / "sub/a.toml", GOOD)
    result = rrd("submit", "a.toml", "sub/a.toml")
    assert result.exit_code == 78
    assert "two jobs would be called a: a.toml and sub/a.toml" in result.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become nobody")
def test_without_permission(rrd: Rrd, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        spool = Path(top, "jobs.d")
        spool.mkdir(0o755)
        job = write(Path(top, "a.toml"), GOOD.replace('"models', '"/models').replace('"data.txt', '"/data.txt'))
        os.chmod(job, 0o644)
        os.seteuid(65534)
        try:
            result = rrd("submit", job, "--jobs-dir", spool)
        finally:
            os.seteuid(0)
    assert result.exit_code == 77, result.output
    assert "no permission to write" in result.stderr
    assert "group rrd" in result.stderr


@pytest.mark.parametrize("text", [
    "model = 'm'\ndata='d'\n", '"model" = "m"\ndata = """d"""\n', 'data="d"\r\nmodel = "m" # model = "m"\r\n',
    'model = "m\\u0041"\ndata = "d"\nlora_ranks = {model = 3, data = 4}\n',
    'model = "sp ace"\ndata = "~/d"\noutput = "../o"\n[lora_ranks]\ndata = 7\n',
    "model = 'back\\1slash'\ndata = 'd'\n"])
def test_full_paths_however_they_are_written(tmp_path: Path, text: str) -> None:
    spec = parse_job("a.toml", text.encode(), base=tmp_path)
    assert parse_job("a.toml", with_full_paths(text, spec).encode()) == spec
