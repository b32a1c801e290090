"""TOML in and out."""

from __future__ import annotations

import tomli
from hypothesis import given
from hypothesis import strategies as st

from rrd import toml
from rrd.toml import Fault

scalars = (st.text(st.characters(exclude_categories=["Cs"])) | st.booleans() | st.integers(-(2**63), 2**63 - 1)
           | st.floats(allow_nan=False, allow_infinity=False))
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text("ab\"= \n", max_size=5), v,
                                                                                    max_size=3), max_leaves=6)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), values, max_size=5))
def test_what_is_dumped_reads_back(table: dict[str, object]) -> None:
    assert tomli.loads(toml.dump(table)) == table


def test_none_is_left_out() -> None:
    assert toml.dump({"a": None, "b": 1}) == "b = 1\n"


@given(st.binary(max_size=300) | st.text("abc=[]{}\"'\n.#0123456789eE+-_T:,", max_size=300).map(str.encode))
def test_reading_raises_only_faults(data: bytes) -> None:
    try:
        toml.read(data)
    except Fault as e:
        line, message = e.line, e.message
    else:
        line, message = 0, "none"
    assert message
    assert line <= data.count(b"\n") + 1


TEXT = '''# comment
lr = 1
note = """
model = "inside a string"
"""
"model" = 2
[[lane]]
dies = []
[lane.gate]
[[lane]]
dies = [1]
gate.kind = "x"
'''


def test_line_of_finds_keys_in_tables() -> None:
    assert toml.line_of(TEXT, ("lr",)) == 2
    assert toml.line_of(TEXT, ("model",)) == 6
    assert toml.line_of(TEXT, ("lane", 0, "dies")) == 8
    assert toml.line_of(TEXT, ("lane", 1, "dies", 0)) == 11
    assert toml.line_of(TEXT, ("lane", 1, "gate")) == 12
    assert toml.line_of(TEXT, ("lane", 1, "nothing")) == 10
    assert toml.line_of(TEXT, ("nothing",)) == 0


def test_show_never_fails_and_is_short_and_safe() -> None:
    for value in (10**5000, -(10**5000), "x" * 9999, "\x1b[31m\u202e", [1] * 999, {"a": 1}, None, float("nan"),
                  object()):
        assert len(toml.show(value)) <= 90
    assert "\x1b" not in toml.show("\x1b[31m")
    assert toml.show(True) == "true"
