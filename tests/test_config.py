"""rrd.toml: precedence, defaults, lanes, and a sentence for every mistake."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from every_key import assert_every_key_is_shown
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rrd import config as cfg
from rrd.config import Config, GateConfig, LaneConfig
from rrd.errors import BadConfig

ROOT = Path(__file__).parents[1]


def load(tmp_path: Path, text: str, **overrides: object) -> Config:
    file = tmp_path / "rrd.toml"
    file.write_text(text)
    return Config.load(file, overrides, environ={}, service=True)


LANE = '[[lane]]\ndies = ["cpu"]\n'
COMMAND = LANE + '[lane.gate]\nkind = "command"\n'

BAD: list[tuple[str, int, str]] = [
    ("treads = 2", 1, "unknown key `treads` (did you mean `threads`?)"),
    ("[[lanes]]\n", 1, "unknown key `lanes` (did you mean `lane`?)"),
    ("\nthreads = 0", 2, "`threads` must be at least 1, not 0"),
    ('threads = "2"', 1, "`threads` must be a whole number, not \"2\" (write it without quotes)"),
    ("threads = ", 1, "not TOML"),
    ('state_dir = "var"', 1, '`state_dir` must be a full path, not "var"'),
    ("state_dir = 3", 1, "`state_dir` must be a full path, not 3"),
    ('state_dir = "/a\\u0000"', 1, "`state_dir` must be a full path"),
    ('state_dir = "/var/cache/rrd/state"', 1, "must not lie below `cache_dir`"),
    ('jobs_dir = "/var/lib/rrd"', 1, "`jobs_dir` must not be `state_dir`"),
    (f'run_dir = "/{"x" * 100}"', 1, "too long for a unix socket"),
    ('model_roots = ["/m", "m"]', 1, '`model_roots[1]` must be a full path, not "m"'),
    ('model_roots = "/m"', 1, "`model_roots` must be a list, not"),
    ('metrics = "9477"', 1, '`metrics` must be "host:port", or "" for none'),
    ('metrics = "localhost:99999"', 1, "a port up to 65535"),
    ("metrics = false", 1, '`metrics` must be "host:port"'),
    ('die_memory = "11 gibbles"', 1, 'must be a size such as "11GiB"'),
    ('die_memory = "1KiB"', 1, "must be a size such as"),
    ('spool_uids = ["no-such-user-here"]', 1, "`spool_uids[0]` must list users of this machine"),
    ("spool_uids = [-1]", 1, "must list users"),
    ('group = "Größe"', 1, "`group` must be a name of letters, digits"),
    ("hang_seconds = nan", 1, "`hang_seconds` must be a finite number"),
    ("rescan_seconds = 0", 1, "must be at least 1"),
    ("[[lane]]\n", 1, "`lane[0].dies` is missing"),
    ("[[lane]]\ndies = []\n", 2, "`lane[0].dies` must be a list that is not empty"),
    (LANE + '[[lane]]\ndies = ["gpu"]\n', 4, '`lane[1].dies[0]` must list devices such as "cpu" or "cuda:0", not'),
    (LANE + "[[lane]]\ndise = []\n", 4, "unknown key `lane[1].dise` (did you mean `dies`?)"),
    ('[[lane]]\ndies = ["cuda:0"]\n[[lane]]\ndies = ["cuda:0"]', 1, '`lane` lists "cuda:0" twice'),
    ('[[lane]]\nname = "1"\ndies = ["cpu"]\n' + LANE, 1, '`lane` names two lanes "1"'),
    (COMMAND, 3, '`lane[0].gate.acquire` must name a program for kind = "command"'),
    (COMMAND + 'acquire = ["a"]\nrelease = [""]', 6, "`lane[0].gate.release` must name a program"),
    ("[[lane]]\n[lane.gate]\n[[lane]]\ndies = ['cpu']\n[lane.gate]\nkind = 'none'", 1, "`lane[0].dies` is missing"),
    (LANE + LANE + "[lane.gate]\nkin = 1", 6, "unknown key `lane[1].gate.kin` (did you mean `kind`?)"),
    (LANE + 'gate.kind = "socket"', 3, "must be the full path of the helper's socket"),
    (LANE + 'gate.kind = "magic"', 3, '`lane[0].gate.kind` must be "none", "command", "socket" or "simulated"'),
    (LANE + "gate.timeout = 0", 3, "must be greater than 0"),
]


@pytest.mark.parametrize(("text", "line", "says"), BAD, ids=[f"{i}-{t[:16]!r}" for i, (t, _, _) in enumerate(BAD)])
def test_a_bad_file_earns_its_sentence(tmp_path: Path, text: str, line: int, says: str) -> None:
    with pytest.raises(BadConfig) as caught:
        load(tmp_path, text)
    assert says in str(caught.value)
    assert f"rrd.toml:{line}: " in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 78


def test_a_named_file_must_be_there_and_readable(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="no such file"):
        Config.load(tmp_path / "nothing.toml", environ={}, service=True)
    with pytest.raises(BadConfig, match="no such file"):
        Config.load(environ={"RRD_CONFIG": str(tmp_path / "nothing.toml")}, service=True)
    with pytest.raises(BadConfig, match="cannot be read: Is a directory"):
        Config.load(tmp_path, environ={}, service=True)
    Config.load(environ={"HOME": str(tmp_path)}, service=False)  # the default file need not exist


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "rrd.toml"
    file.write_text('state_dir = "/file/state"\ncache_dir = "/file/cache"\nrun_dir = "/file/run"\nthreads = 2\n')
    environ = {"RRD_CONFIG": str(file), "RRD_STATE_DIR": "/env/state", "RRD_CACHE_DIR": "/env/cache",
               "RRD_JOBS_DIR": ""}
    flags = {"state_dir": "/flag/state", "threads": 3, "metrics": None}
    config = Config.load(None, flags, environ=environ, service=True)
    assert (config.state_dir, config.cache_dir, config.run_dir, config.jobs_dir) == (
        Path("/flag/state"), Path("/env/cache"), Path("/file/run"), Path("/etc/rrd/jobs.d"))
    assert (config.threads, config.metrics) == (3, "127.0.0.1:9477")


def test_the_blame_goes_where_the_value_came_from(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"^--threads: `threads` must be at least 1"):
        load(tmp_path, "threads = 2", threads=0)
    with pytest.raises(BadConfig, match=r"^RRD_RUN_DIR: `run_dir` is too long"):
        Config.load(environ={"RRD_RUN_DIR": "/" + "x" * 99}, service=True)


def test_paths_of_flags_and_environment_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = Config.load(None, {"state_dir": "s"}, environ={"RRD_JOBS_DIR": "j/../jobs"}, service=True)
    assert (config.state_dir, config.jobs_dir) == (tmp_path / "s", tmp_path / "jobs")


def test_a_service_uses_the_directories_systemd_made() -> None:
    environ = {"STATE_DIRECTORY": "/var/lib/rrd-two:/var/lib/more", "RUNTIME_DIRECTORY": "/run/rrd-two"}
    config = Config.load("/dev/null", environ=environ)
    assert (config.state_dir, config.run_dir, config.cache_dir) == (
        Path("/var/lib/rrd-two"), Path("/run/rrd-two"), Path("/var/cache/rrd"))


def test_everybody_else_uses_xdg_directories() -> None:
    config = Config.load(environ={"HOME": "/home/ada"}, service=False)
    assert (config.state_dir, config.cache_dir, config.run_dir, config.jobs_dir) == tuple(map(Path, (
        "/home/ada/.local/state/rrd", "/home/ada/.cache/rrd", "/home/ada/.local/state/rrd/run",
        "/home/ada/.config/rrd/jobs.d")))
    environ = {"HOME": "/home/ada", "XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": "/s", "XDG_CACHE_HOME": "rel"}
    config = Config.load(environ=environ, service=False)
    assert (config.state_dir, config.cache_dir, config.run_dir) == (
        Path("/s/rrd"), Path("/home/ada/.cache/rrd"), Path("/run/user/7/rrd"))


def test_values_mean_what_they_say(tmp_path: Path) -> None:
    config = load(tmp_path, '''
die_memory = "11GiB"
metrics = "[::1]:80"
spool_uids = ["nobody", 7]
output_root = "/o/"
''')
    assert config.die_memory == 11 * 2**30
    assert config.metrics_address == ("::1", 80)
    assert config.spool_owners >= {0, 7, os.geteuid()}
    assert config.adapters_dir == Path("/o")
    assert load(tmp_path, 'metrics = ""').metrics_address is None
    assert load(tmp_path, "").adapters_dir == Path("/var/lib/rrd/adapters")
    with pytest.raises(ValidationError):
        config.threads = 4  # type: ignore[misc]


@pytest.mark.parametrize(("text", "size"), [
    ("1GiB", 2**30), ("1.5 GB", 1_500_000_000), ("800M", 800_000_000), ("5000000", 5_000_000)])
def test_sizes(text: str, size: int) -> None:
    assert cfg.parse_size(text) == size


def test_lanes_are_expanded_in_order(tmp_path: Path) -> None:
    config = load(tmp_path, '''
threads = 3
[[lane]]
name = "k80"
dies = ["cuda:0", "cuda:1"]
gate.kind = "socket"
gate.socket = "/run/rrd-gate.sock"
[[lane]]
dies = ["cpu"]
threads = 1
''')
    assert [(d.index, d.name, d.device, d.lane, d.threads) for d in config.dies] == [
        (0, "0", "cuda:0", "k80", 3), (1, "1", "cuda:1", "k80", 3), (2, "2", "cpu", "1", 1)]
    assert [(lane.name, lane.gate.kind, len(lane.dies)) for lane in config.lanes] == [
        ("k80", "socket", 2), ("1", "none", 1)]


def test_without_configuration_the_first_dies_lie_in_different_lanes() -> None:
    lanes = cfg.expand(Config(), 2)
    assert [[d.index for d in lane.dies] for lane in lanes] == [[0, 2, 4], [1, 3, 5]]
    assert {d.threads for lane in lanes for d in lane.dies} == {1}
    assert len(cfg.expand(Config(), 16)) == 16


@given(st.integers(1, 64), st.integers(1, 8), st.none() | st.integers(1, 40))
def test_cpu_dies_are_spread_evenly_and_never_overbook_cores(cores: int, threads: int, cpu_dies: int | None) -> None:
    lanes = cfg.expand(Config(threads=threads, cpu_dies=cpu_dies), cores)
    dies = sorted(d.index for lane in lanes for d in lane.dies)
    assert dies == list(range(cpu_dies or max(6, cores)))
    sizes = [len(lane.dies) for lane in lanes]
    assert max(sizes) - min(sizes) <= 1
    assert len(lanes) * threads <= max(cores, threads)


def test_the_schema_for_editors_is_current() -> None:
    """To renew: python etc/schema/renew.py."""
    assert json.loads((ROOT / "etc/schema/rrd.schema.json").read_text()) == json.loads(json.dumps(cfg.json_schema()))


def test_the_shipped_file_shows_every_key_with_its_default(tmp_path: Path) -> None:
    text = (ROOT / "etc/rrd.toml").read_text()
    assert load(tmp_path, text) == load(tmp_path, "")
    top, _, lane = text.partition("#[[lane]]\n")
    lane, _, gate = lane.partition("#[lane.gate]\n")
    assert_every_key_is_shown(top, Config, tables=frozenset({"lane"}))
    assert_every_key_is_shown(lane, LaneConfig, tables=frozenset({"gate"}))
    assert_every_key_is_shown(gate, GateConfig)
    uncommented = re.sub(r"^#(?=[^ \n])", "", text, flags=re.MULTILINE)
    assert load(tmp_path, uncommented).dies[1].device == "cuda:1"
