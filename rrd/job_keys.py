"""The types of a job file's keys: each a function from what stands in the file to what is meant.

They raise ``Fault`` with the part of the sentence after the key's name; what they do not know they hand on to pydantic,
which says that it must be text, a number, a list.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

from rrd.toml import Fault, show

MAX_STEPS = 10**9

ALIASES = {
    "learning_rate": "lr", "batch": "batch_size", "per_device_train_batch_size": "batch_size",
    "micro_batch_size": "batch_size", "rank": "lora_rank", "r": "lora_rank", "lora_r": "lora_rank",
    "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "lora_targets", "use_rslora": "lora_rs",
    "rank_pattern": "lora_ranks", "alpha_pattern": "lora_alphas", "adapter": "init_adapter",
    "resume_adapter": "init_adapter",
    "accumulation": "grad_accum", "gradient_accumulation": "grad_accum", "gradient_accumulation_steps": "grad_accum",
    "max_seq_len": "seq_len", "max_seq_length": "seq_len", "max_length": "seq_len", "context": "seq_len",
    "context_length": "seq_len", "ctx_len": "seq_len", "dataset": "data", "train_data": "data", "base_model": "model",
    "model_name_or_path": "model", "output_dir": "output", "num_train_epochs": "epochs", "num_epochs": "epochs",
    "lr_scheduler_type": "schedule", "scheduler": "schedule", "warmup": "warmup_steps", "max_grad_norm": "clip_norm",
    "save_steps": "checkpoint_every", "eval_steps": "eval_every", "device": "die", "gpu": "die",
    "load_in_8bit": "quantize",
}
"""Other tools' words for our keys. They are not taken, only understood: the error names the key that was meant."""

_UNITS = {"s": 1, "sec": 1, "second": 1, "min": 60, "m": 60, "minute": 60, "h": 3600, "hour": 3600, "d": 86400,
          "day": 86400}


def parse_duration(text: str) -> float:
    """Seconds in ``"90s"``, ``"10min"``, ``"1.5h"``. Raises ``Fault``."""
    m = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([a-z]+?)s?\s*", text.lower())
    if not m or m[2] not in _UNITS:
        raise Fault(f'must be a duration such as "10min", "90s" or "2h", not {show(text)}')
    return float(m[1]) * _UNITS[m[2]]


_FETCH = "rrd never downloads: fetch the files, as with `hf download ORG/NAME --local-dir DIR`, and name DIR here"


def may_be_on_a_hub(path: str) -> bool:
    """Whether ``path`` looks like ``org/name``, what models and data sets are called there, and not like a file."""
    hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path)
    return hub is not None and not path.endswith((".jsonl", ".json", ".txt", ".parquet", ".safetensors"))


def _path(value: object) -> object:
    if not isinstance(value, str):
        return value  # pydantic says that it must be text
    if not value or len(value.encode()) > 4096 or any(ord(c) < 32 or ord(c) == 127 for c in value):
        raise Fault(f"is no path: {show(value)}", hint="give the full path of a file or directory")
    if "://" in value:
        raise Fault(f"must be a path on this machine, not {show(value)}", hint=_FETCH)
    if not value.startswith("/"):
        hint = "the service has no current directory: start with `/`, or use `rrd submit`, which fills it in"
        raise Fault(f"must be a full path, not {show(value)}",
                    hint=f"start it with `/`; or is it a name on a hub? {_FETCH}" if may_be_on_a_hub(value) else hint)
    return os.path.normpath(value)


def _die(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10_000:
        return value
    if isinstance(value, str):
        if value.isascii() and value.isdigit() and len(value) < 5:
            return int(value)
        if value == "auto" or re.fullmatch(r"GPU-[0-9a-fA-F-]{8,40}", value):
            return value
        if re.fullmatch(r"([0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]", value):
            return value.lower()
    raise Fault(f'must be "auto", a die\'s number, a UUID or a PCI address, not {show(value)}',
                hint="`rrd dies` lists them")


def _steps_or_auto(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 1_000_000:
        return value
    raise Fault(f'must be "auto" or a number of steps from 1 to 1,000,000, not {show(value)}')


def _cadence(value: object) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_STEPS:
        return value
    if isinstance(value, str):
        if not 1 <= parse_duration(value) <= 7 * 86400:
            raise Fault(f"must be between 1 second and 7 days, not {show(value)}")
        return value.strip()
    raise Fault(f'must be a number of steps (at least 1) or a duration such as "10min", not {show(value)}')


def _quantize(value: object) -> bool | Literal["int8"]:
    if value is False:
        return False
    if value is True or value == "int8":
        return "int8"
    raise Fault(f'must be true, false or "int8", not {show(value)}')


def _names(value: object) -> object:
    """Lists of module names; JSON and TOML know no tuples."""
    if not isinstance(value, (list, tuple)):
        return value
    for name in value:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_]{1,100}", name):
            raise Fault(f'must list names of linear modules such as "q_proj", not {show(name)}')
    if not value or len(set(value)) < len(value):
        raise Fault("must name each module once, and at least one", hint="leave it out for the family's default")
    return tuple(value)


def _ranks(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    for name, rank in value.items():
        _names([name])
        if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= 4096:
            raise Fault(f"must give a rank from 1 to 4096 for each module, not {show(rank)} for {show(name)}")
    return dict(value)


def _alphas(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    for name, alpha in value.items():
        _names([name])
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha <= 1e6:
            raise Fault(f"must give an alpha above 0 for each module, not {show(alpha)} for {show(name)}")
    return {name: float(alpha) for name, alpha in value.items()}


def _betas(value: object) -> object:
    if not isinstance(value, (list, tuple)):
        return value
    numbers = [float(b) for b in value if isinstance(b, (int, float)) and not isinstance(b, bool) and 0 <= b < 1]
    if len(numbers) != 2 or len(value) != 2:
        raise Fault("must be two numbers from 0 up to, not including, 1", hint="the usual ones are [0.9, 0.999]")
    return tuple(numbers)


def _schema(*kinds: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(kinds)} if len(kinds) > 1 else kinds[0])


AbsPath = Annotated[str, BeforeValidator(_path)]
Die = Annotated[int | str, PlainValidator(_die), _schema({"type": "integer", "minimum": 0}, {"type": "string"})]
StepsOrAuto = Annotated[int | Literal["auto"], PlainValidator(_steps_or_auto),
                        _schema({"const": "auto"}, {"type": "integer", "minimum": 1, "maximum": 1_000_000})]
Cadence = Annotated[int | str, PlainValidator(_cadence),
                    _schema({"type": "integer", "minimum": 1}, {"type": "string", "examples": ["10min", "90s"]})]
Quantize = Annotated[bool | Literal["int8"], PlainValidator(_quantize),
                     _schema({"type": "boolean"}, {"const": "int8"})]
Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
Ranks = Annotated[dict[str, int], BeforeValidator(_ranks)]
Alphas = Annotated[dict[str, float], BeforeValidator(_alphas)]
Betas = Annotated[tuple[float, float], BeforeValidator(_betas)]
