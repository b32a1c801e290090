"""The spool: the scan is the truth, and one bad file hides nothing."""

from __future__ import annotations

import grp
import os
import pwd
import socket
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrd import spool as spool_module
from rrd.config import Config
from rrd.job import JobSpec
from rrd.spool import JobFile, Rejection, Scan, Spool, settle_outputs

OLD = 1_000_000_000.0
"""Unix time of files that were written long ago."""


class Clock:
    """A wall clock and a monotonic clock that move only when told to."""

    def __init__(self) -> None:
        self.wall, self.mono = OLD + 1e6, 100.0

    def pass_(self, seconds: float) -> None:
        self.wall += seconds
        self.mono += seconds


class Bench:
    """A spool over a directory of its own, with helpers to put files there and to let time pass."""

    def __init__(self, tmp_path: Path, **config: object) -> None:
        self.dir = tmp_path / "jobs.d"
        self.dir.mkdir()
        self.config = Config.model_validate({
            "state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache", "run_dir": "/run/rrd-test",
            "jobs_dir": self.dir, **config})
        self.clock = Clock()
        self.spool = self.fresh()

    def fresh(self, accepted: tuple[JobFile, ...] = ()) -> Spool:
        return Spool(self.config, accepted=accepted, wall=lambda: self.clock.wall, monotonic=lambda: self.clock.mono)

    def put(self, name: str, text: str | bytes | None = None, *, mtime: float = OLD, mode: int = 0o644) -> Path:
        path = self.dir / name
        data = job() if text is None else text
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        path.chmod(mode)
        os.utime(path, (mtime, mtime))
        return path

    def settled(self) -> Scan:
        """The scan after everything that was there has had its time."""
        for _ in range(100):
            scan = self.spool.scan()
            if scan.next_check is None:
                return scan
            self.clock.pass_(scan.next_check - self.clock.mono)
        raise AssertionError("never settles")


def job(**keys: object) -> str:
    return 'model = "/m"\ndata = "/d.jsonl"\n' + "".join(f"{k} = {v}\n" for k, v in keys.items())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


# ---- when a file counts ----


def test_a_file_counts_after_two_equal_scans_200_ms_apart(bench: Bench) -> None:
    bench.put("a.toml")
    scan = bench.spool.scan()
    assert (set(scan.jobs), scan.pending, scan.present) == (set(), {"a.toml"}, {"a"})
    assert scan.next_check == pytest.approx(100.2)
    bench.clock.pass_(0.19)
    assert bench.spool.scan().pending == {"a.toml"}
    bench.clock.pass_(0.02)
    scan = bench.spool.scan()
    assert (set(scan.jobs), scan.pending, scan.next_check) == ({"a"}, set(), None)
    found = scan.jobs["a"]
    assert (found.spec.lora_rank, found.mtime, found.data) == (32, OLD, job().encode())
    assert found.path == bench.dir / "a.toml"


def test_a_file_that_keeps_changing_never_counts(bench: Bench) -> None:
    """A truncated file can be valid: `lora_rank = 3`, cut from 32."""
    for rank in range(1, 9):
        bench.put("a.toml", job(lora_rank=rank), mtime=OLD + rank)
        assert bench.spool.scan().jobs == {}
        bench.clock.pass_(0.19)
    assert bench.settled().jobs["a"].spec.lora_rank == 8


def test_an_edit_that_hides_its_time_and_size_is_seen(bench: Bench) -> None:
    bench.put("a.toml", job(lora_rank=10))
    bench.settled()
    bench.put("a.toml", job(lora_rank=20))  # same size, same mtime; the change time tells
    assert bench.settled().jobs["a"].spec.lora_rank == 20


def test_a_young_file_that_does_not_parse_is_pending_not_rejected(bench: Bench) -> None:
    bench.put("a.toml", b"", mtime=bench.clock.wall)
    bench.spool.scan()
    bench.clock.pass_(0.5)
    scan = bench.spool.scan()
    assert (scan.pending, scan.rejected) == ({"a.toml"}, {})
    assert scan.next_check == pytest.approx(102.0)
    bench.clock.pass_(1.5)
    scan = bench.spool.scan()
    assert (scan.pending, set(scan.rejected)) == (set(), {"a.toml"})


def test_a_file_from_the_future_is_judged_too(bench: Bench) -> None:
    bench.put("a.toml", "x", mtime=bench.clock.wall + 1)
    bench.put("b.toml", "x", mtime=bench.clock.wall + 1e6)
    assert set(bench.settled().rejected) == {"a.toml", "b.toml"}


def test_a_file_written_while_it_is_read_is_read_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("a.toml", job(lora_rank=1))
    bench.spool.scan()
    bench.clock.pass_(0.3)
    read = os.read
    monkeypatch.setattr(os, "read", lambda fd, n: (bench.put("a.toml", job(lora_rank=222)), read(fd, n))[1])
    assert bench.spool.scan().pending == {"a.toml"}
    monkeypatch.undo()
    assert bench.settled().jobs["a"].spec.lora_rank == 222


# ---- files that may not speak for a job ----


def _link(bench: Bench) -> None:
    (bench.dir / "bad.toml").symlink_to(bench.put("target"))


def _hard_link(bench: Bench) -> None:
    os.link(bench.put("bad.toml"), bench.dir / "other-name")


def _socket(bench: Bench) -> None:
    with socket.socket(socket.AF_UNIX) as s:
        here = os.getcwd()
        os.chdir(bench.dir)  # the path of a socket must be short
        s.bind("bad.toml")
        os.chdir(here)


def _foreign(bench: Bench) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    os.chown(bench.put("bad.toml"), 65534, -1)


UNFIT: list[tuple[str, Callable[[Bench], object], str]] = [
    ("symbolic link", _link, "bad.toml: is a symbolic link, which is not followed"),
    ("dangling link", lambda b: (b.dir / "bad.toml").symlink_to("/nowhere"), "bad.toml: is a symbolic link"),
    ("hard link", _hard_link, "bad.toml: has 2 names (hard links)"),
    ("directory", lambda b: (b.dir / "bad.toml").mkdir(), "bad.toml: is not a regular file"),
    ("fifo", lambda b: os.mkfifo(b.dir / "bad.toml"), "bad.toml: is not a regular file"),
    ("socket", _socket, "bad.toml: is not a regular file"),
    ("large", lambda b: b.put("bad.toml", job() + "#" * 70_000), "bad.toml: is larger than 64 KiB"),
    ("sparse", lambda b: os.truncate(b.put("bad.toml"), 2**40), "bad.toml: is larger than 64 KiB"),
    ("group-writable", lambda b: b.put("bad.toml", mode=0o664), "bad.toml: may be written by its group or by others"),
    ("world-writable", lambda b: b.put("bad.toml", mode=0o602), "bad.toml: may be written by its group or by others"),
    ("foreign", _foreign, "bad.toml: belongs to nobody, whose job files do not count"),
    ("unknown key", lambda b: b.put("bad.toml", job(lora_rnk=3)), "bad.toml:3: unknown key `lora_rnk`"),
    ("no TOML", lambda b: b.put("bad.toml", "\x00"), "bad.toml:1: not TOML"),
    ("empty", lambda b: b.put("bad.toml", ""), "bad.toml: the file is empty"),
    ("pickle", lambda b: b.put("bad.toml", 'model = "/m.bin"\ndata = "/d"'), "bad.toml: `model` is a .bin file"),
    ("own state", lambda b: b.put("bad.toml", job(output=f'"{b.config.state_dir}/x"')), "bad.toml: `output` lies in"),
]


@pytest.mark.parametrize(("make", "says"), [u[1:] for u in UNFIT], ids=[u[0] for u in UNFIT])
def test_an_unfit_file_is_refused_in_a_sentence_and_hides_nothing(
        bench: Bench, make: Callable[[Bench], object], says: str) -> None:
    make(bench)
    bench.put("good.toml")
    scan = bench.settled()
    assert set(scan.jobs) == {"good"}
    assert set(scan.rejected) == {"bad.toml"}
    assert scan.rejected["bad.toml"].sentence.startswith(says)
    assert scan.present == {"good", "bad"}


def test_rejections_say_line_key_and_hint(bench: Bench) -> None:
    bench.put("bad.toml", job(lora_rnk=3))
    found = bench.settled().rejected["bad.toml"]
    assert (found.file, found.line, found.key, found.hint) == ("bad.toml", 3, "lora_rnk", "did you mean `lora_rank`?")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused_until_it_is_readable(bench: Bench) -> None:
    path = bench.put("a.toml", mode=0o000)
    assert "cannot be read: Permission denied" in bench.settled().rejected["a.toml"].sentence
    path.chmod(0o600)
    assert set(bench.settled().jobs) == {"a"}


def test_a_read_error_is_refused_and_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("a.toml")

    def broken(fd: int, n: int) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "read", broken)
        assert bench.settled().rejected["a.toml"].sentence == "a.toml: cannot be read: Input/output error"
    assert set(bench.settled().jobs) == {"a"}


def test_a_file_of_an_allowed_user_counts(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root gives files away")
    bench = Bench(tmp_path, spool_uids=(65534,))
    os.chown(bench.put("a.toml"), 65534, -1)
    assert set(bench.settled().jobs) == {"a"}


def test_files_of_the_group_s_members_count(tmp_path: Path) -> None:
    """Primary or not: `nobody` is in `nogroup` by its line in passwd."""
    if os.geteuid():
        pytest.skip("only root gives files away")
    group = grp.getgrgid(pwd.getpwnam("nobody").pw_gid).gr_name
    bench = Bench(tmp_path, group=group)
    os.chown(bench.put("a.toml"), pwd.getpwnam("nobody").pw_uid, -1)
    os.chown(bench.put("b.toml"), 54321, -1)
    scan = bench.settled()
    assert set(scan.jobs) == {"a"}
    assert "belongs to user 54321" in scan.rejected["b.toml"].sentence


def test_other_names_are_ignored_without_a_word(bench: Bench) -> None:
    for name in ("a.toml~", ".a.toml.swp", "a.toml.dpkg-new", "#a.toml#", "-a.toml", "a b.toml", "a.TOML", "README",
                 ".toml", "4913", "x" * 64 + ".toml"):
        bench.put(name)
    os.rename(bench.put("z"), os.fsencode(bench.dir) + b"/\xff.toml")
    scan = bench.settled()
    assert (scan.jobs, scan.rejected, scan.present) == ({}, {}, frozenset())


# ---- edits, removal, the directory ----


def test_a_good_job_goes_on_as_accepted_while_its_file_is_bad(bench: Bench) -> None:
    bench.put("a.toml", job(lora_rank=8))
    bench.settled()
    bench.put("a.toml", "lora_rank = ")
    scan = bench.spool.scan()
    assert (scan.jobs["a"].spec.lora_rank, scan.pending) == (8, {"a.toml"})
    scan = bench.settled()
    assert (scan.jobs["a"].spec.lora_rank, set(scan.rejected)) == (8, {"a.toml"})
    bench.put("a.toml", job(lora_rank=16))
    scan = bench.settled()
    assert (scan.jobs["a"].spec.lora_rank, scan.rejected) == (16, {})


def test_a_removed_file_ends_its_job_once_it_stays_away(bench: Bench) -> None:
    path = bench.put("a.toml")
    bench.settled()
    path.unlink()
    scan = bench.spool.scan()
    assert (set(scan.jobs), scan.present) == ({"a"}, {"a"})  # an editor may be putting it back
    assert scan.next_check is not None
    scan = bench.settled()
    assert (scan.jobs, scan.present) == ({}, frozenset())


def test_a_file_replaced_by_its_editor_never_ends_its_job(bench: Bench) -> None:
    path = bench.put("a.toml")
    bench.settled()
    path.unlink()
    bench.spool.scan()
    bench.put("a.toml", job(weight=2.0))
    bench.clock.pass_(0.1)
    assert set(bench.spool.scan().jobs) == {"a"}
    bench.clock.pass_(0.1)
    assert set(bench.spool.scan().jobs) == {"a"}
    assert bench.settled().jobs["a"].spec.weight == 2.0


def test_a_bad_file_that_is_removed_is_forgotten(bench: Bench) -> None:
    path = bench.put("a.toml", "x")
    assert set(bench.settled().rejected) == {"a.toml"}
    path.unlink()
    scan = bench.settled()
    assert (scan.rejected, scan.present) == ({}, frozenset())


def _gone(directory: Path) -> None:
    directory.rename(directory.with_name("away"))


def _a_file(directory: Path) -> None:
    _gone(directory)
    directory.write_text("x")


@pytest.mark.parametrize(("break_it", "says"), [
    (_gone, "there is no such directory"), (_a_file, "this is no directory")])
def test_a_directory_that_cannot_be_read_ends_no_job(bench: Bench, break_it: Callable[[Path], None], says: str) -> None:
    bench.put("a.toml")
    bench.put("bad.toml", "x")
    before = bench.settled()
    break_it(bench.dir)
    for _ in range(3):
        scan = bench.spool.scan()
        bench.clock.pass_(10)
        assert (scan.jobs, scan.rejected, scan.present) == (before.jobs, before.rejected, before.present)
        assert scan.unavailable
        assert says in scan.unavailable.sentence
    bench.dir.unlink(missing_ok=True)
    bench.dir.with_name("away").rename(bench.dir)
    scan = bench.settled()
    assert (scan.jobs, scan.unavailable) == (before.jobs, None)


def test_an_unreadable_directory_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    scan = bench.spool.scan()
    assert scan.unavailable
    assert "the daemon may not read this directory" in scan.unavailable.sentence
    assert scan.unavailable.hint.startswith("chmod")


def test_jobs_known_from_before_go_on_when_their_files_are_bad_at_the_start(bench: Bench) -> None:
    bench.put("a.toml", job(lora_rank=8))
    bench.put("b.toml")
    known = bench.settled().jobs
    bench.put("a.toml", "x")
    (bench.dir / "b.toml").unlink()
    bench.spool = bench.fresh(tuple(known.values()))
    assert set(bench.spool.scan().jobs) == {"a", "b"}
    scan = bench.settled()
    assert (set(scan.jobs), set(scan.rejected)) == ({"a"}, {"a.toml"})


def test_a_job_known_from_before_keeps_its_output_though_its_file_is_bad(bench: Bench) -> None:
    bench.put("a.toml", job(output='"/o"'))
    known = bench.settled().jobs["a"]
    bench.put("a.toml", "x")
    bench.put("b.toml", job(output='"/o"'), mtime=OLD - 9)
    bench.spool = bench.fresh((replace(known, output=""),))
    scan = bench.settled()
    assert (set(scan.jobs), set(scan.rejected)) == ({"a"}, {"a.toml", "b.toml"})


def test_jobs_come_in_order_of_their_files_times(bench: Bench) -> None:
    for name, age in (("a", 3), ("b", 1), ("c", 2), ("d", 1)):
        bench.put(f"{name}.toml", mtime=OLD + age)
    assert list(bench.settled().jobs) == ["b", "d", "c", "a"]


def test_a_new_configuration_judges_every_file_anew(bench: Bench) -> None:
    bench.put("a.toml")
    bench.settled()
    bench.spool.reconfigure(bench.config.model_copy(update={"model_roots": (Path("/elsewhere"),)}))
    scan = bench.settled()
    assert "outside model_roots" in scan.rejected["a.toml"].sentence
    assert set(scan.jobs) == {"a"}


def test_a_configuration_that_comes_during_a_scan_is_not_lost(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.put("a.toml")
    bench.settled()
    fenced, listdir = bench.config.model_copy(update={"data_roots": (Path("/elsewhere"),)}), os.listdir
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", lambda fd: (bench.spool.reconfigure(fenced), listdir(fd))[1])
        bench.spool.scan()
    assert "outside data_roots" in bench.settled().rejected["a.toml"].sentence


# ---- outputs ----


def test_of_two_jobs_with_one_output_the_older_file_wins(bench: Bench) -> None:
    (bench.dir.parent / "link").symlink_to(bench.dir.parent)
    bench.put("a.toml", job(output=f'"{bench.dir.parent}/out"'), mtime=OLD + 2)
    bench.put("b.toml", job(output=f'"{bench.dir.parent}/link/out"'), mtime=OLD + 1)
    scan = bench.settled()
    assert set(scan.jobs) == {"b"}
    assert "overlaps, that of b.toml" in scan.rejected["a.toml"].sentence
    (bench.dir / "b.toml").unlink()
    assert set(bench.settled().jobs) == {"a"}  # without having been touched


def test_who_has_an_output_keeps_it(bench: Bench) -> None:
    bench.put("a.toml", job(output='"/o"'), mtime=OLD + 2)
    bench.settled()
    bench.put("b.toml", job(output='"/o/inner"'), mtime=OLD + 1)
    bench.put("c.toml", job(output='"/p"'), mtime=OLD + 1)
    assert set(bench.settled().jobs) == {"a", "c"}
    bench.put("c.toml", job(output='"/o"'), mtime=OLD)  # an edit that wants what another has
    scan = bench.settled()
    assert scan.jobs["c"].output == "/p"
    assert set(scan.rejected) == {"b.toml", "c.toml"}


def test_outputs_move_along_a_chain_of_edits(bench: Bench) -> None:
    for name, out in (("a", "/x"), ("b", "/y"), ("c", "/z")):
        bench.put(f"{name}.toml", job(output=f'"{out}"'))
    bench.settled()
    for name, out in (("a", "/y"), ("b", "/z"), ("c", "/z/deeper"), ("d", "/x")):
        bench.put(f"{name}.toml", job(output=f'"{out}"'))
    assert {i: j.output for i, j in bench.settled().jobs.items()} == {"a": "/x", "b": "/y", "c": "/z/deeper"}
    bench.put("c.toml", job(output='"/w"'))
    assert {i: j.output for i, j in bench.settled().jobs.items()} == {"a": "/y", "b": "/z", "c": "/w", "d": "/x"}


def offer(name: str, output: str, mtime: float) -> JobFile:
    return JobFile(name, Path(name), JobSpec(model="/m", data="/d"), "", mtime, b"", output)


OUTPUTS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
OFFERS = st.dictionaries(st.sampled_from("uvwxyz"), st.tuples(OUTPUTS, st.integers(0, 3)), max_size=6).map(
    lambda d: {k: offer(k, o, t) for k, (o, t) in d.items()})


@given(OFFERS, OFFERS)
def test_no_two_jobs_ever_share_an_output(first: dict[str, JobFile], second: dict[str, JobFile]) -> None:
    jobs, refused = settle_outputs(first, {})
    assert jobs.keys() | refused.keys() == first.keys()
    assert not jobs.keys() & refused.keys()
    assert settle_outputs(first, jobs)[0] == jobs  # settled stays settled
    later, _ = settle_outputs(second, {name: job for name, job in jobs.items() if name in second})
    for at in (jobs, later):
        outputs = sorted(f"{job.output}/" for job in at.values())
        assert not any(b.startswith(a) for a, b in pairwise(outputs))


# ---- cost ----


def test_an_unchanged_file_is_never_opened_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(50):
        bench.put(f"good{i}.toml")
        bench.put(f"bad{i}.toml", "x")
    before = bench.settled()

    def opened(fd: int, name: str, owners: frozenset[int]) -> tuple[bytes, os.stat_result]:
        raise AssertionError(name)

    monkeypatch.setattr(spool_module, "_read", opened)
    bench.clock.pass_(1000)
    assert bench.spool.scan() == before


def test_a_scan_and_its_parts_cannot_be_changed_by_accident(bench: Bench) -> None:
    scan = replace(bench.settled(), unavailable=Rejection("f", "s"))
    with pytest.raises(AttributeError):
        scan.next_check = 3.0  # type: ignore[misc]
