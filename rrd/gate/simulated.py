"""The gate for tests and for trying out a rotation: answers as scripted, and asserts the rules of a real one."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rrd.gate.base import GateRefused, to_its_end
from rrd.text import duration


@dataclass(frozen=True)
class Act:
    """What the gate does at one ``acquire``, ``after`` seconds.

    ``hang`` never answers; ``vanish`` refuses, and refuses that die ever after, until it is back; ``fall`` does, too,
    and the gate knows that it is lost.
    """

    what: Literal["grant", "refuse", "hang", "vanish", "fall"] = "grant"
    after: float = 0.0
    reason: str = "scripted"


class SimulatedGate:
    """Plays ``script`` (per die, one act for each acquire; then it grants), within ``timeout`` seconds each.

    ``latency`` is what a grant and a release take: a bar swap is about 0.3 ms. ``log`` records
    (verb, die) as they take effect; ``held`` is the die that may be touched.
    """

    def __init__(
        self, script: Mapping[str, Iterable[Act]] | None = None, *, latency: float = 0.0003, timeout: float = 10.0
    ) -> None:
        self._script = defaultdict(deque, {die: deque(acts) for die, acts in (script or {}).items()})
        self._latency = latency
        self._timeout = timeout
        self._gone: dict[str, bool] = {}
        self.held: str | None = None
        self.log: list[tuple[str, str]] = []

    async def acquire(self, die: str) -> None:
        """See Gate. One die at a time: that is what a gate is for."""
        assert self.held is None, f"die {die} asked for while die {self.held} is held"
        acts = self._script[die]
        act = acts.popleft() if acts else Act()
        if act.what in ("vanish", "fall"):
            self.vanish(die, lost=act.what == "fall")
        await self._take(act.after + self._latency if act.what != "hang" else self._timeout + 1, "acquire", die)
        if die in self._gone:
            raise GateRefused("acquire", die, "the die has vanished", lost=self._gone[die])
        if act.what == "refuse":
            raise GateRefused("acquire", die, act.reason)
        assert self.held is None, f"die {die} granted while die {self.held} is held"
        self.held = die
        self.log.append(("acquire", die))

    async def release(self, die: str) -> None:
        """See Gate. The die is out of reach from the moment this is asked."""
        if self.held != die:
            return
        self.held = None
        self.log.append(("release", die))
        await to_its_end(asyncio.sleep(self._latency))

    async def close(self) -> None:
        """See Gate."""
        if self.held is not None:
            await self.release(self.held)

    def touch(self, die: str) -> None:
        """To be called wherever a die is used, for memory queries too: it must be the one that is held."""
        assert self.held == die, f"die {die} touched while {self.held or 'none'} is held"

    def vanish(self, die: str, *, lost: bool = False) -> None:
        """``die`` falls off the bus: it is no longer held, and refused until it is back; ``lost``: with that word."""
        self._gone[die] = lost
        if self.held == die:
            self.held = None

    def come_back(self, die: str) -> None:
        """``die`` is there again."""
        self._gone.pop(die, None)

    async def _take(self, seconds: float, verb: str, die: str) -> None:
        await asyncio.sleep(min(seconds, self._timeout))
        if seconds > self._timeout:
            raise GateRefused(verb, die, f"no answer within {duration(self._timeout)}")
