"""An adapter in PEFT's layout as its configuration and header say it: what it is on, and at which scale.

B A is only worth something at the scale it was trained at, so a job that starts from one must have its targets, ranks
and alphas. No torch: the command line looks, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from rrd.errors import BadJob
from rrd.job import JobSpec
from rrd.safetensors_header import Header, TensorInfo, read_header, read_json
from rrd.text import one_line

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_MUST_BE_OFF = {"use_dora": "DoRA", "modules_to_save": "modules trained as a whole", "lora_bias": "biases",
                "target_parameters": "adapters on bare parameters", "layer_replication": "repeated layers"}
_PLAIN = "start from a plain LoRA, of nothing but lora_A and lora_B of linear modules"


def check(directory: Path, spec: JobSpec, targets: Collection[str] | None,
          linears: Mapping[str, Sequence[int]] | None = None) -> None:
    """Whether the adapter in ``directory`` is one for ``spec``, as far as it says itself. Raises BadJob.

    ``targets``: the modules that the job adapts. ``linears``: the shapes of the model's weights, by the paths of its
    linear modules. None: not known.
    """
    config, header = read(directory)
    ranks = {n.removesuffix(A): info.shape[0] for n, info in named(header).items() if n.endswith(A) and info.shape}
    alphas = _pattern(directory, config, "alpha_pattern", _number(config.get("lora_alpha")))
    leaves = {leaf(path) for path in ranks}
    if targets is not None and (odd := sorted(leaves ^ set(targets))):
        there = "is on" if odd[0] in leaves else "is not on"
        refuse(directory, f"{there} {odd[0]}, unlike this job", f"lora_targets = {_list(sorted(leaves))}")
    if bool(config.get("use_rslora")) != spec.lora_rs:
        refuse(directory, "is scaled by the other rule", f"lora_rs = {str(not spec.lora_rs).lower()}")
    for path, rank in ranks.items():
        name = leaf(path)
        mine = spec.lora_ranks.get(name, spec.lora_rank)
        alpha, my_alpha = alphas(path), spec.lora_alphas.get(name, spec.alpha)
        if rank != mine:
            refuse(directory, f"has rank {rank} on {name}, and this job {mine}",
                   f"lora_rank = {rank}, or lora_ranks = {{{name} = {rank}}}")
        if not math.isclose(alpha, my_alpha, rel_tol=1e-9):
            refuse(directory, f"has alpha {alpha:g} on {name}, and this job {my_alpha:g}",
                   f"lora_alpha = {alpha:g}, or lora_alphas = {{{name} = {alpha:g}}}")
    if linears is not None:
        _check_model(directory, named(header), linears)


def _check_model(directory: Path, tensors: Mapping[str, TensorInfo], linears: Mapping[str, Sequence[int]]) -> None:
    """Whether it was made for a model with these linear modules. A weight may be stored [out, in] or [in, out]."""
    very = "start from an adapter of this very model"
    for name, info in tensors.items():
        path = name.removesuffix(A).removesuffix(B)
        if path not in linears:
            refuse(directory, f"is of another model: it has {name}", very)
        if len(info.shape) != 2 or info.shape[1 if name.endswith(A) else 0] not in linears[path]:
            refuse(directory, f"is of another model: its {name} is {list(info.shape)}, and the weight there "
                   f"{list(linears[path])}", very)


def read(directory: Path) -> tuple[Mapping[str, Any], Header]:
    """Its configuration and the header of its tensors. Raises BadJob for what rrd cannot go on from."""
    if not directory.is_dir() or not (directory / CONFIG).exists():
        what = "is a file" if directory.is_file() else f"has no {CONFIG}" if directory.is_dir() else "is not there"
        raise BadJob(f"the adapter to start from {what}", file=str(directory), key="init_adapter",
                     hint=f"name the directory that holds {CONFIG} and {WEIGHTS}")
    if not (directory / WEIGHTS).exists() and (directory / "adapter_model.bin").exists():
        refuse(directory, "has pickled weights only, which rrd never opens", "save it again as safetensors")
    config = read_json(directory / CONFIG)
    if str(config.get("peft_type")).upper() != "LORA":
        refuse(directory, f"is no LoRA but {one_line(str(config.get('peft_type')), 40)}", _PLAIN)
    for key, what in _MUST_BE_OFF.items():
        if config.get(key):
            refuse(directory, f"has {what} ({key}), which rrd does not train", _PLAIN)
    if config.get("bias", "none") != "none":
        refuse(directory, "has biases of its own, which rrd does not train", _PLAIN)
    return config, read_header(directory / WEIGHTS)


def named(header: Header) -> dict[str, TensorInfo]:
    """The header's tensors by our names. Others than pairs of A and B are left as they are, to be named as odd."""
    return {name.removeprefix(PREFIX): info for name, info in header.tensors.items()}


def leaf(path: str) -> str:
    """The name of a module, without those it is in."""
    return path.rpartition(".")[2]


def refuse(directory: Path, why: str, hint: str) -> NoReturn:
    """Raise the BadJob of an adapter that is not for this job; ``why`` goes on after "the adapter"."""
    raise BadJob(f"the adapter {one_line(why, 300)}", file=str(directory), key="init_adapter", hint=hint)


def _pattern(directory: Path, config: Mapping[str, Any], key: str, otherwise: float) -> Callable[[str], float]:
    """PEFT's ``alpha_pattern``: by the end of a module's path. Only names, for others may be any regular expression."""
    table = config.get(key) or {}
    if not isinstance(table, dict) or not all(re.fullmatch(r"\^?[\w.]+\$?", str(k)) for k in table):
        refuse(directory, f"has a {key} that is more than names", f"name modules in {key}, such as q_proj")
    plain = {str(k).strip("^$"): _number(v) for k, v in table.items()}

    def of(path: str) -> float:
        return next((v for k, v in plain.items() if path == k or path.endswith("." + k)), otherwise)

    return of


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _list(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{n}"' for n in names) + "]"
