"""The watch: whatever happens to its ears, the spool ends up as a fresh scan says."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrd.config import Config
from rrd.spool import Scan, Spool
from rrd.watch import Debounce, Ears, Watch, inotify

DEADLINE = 20.0


# ---- debounce ----


def test_a_burst_is_over_after_a_quiet_time() -> None:
    burst = Debounce(0.3, 2.0)
    assert burst.due() is None
    assert burst.mark(10.0)
    assert burst.due() == 10.3
    assert not burst.mark(10.2)
    assert burst.due() == 10.5
    burst.clear()
    assert burst.due() is None
    assert burst.mark(11.0)


def test_a_burst_without_end_is_cut_short() -> None:
    burst = Debounce(0.3, 2.0)
    for tenth in range(100):
        burst.mark(10.0 + tenth / 10)
    assert burst.due() == 12.0


# ---- the watch, in real time with short times ----


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, DEADLINE))


def quick(directory: Path, **more: Any) -> Watch:
    """A watch that would never rescan by itself within a test."""
    times = {"rescan_seconds": 3600.0, "check_seconds": 0.02, "debounce": Debounce(0.005, 0.05)}
    return Watch(directory, **{**times, **more})


class Observers:
    """Makes inotify observers and remembers them; refuses while ``refuse`` is set."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.refuse = False

    def __call__(self) -> Any:
        if self.refuse:
            raise OSError(24, "inotify instance limit reached")
        self.made.append(inotify())
        return self.made[-1]


CHANGES: list[tuple[str, Callable[[Path], object]]] = [
    ("write", lambda d: (d / "new.toml").write_text("x")),
    ("edit in place", lambda d: (d / "old.toml").write_text("y")),
    ("rename inside", lambda d: (d / "old.toml").rename(d / "new.toml")),
    ("move in", lambda d: (d.parent / "out.toml").rename(d / "new.toml")),
    ("move out", lambda d: (d / "old.toml").rename(d.parent / "gone.toml")),
    ("hard link", lambda d: os.link(d / "old.toml", d / "new.toml")),
    ("symbolic link", lambda d: (d / "new.toml").symlink_to("old.toml")),
    ("delete", lambda d: (d / "old.toml").unlink()),
    ("mode", lambda d: (d / "old.toml").chmod(0o666)),
]


@pytest.mark.parametrize("change", [c for _, c in CHANGES], ids=[name for name, _ in CHANGES])
def test_every_kind_of_change_is_heard(tmp_path: Path, change: Callable[[Path], object]) -> None:
    directory = tmp_path / "jobs.d"
    directory.mkdir()
    (directory / "old.toml").write_text("x")
    (tmp_path / "out.toml").write_text("x")

    async def main() -> None:
        watch = quick(directory, check_seconds=3600.0)
        assert await watch.dirty()
        assert watch.healthy
        change(directory)
        assert await watch.dirty()
        await watch.close()

    run(main())


def test_reading_the_spool_is_no_change(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("x")

    async def main() -> None:
        watch = quick(tmp_path)
        await watch.dirty()
        for _ in range(3):
            (tmp_path / "a.toml").read_text()
            os.listdir(tmp_path)
        started = time.monotonic()
        assert await watch.dirty(until=started + 0.2)
        assert time.monotonic() - started >= 0.2
        await watch.close()

    run(main())


def test_it_wakes_at_its_deadlines_and_when_poked(tmp_path: Path) -> None:
    async def main() -> None:
        watch = quick(tmp_path, rescan_seconds=0.05, check_seconds=3600.0, observer=None)
        for _ in range(3):
            assert await watch.dirty()
        await watch.close()
        watch = quick(tmp_path)
        assert await watch.dirty()
        assert await watch.dirty(until=time.monotonic() + 0.01)
        waiting = asyncio.create_task(watch.dirty())
        await asyncio.sleep(0)
        watch.poke()
        assert await waiting
        await watch.close()

    run(main())


def test_closing_ends_the_wait_and_every_thread(tmp_path: Path) -> None:
    async def main() -> None:
        before = {t for t in threading.enumerate() if "asyncio" not in t.name}
        watch = quick(tmp_path)
        await watch.dirty()
        waiting = asyncio.create_task(watch.dirty())
        await asyncio.sleep(0)
        await watch.close()
        assert not await waiting
        assert not await watch.dirty()
        assert {t for t in threading.enumerate() if "asyncio" not in t.name} <= before

    run(main())


async def until(watch: Watch, holds: Callable[[], bool]) -> None:
    """Wait for what the watch does by itself; the deadline of ``run`` bounds it."""
    while not holds():
        await watch.dirty(until=time.monotonic() + 0.005)


def test_a_deaf_watch_is_rebuilt(tmp_path: Path) -> None:
    """Dead emitter, dead observer, dead reader of the kernel's queue, and a directory that was replaced."""
    directory = tmp_path / "jobs.d"
    directory.mkdir()
    make = Observers()

    def replaced() -> None:
        directory.rename(tmp_path / "old")
        directory.mkdir()

    def recreated() -> None:
        directory.rmdir()
        directory.mkdir()  # likely under the same inode number

    def reader_dies() -> None:
        make.made[-1]._inotify_fd.stop()
        (directory / "unheard.toml").write_text("x")

    harms: list[Callable[[], object]] = [
        lambda: [e.stop() for e in make.made[-1].emitters], lambda: make.made[-1].stop(), replaced, recreated]
    if hasattr(inotify(), "_inotify_fd"):  # watchdog 6 and before read in the emitter
        harms.append(reader_dies)

    async def main() -> None:
        watch = quick(directory, observer=make)
        await watch.dirty()
        for n, harm in enumerate(harms, 2):
            harm()
            await until(watch, lambda n=n: len(make.made) >= n and watch.healthy)  # type: ignore[misc]
        await watch.close()

    run(main())


def test_what_happened_while_it_was_deaf_is_not_lost(tmp_path: Path) -> None:
    """An edit in place leaves no trace in the directory; a directory put in place of another may have its time."""
    directory = tmp_path / "jobs.d"
    directory.mkdir()
    (directory / "a.toml").write_text("x")
    make = Observers()

    async def main() -> None:
        watch = quick(directory, observer=make)
        await watch.dirty()
        for emitter in make.made[-1].emitters:
            emitter.stop()
        (directory / "a.toml").write_text("y")
        assert await watch.dirty()
        assert len(make.made) == 2
        times = directory.stat()
        shutil.copytree(directory, tmp_path / "new")
        directory.rename(tmp_path / "old")
        (tmp_path / "new").rename(directory)
        os.utime(directory, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert await watch.dirty()
        assert len(make.made) == 3
        await watch.close()

    run(main())


def test_a_healthy_watch_is_left_alone(tmp_path: Path) -> None:
    make = Observers()

    async def main() -> None:
        watch = quick(tmp_path, observer=make)
        for i in range(30):
            (tmp_path / f"{i % 3}.toml").write_text("x")
            await watch.dirty(until=time.monotonic() + 0.01)
        assert len(make.made) == 1
        await watch.close()

    run(main())


def test_without_a_watch_the_spool_is_polled_and_says_so(tmp_path: Path) -> None:
    make = Observers()
    make.refuse = True

    async def main() -> None:
        watch = quick(tmp_path, observer=make)
        for _ in range(5):
            assert await watch.dirty()
            assert not watch.healthy
        make.refuse = False
        await until(watch, lambda: watch.healthy)
        await watch.close()

    run(main())


def test_a_missing_directory_is_watched_once_it_appears(tmp_path: Path) -> None:
    directory = tmp_path / "jobs.d"

    async def main() -> None:
        watch = quick(directory)
        for _ in range(3):  # the spool is to say so, and to see it come
            assert await watch.dirty()
            assert not watch.healthy
        directory.mkdir()
        await until(watch, lambda: watch.healthy)
        await watch.close()

    run(main())


def test_a_symbolic_link_to_the_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    async def main() -> None:
        watch = quick(tmp_path / "link", check_seconds=3600.0)
        await watch.dirty()
        (tmp_path / "real/a.toml").write_text("x")
        assert await watch.dirty()
        await watch.close()

    run(main())


def test_a_change_that_nobody_told_of_is_noticed_by_the_directorys_time(tmp_path: Path) -> None:
    class Deaf:
        """An observer whose threads live and hear nothing."""

        emitters = (threading.current_thread(),)

        def schedule(self, *_: Any, **__: Any) -> None: ...
        def start(self) -> None: ...
        def stop(self) -> None: ...
        def join(self, _: float) -> None: ...
        def is_alive(self) -> bool:
            return True

    made: list[Any] = []
    ears = Ears(tmp_path, lambda: made.append(Deaf()) or made[-1], lambda: None)
    assert ears.check()
    assert not ears.check()
    os.utime(tmp_path, (1, 1))
    assert ears.check()  # scan now; perhaps the event is late
    assert len(made) == 1
    assert ears.check()  # it never came: rebuilt
    assert len(made) == 2
    assert not ears.check()


# ---- the spool and its watch together ----

NAMES = ("a.toml", "b.toml", "c.toml", "a.toml~", "ignored")
TEXTS = ("", "lora_rank = 3", 'model = "/m"\ndata = "/d"\n', 'model = "/m"\ndata = "/d"\nlora_rank = 3',
         'model = "/m"\ndata = "/d"\nlora_rank = 32', 'model = "/m"\ndata = "/d"\nlora_rnk = 3')
NAME, TEXT = st.sampled_from(NAMES), st.sampled_from(TEXTS)
OPERATION = st.one_of(
    st.tuples(st.just("drop"), NAME, TEXT), st.tuples(st.just("edit"), NAME, TEXT),
    st.tuples(st.just("rename"), NAME, NAME), st.tuples(st.just("delete"), NAME, st.just("")),
    st.tuples(st.just("scan"), st.just(""), st.just("")),
    st.tuples(st.just("replace directory"), st.just(""), st.just("")))


def operate(directory: Path, what: str, one: str, other: str) -> None:
    if what == "drop":  # as `rrd submit` does: beside, then in one move
        (directory / ".new").write_text(other)
        (directory / ".new").rename(directory / one)
    elif what == "edit":
        (directory / one).write_text(other)
    elif what == "rename" and (directory / one).exists():
        (directory / one).rename(directory / other)
    elif what == "delete":
        (directory / one).unlink(missing_ok=True)
    elif what == "replace directory":
        copy = directory.with_name("copy")
        shutil.copytree(directory, copy)
        shutil.rmtree(directory)
        copy.rename(directory)


SPEED = 200.0
"""How much faster the spool's clocks run than real time."""


def hurried(config: Config) -> Spool:
    """A spool in whose eyes every file is old and 200 ms pass in one."""
    return Spool(config, wall=lambda: time.time() + 1e6, monotonic=lambda: time.monotonic() * SPEED)


def settled(spool: Spool) -> Scan:
    scan = spool.scan()
    while scan.next_check is not None:
        time.sleep(max(0.0, scan.next_check / SPEED - time.monotonic()))
        scan = spool.scan()
    return scan


def agrees(live: Scan, fresh: Scan) -> bool:
    """Whether they say the same; a job whose file has gone bad may go on as it was accepted."""
    good = {i: (job.digest, job.mtime) for i, job in live.jobs.items() if f"{i}.toml" not in live.rejected}
    return (good == {i: (job.digest, job.mtime) for i, job in fresh.jobs.items()} and live.rejected == fresh.rejected
            and live.present == fresh.present and not live.pending)


async def follow(directory: Path, operations: list[tuple[str, str, str]], ears: str) -> None:
    config = Config(state_dir=directory.with_name("state"), jobs_dir=directory)
    make = Observers()
    make.refuse = ears == "polling"
    watch = Watch(directory, rescan_seconds=3600.0, check_seconds=0.003, debounce=Debounce(0.001, 0.005), observer=make)
    spool = hurried(config)
    try:
        await watch.dirty()
        scan = spool.scan()
        for n, operation in enumerate(operations):
            if ears == "killed" and n == len(operations) // 2 and make.made:
                for emitter in list(make.made[-1].emitters):
                    emitter.stop()
            if operation[0] == "scan":
                scan = spool.scan()
            else:
                operate(directory, *operation)
        fresh = settled(hurried(config))
        while not agrees(scan, fresh):
            due = None if scan.next_check is None else scan.next_check / SPEED
            assert await watch.dirty(due)
            scan = spool.scan()
    finally:
        await watch.close()


@settings(max_examples=1000, deadline=None)
@given(st.lists(OPERATION, max_size=12), st.sampled_from(["inotify", "polling", "killed"]))
def test_after_any_history_the_spool_agrees_with_a_fresh_scan(
        operations: list[tuple[str, str, str]], ears: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as base:
        directory = Path(base) / "jobs.d"
        directory.mkdir()
        run(follow(directory, operations, ears))
