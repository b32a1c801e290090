"""An adapter to start from: one in PEFT's layout, made by rrd or anything else, that fits the job exactly.

B A is only worth something at the scale it was trained at, so targets, ranks and alphas must be the job's. Everything
is checked from ``adapter_config.json`` and the header of ``adapter_model.safetensors`` before a tensor is read.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from rrd.errors import BadJob
from rrd.job import JobSpec
from rrd.safetensors_header import Header, Located, read_header, read_json
from rrd.text import one_line
from rrd.train.state import as_memory
from rrd.train.tensor_file import DTYPES, read_tensor

PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"

_MUST_BE_OFF = {"use_dora": "DoRA", "modules_to_save": "modules trained as a whole", "lora_bias": "biases",
                "target_parameters": "adapters on bare parameters", "layer_replication": "repeated layers"}


def check(directory: Path, spec: JobSpec, targets: Sequence[str]) -> None:
    """Whether the adapter in ``directory`` is one for ``spec``, as far as it says itself. Raises BadJob."""
    config, header = _read(directory)
    ranks = {n.removesuffix(A): info.shape[0] for n, info in _named(header).items() if n.endswith(A) and info.shape}
    alphas = _pattern(directory, config, "alpha_pattern", _number(config.get("lora_alpha")))
    leaves = {_leaf(path) for path in ranks}
    if odd := sorted(leaves ^ set(targets)):
        there = "is on" if odd[0] in leaves else "is not on"
        _refuse(directory, f"{there} {odd[0]}, unlike this job", f"lora_targets = {_list(sorted(leaves))}")
    if bool(config.get("use_rslora")) != spec.lora_rs:
        _refuse(directory, "is scaled by the other rule", f"lora_rs = {str(not spec.lora_rs).lower()}")
    for path, rank in ranks.items():
        leaf = _leaf(path)
        mine = spec.lora_ranks.get(leaf, spec.lora_rank)
        alpha, my_alpha = alphas(path), spec.lora_alphas.get(leaf, spec.alpha)
        if rank != mine:
            _refuse(directory, f"has rank {rank} on {leaf}, and this job {mine}",
                    f"lora_rank = {rank}, or lora_ranks = {{{leaf} = {rank}}}")
        if not math.isclose(alpha, my_alpha, rel_tol=1e-9):
            _refuse(directory, f"has alpha {alpha:g} on {leaf}, and this job {my_alpha:g}",
                    f"lora_alpha = {alpha:g}, or lora_alphas = {{{leaf} = {alpha:g}}}")


def fill(named: Sequence[tuple[str, Tensor]], directory: Path) -> str:
    """Give the adapter's parameters ``named`` the values in ``directory``. Returns the digest of those.

    Raises:
        BadJob: it is not for exactly these modules, or holds something that is no number.
    """
    _, header = _read(directory)
    found, wanted = _named(header), dict(named)
    if odd := sorted(found.keys() ^ wanted.keys()):
        does = "has" if odd[0] in found else "lacks"
        _refuse(directory, f"is of another model: it {does} {odd[0]}", "start from an adapter of this very model")
    sha = hashlib.sha256()
    for name in sorted(found):
        info = found[name]
        if info.shape != tuple(wanted[name].shape):
            _refuse(directory, f"has {name} in shape {list(info.shape)}, and this model {list(wanted[name].shape)}",
                    "start from an adapter of this very model")
        if not DTYPES.get(info.dtype, torch.int8).is_floating_point:
            _refuse(directory, f"has {name} as {info.dtype}, which are no floats we can read", "")
        value = read_tensor(Located(directory / WEIGHTS, info)).float()
        if not torch.isfinite(value).all():
            _refuse(directory, f"has values in {name} that are no numbers", "take an earlier one")
        sha.update(repr((name, info.shape)).encode())
        sha.update(as_memory(value))
        wanted[name].data.copy_(value)
    return sha.hexdigest()


def _read(directory: Path) -> tuple[Mapping[str, Any], Header]:
    if not (directory / WEIGHTS).exists() and (directory / "adapter_model.bin").exists():
        _refuse(directory, "has pickled weights only, which rrd never opens", "save it again as safetensors")
    config = read_json(directory / CONFIG)
    if str(config.get("peft_type")).upper() != "LORA":
        _refuse(directory, f"is no LoRA but {one_line(str(config.get('peft_type')), 40)}", "")
    for key, what in _MUST_BE_OFF.items():
        if config.get(key):
            _refuse(directory, f"has {what} ({key}), which rrd does not train", "")
    if config.get("bias", "none") != "none":
        _refuse(directory, "has biases of its own, which rrd does not train", "")
    return config, read_header(directory / WEIGHTS)


def _named(header: Header) -> dict[str, Any]:
    """The header's tensors by our names. Others than pairs of A and B are left as they are, to be named as odd."""
    return {name.removeprefix(PREFIX): info for name, info in header.tensors.items()}


def _pattern(directory: Path, config: Mapping[str, Any], key: str, otherwise: float) -> Callable[[str], float]:
    """PEFT's ``alpha_pattern``: by the end of a module's path. Only names, for others may be any regular expression."""
    table = config.get(key) or {}
    if not isinstance(table, dict) or not all(re.fullmatch(r"\^?[\w.]+\$?", str(k)) for k in table):
        _refuse(directory, f"has a {key} that is more than names", "")
    plain = {str(k).strip("^$"): _number(v) for k, v in table.items()}

    def of(path: str) -> float:
        return next((v for k, v in plain.items() if path == k or path.endswith("." + k)), otherwise)

    return of


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _list(names: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{n}"' for n in names) + "]"


def _refuse(directory: Path, why: str, hint: str) -> NoReturn:
    raise BadJob(f"the adapter {one_line(why, 300)}", file=str(directory), key="init_adapter", hint=hint)
