"""Records to token ids, with the tokens that carry no loss marked.

A token without loss stands as its complement ``~id``, so that one int32 array holds both ids and mask. Records are such
arrays, not lists: a hundred megabytes of text are thirty million tokens.

Turns are written by the model's own chat template where there is one (:mod:`rrd.train.template`). Without, they are
written in one of two formats, chosen by the tokenizer: **ChatML** where it has the markers
(``<|im_start|>user\\n...<|im_end|>\\n``), else **plain turns** (``User: ...\\n\\nAssistant: ...``). The end-of-text
token, where there is one, closes every record (in plain turns, every answer), unless a template closed it with a
special token of its own. The loss is on answers, completions and plain text, their end token included; never on
prompts, other speakers or markers that the model will be given.

Prompts and answers are tokenized apart: at generation the model gets the prompt's tokens, and continues with new ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import tokenizers

from rrd.errors import BadJob
from rrd.inputs import TOKENIZERS, no_tokenizer
from rrd.text import one_line
from rrd.train import template
from rrd.train.read import BadLine, Record, Turn, open_regular
from rrd.train.template import ChatTemplate, Span

RENDERING = 1
"""Raise it whenever the tokens of the same record change: it is part of the cache's key."""

IM_START, IM_END = "<|im_start|>", "<|im_end|>"
PIECE = 1 << 16
"""Characters of one text that are tokenized in one go."""
GROUP = 1 << 20
"""Characters that are tokenized in one call."""

_GAP = re.compile(r"(?<=\w) (?=\w)")
_FILE_LIMIT = 256 << 20


Tokens: TypeAlias = "array[int]"
"""int32: ids, and ``~id`` where there is no loss."""

_NOT = bytes(255 - b for b in range(256))


def unlearned(tokens: Tokens) -> Tokens:
    """``tokens`` without loss: the complement of each."""
    flipped = array("i")
    flipped.frombytes(tokens.tobytes().translate(_NOT))
    return flipped


class TokenizerLike(Protocol):
    """What the data cache needs of a tokenizer. ``digest`` changes whenever the tokens of some record would."""

    digest: str
    eos: int | None
    runs_code: bool
    """Whether it runs a model's chat template: such code belongs in a process of its own."""

    @property
    def library(self) -> str:
        """Compiled code that it uses, for ``use`` in another process; empty where there is none."""
        ...

    def make_ready(self, cache_dir: Path, alive: Callable[[], None]) -> None:
        """Get faster, if it can, by what is compiled once and kept below ``cache_dir``."""
        ...

    def use(self, library: Path) -> None:
        """Use what another process's ``make_ready`` has found."""
        ...

    def encode(self, records: Sequence[Record]) -> list[Tokens | BadLine]:
        """The tokens of each record; ``~id`` where a token carries no loss. No end token yet: see ``closed``.

        A record that cannot be written, as its chat template says, is the reason.
        """
        ...

    def closed(self, tokens: Tokens) -> Tokens:
        """``tokens`` of one whole record with the end token behind them; may change what it is given."""
        ...


def load_tokenizer(path: str) -> TokenizerLike:
    """The tokenizer at ``path``: a tokenizer file, or a directory (usually the model's) that holds one.

    Raises:
        BadJob: there is none, or it cannot be used.
    """
    place = Path(path)
    names = [place.name] if place.is_file() else [n for n in KINDS if (place / n).is_file()]
    for name in names:
        for ending, kind in KINDS.items():
            if name.endswith(ending):
                return kind(place if place.is_file() else place / name)
    raise no_tokenizer(path)


class HuggingFace:
    """A ``tokenizer.json``, run by the ``tokenizers`` library on as many threads as RAYON_NUM_THREADS allows."""

    library = ""

    def __init__(self, file: Path) -> None:
        data = read_small(file)
        self._file = str(file)
        with self._understood():
            self._rust = tokenizers.Tokenizer.from_str(data.decode())
            self._rust.no_truncation()  # a tokenizer.json may carry both, left over from its own training
            self._rust.no_padding()
            self._rust.encode("", add_special_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        special = {t.content for t in added.values()}
        settings = _settings(file.parent)
        self.eos = _end_token(settings, self._rust)
        self.bos = _start_token(settings, self._rust)
        self.chatml = {IM_START, IM_END} <= special
        self._anchor = self._find_anchor()
        self._template, source = _chat_template(file.parent, settings, {t.content for t in added.values() if t.special})
        self.runs_code = self._template is not None
        self._ends = {self.eos} | ({i for i, t in added.items() if t.special} if self._template else set())
        written = [template.VERSION, source] if self._template else []
        facts = json.dumps([RENDERING, self.eos, self.bos, self.chatml, *written]).encode()
        self.digest = hashlib.sha256(facts + data).hexdigest()

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """What the library makes of somebody's file: its panics are no ordinary exceptions."""
        try:
            yield
        except BaseException as e:
            if not isinstance(e, Exception) and type(e).__name__ != "PanicException":
                raise
            raise BadJob(f"not a usable tokenizer: {one_line(str(e), 200)}", file=self._file) from e

    def make_ready(self, cache_dir: Path, alive: Callable[[], None]) -> None:
        """It is as fast as it gets."""

    def use(self, library: Path) -> None:
        raise AssertionError("there is none")

    def encode(self, records: Sequence[Record]) -> list[Tokens | BadLine]:
        spans = [self._render(r) for r in records]
        texts = [(s.piece, i > 0 or r.continues) for r, ss in zip(records, spans, strict=True)
                 if not isinstance(ss, BadLine) for i, s in enumerate(ss) if isinstance(s.piece, str)]
        ids = iter(self._encode_texts(texts))
        return [ss if isinstance(ss, BadLine) else self._join(r, ss, ids) for r, ss in zip(records, spans, strict=True)]

    def _join(self, record: Record, spans: Iterable[Span], ids: Iterator[list[int]]) -> Tokens:
        tokens = array("i")
        for piece, learn in spans:
            new = array("i", next(ids) if isinstance(piece, str) else [piece])
            tokens.extend(new if learn else unlearned(new))
        if self.bos is not None and self._starts(record) and not (tokens and tokens[0] in (self.bos, ~self.bos)):
            tokens.insert(0, ~self.bos)
        return tokens

    def _starts(self, record: Record) -> bool:
        """Whether a start token goes before the record: a template writes it by itself, if it wants it."""
        return not record.continues and (self._template is None or not _is_dialogue(record))

    def closed(self, tokens: Tokens) -> Tokens:
        if self.eos is not None and not (tokens and tokens[-1] in self._ends):
            tokens.append(self.eos)
        return tokens

    def _render(self, record: Record) -> list[Span] | BadLine:
        if not _is_dialogue(record):
            return [Span(t.text, t.role != "prompt") for t in record.turns if t.text]
        if self._template is not None:
            try:
                return self._template.spans(record.turns)
            except BadLine as e:
                return e
        return merged(_chatml(record.turns) if self.chatml else _plain_turns(record.turns, self.eos))

    def _encode_texts(self, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """Ids of each (text, whether it continues another); a long text goes in pieces, each continuing the last."""
        parts = [[(p, continues or i > 0) for i, p in enumerate(pieces(t))] for t, continues in texts]
        ids = iter(self._encode_pieces([p for ps in parts for p in ps]))
        return [next(ids) if len(ps) == 1 else [t for _ in ps for t in next(ids)] for ps in parts]

    def _encode_pieces(self, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        anchor, skip = self._anchor
        plain = self._batch([anchor + t if continues else t for t, continues in texts])
        if not anchor:
            return plain
        return [self._drop_anchor(ids, t, skip) if continues else ids
                for ids, (t, continues) in zip(plain, texts, strict=True)]

    def _drop_anchor(self, ids: list[int], text: str, skip: list[int]) -> list[int]:
        return ids[len(skip):] if ids[: len(skip)] == skip else self._batch([text])[0]

    def _batch(self, texts: list[str]) -> list[list[int]]:
        fast = getattr(self._rust, "encode_batch_fast", self._rust.encode_batch)  # since tokenizers 0.20: no offsets
        out: list[list[int]] = []
        for group in groups(texts):
            with self._understood():
                out += [e.ids for e in fast(group, add_special_tokens=False)]
        return out

    def _find_anchor(self) -> tuple[str, list[int]]:
        """What to put before a text that continues another, and its own ids, to be dropped again.

        SentencePiece-like tokenizers begin every text with a space marker, which has no place in the middle of a
        record. A line end never melts into the next word, so it serves as the stand-in for what came before.
        """
        line_end, word, both = self._batch(["\n", "a", "\na"])
        same = both[: len(line_end)] == line_end and both[len(line_end):] != word
        return ("\n", line_end) if same else ("", [])


def _is_dialogue(record: Record) -> bool:
    return not {t.role for t in record.turns} <= {"text", "prompt", "completion"}


def _chatml(turns: Iterable[Turn]) -> Iterable[Span]:
    for i, (role, text, learn) in enumerate(turns):
        yield Span(("\n" if i else "") + f"{IM_START}{role}\n", False)
        yield Span(text + IM_END, learn and role == "assistant")


def _plain_turns(turns: Iterable[Turn], eos: int | None) -> Iterable[Span]:
    for i, (role, text, learn) in enumerate(turns):
        yield Span(("\n\n" if i else "") + f"{role.capitalize()}:", False)
        yield Span(f" {text.strip()}", learn and role == "assistant")
        if role == "assistant" and eos is not None:
            yield Span(eos, learn)


def merged(spans: Iterable[Span]) -> list[Span]:
    """``spans`` with neighbouring texts of the same kind joined: fewer and more natural texts to tokenize."""
    out: list[Span] = []
    for span in spans:
        last = out[-1] if out else Span(0, False)
        if isinstance(span.piece, str) and isinstance(last.piece, str) and span.learn == last.learn:
            out[-1] = Span(last.piece + span.piece, span.learn)
        else:
            out.append(span)
    return out


def pieces(text: str) -> Iterable[str]:
    """``text`` in pieces of at most PIECE characters, cut before a space between two words where there is one.

    That is where byte-level tokenizers cut by themselves, so the tokens are those of the whole text.
    """
    start = 0
    while len(text) - start > PIECE:
        gaps = [m.start() for m in _GAP.finditer(text, start + PIECE // 2, start + PIECE)]
        end = gaps[-1] if gaps else start + PIECE
        yield text[start:end]
        start = end
    yield text[start:]


def groups(texts: list[str]) -> Iterable[list[str]]:
    """``texts`` in lists of about GROUP characters: what the library holds of a text is 50 times its size."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


def read_small(file: Path) -> bytes:
    """The bytes of a tokenizer's or configuration's file. Raises BadJob if it cannot be read or is absurdly large."""
    with open_regular(str(file), what="the file") as f:
        data = f.read(_FILE_LIMIT + 1)
    if len(data) > _FILE_LIMIT:
        raise BadJob(f"larger than {_FILE_LIMIT >> 20} MiB", file=str(file))
    return data


def _settings(directory: Path) -> dict[str, dict[str, Any]]:
    """The JSON files beside a tokenizer that may name its end and start tokens, those that are there."""
    names = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json")
    return {n: _object(directory / n) for n in names if (directory / n).is_file()}


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small(file))
    except (ValueError, RecursionError) as e:
        raise BadJob(f"not JSON: {one_line(str(e), 100)}", file=str(file)) from e
    if not isinstance(found, dict):
        raise BadJob("not a JSON object", file=str(file))
    return found


_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def _chat_template(directory: Path, settings: dict[str, dict[str, Any]], special: set[str]
                   ) -> tuple[ChatTemplate | None, str]:
    """The template that is beside a tokenizer, and its text: a file of its own goes before one in the settings."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        found: object = read_small(file).decode("utf-8", "replace")
    else:
        file = directory / "tokenizer_config.json"
        found = settings.get(file.name, {}).get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
    if not isinstance(found, str) or not found.strip():
        return None, ""
    names = {n: text for n in _TOKEN_NAMES for s in settings.values() if (text := _text(s.get(n)))}
    return ChatTemplate(found, names, special | set(names.values()), file=str(file)), found


def _text(token: object) -> str:
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _end_token(settings: dict[str, dict[str, Any]], rust: tokenizers.Tokenizer) -> int | None:
    return _special("eos_token", settings, rust)


def _start_token(settings: dict[str, dict[str, Any]], rust: tokenizers.Tokenizer) -> int | None:
    """The token every text starts with, if the tokenizer adds one: as its settings say, else as it does by itself."""
    says = settings.get("tokenizer_config.json", {}).get("add_bos_token")
    bos = _special("bos_token", settings, rust)
    does = rust.encode("", add_special_tokens=True).ids[:1] == [bos]
    return bos if (says if isinstance(says, bool) else does) else None


def _special(key: str, settings: dict[str, dict[str, Any]], rust: tokenizers.Tokenizer) -> int | None:
    """The id of ``eos_token`` or ``bos_token``: by its text in the tokenizer's settings, or ``*_id`` in the model's."""
    for found in settings.values():
        text, number = _text(found.get(key)), found.get(key + "_id")
        number = number[0] if isinstance(number, list) and number else number
        token = rust.token_to_id(text) if text else number
        if isinstance(token, int) and not isinstance(token, bool) and rust.id_to_token(token) is not None:
            return token
    return None


def _world(file: Path) -> TokenizerLike:
    from rrd.train.world import World

    return World(file)


KINDS: dict[str, Callable[[Path], TokenizerLike]] = dict(zip(TOKENIZERS, (HuggingFace, _world), strict=True))
"""How a tokenizer file's name ends, and what reads it. Further families register here."""
