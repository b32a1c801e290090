"""Whether checkpoints will fit, seen beforehand."""

from __future__ import annotations

import os
from pathlib import Path

from boxes import box, toy_keys, write_job
from disks import small_disk
from saves import commit

from rrd.checkpoint import RESERVE
from rrd.room import Room, Wish, look, refusal

MIB = 1 << 20
WISH = Wish("a", 100 * MIB, 3)


def room(free: int, total: int = 10**12, **there: int) -> Room:
    return Room(free, total, {"a": 0, **there})


def test_three_checkpoints_another_while_it_is_written_and_the_reserve_must_fit() -> None:
    needed = 3 * WISH.bytes + 125 * MIB + RESERVE
    assert refusal(WISH, [], room(needed)) is None
    no = refusal(WISH, [], room(needed - 1))
    assert no is not None and not no.ever
    assert no.why == ("its checkpoints need 489 MiB more (3 of 100 MiB, another while it is written, and 64.0 MiB to "
                      "spare), and the disk has 489 MiB free")
    assert "by itself" in no.hint


def test_those_that_are_there_need_no_room_again() -> None:
    needed = WISH.bytes + 125 * MIB + RESERVE
    assert refusal(WISH, [], room(needed, a=2)) is None
    assert refusal(WISH, [], room(needed - 1, a=2)) is not None
    assert refusal(WISH, [], room(125 * MIB + RESERVE, a=7)) is None


def test_what_the_others_have_not_written_yet_is_not_free() -> None:
    other = Wish("b", 1000 * MIB, 2)
    needed = 3 * WISH.bytes + 125 * MIB + RESERVE
    there = 1250 * MIB + 1000 * MIB
    assert refusal(WISH, [other, WISH], room(needed + there, b=1)) is None
    no = refusal(WISH, [other, WISH], room(needed + there - 1, b=1))
    assert no is not None and no.why.endswith("the disk has 2.7 GiB free, of which other jobs will need 2.2 GiB")


def test_what_no_cleaning_up_can_help_is_no_wait() -> None:
    no = refusal(WISH, [], room(10 * MIB, 400 * MIB))
    assert no is not None and no.ever
    assert no.why.endswith("and the disk is one of 400 MiB") and "smaller `keep`" in no.hint


def test_the_disk_is_looked_at(tmp_path: Path) -> None:
    (job := tmp_path / "jobs" / "a").mkdir(parents=True)
    commit(job, 10)
    found = look(tmp_path, ["a", "b"])
    assert found is not None and found.there == {"a": 1, "b": 0} and 0 < found.free <= found.total
    assert look(tmp_path / "none", []) is None


def test_a_job_that_does_not_fit_waits_and_says_so_and_one_that_never_can_is_refused(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=5)
    with small_disk(tmp_path / "state", "100m") as state, box(tmp_path, "cpu_dies = 1\n") as b:
        with open(state / "ballast", "wb") as f:
            os.posix_fallocate(f.fileno(), 0, 20 << 20)
        write_job(b.jobs_dir, "waits", **keys, keep=600)
        write_job(b.jobs_dir, "never", **keys, keep=3000)
        write_job(b.jobs_dir, "fits", **keys)
        b.start()
        waits = b.wait_job("waits", lambda j: "its checkpoints need" in j.why)
        assert waits.state == "waiting" and "MiB free" in waits.why and "by itself" in waits.hint
        never = b.wait_state("never", "failed")
        assert "the disk is one of 100 MiB" in never.why and never.die is None
        b.wait_done("fits")
