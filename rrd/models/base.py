"""Loading a model directory: every tensor the model needs, once a die, streamed from its files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rrd.models.registry import Family

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while a model loads: the worker's heartbeat."""


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
    """What the weights are stored in."""
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

    ``dtype`` is what the weights are stored in, ``compute`` what is computed in (default: see ``rrd.models.dtypes``).
    With ``store_dir``, CPU dies share one read-only mapped copy under it; without, and for ``trainable``, the tensors
    are this process's own.

    Raises:
        BadJob: the model is missing, damaged, of no known family, or needs what rrd cannot do.
    """
    raise NotImplementedError
