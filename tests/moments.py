"""The moments of a job's life at which something else may happen to it, and how to get there in a ``World``."""

from __future__ import annotations

from typing import Any

from world import World

from rrd.messages import Failed

STATES = ["waiting", "preparing", "in line", "loading", "running", "saving", "paused", "disk", "exporting", "done",
          "failed", "cancelled"]
"""Where a job may be when the user does something: more than there are states."""


async def bring(w: World, state: str, **keys: Any) -> None:
    """Bring the job ``a`` to ``state``."""
    if state in ("waiting", "in line"):
        w.drop(*[f"older{i}" for i in range(1 if state == "in line" else 9)], max_steps=100_000)
        await w.until_step("older0", 1)
    w.drop("a", **keys)
    match state:
        case "waiting":
            await w.seconds(3)
            assert w.state("a") == "waiting" and not w.job("a").prepared
        case "in line":
            await w.until(lambda: w.state("a") == "waiting" and w.job("a").prepared)
        case "preparing" | "loading" | "done":
            await w.until_state("a", state)
        case "running":
            await w.until_step("a", 13)
        case "saving":
            w.workers.write_seconds = 2.0
            await w.until(lambda: w.job("a").saving)
        case "paused" | "cancelled":
            await w.until_step("a", 13)
            (w.verbs.pause if state == "paused" else w.verbs.cancel)("a")
            await w.until_state("a", state)
        case "disk":
            await w.until_step("a", 13)
            w.disk.full = True
            await w.until_state("a", "paused")
        case "exporting":
            w.workers.write_seconds = 2.0
            await w.until_state("a", "exporting")
        case "failed":
            w.workers.at("a", "step 13", failed("job"))
            await w.until_state("a", "failed")


def relieve(w: World) -> None:
    """Take away what stands in the job's way."""
    w.disk.full = False
    w.workers.write_seconds = 0.05
    for name in [n for n in w.files if n.startswith("older")]:
        w.remove(name)


def failed(blame: str, message: str = "no") -> Failed:
    return Failed(job="", blame=blame, message=message, hint="do something")  # type: ignore[arg-type]
