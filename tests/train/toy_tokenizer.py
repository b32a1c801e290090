"""Small real tokenizers, trained on the spot: one byte-level BPE, one SentencePiece-like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The daemon trains many adapters in rotation and loses nothing.", "def add(a, b):\n    return a + b\n",
    "User: what is a die?\n\nAssistant: one chip that trains.", "übermäßig 日本語 emoji 🙂",
    "a step is one optimizer update; a visit is one turn",
]


def byte_level(special: list[str]) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tok.train_from_iterator(CORPUS * 4, trainer)
    return tok


def metaspace() -> Tokenizer:
    """Like Llama 2's and Mistral's: every text starts with a space marker."""
    tok = Tokenizer(models.BPE(unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tok.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    tok.train_from_iterator(CORPUS * 4, trainer)
    return tok


def save(tok: Tokenizer, directory: Path, **settings: Any) -> str:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``directory``; returns it as a string."""
    directory.mkdir(parents=True, exist_ok=True)
    tok.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(directory)


def plain_dir(directory: Path) -> str:
    return save(byte_level(["<eos>"]), directory, eos_token="<eos>")


def chatml_dir(directory: Path) -> str:
    return save(byte_level(["<eos>", "<|im_start|>", "<|im_end|>"]), directory, eos_token={"content": "<eos>"})
