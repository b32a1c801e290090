"""TOML in and out: bytes into checked models, every fault as one sentence with its line.

tomli's surprises are met here once, for job files and for ``rrd.toml``: a byte order mark, bytes that are not UTF-8,
deep nesting, numbers of thousands of digits.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import tomli
from pydantic import BaseModel, ValidationError

from rrd.text import one_line

M = TypeVar("M", bound=BaseModel)


class Fault(ValueError):
    """What is wrong with a file, before it is known which file. Validators raise it with message and hint only."""

    def __init__(self, message: str, *, hint: str = "", key: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.message, self.hint, self.key, self.line = message, hint, key, line


# ---- reading ----------------------------------------------------------------------------------------------------


def read(data: bytes) -> dict[str, Any]:
    """The values in ``data``. Raises only ``Fault``, whatever the bytes are."""
    text = decode(data)
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as e:
        raise _syntax(text, str(e)) from None
    except RecursionError:
        raise Fault("values are nested too deeply", hint="the file should be flat: `key = value` lines") from None
    except ValueError:  # an integer of more digits than Python converts
        digits = re.search(r"\d[\d_]{999,}", text)
        line = text.count("\n", 0, digits.start()) + 1 if digits else 0
        raise Fault("a number has thousands of digits", hint="no key takes such a number", line=line) from None


def decode(data: bytes) -> str:
    """``data`` as text. Raises ``Fault`` for what is no UTF-8, is UTF-16, or starts with a byte order mark."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise Fault("the file is UTF-16", hint="save it as UTF-8", line=1)
    if data.startswith(b"\xef\xbb\xbf"):
        hint = "save it as UTF-8 without BOM; `sed -i '1s/^\\xEF\\xBB\\xBF//' FILE` removes it"
        raise Fault("the file starts with a byte order mark, which TOML does not allow", hint=hint, line=1)
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise Fault(f"byte 0x{data[e.start]:02x} is not UTF-8", hint="save the file as UTF-8", line=line) from None


def _syntax(text: str, said: str) -> Fault:
    """tomli's message, with the line taken out of it and a hint where we know better."""
    where = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)$", said)
    line = int(where[1]) if where and where[1] else text.count("\n") + (not text.endswith("\n"))
    message = said[: where.start()] if where else said
    shown = (text.split("\n")[line - 1 : line] or [""])[0]
    if message == "Cannot overwrite a value":
        key = _KEY.match(shown) or _TABLE.match(shown)
        what = f"`{one_line(key[key.lastindex or 0].strip(), 100)}`" if key else "a key"
        return Fault(f"{what} stands twice", hint="keep one of the two", line=line)
    return Fault(one_line(f"not TOML: {message[:1].lower()}{message[1:]}", 200), hint=_syntax_hint(shown), line=line)


def _syntax_hint(line: str) -> str:
    value = line.partition("=")[2].strip()
    if re.match(r"\s*[A-Za-z0-9_-]+\s*:", line):
        return "TOML writes `key = value`, with an equals sign"
    if value in {"True", "False", "None", "null", "yes", "no", "on", "off"}:
        return "TOML writes `true` or `false`; a key without a value is left out"
    if re.match(r"[A-Za-z/~.]", value) and value not in {"true", "false", "inf", "nan"}:
        return "text needs quotes"
    return ""


# ---- checking ---------------------------------------------------------------------------------------------------


def check(model: type[M], values: Mapping[str, Any], text: str = "") -> M:
    """``values`` as a ``model``. Raises the ``Fault`` that stands first in ``text``, missing keys last."""
    try:
        return model.model_validate(dict(values))
    except ValidationError as e:
        lines = _lines(text)
        found = [(error["type"] == "missing", _line(lines, _place(error)) or math.inf, error)
                 for error in e.errors(include_url=False)]
        # a key is often missing because it was misspelt: that is the better sentence
        _, line, first = min(found, key=lambda f: f[:2])
        raise _fault(model, first, 0 if line == math.inf else int(line)) from None
    except RecursionError:
        raise Fault("values are nested too deeply", hint="the file should be flat: `key = value` lines") from None


def _own(error: Any) -> Fault | None:
    """What one of our own checks said."""
    raised = error.get("ctx", {}).get("error")
    return raised if isinstance(raised, Fault) else None


def _place(error: Any) -> tuple[str | int, ...]:
    loc: tuple[str | int, ...] = error["loc"]
    own = _own(error)
    return (*loc, own.key) if own and own.key else loc


def _fault(model: type[BaseModel], error: Any, line: int) -> Fault:
    kind, given, ctx, own, loc = error["type"], error.get("input"), error.get("ctx", {}), _own(error), _place(error)
    key = dotted(loc)
    named = f"`{one_line(key, 100)}`"
    if kind == "missing":
        message, hint = f"{named} is missing", f"add a line `{loc[-1]} = …`: {summary(model, loc)}"
    elif kind == "extra_forbidden":
        message, hint = f"unknown key {named}", _key_meant(model, loc, given)
    elif own:
        message, hint = f"{named} {own.message}" if key else own.message, own.hint
    else:
        message, hint = f"{named} {_must(kind, ctx)}, not {show(given)}", _quotes_hint(kind, given, ctx)
    return Fault(message, hint=hint, key=key, line=line)


def _must(kind: str, ctx: Mapping[str, Any]) -> str:
    """What pydantic's error of this kind asks for, in plain words."""
    bounds = {"greater_than_equal": "at least", "greater_than": "greater than", "less_than_equal": "at most",
              "less_than": "less than"}
    if kind in bounds:
        bound = ctx[("ge", "gt", "le", "lt")[list(bounds).index(kind)]]
        return f"must be {bounds[kind]} {bound:,}" if isinstance(bound, int) else f"must be {bounds[kind]} {bound:g}"
    if kind == "literal_error":
        return f"must be {str(ctx['expected']).replace(chr(39), chr(34))}"
    types = {"int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
             "finite_number": "a finite number", "bool_type": "true or false", "string_type": "text in quotes",
             "dict_type": "a table", "model_type": "a table", "list_type": "a list", "tuple_type": "a list",
             "string_pattern_mismatch": "a name of letters, digits, - and _", "too_short": "a list that is not empty",
             "too_long": "a shorter list", "string_too_short": "text that is not empty",
             "string_too_long": "shorter text"}
    return f"must be {types[kind]}" if kind in types else f"is not right ({kind})"


def _quotes_hint(kind: str, given: object, ctx: Mapping[str, Any]) -> str:
    if kind == "literal_error" and isinstance(given, str):
        return did_you_mean(given, re.findall(r"'([^']*)'", str(ctx["expected"])))
    if isinstance(given, str) and kind in {"int_type", "float_type", "bool_type"}:
        return "write it without quotes"
    return "write it in quotes" if kind == "string_type" else ""


def _key_meant(model: type[BaseModel], loc: tuple[str | int, ...], given: object) -> str:
    """What the unknown key at ``loc`` may be: what its table's ``ALIASES`` say, else a known one that looks like it.

    For a table: keys that begin with its name.
    """
    at, word = _model_at(model, loc[:-1]), str(loc[-1])
    flat = [key for key in keys_at(model, loc[:-1]) if key.startswith(f"{word}_")]
    if isinstance(given, Mapping) and flat:
        return f"it is no table: write `{flat[0]} = …` and so on, above all tables"
    alias = getattr(at, "ALIASES", {}).get(word.lower().replace("-", "_"))
    return f"did you mean `{alias}`?" if alias else did_you_mean(word, keys_at(model, loc[:-1]))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``did you mean `lora_rank`?``, or nothing when no known word is near."""
    words = sorted(known)
    folded = word.lower().replace("-", "_")
    near = difflib.get_close_matches(folded[:64], words, n=1, cutoff=0.6)
    return f"did you mean `{near[0]}`?" if near else ""


def keys_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """The keys that the table at ``loc`` of ``model`` may have."""
    at = _model_at(model, loc)
    return list(at.model_fields) if at else []


def summary(model: type[BaseModel], loc: tuple[str | int, ...]) -> str:
    """The first line of the description of the key at ``loc``."""
    at = _model_at(model, loc[:-1])
    field = at.model_fields.get(str(loc[-1])) if at else None
    return (field.description or "").split("\n")[0].rstrip(".") if field else ""


def _model_at(model: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    at: type[BaseModel] | None = model
    for part in loc:
        if at is None or isinstance(part, int):
            continue
        field = at.model_fields.get(part)
        at = _model_in(field.annotation) if field else None
    return at


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(a) for a in getattr(annotation, "__args__", ()))
    return next((m for m in found if m), None)


def dotted(loc: Iterable[str | int]) -> str:
    """``("lane", 0, "gate")`` as ``lane[0].gate``."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in loc).lstrip(".")


def show(value: object) -> str:
    """``value`` as it might stand in the file: short, safe, and never failing."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**24:
        return "a number of more than 24 digits"
    if isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, str):
        return one_line(json.dumps(value[:80], ensure_ascii=False), 80)
    kinds = {dict: "a table", list: "a list", tuple: "a list", type(None): "nothing"}
    return kinds.get(type(value), "a date or time" if hasattr(value, "isoformat") else f"a {type(value).__name__}")


_TABLE = re.compile(r"\s*(\[\[?)([^\[\]]+)\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"""\s*((?:"[^"\\]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"\\]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")


def line_of(text: str, loc: tuple[str | int, ...]) -> int:
    """The line on which the key at ``loc`` is set, or that of the nearest table around it; 0 if it is not found.

    Good enough for messages: keys inside inline tables get the line of the table, multi-line strings are skipped.
    """
    return _line(_lines(text), loc)


def _line(lines: Mapping[tuple[str | int, ...], int], loc: tuple[str | int, ...]) -> int:
    found = (lines.get(loc[:n]) for n in range(len(loc), 0, -1))
    return next((n for n in found if n), 0)


def _lines(text: str) -> dict[tuple[str | int, ...], int]:
    """The first line of each key and table, by its place."""
    counts: dict[str, int] = {}  # arrays of tables, and the number of their newest
    lines: dict[tuple[str | int, ...], int] = {}
    table: list[str | int] = []
    in_string = False
    for number, line in enumerate(text.split("\n"), 1):
        was_in_string, in_string = in_string, in_string ^ bool((line.count('"""') + line.count("'''")) % 2)
        if was_in_string:
            continue
        place: list[str | int] = []
        if m := _TABLE.match(line):
            name = ".".join(_parts(m[2]))
            if m[1] == "[[":
                counts[name] = counts.get(name, -1) + 1
            table = place = _numbered(_parts(m[2]), counts)
        elif m := _KEY.match(line):
            place = [*table, *_parts(m[1])]
        for n in range(len(place), 0, -1):
            lines.setdefault(tuple(place[:n]), number)
    return lines


def _parts(dotted_key: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted_key.split(".")][:32]


def _numbered(parts: list[str], counts: Mapping[str, int]) -> list[str | int]:
    """The place that a table's header names: its parts, with the number of the newest table after each array."""
    place: list[str | int] = []
    for n, part in enumerate(parts, 1):
        place.append(part)
        if (count := counts.get(".".join(parts[:n]))) is not None:
            place.append(count)
    return place


# ---- writing ----------------------------------------------------------------------------------------------------


def dump(values: Mapping[str, object]) -> str:
    """``values`` as ``key = value`` lines; None is left out, a mapping becomes an inline table."""
    return "".join(f"{_key(k)} = {_value(v)}\n" for k, v in values.items() if v is not None)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _text(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        assert math.isfinite(value), value
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + "}"
    assert isinstance(value, (list, tuple)), value
    return "[" + ", ".join(_value(v) for v in value) + "]"


def _text(text: str) -> str:
    """A basic string. JSON's escapes are a subset of TOML's but for DEL, which TOML wants escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
