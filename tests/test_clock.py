"""The clock on the wall may be set, and the machine may sleep: nothing is due earlier or later for that."""

from __future__ import annotations

import ast
import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from world import HANG, World, play

from rrd.messages import Message, Run

PACKAGE = Path(__file__).parent.parent / "rrd"


def steadily(w: World, chance: random.Random) -> None:
    """A clock that nobody touches."""


def forth_and_back(w: World, chance: random.Random) -> None:
    w.clock_error = chance.uniform(-1, 1) * 10 ** chance.uniform(0, 9)


def ever_later(w: World, chance: random.Random) -> None:
    """As after suspensions: only the wall's clock has gone on."""
    w.clock_error += chance.uniform(0, 1e5)


async def _past(w: World, change: Callable[[World, random.Random], None]) -> list[tuple[float, Message]]:
    """A history in which everything that has a deadline happens: cadences, a hang, a crash, a full disk, back-offs."""
    chance, orders = random.Random(1), []

    async def meddle() -> None:
        while True:
            change(w, chance)
            await asyncio.sleep(0.35)

    meddling = asyncio.create_task(meddle())
    w.workers.at("b", "step 40", HANG)
    w.drop("a", "b", max_steps=600, checkpoint_every="10s")
    w.drop("c", max_steps=300, checkpoint_every=25, steps_per_visit="auto", visit_seconds=2.0)
    await w.until_step("c", 60)
    w.disk.full = True
    await w.until_state("c", "paused")
    w.disk.full = False
    await w.until_done("a", "b", "c")
    meddling.cancel()
    orders = [o for o in w.workers.orders if isinstance(o, Run)]
    return [(0.0, o) for o in orders] + [(round(asyncio.get_running_loop().time(), 1), Message())]


def past(tmp: Path, change: Callable[[World, random.Random], None]) -> tuple[object, object, object]:
    found: list[tuple[object, object, object]] = []

    async def story() -> None:
        async with World(tmp, 2, hang_seconds=30) as w:
            orders = await _past(w, change)
            found.append((orders, {k: list(v) for k, v in w.disk.checkpoints.items()}, list(w.workers.history)))

    play(story())
    return found[0]


@pytest.mark.parametrize("change", [forth_and_back, ever_later])
def test_a_clock_that_is_set_changes_no_visit_no_cadence_and_no_deadline(
        tmp_path: Path, change: Callable[[World, random.Random], None]) -> None:
    assert past(tmp_path, change) == past(tmp_path, steadily)


ON_THE_WALL = {
    "daemon.py": "when it started, and when a snapshot was taken: shown", "journal.py": "when it happened: shown",
    "spool.py": "how old a file is that cannot be read yet; it waits for it a few seconds, whatever the clock says",
    "checkpoint.py": "when it was written: shown", "herald.py": "when a job ended", "snapshot.py": "shown",
    "store.py": "which copies nobody has used for a month: a clock that is wrong costs a copy, which is made anew",
    "scheduler.py": "handed in, for what is shown", "lane.py": "handed in, for what is shown",
    "preparer.py": "handed in, for what is shown", "faults.py": "handed in, for what is shown",
    "loop.py": "when a step was: shown", "tensorboard.py": "when a step was: shown",
    "prepare.py": "whether a file may have changed within the tick of its time stamp: it is read again then",
}
"""Modules that know the time of day, and what for."""


def test_the_time_of_day_is_for_people() -> None:
    """Below the command line, who asks for it is named here."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            asks = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and (
                (node.value.id, node.attr) in {("time", "time"), ("time", "time_ns"), ("datetime", "now")})
            if asks and path.parts[len(PACKAGE.parts)] != "cli":
                found.add(path.name)
    assert found <= ON_THE_WALL.keys(), "a deadline by the wall's clock?"
