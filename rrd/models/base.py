"""Loading a model directory: every tensor the model needs, once a die, streamed from its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rrd.errors import BadJob
from rrd.models import store
from rrd.models.dtypes import choose
from rrd.models.files import ModelFiles, Progress, inspect
from rrd.models.layout import Layout
from rrd.models.registry import Family


@dataclass
class Base:
    """The frozen (or, for full fine-tuning, private and trainable) tensors of one model on one die."""

    key: str
    """Same key, same bytes in ``tensors``: jobs on one die with one key share one Base."""
    config: Any
    """The family's reading of ``config.json``."""
    tensors: dict[str, Tensor]
    """By the names in the model's files."""
    digest: str
    """sha256 over the model's content: part of a job's identity."""
    family: Family
    raw_config: dict[str, Any] = field(default_factory=dict)
    """``config.json`` as it stands."""
    dtype: torch.dtype = torch.float32
    """What the weights are stored in; of an int8 base, those that are not quantized."""
    compute: torch.dtype = torch.float32
    """What activations and products are computed in."""
    trainable: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def load_base(
    model_dir: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compute: torch.dtype | None = None,
    store_dir: str | Path | None = None,
    trainable: bool = False,
    quantize: bool | str = False,
    progress: Progress | None = None,
) -> Base:
    """Load the model in ``model_dir`` (``config.json`` and safetensors, one file or shards with an index).

    ``dtype`` is what the weights are stored in and ``compute`` what is computed in; ``rrd.models.dtypes.choose`` knows
    both for a job. ``compute`` None means what ``choose`` says for ``dtype``. ``quantize`` (true or "int8") holds the
    linears of the blocks in int8 (``rrd.models.int8``); ``dtype`` is what the other weights are stored in. With
    ``store_dir``, CPU dies share one read-only mapped copy under it; without, and for ``trainable``, the tensors are
    this process's own.

    Raises:
        BadJob: the model is missing, damaged, of no known family, or needs what rrd cannot do.
        DiskTrouble: the store cannot be written.
    """
    assert not (quantize and trainable), "what is trained is not quantized"
    device = torch.device(device)
    compute = choose(str(dtype).removeprefix("torch."), device)[1] if compute is None else compute
    stored = compute if trainable else dtype
    files = inspect(Path(model_dir))
    if trainable:
        check_whole(files)
    layout = Layout(files, stored, int8=bool(quantize))
    if store_dir is not None and device.type == "cpu" and not trainable:
        tensors, digest = store.shared(layout, Path(store_dir), progress)
    else:
        tensors, digest = _own(layout, device, progress)
    held = "int8-" * bool(quantize) + f"{stored}-{compute}-{device}".replace("torch.", "")
    key = f"{digest}-{held}" + ("-own" if trainable else "")
    return Base(key, files.config, tensors, digest, files.family, files.raw_config, stored, compute, trainable)


def check_whole(files: ModelFiles) -> None:
    """Whether all weights can be trained. Raises BadJob."""
    if not getattr(files.config, "trains_whole", True):
        raise BadJob("this model's tensors are not stored as transformers uses them: it is not trained as a whole",
                     key="method", hint='use method = "lora"')


def _own(layout: Layout, device: torch.device, progress: Progress | None) -> tuple[dict[str, Tensor], str]:
    """The tensors in one buffer of this process, and the model's digest."""
    tensors = dict(layout.views(torch.empty(layout.size, dtype=torch.uint8, device=device)))
    stream = layout.stream(progress)
    for name, first, piece in stream:
        tensors[name].view(-1)[first : first + piece.numel()].copy_(piece)
    return tensors, stream.digest
