"""How fast data becomes tokens on disk, beside the tokenizers alone.

    python tests/bench/bench_tokenize.py [--megabytes 100] [--model DIR] [--quick]

The data is JSON lines of Python's own library, 6,000 characters a line. Each side runs in a process of its own.
"prepared" is all that happens until a job can train (reading, JSON, cutting, sealing, assembling, checking), with a
process a core; its rate is also given by the CPU time of all its processes, which a busy box changes less. "alone" is
the tokenizer on texts in memory, in one thread. A last run is killed half way and goes on; the rest is weighed by CPU
time. On a quiet box of two cores 100 MB take about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import rig

SOME = 4_000_000
"""Characters that a tokenizer alone is measured with."""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--megabytes", type=int, default=100)
    p.add_argument("--model", type=Path, default=Path(".demo/models/SmolLM2-135M-Instruct"),
                   help="a directory with a tokenizer.json")
    p.add_argument("--quick", action="store_true")
    p.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.child:
        child(*args.child)
        return
    with tempfile.TemporaryDirectory() as name:
        where = Path(name)
        data = make_data(where / "data.jsonl", 3 if args.quick else args.megabytes)
        model = args.model if (args.model / "tokenizer.json").is_file() else own_tokenizer(where / "model", data)
        world = Path(find_spec("rwkv").submodule_search_locations[0]) / "rwkv_vocab_v20230424.txt"  # type: ignore
        results = rig.Results("tokenize")
        for kind, tokenizer in (("tokenizer.json", model), ("World", world)):
            measure(results, kind, data, tokenizer, where)
        results.finish()


def make_data(path: Path, megabytes: int) -> Path:
    texts = [f.read_text("utf-8", "ignore") for f in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))]
    left = megabytes * 1_000_000
    with path.open("w") as out:
        while left > 0:
            for text in texts:
                for at in range(0, len(text), 6000):
                    left -= out.write(json.dumps({"text": text[at : at + 6000]}) + "\n") if left > 0 else 0
    return path


def own_tokenizer(where: Path, data: Path) -> Path:
    """A byte-level BPE of 8,192 tokens, where no model is at hand."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.train_from_iterator(some_texts(data), trainers.BpeTrainer(vocab_size=8192, show_progress=False))
    where.mkdir()
    tok.save(str(where / "tokenizer.json"))
    return where


def some_texts(data: Path) -> list[str]:
    found, left = [], SOME
    for line in data.open():
        found.append(json.loads(line)["text"])
        left -= len(found[-1])
        if left < 0:
            break
    return found


def measure(results: rig.Results, kind: str, data: Path, tokenizer: Path, where: Path) -> None:
    run(["alone", str(data), str(tokenizer)])  # what is compiled or cached once is not what is measured
    whole = run(["prepare", str(data), str(tokenizer)], cache=where / f"{kind}-straight")
    alone = run(["alone", str(data), str(tokenizer)])
    rest = killed_half_way(data, tokenizer, where / f"{kind}-killed")
    results.add(f"{kind}: prepared", whole["wall"], "MB/s")
    results.add(f"{kind}: prepared, per second of CPU", whole["cpu"], "MB")
    results.add(f"{kind}: cores at work while it is prepared", whole["wall"] / whole["cpu"])
    results.add(f"{kind}: signs of progress", whole["signs"], "", digits=0)
    results.add(f"{kind}: alone, per second of CPU", alone["ours"], "MB")
    results.add(f"{kind}: the peer alone, per second of CPU", alone["peer"], "MB")
    results.add(f"{kind}: most memory of a process that tokenizes", whole["memory"], "MB", digits=0)
    results.add(f"{kind}: killed half way, the rest against the whole", whole["cpu"] / rest["cpu"], most=0.65)


def run(what: list[str], cache: Path | None = None) -> dict[str, float]:
    env = {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "BENCH_CACHE": str(cache or "")}
    done = subprocess.run([sys.executable, __file__, "--child", *what], env=env, check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def killed_half_way(data: Path, tokenizer: Path, cache: Path) -> dict[str, float]:
    """What the rest takes."""
    command = [sys.executable, __file__, "--child", "prepare", str(data), str(tokenizer)]
    process = subprocess.Popen(command, env={**os.environ, "BENCH_CACHE": str(cache)}, stdout=subprocess.PIPE)
    assert process.stdout
    for line in process.stdout:
        if line.startswith(b"at ") and float(line[3:]) > 0.5:
            break
    process.kill()
    process.wait()
    return run(["prepare", str(data), str(tokenizer)], cache=cache)


def child(what: str, data: str, tokenizer: str) -> None:
    megabytes = os.path.getsize(data) / 1e6
    if what == "prepare":
        from rrd.train.prepare import prepare

        start, own, signs, memory = time.monotonic(), time.process_time(), 0, 0.0

        def progress(share: float) -> None:
            nonlocal signs, memory
            signs, memory = signs + 1, max(memory, crew_memory())
            print("at", share, flush=True)

        prepare(data, tokenizer, seq_len=512, too_long="split", cache_dir=Path(os.environ["BENCH_CACHE"]) / "data",
                processes=len(os.sched_getaffinity(0)), progress=progress)
        seconds = time.monotonic() - start
        crew = resource.getrusage(resource.RUSAGE_CHILDREN)
        memory = memory or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3  # so little that there was no crew
        print(json.dumps({"wall": megabytes / seconds, "signs": signs, "memory": memory,
                          "cpu": megabytes / (time.process_time() - own + crew.ru_utime + crew.ru_stime)}))
        return
    texts = some_texts(Path(data))
    ours, peer = sides(Path(tokenizer))
    few = texts[:200]  # a peer in Python takes its time
    print(json.dumps({"ours": size(texts) / cpu(ours, texts), "peer": size(few) / cpu(peer, few)}))


def crew_memory() -> float:
    """Megabytes, the most that any process working for this one has held (rusage counts what it was forked from)."""
    peaks = [0.0]
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            peaks += [int(line.split()[1]) / 1e3 for line in status.splitlines() if line.startswith("VmHWM")]
    return max(peaks)


def size(texts: list[str]) -> float:
    """Megabytes."""
    return sum(len(t.encode()) for t in texts) / 1e6


def sides(tokenizer: Path) -> tuple[Callable[[list[str]], object], Callable[[list[str]], object]]:
    """Our tokenizer alone, and the one that people use."""
    from rrd.ops.native import default_cache_dir
    from rrd.train.read import Record, Turn
    from rrd.train.tokenize import load_tokenizer

    tok = load_tokenizer(str(tokenizer))
    tok.make_ready(default_cache_dir(), lambda: None)

    def ours(texts: list[str]) -> object:
        return tok.encode([Record(1, (Turn("text", t),)) for t in texts])

    if tokenizer.is_dir():
        import tokenizers

        theirs = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
        return ours, lambda texts: [e.ids for e in theirs.encode_batch(texts, add_special_tokens=False)]
    from rwkv.rwkv_tokenizer import TRIE_TOKENIZER

    trie = TRIE_TOKENIZER(str(tokenizer))
    return ours, lambda texts: [trie.encode(t) for t in texts]


def cpu(side: Callable[[list[str]], object], texts: list[str]) -> float:
    start = time.process_time()
    side(texts)
    return time.process_time() - start


if __name__ == "__main__":
    main()
