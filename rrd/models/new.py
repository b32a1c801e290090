"""``python -m rrd.models.new rwkv7 --layers 12 --width 768 DIR``: a model directory to train from scratch.

The model is written tensor by tensor, in BlinkDL's names and with RWKV-LM's initialisation; a job with
``method = "full"`` then trains it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from rrd import durable
from rrd.errors import BadJob, RrdError
from rrd.models.dtypes import OF_NAME
from rrd.models.rwkv7 import Rwkv7
from rrd.models.rwkv7_config import BETWEEN, HEAD_SIZE, RwkvConfig
from rrd.models.rwkv7_init import initial, new_config

_FILE_NAME = {torch.float32: "F32", torch.bfloat16: "BF16"}


def new_model(config: RwkvConfig, path: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0,
              beside: tuple[Path, ...] = ()) -> None:
    """Write a new model, and copies of the files ``beside`` (a tokenizer), to the directory ``path``: whole or not.

    Raises:
        BadJob: there is something at ``path``. DiskTrouble: it cannot be written.
    """
    if path.exists():
        raise BadJob("is there already", file=str(path), hint="name a new directory")
    durable.make_dir(path.parent)
    try:
        with durable.NewDirectory(path.parent, path.name) as new:
            new.add("model.safetensors", _file(config, dtype, seed))
            for file in beside:
                new.add(file.name, [file.read_bytes()])
            new.commit(path.name)
    except OSError as e:
        raise durable.trouble(e, path) from e


def _file(config: RwkvConfig, dtype: torch.dtype, seed: int) -> Iterator[bytes]:
    """The safetensors file: its header, then one tensor after the other."""
    shapes, at = Rwkv7().tensors(config), 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    item = torch.empty((), dtype=dtype).element_size()
    for name, shape in shapes.items():
        end = at + torch.Size(shape).numel() * item
        header[name] = {"dtype": _FILE_NAME[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    yield len(text).to_bytes(8, "little") + text
    for name, shape in shapes.items():
        yield _bytes(initial(name, shape, config, seed).to(dtype).contiguous())


def _bytes(t: Tensor) -> bytes:
    return ctypes.string_at(t.data_ptr(), t.numel() * t.element_size())


def main(argv: list[str]) -> int:
    args = _arguments().parse_args(argv)
    try:
        for kind in BETWEEN:
            if (m := getattr(args, kind)) and args.layers % m:
                raise BadJob(f"{m} {kind} blocks cannot stand at equal distances among {args.layers}")
        if args.width % HEAD_SIZE:
            raise BadJob(f"--width must be a multiple of {HEAD_SIZE}")
        config = new_config(args.layers, args.width, args.vocab, n_inner=args.inner,
                            between={kind: getattr(args, kind) for kind in BETWEEN})
        new_model(config, args.dir, dtype=OF_NAME[args.dtype], seed=args.seed, beside=tuple(args.beside))
    except (RrdError, OSError) as e:
        print(f"rrd: {e}", file=sys.stderr)
        return e.exit_code if isinstance(e, RrdError) else 1
    count = sum(torch.Size(s).numel() for s in Rwkv7().tensors(config).values())
    print(f"{args.dir}: {count:,} parameters")
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m rrd.models.new", description=__doc__)
    parser.add_argument("family", choices=["rwkv7"])
    parser.add_argument("dir", type=Path)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True, help=f"channels, a multiple of {HEAD_SIZE}")
    parser.add_argument("--vocab", type=int, default=65536)
    parser.add_argument("--inner", type=int, help="width of the channel mix; 4 x --width")
    for kind in BETWEEN:
        parser.add_argument(f"--{kind}", type=int, default=0, metavar="M", help=f"{kind} blocks between the others")
    parser.add_argument("--dtype", choices=sorted(OF_NAME), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", type=Path, nargs="*", default=[], help="files to copy: a tokenizer")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
