"""``python tests/campaign/fuzz.py SECONDS [TARGET ...]``: atheris (``pip install atheris``) on each target for so long.

Each has a process of its own, which ends with status 0, or with the input that it found in the file that it names.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent))
with atheris.instrument_imports(include=["rrd", "tomli", "json"], enable_loader_override=False):
    import fuzz_targets


def fuzz(name: str, seconds: float) -> None:
    corpus = Path(tempfile.mkdtemp(prefix=f"rrd-corpus-{name}-"))
    for i, seed in enumerate(fuzz_targets.seeds().get(name, ())):
        (corpus / str(i)).write_bytes(seed)
    atheris.Setup(
        [sys.argv[0], f"-max_total_time={seconds:.0f}", "-max_len=65536", "-timeout=20", "-rss_limit_mb=2048",
         "-print_final_stats=1", f"-artifact_prefix={corpus}-", str(corpus)],
        functools.partial(fuzz_targets.one, fuzz_targets.TARGETS[name]))
    atheris.Fuzz()


def main(seconds: float, names: list[str]) -> int:
    worst = 0
    for name in names or list(fuzz_targets.TARGETS):
        if (pid := os.fork()) == 0:
            fuzz(name, seconds)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(f"{name}: exit status {status}", flush=True)
        worst = max(worst, abs(status))
    return worst


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
