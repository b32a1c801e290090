"""A job's inputs looked at from outside: names, headers and configurations, no weight and no line of data.

``rrd check`` and ``rrd submit`` look before a job is the daemon's, and the worker that prepares it looks again. What is
not there yet, or not for this user to read, is passed over: it may be when the job's turn comes. No torch.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrd import adapter
from rrd.errors import BadJob, NotReadable
from rrd.job import JobSpec
from rrd.safetensors_header import home_of, model_tensors, read_json
from rrd.text import one_line

DATA_KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "lines", ".txt": "text", ".parquet": "parquet"}
"""What a data file holds, by its name's end."""

TOKENIZERS = ("tokenizer.json", "rwkv_vocab_v20230424.txt")
"""Files that are looked for beside a model, in this order."""

LLAMAS = ("llama", "mistral", "qwen2", "qwen3")
"""What ``config.json`` calls the models that rrd itself knows; their tensors are named as their modules are."""

_RENAME = "rename it to what it holds: .jsonl for one JSON object a line, .txt for plain text"
_CONVERT = {".csv": "convert it to .jsonl, one JSON object a line", ".gz": "unpack it: gunzip",
            ".zst": "unpack it: zstd -d", ".zip": "unpack it"}


def look(spec: JobSpec) -> list[str]:
    """Sentences about what is odd but may be meant. Raises BadJob for what could only fail later."""
    warnings = []
    for key in ("data", "eval_data"):
        if path := getattr(spec, key):
            warnings += check_data(path, key)
    if spec.eval_data and os.path.realpath(spec.eval_data) == os.path.realpath(spec.data):
        warnings.append("`eval_data` is the text that it trains on, so its loss says nothing about other text")
    model = _model(spec)
    if model is not None:
        warnings += model.check(spec)
    if spec.tokenizer or model is not None:
        _check_tokenizer(spec)
    if spec.init_adapter and os.access(spec.init_adapter, os.R_OK):
        linears = model.linears if model is not None and model.own else None
        all_of_them = {adapter.leaf(path) for path in linears} if linears else None
        adapter.check(Path(spec.init_adapter), spec, spec.lora_targets or all_of_them, linears)
    return warnings


def kind_of(path: str, key: str = "") -> str:
    """What ``path`` holds by its name: "lines" of JSON, "text" or "parquet". Raises BadJob for other kinds."""
    ending = Path(path).suffix.lower()
    if ending not in DATA_KINDS:
        raise BadJob(f"data files end in .jsonl, .txt or .parquet, not {one_line(ending, 20) or 'nothing'}", file=path,
                     key=key, hint=_CONVERT.get(ending, _RENAME))
    return DATA_KINDS[ending]


def check_data(path: str, key: str) -> list[str]:
    """Whether ``path``, which may not be there yet, can be a data file; a warning where it is empty. Raises BadJob."""
    if os.path.isdir(path):
        raise BadJob(f"`{key}` is a directory, and data is one file", file=path, key=key,
                     hint="name one file in it, or put them together: cat *.jsonl > all.jsonl")
    kind_of(path, key)
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return []
    if not stat.S_ISREG(found.st_mode):
        raise BadJob(f"`{key}` is not a regular file", file=path, key=key,
                     hint="a pipe can be read only once: write a file")
    return [f"`{key}` is empty so far: {one_line(path, 200)}"] if found.st_size == 0 else []


# ---- the model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Model:
    """A model as far as its headers tell."""

    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def kind(self) -> str:
        """What it calls itself; "rwkv7" for what has RWKV's tensors; else empty."""
        if any(name.endswith("blocks.0.ln0.weight") for name in self.shapes):
            return "rwkv7"
        return str(self.config.get("model_type") or "")

    @property
    def own(self) -> bool:
        """Whether rrd knows it itself, so that its modules are those of its files."""
        return self.kind in ("rwkv7", *LLAMAS)

    @property
    def linears(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the weights of its blocks' linears, by the modules' paths."""
        return {name.removesuffix(".weight"): shape for name, shape in self.shapes.items()
                if len(shape) == 2 and name.endswith(".weight") and re.search(r"\.[0-9]+\.", name)}

    def check(self, spec: JobSpec) -> list[str]:
        """What ``spec`` asks of it. Raises BadJob."""
        if not self.kind:
            raise BadJob("has no config.json that says what it is", file=spec.model, key="model",
                         hint="fetch the model again, all of its files")
        if spec.chunk_len and self.own and self.kind != "rwkv7":
            raise no_pieces(self.kind)
        return [*self._check_modules(spec), *self._check_positions(spec)]

    def _check_modules(self, spec: JobSpec) -> list[str]:
        if spec.method != "lora":
            return []
        there = {adapter.leaf(name.removesuffix(".weight")) for name, s in self.shapes.items() if len(s) == 2}
        for key in ("lora_targets", "lora_ranks", "lora_alphas"):
            for name in getattr(spec, key) or ():
                if name not in there:
                    error = no_module(name, map(adapter.leaf, self.linears), key)
                    if self.own:
                        raise error
                    return [f"{error.message}, as far as its files tell: {error.hint}"]
        return []

    def _check_positions(self, spec: JobSpec) -> list[str]:
        """A table of positions ends; rotary ones only get worse where nobody has trained them."""
        most = self.config.get("max_position_embeddings") or self.config.get("n_positions")
        if type(most) is not int or spec.seq_len <= most:
            return []
        if any(re.search(r"(^|\.)(wpe|embed_positions|position_embeddings)\.weight$", name) for name in self.shapes):
            raise BadJob(f"`seq_len` is {spec.seq_len}, and the model has positions for {most} tokens", key="seq_len",
                         hint=f"seq_len = {most} at most")
        return [f"`seq_len` is {spec.seq_len}, and the model was made for up to {most} tokens"]


def no_module(name: str, there: Iterable[str], key: str = "lora_targets") -> BadJob:
    """The sentence for a module that is to be adapted, and is not among those ``there``."""
    return BadJob(f"`{key}`: the model has no linear module {name!r}", key=key,
                  hint="it has " + ", ".join(sorted(set(there))))


def no_pieces(kind: str) -> BadJob:
    """The sentence for a model without states."""
    return BadJob(f"`chunk_len`: {kind} models cannot run a sample in pieces", key="chunk_len",
                  hint="leave it out; gradient_checkpointing = true saves memory, too")


def _model(spec: JobSpec) -> _Model | None:
    """Raises BadJob where what is there is no model."""
    path = Path(spec.model)
    file = home_of(path) / "config.json"
    try:
        if not path.exists():
            return None
        shapes = {name: at.info.shape for name, at in model_tensors(path).items()}
        return _Model(read_json(file) if file.exists() else {}, shapes)
    except (PermissionError, NotReadable):
        return None
    except BadJob as e:
        raise BadJob(e.message, hint=e.hint, key="model") from None


def _check_tokenizer(spec: JobSpec) -> None:
    """Whether there is one where it would be looked for. What it holds is for the worker to see."""
    place = Path(spec.tokenizer) if spec.tokenizer else home_of(Path(spec.model))
    if not place.exists() or place.is_file():
        return  # it may come; a file is opened under any name that ends like one
    if os.access(place, os.R_OK | os.X_OK) and not any((place / name).is_file() for name in TOKENIZERS):
        raise no_tokenizer(str(place))


def no_tokenizer(place: str) -> BadJob:
    """The sentence for a place without one."""
    return BadJob(f"no tokenizer found at {one_line(place, 200)}", key="tokenizer",
                  hint=f"put {' or '.join(TOKENIZERS)} beside the model, or name one with tokenizer = \"...\"")
