"""What the rows of data look like, and the turns they become: the shapes that circulate, and no guesses beyond them.

======================================  ==================================================================
keys of a row                           what becomes of it
======================================  ==================================================================
``messages`` or ``conversations``       a dialogue: ``role`` and ``content``, or ShareGPT's ``from`` and ``value``
``prompt`` and ``completion``           text continued as it stands; or, where both are lists of messages, a dialogue
``instruction`` and ``output``          a question and its answer (Alpaca), with ``input`` below the question
``question`` and ``answer``, and the    a question and its answer
like: see ``_PAIRS``
``text``                                plain text
======================================  ==================================================================

A ``system`` beside a question or ``conversations`` goes first. Losses are taken on plain text, completions and answers;
not on an answer whose message says ``"weight": 0`` (as OpenAI's files do) or that stands in a ``prompt``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from rrd.text import one_line

_SPEAKERS = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "tool": "tool", "function": "tool",
    "observation": "tool", "assistant": "assistant", "gpt": "assistant", "model": "assistant", "bot": "assistant",
    "chatgpt": "assistant",
}
_PAIRS = (("question", "answer"), ("question", "response"), ("prompt", "response"), ("query", "response"),
          ("instruction", "response"), ("input", "output"))
"""Names that a question and its answer go by, besides Alpaca's."""

Row = Mapping[str, object]


class Turn(NamedTuple):
    """One speaker's words. ``role``: text, prompt, completion, system, user, tool or assistant.

    Losses are taken on text, completion and, where ``learn``, assistant; the others are context.
    """

    role: str
    text: str
    learn: bool = True


class Record(NamedTuple):
    """One training example: where it starts, and its turns. ``continues``: more of the text of the record before."""

    line: int
    turns: tuple[Turn, ...]
    continues: bool = False


class BadLine(Exception):
    """Why one line cannot be used."""


def turns_of(row: Row) -> tuple[Turn, ...]:
    """The turns of one row. Raises BadLine with the reason."""
    for keys, shape in _SHAPES:
        if keys <= row.keys():
            return shape(row)
    found = ", ".join(sorted(row)[:8]) or "none"
    raise BadLine(f"no keys that make an example (text; prompt and completion; instruction and output; question and "
                  f"answer; messages; conversations): found {one_line(found, 120)}")


def _words(row: Row, key: str, *, may_be_empty: bool = False) -> str:
    """The words under ``key``: a string, or a list of parts of type text; there, and such that UTF-8 can hold them."""
    text = row.get(key)
    if isinstance(text, list) and text:
        text = "".join(_part(part, key) for part in text)
    if not isinstance(text, str):
        raise BadLine(f"{key} is {'missing' if text is None else 'not a string'}")
    if not may_be_empty and not text.strip():
        raise BadLine(f"{key} is empty")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise BadLine(f"{key} holds half a character (a lone surrogate)") from e
    return text


def _part(part: object, key: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else part
    raise BadLine(f"{key} has a part that is no text: {one_line(str(kind), 30)!r}")


def _plain(row: Row) -> tuple[Turn, ...]:
    return (Turn("text", _words(row, "text")),)


def _continued(row: Row) -> tuple[Turn, ...]:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        asked = [_turn(t, f"prompt[{i}]") for i, t in enumerate(row["prompt"])]
        answers = [_turn(t, f"completion[{i}]") for i, t in enumerate(row["completion"])]
        return _dialogue([*(t._replace(learn=False) for t in asked), *answers], "completion")
    return Turn("prompt", _words(row, "prompt", may_be_empty=True)), Turn("completion", _words(row, "completion"))


def _pair(question: str, answer: str) -> Callable[[Row], tuple[Turn, ...]]:
    def shape(row: Row) -> tuple[Turn, ...]:
        return (*_system(row), Turn("user", _words(row, question)), Turn("assistant", _words(row, answer)))

    return shape


def _alpaca(row: Row) -> tuple[Turn, ...]:
    asked = _words(row, "instruction")
    extra = _words(row, "input", may_be_empty=True) if row.get("input") is not None else ""
    asked += "\n\n" + extra if extra.strip() else ""
    return (*_system(row), Turn("user", asked), Turn("assistant", _words(row, "output")))


def _system(row: Row) -> tuple[Turn, ...]:
    said = row.get("system")
    return (Turn("system", _words(row, "system")),) if isinstance(said, str) and said.strip() else ()


def _messages(row: Row) -> tuple[Turn, ...]:
    return _listed(row, "messages")


def _conversations(row: Row) -> tuple[Turn, ...]:
    return _listed(row, "conversations")


def _listed(row: Row, key: str) -> tuple[Turn, ...]:
    said = row[key]
    if not isinstance(said, list) or not said:
        raise BadLine(f"{key} is {'empty' if said == [] else 'not a list'}")
    turns = [_turn(t, f"{key}[{i}]") for i, t in enumerate(said)]
    return _dialogue([*(_system(row) if turns[0].role != "system" else ()), *turns], key)


def _dialogue(turns: list[Turn], key: str) -> tuple[Turn, ...]:
    while turns and not (turns[-1].role == "assistant" and turns[-1].learn):  # what comes after the last answer teaches
        turns.pop()                                                           # nothing
    if not turns:
        raise BadLine(f"{key} has no turn of the assistant to learn from")
    return tuple(turns)


def _turn(said: object, where: str) -> Turn:
    if not isinstance(said, dict):
        raise BadLine(f"{where} is not an object")
    sharegpt = said.get("from") is not None or said.get("value") is not None
    who, what = ("from", "value") if sharegpt else ("role", "content")
    try:
        role, text = _words(said, who), _words(said, what)
    except BadLine as e:
        raise BadLine(f"{where}: {e}") from e
    if role not in _SPEAKERS:
        raise BadLine(f"{where}: {who} is {one_line(role, 30)!r}, not system, user, assistant or tool")
    weight = said.get("weight", 1)
    if weight not in (None, 0, 1):
        raise BadLine(f"{where}: weight is {one_line(str(weight), 30)}, not 0 or 1")
    return Turn(_SPEAKERS[role], text, weight != 0)


_SHAPES: tuple[tuple[set[str], Callable[[Row], tuple[Turn, ...]]], ...] = (
    ({"messages"}, _messages),
    ({"conversations"}, _conversations),
    ({"prompt", "completion"}, _continued),
    ({"instruction", "output"}, _alpaca),  # before text: the alpaca files carry both
    *(({asked, answer}, _pair(asked, answer)) for asked, answer in _PAIRS),
    ({"text"}, _plain),
)
