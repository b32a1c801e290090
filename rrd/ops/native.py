"""The compiled kernels of CPU dies: built once with the machine's own compiler, into the cache, and loaded by ctypes.

Built ahead (``python -m rrd.ops.native CACHE_DIR``, or by the first worker that needs them, while the others wait) into
``<cache_dir>/kernels/<source and processor>/``, beside and by one rename, and kept: a new compiler builds nothing anew.
Where there is no compiler, or what it built does not load or does not compute what torch does, the ops fall back to
torch's, and ``why_not`` says so.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rrd import durable
from rrd.errors import RrdError
from rrd.ops.fingerprint import fingerprint
from rrd.text import one_line

SOURCE = Path(__file__).parent.parent / "kernels" / "rwkv7_cpu.cpp"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC")
BUILD_SECONDS = 300.0

Alive = Callable[[], None]
"""Called every now and then during a build: the heartbeat."""


class NoKernels(RrdError):
    """There are no compiled kernels; the message says why."""


class Kernels:
    """The loaded library. ``name`` is of the bits it gives: to a job, two builds of one name are the same."""

    def __init__(self, file: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(file))
        except OSError as e:
            raise NoKernels(f"the compiled kernels do not load: {one_line(str(e), 200)}") from e
        self.chunk = int(self._library.rrd_chunk())
        """Tokens between the states that a forward pass keeps."""
        self.lanes = int(self._library.rrd_vector_floats())
        """Floats in the processor's vector: sizes must be multiples of it."""
        self.piece = int(self._library.rrd_piece())
        """Tokens of a sample that are one unit of ``norm_shift``."""
        self.name = fingerprint(self)

    def __call__(self, function: str, *args: object, units: int) -> None:
        """Call one of the library's functions, its ``units`` of work split over torch's threads.

        Tensors and lists of them become pointers, ints are longs. As with torch's own operations, a process forked from
        one that has computed on several threads must not.
        """
        getattr(self._library, function)(*(_argument(a) for a in (*args, units, torch.get_num_threads())))


def _argument(a: object) -> object:
    if a is None:
        return ctypes.c_void_p(None)
    if isinstance(a, Tensor):
        assert a.is_contiguous()
        return ctypes.c_void_p(a.data_ptr())
    if isinstance(a, int):
        return ctypes.c_long(a)
    if isinstance(a, float):
        return ctypes.c_float(a)
    assert isinstance(a, (list, tuple))
    return (ctypes.c_void_p * len(a))(*(None if t is None else t.data_ptr() for t in a))


# ---- which kernels this process has ------------------------------------------------------------------------------

_loaded: Kernels | None = None
_failed: NoKernels | None = None


def kernels() -> Kernels | None:
    """This process's kernels, built if need be; None where there are none (``why_not``). Decided once a process."""
    if _loaded is None and _failed is None:
        use(default_cache_dir())
    return _loaded


def why_not() -> str:
    """A sentence where there are no kernels; empty where there are, and before anybody asked."""
    return "" if _failed is None else _failed.message


def use(cache_dir: Path, alive: Alive = lambda: None) -> None:
    """Load the kernels from below ``cache_dir``, building them there if need be. Never raises: see ``why_not``."""
    global _loaded, _failed
    if _loaded is not None or _failed is not None:
        return
    try:
        _loaded = _checked(build(cache_dir, alive, source=SOURCE, check=_checked))
    except NoKernels as e:
        _failed = e
    except (RrdError, OSError) as e:
        _failed = NoKernels(f"the compiled kernels cannot be stored: {one_line(str(e), 200)}")


def default_cache_dir() -> Path:
    """Where kernels are kept when nobody says: as for the command line."""
    if given := os.environ.get("RRD_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rrd"


def _checked(file: Path) -> Kernels:
    """The library, if it computes the recurrence. Raises NoKernels for one that does not, or does not load."""
    from rrd.ops.reference import wkv7

    k = Kernels(file)
    T, H, N = 40, 2, 64
    wave = torch.arange(6 * T * H * N, dtype=torch.float64).mul_(0.37).sin_().view(6, 1, T, H, N) * 0.2
    r, log_d, k_, v, a, b = (wave[0], -wave[1].abs(), *wave[2:])
    expected, last = wkv7(r, log_d, k_, v, a, b)
    xs = [x.float().contiguous() for x in (r, log_d, k_, v, a, b)]
    y, state = torch.empty(1, T, H, N), torch.empty(1, H, N, N)
    k("rrd_wkv7_forward", xs, None, y, None, state, T, H, units=H)
    if not (torch.allclose(y.double(), expected, atol=1e-5) and torch.allclose(state.double(), last, atol=1e-5)):
        raise NoKernels("the compiled kernels do not compute what they should")
    return k


# ---- building ----------------------------------------------------------------------------------------------------


def build(cache_dir: Path, alive: Alive = lambda: None, *, source: Path = SOURCE,
          check: Callable[[Path], object] = lambda file: None) -> Path:
    """The library of ``source`` below ``cache_dir``, built unless it is there; kept if ``check`` does not raise.

    Raises:
        NoKernels: it is not there, and there is no compiler or it fails. DiskTrouble: the cache cannot be written.
    """
    place, library = cache_dir / "kernels", f"{source.stem}.so"
    final = place / _source_key(source)
    if not (final / library).is_file():
        if (compiler := _compiler()) is None:
            raise NoKernels("no C++ compiler is installed")
        durable.make_dir(place)
        with durable.lock_when_free(place / "lock", what="the kernels' build", alive=alive, seconds=BUILD_SECONDS):
            if not (final / library).is_file():
                _build(compiler, source, final, alive, check)
    return final / library


def _source_key(source: Path) -> str:
    return hashlib.sha256(source.read_bytes() + repr((FLAGS, _processor())).encode()).hexdigest()[:16]


def _processor() -> tuple[str, str]:
    """What ``-march=native`` looks at: a cache that moves to another machine must not be run there."""
    try:
        info = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        info = ""
    flags = re.search(r"^(flags|Features)\s*:\s*(.*)$", info, re.M)
    return platform.machine(), " ".join(sorted(flags[2].split())) if flags else ""


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "g++", "c++", "clang++"]
    return next((found for n in names if n and (found := shutil.which(n))), None)


def _build(compiler: str, source: Path, final: Path, alive: Alive, check: Callable[[Path], object]) -> None:
    with tempfile.TemporaryDirectory() as room:
        out = Path(room) / f"{source.stem}.so"
        _compile([compiler, *FLAGS, "-o", str(out), str(source)], alive)
        check(out)  # what computes wrong is not kept: another compiler may do better
        try:
            with durable.NewDirectory(final.parent, final.name) as new:
                new.add(out.name, [out.read_bytes()])
                new.commit(final.name, replace=True)
        except OSError as e:
            raise durable.trouble(e, final) from e


def _compile(command: Sequence[str], alive: Alive) -> None:
    end = time.monotonic() + BUILD_SECONDS
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        except OSError as e:
            raise NoKernels(f"the compiler does not run: {e}") from e
        while True:
            try:
                status = process.wait(0.5)
                break
            except subprocess.TimeoutExpired:
                alive()
                if time.monotonic() > end:
                    process.kill()
        said.seek(0)
        if status:
            words = said.read(4000).decode(errors="replace").strip() or f"it ended with {status}"
            raise NoKernels(f"the kernels do not compile: {one_line(words, 300)}")


def main(argv: list[str]) -> int:
    """All that there is to build: the recurrence's, and the tokenizer's."""
    place = Path(argv[0]) if argv else default_cache_dir()
    try:
        found = _checked(build(place, check=_checked))
        build(place, source=SOURCE.with_name("world.cpp"))
    except RrdError as e:
        print(f"rrd: {e}", file=sys.stderr)
        return 1
    print(f"{found.name}: vectors of {found.lanes} floats, in {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
