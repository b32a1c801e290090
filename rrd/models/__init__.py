"""Model families: frozen bases loaded once a die, and module trees built over them by reference."""

from __future__ import annotations

from rrd.models.base import Base, load_base
from rrd.models.registry import CausalLM, Family, build, family_of

__all__ = ["Base", "CausalLM", "Family", "build", "family_of", "load_base"]
