"""How near the estimate of a job's memory comes: what a step takes at its peak, and what was said beforehand.

    python tests/bench/bench_memory.py [--smol DIRECTORY] [--only 12m]

Each case is a process of its own, on a CPU die: the base from a store, a checkpoint copied aside, a step. Measured is
how far its peak (VmHWM of proc(5)) is above what it held before it loaded anything. ``--smol`` adds a real model.
Printed: MiB measured, MiB estimated, their ratio.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

MIB = 1 << 20
LLAMAS = {"12m": {"hidden": 256, "layers": 6, "heads": 8, "kv_heads": 4, "ffn": 768, "vocab": 16384},
          "smol3": {"hidden": 576, "layers": 3, "heads": 9, "kv_heads": 3, "ffn": 1536, "vocab": 49152},
          "narrow": {"hidden": 128, "layers": 4, "heads": 4, "kv_heads": 2, "ffn": 384, "vocab": 49152}}
RWKVS = {"rwkv": {"C": 256, "L": 6, "V": 16384}}
BRIDGED = {"gpt2": {"n_embd": 256, "n_layer": 6, "n_head": 4, "n_positions": 4096},
           "gemma": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 768, "head_dim": 64,
                     "max_position_embeddings": 4096}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("12m", {"batch_size": 1, "seq_len": 4096}),
    ("12m", {"batch_size": 32, "seq_len": 128}),
    ("12m", {"batch_size": 8, "seq_len": 256, "method": "full"}),
    ("12m", {"batch_size": 8, "seq_len": 512, "gradient_checkpointing": True}),
    ("smol3", {"batch_size": 1, "seq_len": 512, "method": "full"}),
    ("smol3", {"batch_size": 1, "seq_len": 512, "method": "full", "dtype": "bfloat16"}),
    ("smol3", {"batch_size": 4, "seq_len": 512}),
    ("smol3", {"batch_size": 4, "seq_len": 512, "lora_dropout": 0.1}),
    ("smol3", {"batch_size": 4, "seq_len": 512, "quantize": True}),
    ("narrow", {"batch_size": 16, "seq_len": 128}),
    ("rwkv", {"batch_size": 4, "seq_len": 512}),
    ("rwkv", {"batch_size": 4, "seq_len": 512, "method": "full"}),
    ("rwkv", {"batch_size": 4, "seq_len": 512, "gradient_checkpointing": True}),
    ("gpt2", {"batch_size": 1, "seq_len": 2048}),
    ("gpt2", {"batch_size": 4, "seq_len": 512}),
    ("gpt2", {"batch_size": 4, "seq_len": 512, "method": "full"}),
    ("gpt2", {"batch_size": 4, "seq_len": 512, "gradient_checkpointing": True}),
    ("gemma", {"batch_size": 4, "seq_len": 512}),
]
SMOL: list[dict[str, Any]] = [{"batch_size": 2, "seq_len": 512}, {"batch_size": 1, "seq_len": 128, "method": "full"}]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--smol", type=Path, metavar="MODEL", help="also a real model, of this directory")
    p.add_argument("--only", default="", help="cases whose line has this")
    args = p.parse_args()
    cases = CASES + [(str(args.smol), keys) for keys in SMOL if args.smol]
    with tempfile.TemporaryDirectory() as where:
        for name, keys in cases:
            line = f"{Path(name).name:8} {', '.join(f'{k} {v}' for k, v in keys.items())}"
            if args.only in line:
                measured, estimated = measure(model_of(name, Path(where)), keys)
                print(f"{line:70} {measured / MIB:7.0f} {estimated / MIB:7.0f} {estimated / measured:6.2f}", flush=True)


def model_of(name: str, where: Path) -> Path:
    """The directory of a model of this shape, made where it is none."""
    at = where / name
    if at.exists() or Path(name).is_dir():
        return at if at.exists() else Path(name)
    if name in LLAMAS:
        from toys import make_model

        return make_model(at, **LLAMAS[name])
    if name in RWKVS:
        from rwkv_toys import make_rwkv

        return make_rwkv(at, **RWKVS[name])
    from bridge_toys import make_bridged

    return make_bridged(at, name, **BRIDGED[name])


def measure(model: Path, keys: dict[str, Any]) -> tuple[int, int]:
    """(measured, estimated): bytes."""
    done = subprocess.run([sys.executable, str(HERE.with_name("one_step.py")), str(model), json.dumps(keys)],
                          check=True, capture_output=True, text=True)
    measured, estimated = map(int, done.stdout.split()[-2:])
    return measured, estimated


if __name__ == "__main__":
    main()
