"""Made-up pasts of jobs, as their directories hold them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

START = 1_700_000_000.0


def make_past(directory: Path, steps: int = 1000, *, seed: int = 0, start: float = 4.0, end: float = 2.0,
              evals: bool = True, torn: bool = False) -> Path:
    """A history of ``steps`` steps with evaluations each tenth, checkpoints each eighth, and one restart."""
    directory.mkdir(parents=True)
    g, lines = random.Random(seed), list[dict[str, Any]]()
    events: list[dict[str, Any]] = [{"time": START, "kind": "job_accepted", "level": "info", "message": "accepted",
                                     "hint": "", "step": 0, "die": None}]
    if evals:
        lines.append({"step": 0, "eval_loss": start, "time": START})
    for s in range(1, steps + 1):
        mean = end + (start - end) * math.exp(-4 * s / steps)
        lines.append({"step": s, "loss": mean + g.gauss(0, 0.12), "lr": 2e-4 * (1 + math.cos(math.pi * s / steps)) / 2,
                      "grad_norm": 0.5 + g.random(), "tokens": 1024, "seconds": round(0.5 + 0.1 * g.random(), 6),
                      "die": str(seed % 6), "round": s // 10, "time": round(START + 2.0 * s, 3), "applied": True})
        if evals and s % max(1, steps // 10) == 0:
            lines.append({"step": s, "eval_loss": mean + 0.1, "time": START + 2.0 * s})
        if s % max(1, steps // 8) == 0:
            events.append({"time": START + 2.0 * s, "kind": "checkpoint", "level": "info", "hint": "", "step": s,
                           "message": f"checkpoint of step {s} is safe (0.3 MB in 44 ms)", "die": "0"})
    middle = steps // 2
    events += [{"time": START + 2.0 * middle, "kind": "worker_died", "level": "error", "hint": "", "step": middle + 3,
                "message": "the worker was killed", "die": "0"},
               {"time": START + 2.0 * middle, "kind": "loaded", "level": "info", "hint": "", "step": middle,
                "message": f"loaded in 405 ms, resumed from step {middle}", "die": "0"}]
    write(directory / "history.jsonl", lines)
    write(directory / "events.jsonl", events)
    if torn:
        with open(directory / "history.jsonl", "a") as f:
            f.write('{"step": 10001, "loss": 2.')
    return directory


def write(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
