"""The result of a job, in the ecosystem's format: a PEFT adapter, or a whole model; checked before it is published.

PEFT layout (https://huggingface.co/docs/peft, "PEFT checkpoint format"): ``adapter_model.safetensors`` with keys
``base_model.model.<module path>.lora_A.weight`` [r, in] and ``.lora_B.weight`` [out, r], and ``adapter_config.json``.
The same adapter gives the same bytes in every file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rrd.adapter import CONFIG, PREFIX, WEIGHTS, A, B, leaf
from rrd.errors import BadJob, Damaged, RrdError
from rrd.job import JobSpec
from rrd.models import build
from rrd.models.files import inspect, names_in_files
from rrd.models.rwkv7 import Rwkv7
from rrd.models.rwkv7_config import RwkvConfig
from rrd.safetensors_header import Located, model_tensors, read_header
from rrd.train import whole
from rrd.train.cards import native_card, peft_card, rwkv_card
from rrd.train.publish import Publication
from rrd.train.tensor_file import entry, read_tensor, stream

if TYPE_CHECKING:
    from rrd.train.trainer import Trainer

OLD_NAME = "adapter.safetensors"
MERGED = "merged/"
RWKV_WEIGHTS, RWKV_A, RWKV_B = "rwkv_lora.safetensors", ".lora_A", ".lora_B"
_PROBE = 32

Alive = Callable[[str, float], None]


@dataclass(frozen=True)
class AdapterSpec:
    """What an adapter's tensors do not say themselves. The scale of a module is alpha / rank, or alpha / sqrt(rank)."""

    base: str
    rank: int
    alpha: float
    rs: bool = False
    dropout: float = 0.0
    fan_in_fan_out: bool = False
    """Whether the base stores its linears [in, out], as GPT-2 does."""
    alphas: Mapping[str, float] = field(default_factory=dict)
    """Alphas other than ``alpha``, by last path component."""
    rwkv: RwkvConfig | None = None
    """Where the base is an RWKV, which transformers does not load: what it is."""

    @staticmethod
    def of(spec: JobSpec) -> AdapterSpec:
        config = _config_of(Path(spec.model))
        return AdapterSpec(spec.model, spec.lora_rank, spec.alpha, spec.lora_rs, spec.lora_dropout,
                           bool(getattr(config, "fan_in_fan_out", False)), spec.lora_alphas,
                           config if isinstance(config, RwkvConfig) else None)

    def scale(self, path: str, rank: int) -> float:
        """What B A of the module at ``path`` is multiplied by."""
        return self.alphas.get(leaf(path), self.alpha) / (rank**0.5 if self.rs else rank)


def export(trainer: Trainer, output: str | Path, *, alive: Alive = lambda *_: None) -> list[str]:
    """Write and publish what ``trainer`` has trained so far. Returns what the owner should know.

    Raises:
        BadJob: ``output`` is not ours to replace, or the base model cannot be read any more.
        DiskTrouble: it could not be written; what was at ``output`` before is still there.
        Damaged: what was written does not read back as the adapter; it is not published.
        RrdError: the adapter, or the model's output with it, is infinite or no number.
    """
    if trainer.spec.method == "full":
        return export_full(masters(trainer), Path(output), trainer.spec.model, step=trainer.step, alive=alive)
    tensors, spec = masters(trainer), AdapterSpec.of(trainer.spec)
    with Publication(Path(output)) as new:
        _add_adapter(new, tensors, spec, alive)
        _check_file(new.path / WEIGHTS, tensors)
        notes = check_output_changes(trainer)
        if trainer.spec.export_merged:
            whole.add_merged(new, Path(spec.base), updates(tensors, spec), inside=MERGED,
                             alive=lambda share: alive("merging", share))
            whole.check(new.path / MERGED, Path(spec.base), updates(tensors, spec))
        return notes + new.publish({"base": spec.base, "method": "lora", "step": trainer.step})


def _config_of(model: Path) -> Any:
    try:
        return inspect(model).config
    except BadJob:  # the adapter stands for itself, even where its base is gone
        return None


def masters(trainer: Trainer) -> dict[str, Tensor]:
    """The trained tensors in fp32 by name, as a checkpoint has them, whatever the model computes with."""
    return {slot.name: trainer.optimizer.view("param", slot) for slot in trainer.optimizer.layout}


def export_adapter(tensors: Mapping[str, Tensor], output: Path, spec: AdapterSpec, *, step: int) -> list[str]:
    """Write an adapter from its tensors alone (from a checkpoint, say). Names are PEFT's without its prefix."""
    with Publication(output) as new:
        _add_adapter(new, tensors, spec, lambda *_: None)
        _check_file(new.path / WEIGHTS, tensors)
        return new.publish({"base": spec.base, "method": "lora", "step": step})


def export_rwkv(tensors: Mapping[str, Tensor], output: Path, spec: AdapterSpec, *, step: int) -> list[str]:
    """Write an adapter as RWKV's own tools name it: ``blocks.0.att.key.lora_A`` [r, in] and ``.lora_B`` [out, r].

    They merge ``lora_alpha / r * B A`` with one alpha for all (JL-er/RWKV-PEFT, merge.py): where a module's scale is
    another, it is in its B. Raises BadJob where the base is no RWKV.
    """
    files = inspect(Path(spec.base))
    if not isinstance(files.family, Rwkv7):
        raise BadJob(f"{files.family.name} models have no format of RWKV's", hint="leave --format out")
    named: dict[str, Tensor] = {}
    for path, rank in ranks(tensors).items():
        (weight,) = names_in_files(files.config, f"{path}.weight")
        stem, share = weight.removesuffix(".weight"), spec.scale(path, rank) * rank / spec.alpha
        named[stem + RWKV_A] = tensors[path + A]
        named[stem + RWKV_B] = tensors[path + B] if share == 1.0 else tensors[path + B] * share
    with Publication(output) as new:
        chunks, size = stream(entry(n, t) for n, t in named.items())
        new.add(RWKV_WEIGHTS, chunks, size=size)
        new.add("README.md", [native_card(spec.base, spec.alpha, RWKV_WEIGHTS).encode()])
        _check_file(new.path / RWKV_WEIGHTS, named, prefix="")
        facts = {"base": spec.base, "method": "lora", "format": "rwkv", "lora_alpha": spec.alpha, "step": step}
        return new.publish(facts)


def export_merged(tensors: Mapping[str, Tensor], output: Path, spec: AdapterSpec, *, step: int,
                  alive: Alive = lambda *_: None) -> list[str]:
    """Write the whole model with the adapter merged in, in the names and types of its base."""
    with Publication(output) as new:
        whole.add_merged(new, Path(spec.base), updates(tensors, spec), alive=lambda share: alive("merging", share))
        whole.check(new.path, Path(spec.base), updates(tensors, spec))
        return new.publish({"base": spec.base, "method": "merged", "step": step})


def export_full(tensors: Mapping[str, Tensor], output: Path, model: str, *, step: int,
                alive: Alive = lambda *_: None) -> list[str]:
    """Write a fully trained model: ``tensors`` in the names and types of the model it began as."""
    with Publication(output) as new:
        changed = whole.add_trained(new, Path(model), tensors, alive=lambda share: alive("exporting", share))
        whole.check(new.path, Path(model), {})
        _check_trained(new.path, tensors)
        notes = [] if changed else ["the model is still what it was before training"]
        return notes + new.publish({"base": model, "method": "full", "step": step})


def _check_trained(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Whether a written model holds the trained tensors, all of them numbers. The first and the last are read again."""
    found = model_tensors(directory)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise _not_finite(f"training has made {name}")
    for name in {*list(tensors)[:1], *list(tensors)[-1:]}:
        back = read_tensor(found[name])
        if not torch.equal(back, tensors[name].detach().cpu().to(back.dtype)):
            raise Damaged(f"{directory / whole.WEIGHTS} does not hold {name} as it was trained")


def ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The rank of each adapted module, by its path, in order of the paths."""
    paths = sorted(name.removesuffix(A) for name in tensors if name.endswith(A))
    assert {p + end for p in paths for end in (A, B)} == tensors.keys(), "an adapter is pairs of A and B"
    return {path: tensors[path + A].shape[0] for path in paths}


def updates(tensors: Mapping[str, Tensor], spec: AdapterSpec) -> dict[str, whole.Update]:
    """What the adapter adds to each weight of the model, by the weight's name."""
    return {f"{path}.weight": whole.Update(tensors[path + A], tensors[path + B], spec.scale(path, rank))
            for path, rank in ranks(tensors).items()}


def peft_config(tensors: Mapping[str, Tensor], spec: AdapterSpec) -> dict[str, Any]:
    """The contents of ``adapter_config.json``."""
    found = ranks(tensors)
    return {
        "peft_type": "LORA", "base_model_name_or_path": spec.base, "inference_mode": True,
        "task_type": None if spec.rwkv else "CAUSAL_LM",  # what PEFT asks of a causal LM, it asks of transformers' only
        "r": spec.rank, "lora_alpha": int(spec.alpha) if spec.alpha == int(spec.alpha) else spec.alpha,
        "lora_dropout": spec.dropout, "use_rslora": spec.rs, "bias": "none", "fan_in_fan_out": spec.fan_in_fan_out,
        "init_lora_weights": True, "modules_to_save": None, "target_modules": sorted({leaf(p) for p in found}),
        "rank_pattern": _rank_pattern(found, spec.rank), "alpha_pattern": dict(sorted(spec.alphas.items())),
    }


def _rank_pattern(found: Mapping[str, int], rank: int) -> dict[str, int]:
    """Ranks other than ``rank``: by last path component where all of that name agree, else by whole path."""
    of_name = Counter(name for name, _ in {(leaf(p), r) for p, r in found.items()})
    alike = {name for name, different in of_name.items() if different == 1}
    return {(leaf(p) if leaf(p) in alike else p): r for p, r in found.items() if r != rank}


def _add_adapter(new: Publication, tensors: Mapping[str, Tensor], spec: AdapterSpec, alive: Alive) -> None:
    chunks, size = stream((entry(PREFIX + n, t) for n, t in tensors.items()), lambda share: alive("exporting", share))
    new.add(WEIGHTS, chunks, size=size)
    new.add(CONFIG, [json.dumps(peft_config(tensors, spec), indent=2, sort_keys=True).encode() + b"\n"])
    card = rwkv_card(spec.base, spec.rwkv) if spec.rwkv else peft_card(spec.base)
    new.add("README.md", [card.encode()])
    new.link(OLD_NAME, WEIGHTS)


def _not_finite(what: str) -> RrdError:
    return RrdError(f"{what} infinite or no number: it is not exported", hint="lower lr, and train again")


def _check_file(file: Path, tensors: Mapping[str, Tensor], *, prefix: str = PREFIX) -> None:
    """Whether the file reads back as exactly these tensors, one at a time, and all of them are numbers.

    Raises:
        Damaged: it does not.
        RrdError: a tensor is not finite. (The output alone would not tell: torch's attention on CPUs hides a NaN.)
    """
    found = read_header(file).tensors
    if found.keys() != {prefix + n for n in tensors}:
        raise Damaged(f"{file} does not hold the adapter's tensors")
    for name, tensor in tensors.items():
        back = read_tensor(Located(file, found[prefix + name]))
        if not torch.equal(back.view(torch.uint8), tensor.detach().cpu().contiguous().view(torch.uint8)):
            raise Damaged(f"{file} does not hold {name} as it was trained")
        if not torch.isfinite(back).all():
            raise _not_finite(f"training has made {name}")


@torch.no_grad()
def check_output_changes(trainer: Trainer) -> list[str]:
    """Whether the adapter changes what the model says to a stretch of its own data. Returns a note if it does not.

    The base is the frozen tensors without an adapter: no second copy of anything comes onto the die.

    Raises:
        RrdError: the output with the adapter is not finite.
    """
    idx = trainer.data.sample(0)[0][None, :_PROBE].to(trainer.device)
    model, training = trainer.model, trainer.model.training
    try:
        ours = model.eval()(idx)
    finally:
        model.train(training)
    if not torch.isfinite(ours).all():
        raise _not_finite("the adapter makes the model's output")
    if not torch.equal(ours, build(trainer.base).eval()(idx)):
        return []
    zero = not any(t.count_nonzero() for name, t in trainer.named if name.endswith(B))
    return ["the adapter is zero: it does not change the model's output"
            if zero else "the adapter does not change the model's output: what it learned is below its precision"]
