"""Kernels built ahead: ``python -m rrd.ops.cuda.build DIRECTORY ARCH…``, which is `rrd build-kernels`.

One line of JSON a cubin: op, arch, by (the compiler), bytes; or an error on stderr and exit code 1.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rrd.errors import RrdError
from rrd.ops.cuda import cache, nvrtc
from rrd.ops.cuda.source import OPS, source


def build(directory: Path, archs: list[str]) -> None:
    """Cubins of every op for ``archs`` in ``directory``; what is there and whole is not made again."""
    for arch in archs:
        compiler = nvrtc.find(arch)
        for op in OPS:
            data = cache.build(source(op), arch, directory)
            print(json.dumps({"op": op, "arch": arch, "by": str(compiler), "bytes": len(data)}), flush=True)


def main(argv: list[str]) -> int:
    try:
        build(Path(argv[0]), argv[1:])
    except RrdError as e:
        print(json.dumps({"error": e.message, "hint": e.hint}), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
