"""Kernels with one barrier or one bound taken away: for each, some case must fail.

``python tests/kernels/mutants.py [op…]`` makes and runs all of them and says which live.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from host_build import CHECKED, PLAIN, Host, build
from kernel_cases import CASES

from rrd.ops.cuda import source
from rrd.ops.cuda.source import Source, parse

BARRIER = re.compile(r"__syncthreads\(\);")
BOUND = re.compile(r"\b\w+ (<|>=) (M|N|K|n|width|words|T|count|0|ends\[group\])(?![\w.])")

NO_BOUND = {
    "TK < K": "whether there is another step: one too many multiplies zeros",
    "n >= 0": "of three limbs, not of what is given",
}


class Mutant(NamedTuple):
    """A source with one thing changed: where, from what and to what."""

    op: str
    line: int
    was: str
    now: str
    source: Source

    def __str__(self) -> str:
        return f"{self.op}.cu:{self.line}: {self.was} -> {self.now or 'nothing'}"


def barriers(op: str) -> Iterator[Mutant]:
    """Every barrier removed in turn."""
    yield from _mutants(op, BARRIER, lambda m, loop: "")


def bounds(op: str) -> Iterator[Mutant]:
    """Every comparison with a size: always true (or false), and in the head of a loop one more turn."""
    def changed(m: re.Match[str], loop: bool) -> str | None:
        if m[0] in NO_BOUND:
            return None
        if m[1] == "<":
            return m[0].replace("<", "<=") if loop else "true"
        return "true" if m[2] == "0" and not loop else "false" if not loop else None
    yield from _mutants(op, BOUND, changed)


def _mutants(op: str, what: re.Pattern[str], changed) -> Iterator[Mutant]:  # type: ignore[no-untyped-def]
    text = source.source(op).text
    for m in what.finditer(text):
        start = text.rfind("\n", 0, m.start()) + 1
        before = text[start : m.start()]
        if "//" in before:
            continue
        loop = before.lstrip().startswith("for (")
        now = changed(m, loop)
        if now is not None:
            line = text.count("\n", 0, m.start()) + 1
            yield Mutant(op, line, m[0], now, parse(op, text[: m.start()] + now + text[m.end() :]))


def killed_by(mutant: Mutant, place: Path, flags: Sequence[str]) -> str:
    """The case that fails, with why; empty where none does."""
    with_fault = build(mutant.source, place, flags)
    for name, case in CASES[mutant.op].items():
        host = Host({mutant.op: with_fault})
        try:
            case(host, torch.device("cpu"))
        except AssertionError as e:
            said = re.search(r"(AddressSanitizer: [\w-]+|runtime error: [^\n]*|host\.h: [^\n]*)", str(e))
            return f"{name}: {said[1] if said else 'other numbers'}"
        finally:
            host.close()
    return ""


def main(ops: Sequence[str]) -> int:
    lived = 0
    with tempfile.TemporaryDirectory() as room:
        for op in ops or CASES:
            for mutant, flags in [*((m, PLAIN) for m in barriers(op)), *((m, CHECKED) for m in bounds(op))]:
                by = killed_by(mutant, Path(room), flags)
                lived += not by
                print(f"{mutant}: {by or 'LIVES'}", flush=True)
    return lived


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
