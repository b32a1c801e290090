"""Which code reads which model directory. A family is added by one module and one line in ``FAMILIES``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from rrd.errors import BadJob

if TYPE_CHECKING:
    from rrd.models.base import Base
    from rrd.optim.adamw import Rule

Shape = tuple[int, ...]
States = list[tuple[Tensor, ...]]
"""What the blocks of a model know of the tokens before, block by block."""


class CausalLM(nn.Module):
    """A language model. Shapes: B samples, T positions, C channels, V words of the vocabulary.

    Module paths and parameter names are those of the model's files, which is what names an adapter's tensors.
    """

    config: Any
    blocks: nn.ModuleList
    longest: int | None = None
    """Tokens of a sample that are run at once, more being run in pieces by ``carry``; None: the model has no states."""

    splits = True
    """Whether a batch may be run in parts, by samples: all chance and all that samples share is ``ops.linear``'s."""

    @property
    def recomputes(self) -> bool:
        """Whether ``checkpointing`` can be asked for."""
        return True

    def carry(self, idx: Tensor, states: States | None, *, rows: Tensor | None = None, checkpointing: bool = False
              ) -> tuple[Tensor, States]:
        """``hidden`` of tokens that come after others: takes the blocks' states (None: nothing before), returns them.

        Gradients go through the states, so a sequence run in pieces has those of the whole.
        """
        raise AssertionError("a model without states")

    @property
    def growing(self) -> list[tuple[bool, ...]]:
        """For each block's state, which of its tensors hold something of every token, along their second axis."""
        return []

    def make_ready(self, cache_dir: Path, before: str | None, alive: Callable[[], None]) -> str:
        """Get what the model computes with and does not bring: compiled kernels, kept below ``cache_dir``.

        ``before`` is what ``kernels`` said when the job began, None for a new job: those are used if they are there.
        Returns a sentence for the job's owner, or nothing. May take a minute, in which ``alive`` is called.
        """
        return ""

    without_kernels = ""
    """After ``make_ready``: why torch computes what there are compiled kernels for; empty where it does not."""

    @property
    def kernels(self) -> str:
        """Names the compiled kernels that decide the numbers; empty where only torch does."""
        return ""

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """[V, C]; the same tensor as the embedding's where they are tied."""

    @property
    def head_bias(self) -> Tensor | None:
        """[V], added to the head's product; None for nearly all models."""
        return None

    @property
    def head_cap(self) -> float | None:
        """Where logits go through cap * tanh(logits / cap), that cap; None for nearly all models."""
        return None

    @abstractmethod
    def hidden(self, idx: Tensor, *, rows: Tensor | None = None, checkpointing: bool = False) -> Tensor:
        """Activations after the final norm, [B, T, C], for ``idx`` [B, T] int64.

        ``rows``: indices into the B*T positions, ascending; only these are computed to the end, and the result is
        [len(rows), C]. ``checkpointing``: keep only each block's input, and compute the block again in the backward
        pass.
        """

    def settle(self) -> None:
        """Called once all weights are in place."""

    def forward(self, idx: Tensor) -> Tensor:
        """Logits [B, T, V], whole: for tests and for a look at a model, never for training."""
        hidden = self.hidden(idx)
        return nn.functional.linear(hidden, self.head_weight.to(hidden.dtype))


@dataclass(frozen=True)
class Recipe:
    """How a family's models are trained as a whole, where a job does not say; for ``method = "full"`` alone."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    rule: Rule | None = None
    """Which parameters decay, and whose learning rate differs; None: matrices decay."""


class Family(Protocol):
    """What rrd must know of a kind of model. All methods are pure; none reads a file."""

    @property
    def name(self) -> str: ...

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The linear modules that get an adapter when the job names none: last components of their paths."""

    def matches(self, config: Mapping[str, Any], keys: Collection[str]) -> bool:
        """Whether the model with this ``config.json`` ({} where there is none) and these tensors is of the family."""

    def read_config(self, config: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Any:
        """The sizes and switches of the model. Raises BadJob with one sentence for what the family cannot do."""

    def tensors(self, config: Any) -> Mapping[str, Shape]:
        """Every tensor the model needs, in the order they shall stand in memory: what multiplies together, together."""

    def ignores(self, name: str, config: Any) -> bool:
        """Whether a tensor that the model does not need may be in its files."""

    def skeleton(self, config: Any, *, compute: torch.dtype) -> CausalLM:
        """The module tree, to be called under the meta device; ``compute``: the dtype of activations."""


def reads_of(family: Family) -> tuple[str, ...]:
    """What the family reads, as people call it: its ``reads``, or its own name."""
    return getattr(family, "reads", (family.name,))


def recipe_of(family: Family) -> Recipe:
    """The family's ``recipe``, or the usual one."""
    return getattr(family, "recipe", Recipe())


def facts_of(family: Family) -> dict[str, Any]:
    """What else can change the family's bits, for a checkpoint's identity."""
    facts: dict[str, Any] = getattr(family, "facts", dict)()
    return facts


def lora_targets_of(family: Family, config: Any) -> tuple[str, ...]:
    """The linears that get an adapter by default: the family's, or, where it leaves that open, the model's own."""
    return family.lora_targets or tuple(config.lora_targets)


def families() -> tuple[Family, ...]:
    from rrd.models.bridge import Bridge
    from rrd.models.llama import Llama
    from rrd.models.rwkv7 import Rwkv7

    return (Llama(), Rwkv7(), Bridge())


def family_of(config: Mapping[str, Any], keys: Collection[str], *, where: str = "") -> Family:
    """The family that reads this model. Raises BadJob when none does."""
    for family in families():
        if family.matches(config, keys):
            return family
    kind = config.get("model_type")
    raise BadJob(
        f"no family knows this model (model_type {kind!r})", file=where,
        hint="rrd reads " + ", ".join(name for f in families() for name in reads_of(f)),
    )


def build(base: Base) -> CausalLM:
    """The module tree over ``base``'s tensors, by reference: models of one base share its memory.

    A trainable base is moved into the model (``base.tensors`` is empty afterwards): its one copy is the model's.
    """
    with torch.device("meta"):
        model = base.family.skeleton(base.config, compute=base.compute)
    for name, tensor in base.tensors.items():
        _place(model, name, nn.Parameter(tensor, requires_grad=base.trainable))
    model.settle()
    left = [n for n, p in model.named_parameters() if p.is_meta]
    assert not left, f"tensors without a value: {left}"
    if base.trainable:
        base.tensors.clear()
    return model


def _place(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, parameter)
