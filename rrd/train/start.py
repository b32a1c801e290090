"""An adapter to start from: one in PEFT's layout, made by rrd or anything else, that fits the job exactly.

What it says of itself was checked (``rrd.adapter``) before a tensor is read here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rrd import adapter
from rrd.adapter import WEIGHTS, refuse
from rrd.safetensors_header import Located
from rrd.train.state import as_memory
from rrd.train.tensor_file import DTYPES, read_tensor


def fill(named: Sequence[tuple[str, Tensor]], directory: Path) -> str:
    """Give the adapter's parameters ``named`` the values in ``directory``. Returns the digest of those.

    Raises:
        BadJob: it is not for exactly these modules, or holds something that is no number.
    """
    _, header = adapter.read(directory)
    found, wanted = adapter.named(header), dict(named)
    if odd := sorted(found.keys() ^ wanted.keys()):
        does = "has" if odd[0] in found else "lacks"
        refuse(directory, f"is of another model: it {does} {odd[0]}", "start from an adapter of this very model")
    sha = hashlib.sha256()
    for name in sorted(found):
        info = found[name]
        if info.shape != tuple(wanted[name].shape):
            refuse(directory, f"has {name} in shape {list(info.shape)}, and this model {list(wanted[name].shape)}",
                   "start from an adapter of this very model")
        if not DTYPES.get(info.dtype, torch.int8).is_floating_point:
            refuse(directory, f"has {name} as {info.dtype}, which are no floats we can read",
                   "save it again in float32 or bfloat16")
        value = read_tensor(Located(directory / WEIGHTS, info)).float()
        if not torch.isfinite(value).all():
            refuse(directory, f"has values in {name} that are no numbers", "take an earlier one")
        sha.update(repr((name, info.shape)).encode())
        sha.update(as_memory(value))
        wanted[name].data.copy_(value)
    return sha.hexdigest()
