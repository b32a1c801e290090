"""The backend of two programs: what it says, what it kills, and what it puts back after a crash."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rrd.helper.base import BadSetup, Refusal
from rrd.helper.kept import Kept
from rrd.helper.programs import Programs
from rrd.helper.restore import restore
from rrd.helper.space import Sysfs

PROGRAM = """#!/bin/sh
# bus VERB DIE: opens a die by a file beside it; does what the file "mood" says
cd "$(dirname "$0")"
mood=$(cat mood 2>/dev/null)
case $1.$mood in
acquire.later) echo "somebody is first" >&2; exit 75 ;;
acquire.broken) printf 'looking\\nall ones\\n\\n' >&2; exit 3 ;;
acquire.hang) echo $2 > open; sleep 60 & echo $! > child; wait ;;
acquire.*) echo $2 > open ;;
release.stuck) exit 1 ;;
release.*) [ "$(cat open 2>/dev/null)" != $2 ] || rm open ;;
esac
"""


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    (tmp_path / "bus").write_text(PROGRAM)
    (tmp_path / "bus").chmod(0o755)
    return tmp_path


def programs(bus: Path, **how: float) -> Programs:
    kept = Kept.load(str(bus / "state.json"))
    backend = Programs("k80", ["0", "1"], [f"{bus}/bus", "acquire", "{die}"], [f"{bus}/bus", "release", "{die}"], kept,
                       **{"timeout": 20.0, **how})
    backend.start()
    return backend


def is_open(bus: Path) -> str | None:
    return (bus / "open").read_text().strip() if (bus / "open").exists() else None


def test_opens_and_closes(bus: Path) -> None:
    backend = programs(bus)
    for die in ("0", "1", "0"):
        backend.open(die)
        assert is_open(bus) == die
        backend.close(die)
        assert is_open(bus) is None


@pytest.mark.parametrize(("mood", "says", "later"), [
    ("later", "^somebody is first$", True), ("broken", r"^all ones \(exit status 3\)$", False)])
def test_a_refusal_has_the_last_line_as_its_reason(bus: Path, mood: str, says: str, later: bool) -> None:
    backend = programs(bus)
    (bus / "mood").write_text(mood)
    with pytest.raises(Refusal, match=says) as refusal:
        backend.open("0")
    assert refusal.value.later is later
    assert is_open(bus) is None


@pytest.mark.parametrize("why", ["late", "unwanted"])
def test_one_that_hangs_is_killed_with_all_it_started_and_undone(bus: Path, why: str) -> None:
    backend = programs(bus, timeout=1.0 if why == "late" else 60.0)
    (bus / "mood").write_text("hang")
    with pytest.raises(Refusal, match="no answer within"):
        backend.open("0", lambda: why == "late" or not (bus / "child").exists() or not (bus / "child").read_text())
    assert is_open(bus) is None
    if (bus / "child").exists() and (child := (bus / "child").read_text().strip()):
        end = time.monotonic() + 10
        while os.path.exists(f"/proc/{child}") and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            assert time.monotonic() < end


def test_a_release_that_failed_comes_before_the_next_open(bus: Path) -> None:
    backend = programs(bus)
    backend.open("0")
    (bus / "mood").write_text("stuck")
    with pytest.raises(Refusal, match="exit status 1"):
        backend.close("0")
    with pytest.raises(Refusal, match="exit status 1"):
        backend.open("1")
    assert is_open(bus) == "0"
    (bus / "mood").unlink()
    backend.open("1")
    assert is_open(bus) == "1"


def test_after_a_crash_the_open_die_is_closed(bus: Path) -> None:
    programs(bus).open("1")
    assert restore(Kept.load(str(bus / "state.json")), Sysfs())
    assert is_open(bus) is None
    assert not (bus / "state.json").exists()


def test_what_could_not_be_closed_after_a_crash_is_not_forgotten(bus: Path) -> None:
    programs(bus).open("1")
    (bus / "mood").write_text("stuck")
    assert not restore(Kept.load(str(bus / "state.json")), Sysfs())
    (bus / "mood").unlink()
    assert restore(Kept.load(str(bus / "state.json")), Sysfs())
    assert is_open(bus) is None


def test_a_program_that_is_not_there_is_a_bad_setup(bus: Path) -> None:
    (bus / "bus").unlink()
    with pytest.raises(BadSetup, match=r"group k80: .*/bus is no program that can be run"):
        programs(bus)
