"""Optimizers over one flat buffer."""

from __future__ import annotations

from rrd.optim.adamw import AdamW

__all__ = ["AdamW"]
