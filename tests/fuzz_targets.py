"""What rrd reads that somebody else wrote, each as a function of bytes: it returns, or raises an RrdError.

test_untrusted.py tries them blindly, with hypothesis; ``tests/campaign/fuzz.py`` with atheris, which sees where its
inputs lead and so finds its way in.
"""

from __future__ import annotations

import atexit
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rrd import checkpoint, ledger, safetensors_header
from rrd.checkpoint import Manifest
from rrd.config import Config
from rrd.errors import RrdError
from rrd.job import parse_job
from rrd.messages import ORDERS, REPORTS, Decoder
from rrd.train.read import BadLines, DataFile, records
from rrd.train.tokenize import load_tokenizer

SECONDS, MEGABYTES = 1.0, 200
"""No input may take longer, of a processor, or more memory than that; data may be long, and has as much for each MB."""

_dir = Path(tempfile.mkdtemp(prefix="rrd-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))

atexit.register(shutil.rmtree, _dir, ignore_errors=True)


def _file(name: str, data: bytes) -> Path:
    path = _dir / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return path


def job(data: bytes) -> None:
    parse_job("job.toml", data)


def config(data: bytes) -> None:
    Config.load(_file("rrd.toml", data), environ={}, service=False)


def header(data: bytes) -> None:
    safetensors_header.read_header(_file("model.safetensors", data))


def long_header(data: bytes) -> None:
    """The JSON alone: its length is right."""
    header(len(data).to_bytes(8, "little") + data)


def index(data: bytes) -> None:
    safetensors_header.weight_map(_file("model.safetensors.index.json", data))


def manifest(data: bytes) -> None:
    Manifest.decode(data, Path("/c"))


def sealed_manifest(data: bytes) -> None:
    """A manifest whose own hash is right, whatever else it says."""
    import hashlib
    import json

    try:
        body = json.loads(data)
        whole = checkpoint._canonical({**body, "self": hashlib.sha256(checkpoint._canonical(body)).hexdigest()})
    except (ValueError, TypeError, RecursionError):
        return
    checkpoint.read_manifest(_file("ckpt-000000000007/MANIFEST.json", whole).parent)


def record(data: bytes) -> None:
    ledger._read(_file("ledger.json", data), "a")


def orders(data: bytes) -> None:
    list(Decoder(ORDERS).feed(data))


def reports(data: bytes) -> None:
    """One frame of the right length, cut in two on its way."""
    decoder = Decoder(REPORTS)
    frame = len(data).to_bytes(4, "big") + data
    for part in (frame[: len(frame) // 2], frame[len(frame) // 2 :]):
        list(decoder.feed(part))


def lines(data: bytes) -> None:
    with DataFile(str(_file("data.jsonl", data))) as source:
        list(records(source, BadLines("data.jsonl", 100)))


def text(data: bytes) -> None:
    with DataFile(str(_file("data.txt", data))) as source:
        list(records(source, BadLines("data.txt", 100)))


def tokenizer(data: bytes) -> None:
    load_tokenizer(str(_file("t/tokenizer.json", data)))


def vocabulary(data: bytes) -> None:
    load_tokenizer(str(_file("v/rwkv_vocab_v20230424.txt", data)))


TARGETS: dict[str, Callable[[bytes], None]] = {f.__name__: f for f in (
    job, config, header, long_header, index, manifest, sealed_manifest, record, orders, reports, lines, text, tokenizer,
    vocabulary)}


def one(target: Callable[[bytes], None], data: bytes) -> None:
    """Run it: one sentence at the most, quickly, and with little memory."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = "nothing"
    try:
        target(data)
    except RrdError as e:
        said = e.message
    assert said and "\n" not in said and len(said) < 3000, said
    seconds = time.process_time() - start
    assert seconds < SECONDS * (1 + len(data) / 1e6), f"{target.__name__}: {seconds:.1f} s for {len(data)} bytes"
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    assert more < MEGABYTES, f"{target.__name__}: {more} MB for {len(data)} bytes"


def seeds() -> dict[str, list[bytes]]:
    """Something whole to begin with, for each target that has a grammar."""
    tensor = b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"__metadata__":{"format":"pt"}}'
    whole = Manifest("a", 7, "i", {"state.json": (3, "0" * 64)}, 1.5).encode()
    step = b'{"kind":"step","job":"a","step":1,"loss":2.5,"lr":1e-4,"grad_norm":0.5,"tokens":12,"seconds":0.1}'
    run = b'{"kind":"run","job":"a","steps":5,"total":10,"rungs":[{"what":"split","step":3,"factor":2}]}'
    words = b"".join(b"%d %r 1\n" % (i + 1, bytes([i])) for i in range(256)) + b"257 '\\n\\n' 2\n"
    bpe = (b'{"version":"1.0","added_tokens":[],"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]},'
           b'"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true},"normalizer":null}')
    return {
        "job": [b'model = "/m"\ndata = "/d.jsonl"\nlora_rank = 8\nbetas = [0.9, 0.99]\nlora_ranks = {q_proj = 4}\n'],
        "config": [b'metrics = "127.0.0.1:9000"\ncpu_dies = 2\n[[lane]]\ndies = ["cpu"]\nthreads = 2\n'],
        "header": [len(tensor).to_bytes(8, "little") + tensor + bytes(16)], "long_header": [tensor + bytes(16), tensor],
        "index": [b'{"weight_map":{"a":"model-1.safetensors"}}'], "manifest": [whole], "sealed_manifest": [whole],
        "record": [b'{"format":1,"id":"a","state":"running","rungs":[]}'],
        "orders": [len(run).to_bytes(4, "big") + run], "reports": [step, run],
        "lines": [b'{"text":"x"}\n{"prompt":"a","completion":"b"}\n{"messages":[{"role":"user","content":"hi"},'
                  b'{"role":"assistant","content":"ho"}]}\n'],
        "text": [b"one\n\ntwo\n"], "tokenizer": [bpe], "vocabulary": [words],
    }
