"""A model that knows nothing yet, for the demo: a byte-level vocabulary made of the demo's own text, and an RWKV-7."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

WORDS = 4096
LAYERS, WIDTH = 4, 256
END = "<|endoftext|>"


def make_tokenizer(path: Path, data: Iterable[Path]) -> None:
    """Write a ``tokenizer.json`` of WORDS words, learned from the strings of the JSONL files ``data``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=WORDS, special_tokens=[END], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(strings(data), trainer)
    tokenizer.save(str(path))
    path.with_name("tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def strings(data: Iterable[Path]) -> Iterator[str]:
    for file in data:
        for line in file.read_text(encoding="utf-8").split("\n"):
            if line:
                yield from (text for text in json.loads(line).values() if isinstance(text, str))


def make_model(path: Path, tokenizer: Path) -> None:
    """Write a new RWKV-7, 5.6 million weights of RWKV-LM's initialisation, to the directory ``path``."""
    from rrd.models.new import new_model
    from rrd.models.rwkv7_init import new_config

    new_model(new_config(LAYERS, WIDTH, WORDS), path, beside=(tokenizer, tokenizer.with_name("tokenizer_config.json")))
