"""Job files: every bad one earns its sentence, every good one its spec."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from every_key import assert_every_key_is_shown
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rrd import edits, job, job_keys
from rrd.config import Config
from rrd.errors import BadJob
from rrd.job import JobSpec, parse_job

ROOT = Path(__file__).parents[1]
GOOD = 'model = "/m"\ndata = "/d.jsonl"\n'


def parse(text: str | bytes) -> JobSpec:
    return parse_job("code.toml", text.encode() if isinstance(text, str) else text)


def spec(**keys: object) -> JobSpec:
    return JobSpec.model_validate({"model": "/m", "data": "/d", **keys})


# Each bad file, the line it is blamed on, the key, and what the sentence and its hint must say.
BAD: list[tuple[str | bytes, int, str, str]] = [
    (b"", 0, "", "the file is empty"),
    (b" \n\n", 0, "", "the file is empty"),
    ("# only a comment\n", 0, "model", "`model` is missing (add a line `model = …`: Base model"),
    ('model = "/m"\n', 0, "data", "`data` is missing"),
    (b"\xef\xbb\xbf" + GOOD.encode(), 1, "", "starts with a byte order mark"),
    ("model = 'x'".encode("utf-16"), 1, "", "is UTF-16 (save it as UTF-8)"),
    (GOOD.encode() + b'output = "/\xe9"', 3, "", "byte 0xe9 is not UTF-8"),
    (GOOD.encode() + b"# \x00", 3, "", "not TOML: "),
    (GOOD + 'output = "/a\\u0000b"', 3, "output", "`output` is no path"),
    (GOOD + 'output = ""', 3, "output", "`output` is no path"),
    (GOOD + 'output = "/a\\nb"', 3, "output", "`output` is no path"),
    (GOOD + f'output = "/{"a" * 5000}"', 3, "output", "`output` is no path"),
    ('model = "m"\ndata = "/d"', 1, "model", '`model` must be a full path, not "m" (the service has no current'),
    ("model: /m", 1, "", "with an equals sign"),
    ("model = /m", 1, "", "text needs quotes"),
    (GOOD + "paused = True", 3, "", "TOML writes `true` or `false`"),
    (GOOD + "lr = ", 3, "", "not TOML: invalid value"),
    (GOOD + "lora_rank = 3\nlora_rank = 4", 4, "", "`lora_rank` stands twice (keep one of the two)"),
    (GOOD + "seed = 3\n[seed]", 4, "", "`seed` stands twice"),
    (GOOD + "betas = [\n0.9]\nbetas = [\n0.9]\n", 6, "", "a key stands twice"),
    (GOOD + 'lora_rnk = 8', 3, "lora_rnk", "unknown key `lora_rnk` (did you mean `lora_rank`?)"),
    (GOOD + '[lora]\nrank = 8', 3, "lora",
     "unknown key `lora` (it is no table: write `lora_rank = …` and so on, above all tables)"),
    (GOOD + 'learning_rate = 1', 3, "learning_rate", "unknown key `learning_rate` (did you mean `lr`?)"),
    (GOOD + 'Base-Model = "/m"', 3, "Base-Model", "did you mean `model`?"),
    (GOOD + 'BATCH-SIZE = 1', 3, "BATCH-SIZE", "did you mean `batch_size`?"),
    (GOOD + '"\\u001b[31m" = 1', 0, "\x1b[31m", "unknown key `\\u001b[31m`"),
    (GOOD + "[train]\nlr = 1", 3, "train", "unknown key `train`"),
    (GOOD + 'lora_rank = "32"', 3, "lora_rank", 'must be a whole number, not "32" (write it without quotes)'),
    (GOOD + "lora_rank = 3.5", 3, "lora_rank", "must be a whole number, not 3.5"),
    (GOOD + "lora_rank = true", 3, "lora_rank", "must be a whole number, not true"),
    (GOOD + "lora_rank = 0", 3, "lora_rank", "must be at least 1, not 0"),
    (GOOD + "lora_rank = 4097", 3, "lora_rank", "must be at most 4,096, not 4097"),
    (GOOD + "seed = 99999999999999999999999", 3, "seed", "must be less than"),
    (GOOD + f"seed = {'9' * 5000}", 3, "", "a number has thousands of digits (no key takes such a number)"),
    (GOOD + f"seed = 0x{'f' * 9000}", 3, "seed", "a number of more than 24 digits"),
    (GOOD + f"lr = 0x{'f' * 9000}", 3, "lr", "a number of more than 24 digits"),
    (GOOD + "lr = nan", 3, "lr", "must be a finite number, not nan"),
    (GOOD + "lr = inf", 3, "lr", "must be a finite number, not inf"),
    (GOOD + "lr = 0.0", 3, "lr", "must be greater than 0, not 0.0"),
    (GOOD + "lr = 1979-05-27", 3, "lr", "must be a number, not a date or time"),
    (GOOD + "epochs = 0", 3, "epochs", "must be greater than 0"),
    (GOOD + "max_steps = 0", 3, "max_steps", "must be at least 1"),
    (GOOD + "seq_len = 1", 3, "seq_len", "must be at least 2"),
    (GOOD + "lora_dropout = 1.0", 3, "lora_dropout", "must be less than 1"),
    (GOOD + "clip_norm = -1.0", 3, "clip_norm", "must be at least 0"),
    (GOOD + "weight = 0.0", 3, "weight", "must be at least 0.001"),
    (GOOD + "keep = 0", 3, "keep", "must be at least 1"),
    (GOOD + "visit_seconds = 1e9", 3, "visit_seconds", "must be at most 3600"),
    (GOOD + 'schedule = "cosin"', 3, "schedule",
     'must be "cosine", "linear" or "constant", not "cosin" (did you mean `cosine`?)'),
    (GOOD + 'method = "qlora"', 3, "method", 'must be "lora" or "full"'),
    (GOOD + "paused = 1", 3, "paused", "must be true or false, not 1"),
    (GOOD + "model = 3", 3, "", "`model` stands twice"),
    ("model = 3\ndata = '/d'", 1, "model", "must be text in quotes, not 3"),
    (GOOD + "betas = [0.9]", 3, "betas", "must be two numbers from 0"),
    (GOOD + "betas = [0.9, 1.0]", 3, "betas", "must be two numbers from 0"),
    (GOOD + "betas = [0.9, nan]", 3, "betas", "must be two numbers from 0"),
    (GOOD + "betas = 0.9", 3, "betas", "must be a list, not 0.9"),
    (GOOD + "lora_targets = []", 3, "lora_targets", "at least one"),
    (GOOD + 'lora_targets = ["q_proj", "q_proj"]', 3, "lora_targets", "each module once"),
    (GOOD + 'lora_targets = ["model.q_proj"]', 3, "lora_targets", 'not "model.q_proj"'),
    (GOOD + 'lora_targets = "q_proj"', 3, "lora_targets", "must be a list"),
    (GOOD + "lora_ranks = {q_proj = 0}", 3, "lora_ranks", 'a rank from 1 to 4096 for each module, not 0 for "q_proj"'),
    (GOOD + "lora_ranks = 3", 3, "lora_ranks", "must be a table"),
    (GOOD + 'die = "gpu"', 3, "die", "`rrd dies` lists them"),
    (GOOD + "die = -1", 3, "die", "must be \"auto\", a die's number"),
    (GOOD + "die = true", 3, "die", "not true"),
    (GOOD + "quantize = 8", 3, "quantize", 'must be true, false or "int8", not 8'),
    (GOOD + 'steps_per_visit = "all"', 3, "steps_per_visit", 'must be "auto" or a number of steps'),
    (GOOD + "steps_per_visit = 0", 3, "steps_per_visit", 'must be "auto" or a number of steps'),
    (GOOD + 'checkpoint_every = "10 parsecs"', 3, "checkpoint_every", 'must be a duration such as "10min"'),
    (GOOD + 'checkpoint_every = "0s"', 3, "checkpoint_every", "between 1 second and 7 days"),
    (GOOD + 'checkpoint_every = "9999999h"', 3, "checkpoint_every", "between 1 second and 7 days"),
    (GOOD + "checkpoint_every = 0", 3, "checkpoint_every", "must be a number of steps (at least 1) or a duration"),
    (GOOD + "checkpoint_every = 10.5", 3, "checkpoint_every", "not 10.5"),
    (GOOD + "min_lr = 0.1", 3, "min_lr", "must not be above `lr` (0.0002), not 0.1"),
    (GOOD + "warmup_steps = 11\nmax_steps = 10", 3, "warmup_steps", "must not be above `max_steps` (10), not 11"),
    (GOOD + 'method = "full"\nquantize = true', 4, "quantize", 'use method = "lora"'),
    (GOOD + "eval_every = 10", 3, "eval_every", "needs `eval_data`"),
    (GOOD + "x = " + "[" * 3000, 0, "", "nested too deeply"),
    (GOOD + "x = " + "{a=" * 3000, 0, "", "nested too deeply"),
    (GOOD + ".".join("a" * 3000) + " = 1", 0, "", ""),
    (GOOD + "#" * 70_000, 0, "", "larger than 64 KiB"),
    ("lora_rank = 0\nmodle = 3\n", 1, "lora_rank", "must be at least 1"),  # the first fault in the file is said
]


@pytest.mark.parametrize(("text", "line", "key", "says"), BAD, ids=[f"{k or s[:20]}-{i}" for i, (_, _, k, s)
                                                                   in enumerate(BAD)])
def test_a_bad_file_earns_its_sentence(text: str | bytes, line: int, key: str, says: str) -> None:
    with pytest.raises(BadJob) as caught:
        parse(text)
    e = caught.value
    assert says in str(e)
    assert (e.line, e.key) == (line, key)
    assert e.message.startswith(f"code.toml:{line}: " if line else "code.toml: ")
    assert "\n" not in str(e)
    assert len(str(e)) < 500
    assert e.exit_code == 78


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_raise_only_bad_job(data: bytes) -> None:
    with pytest.raises(BadJob):
        parse(data)


KEYS = st.sampled_from([*JobSpec.model_fields, "modle", "x"])
VALUES = st.sampled_from(["nan", "-inf", "1e400", "9" * 30, "-1", "0", "1", "0.5", '"/x"', '"10min"', "[]", "[1, 2]",
                          "{}", "{a = 1}", "true", "1979-05-27T07:32:00Z", '"\\u202e"', '""', "[[[]]]",
                          "0x" + "f" * 400])


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=6, unique_by=lambda kv: kv[0]))
def test_any_value_for_any_key_is_taken_or_refused_in_a_sentence(pairs: list[tuple[str, str]]) -> None:
    text = "".join(f"{k} = {v}\n" for k, v in pairs)
    try:
        spec = parse(text)
    except BadJob as e:
        said = str(e)
    else:
        said = "nothing"
        assert parse(job.to_toml(spec)) == spec
    assert said
    assert "\n" not in said


def test_defaults_and_round_trips() -> None:
    spec = parse(GOOD)
    assert (spec.lora_rank, spec.alpha, spec.lr) == (32, 64, 2e-4)
    assert (spec.checkpoint_seconds, spec.checkpoint_steps) == (600, None)
    assert parse(job.to_toml(spec)) == spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_file_with_every_key_set_round_trips() -> None:
    spec = parse(GOOD + '''
output = "/o/./a/../b"
die = "0000:3B:00.0"
tokenizer = "/t/tokenizer.json"
lora_alpha = 16
lora_targets = ["q_proj", "v_proj"]
lora_ranks = {q_proj = 8}
betas = [0.9, 0]
checkpoint_every = 50
quantize = true
steps_per_visit = 7
eval_data = "/e"
eval_every = 10
export_every = 20
max_steps = 1000
''')
    assert (spec.output, spec.die, spec.betas, spec.quantize) == ("/o/b", "0000:3b:00.0", (0.9, 0.0), "int8")
    assert spec.checkpoint_steps == 50
    assert parse(job.to_toml(spec)) == spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


def test_a_spec_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        parse(GOOD).lr = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(("text", "seconds"), [
    ("90s", 90), ("10min", 600), ("2h", 7200), ("1.5 hours", 5400), ("1d", 86400), ("3 minutes", 180), ("45sec", 45),
    ("5m", 300)])
def test_durations(text: str, seconds: float) -> None:
    assert job_keys.parse_duration(text) == seconds


def test_relative_paths_count_from_a_base_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    spec = parse_job("x.toml", b'model = "~/m"\ndata = "../d"\noutput = "o/"', base=Path("/srv/here"))
    assert (spec.model, spec.data, spec.output) == ("/home/ada/m", "/srv/d", "/srv/here/o")


@pytest.mark.parametrize(("name", "job_id"), [
    ("code.toml", "code"), ("A-1_b.toml", "A-1_b"), ("a" * 63 + ".toml", "a" * 63), ("a" * 64 + ".toml", None),
    ("code.toml\n", None), ("-a.toml", None), (".toml", None), ("code.toml~", None), (".code.toml.swp", None),
    ("code.toml.dpkg-new", None), ("é.toml", None), ("a b.toml", None), ("../a.toml", None), ("a.TOML", None)])
def test_ids(name: str, job_id: str | None) -> None:
    assert job.id_of(name) == job_id


# ---- paths ----


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(state_dir=tmp_path / "state", cache_dir=tmp_path / "cache", run_dir=Path("/run/rrd-test"),
                  jobs_dir=tmp_path / "jobs.d", model_roots=(tmp_path / "models",), data_roots=(tmp_path / "data",))


def good(tmp_path: Path, **keys: object) -> JobSpec:
    return spec(**{"model": f"{tmp_path}/models/m", "data": f"{tmp_path}/data/d.jsonl", **keys})


def test_paths_inside_the_roots_are_fine_and_need_not_exist(tmp_path: Path, config: Config) -> None:
    job.check_paths("a", good(tmp_path), config)
    job.check_paths("a", good(tmp_path, output=f"{tmp_path}/out"), config)
    job.check_paths("a", good(tmp_path, output=f"{tmp_path}/state/adapters/mine"), config)
    assert job.output_of("a", good(tmp_path), config) == tmp_path / "state/adapters/a"


@pytest.mark.parametrize(("key", "value", "says"), [
    ("model", "/etc", "`model` lies outside model_roots"),
    ("model", "{}/models/../data", "`model` lies outside model_roots"),
    ("model", "{}/models/link", "`model` lies outside model_roots"),
    ("tokenizer", "/etc/tokenizer.json", "`tokenizer` lies outside model_roots"),
    ("data", "{}/models/d", "`data` lies outside data_roots"),
    ("eval_data", "/d", "`eval_data` lies outside data_roots"),
    ("model", "{}/models/pytorch_model.bin", "may run code when it is opened"),
    ("model", "{}/models/m.PTH", "convert it: python"),
    ("model", "{}/models/m.gguf", "must be a directory or a .safetensors file"),
    ("data", "{}/data/d.pt", "give text"),
    ("output", "{}/models", "holds other things"),
    ("output", "/", "holds other things"),
    ("output", "{}/state", "holds other things"),
    ("output", "{}/state/adapters", "holds other things"),
    ("output", "{}/state/jobs/a", "one of rrd's own directories"),
    ("output", "{}/jobs.d/a", "one of rrd's own directories"),
])
def test_paths_elsewhere_are_refused(tmp_path: Path, config: Config, key: str, value: str, says: str) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/link").symlink_to("/etc")
    with pytest.raises(BadJob, match=f"^{says}" if says.startswith("`") else says) as caught:
        job.check_paths("a", good(tmp_path, **{key: value.format(tmp_path)}), config)
    assert caught.value.key == key
    assert caught.value.hint


def test_output_root_holds_also_through_links(tmp_path: Path, config: Config) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "away").symlink_to(tmp_path)
    fenced = config.model_copy(update={"output_root": root})
    job.check_paths("a", good(tmp_path, output=f"{root}/x"), fenced)
    for out in (f"{root}/away/x", f"{tmp_path}/x"):
        with pytest.raises(BadJob, match="outside output_root"):
            job.check_paths("a", good(tmp_path, output=out), fenced)


# ---- the older tool's list ----


def test_the_older_tools_list_is_read(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    entry = {"die": 0, "model": "models/m", "data": "d/Code Data.jsonl", "output": "out/code", "lora_rank": 16,
             "lr": 1e-4, "epochs": 2, "seq_len": 256, "steps_per_visit": 5, "quantize": True}
    text = json.dumps([entry, {**entry, "output": "else/code", "die": 1}, {"model": "m", "data": "d/Code Data.jsonl"},
                       {"model": "m", "data": "d/...jsonl"}])
    jobs = job.parse_legacy(text.encode(), base=tmp_path)
    assert [i for i, _ in jobs] == ["code", "code-2", "Code-Data", "job"]
    first = jobs[0][1]
    assert (first.model, first.output, first.quantize, first.epochs) == (
        f"{tmp_path}/models/m", f"{tmp_path}/out/code", "int8", 2.0)
    assert all(job.JOB_ID.fullmatch(i) for i, _ in jobs)


@pytest.mark.parametrize(("data", "says"), [
    (b"", "not JSON"), (b"{}", "not a list of jobs"), (b"[]", "not a list of jobs"), (b"[1]", "not a list of jobs"),
    (b'[{"model": "/m"}]', "job 1: `data` is missing"), (b'[{"modle": "/m"}]', "job 1: "),
    (b'[{"model": "m", "data": "/d"}]', "must be a full path"), (b"\xef\xbb\xbf[]", "byte order mark"),
    (b"[" * 100_000, "not a list of jobs"), (b'[{"model":"/m","data":"/d","lr":NaN}]', "finite"),
    (b'[{"model":"/m","data":"/d","seed":' + b"9" * 9000 + b"}]", "not a list"),
    (b'[\n{"model": "/m",}]', "jobs.json:2: ")])
def test_a_bad_list_earns_its_sentence(data: bytes, says: str) -> None:
    with pytest.raises(BadJob) as caught:
        job.parse_legacy(data)
    assert says in str(caught.value)


# ---- what ships beside the model ----


def test_the_schema_for_editors_is_current() -> None:
    """To renew: python etc/schema/renew.py."""
    assert json.loads((ROOT / "etc/schema/job.schema.json").read_text()) == json.loads(json.dumps(job.json_schema()))


def test_the_example_names_every_key_with_its_default() -> None:
    text = (ROOT / "etc/job.example.toml").read_text()
    parse(text)
    assert_every_key_is_shown(text, JobSpec)


def test_the_documentation_names_every_key_and_its_kind() -> None:
    doc = (ROOT / "docs/job-file.md").read_text()
    rows = {line.split("|")[1].strip(" `"): line for line in doc.splitlines() if line.startswith("| `")}
    for key, field in JobSpec.model_fields.items():
        kind = ("live" if key in edits.LIVE_KEYS else "next place" if key in edits.PLACE_KEYS
                else "restart" if key in edits.RESTART_KEYS
                else "content" if key in job.INPUT_KEYS else "identity")
        assert f"| {kind} |" in rows[key], key
        assert f"| {field.description} |".replace("\n", " ") in rows[key], key
    assert rows.keys() == JobSpec.model_fields.keys()


def test_other_tools_words_lead_to_keys_there_are() -> None:
    fields = JobSpec.model_fields.keys()
    assert set(job_keys.ALIASES.values()) <= fields and not job_keys.ALIASES.keys() & fields
