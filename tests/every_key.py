"""Whether an example file shows every key of a model, with its default."""

from __future__ import annotations

import re

from pydantic import BaseModel

from rrd import toml


def assert_every_key_is_shown(text: str, model: type[BaseModel], *, tables: frozenset[str] = frozenset()) -> None:
    """Each key of ``model`` but ``tables`` stands on a line of its own as ``key = …`` or ``#key = …``, below one line
    of comment; a commented value is the default where there is one that can be written down."""
    lines = text.split("\n")
    for key, field in model.model_fields.items():
        if key in tables:
            continue
        found = [(i, m) for i, line in enumerate(lines) if (m := re.fullmatch(rf"(#?){key} = (.+)", line))]
        assert len(found) == 1, key
        at, match = found[0]
        assert re.match(r"# \S", lines[at - 1]), f"{key} has no comment"
        shown = toml.read(f"{key} = {match[2]}".encode())[key]
        if match[1] and field.default not in (None, "", ()) and not field.is_required():
            default = toml.read(toml.dump({key: field.default}).encode())[key] if isinstance(
                field.default, (str, int, float, tuple, dict)) else str(field.default)
            assert shown == default, key
