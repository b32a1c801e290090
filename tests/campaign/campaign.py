"""``make campaign``: every fault at full size, and one table of what came of it.

The same code runs in small in the default suite. What cannot be done here (no root, no loop devices) is said.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent), str(HERE)]

import cuts  # noqa: E402
import damage  # noqa: E402
import kills  # noqa: E402
import trouble  # noqa: E402
from table import Row, show, timed  # noqa: E402

STEPS = 200
"""Of each job that is killed: so many that a life has a hundred kills or two."""


def parts(root: Path, args: argparse.Namespace) -> dict[str, Callable[[], Row]]:
    """The campaign, in the order of the table."""
    def at(name: str) -> Path:
        (path := root / name).mkdir(parents=True)
        return path

    found: dict[str, Callable[[], Row]] = {
        "kills": lambda: kills.Killer(at("kills"), args.kills, steps=STEPS, seed=args.seed).run(),
        "cuts": lambda: cuts.recorded(at("cuts")),
        "spoiled": lambda: cuts.mutants(at("spoiled"))}
    if why := cuts.why_no_loop(at("probe")):
        found["real"] = lambda: Row("real power cuts, real disk trouble", skipped=why)
    else:
        for n, options in enumerate(cuts.OPTIONS):
            found[f"real{n}"] = lambda n=n, options=options: cuts.real(at(f"real{n}"), options)  # type: ignore[misc]
        found["realspoiled"] = lambda: cuts.real_mutants(at("realspoiled"))
        found["trouble"] = lambda: trouble.troubled(at("trouble"))
    return {**found,
            "refusals": lambda: damage.refusing(at("refusals")),
            "damage": lambda: damage.damaged(at("damage"), args.damage, args.seed),
            "records": lambda: damage.records(at("records"), args.damage, args.seed)}


def where() -> str:
    """When and on what: figures are worth nothing without."""
    import torch

    from rrd import __version__
    from rrd.train.state import cpu_model

    return (f"rrd {__version__}{_revision()}, {time.strftime('%Y-%m-%d')}; {cpu_model()}, {os.cpu_count()} cores, "
            f"Linux {platform.release()}, Python {platform.python_version()}, torch {torch.__version__}")


def _revision() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=HERE)
    return f" at {done.stdout.strip()}" if done.returncode == 0 else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--damage", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", nargs="*", metavar="PART", default=[])
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="rrd-campaign-"))
    print(f"{where()}; seed {args.seed}", flush=True)
    rows = []
    for name, part in parts(root, args).items():
        if not args.only or name in args.only:
            rows.append(timed(part))
            print(rows[-1].line(), *rows[-1].wrong[:20], sep="\n  ", flush=True)
            shutil.rmtree(root / name, ignore_errors=True)
    print(f"\n{show(rows)}")
    shutil.rmtree(root, ignore_errors=True)
    return 1 if any(row.wrong for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
