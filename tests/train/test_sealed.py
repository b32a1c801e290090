from __future__ import annotations

from pathlib import Path

import pytest

from rrd.durable import NewDirectory
from rrd.errors import Damaged
from rrd.train.sealed import MANIFEST, Sealing, read_seal, verify


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    with NewDirectory(tmp_path, "x") as new:
        seal = Sealing(new)
        seal.add("a.bin", [b"one", b"two"])
        seal.add("inner/b.bin", [b"three"])
        seal.link("b", "inner/b.bin")
        seal.close("test 1", {"n": 1})
        return new.commit("x")


def test_it_says_what_it_holds(sealed: Path) -> None:
    seal = read_seal(sealed, "test 1")
    verify(sealed, seal)
    assert (seal.facts, seal.links) == ({"n": 1}, {"b": "inner/b.bin"})
    assert {n: size for n, (size, _) in seal.files.items()} == {"a.bin": 6, "inner/b.bin": 5}
    assert (sealed / "b").read_bytes() == b"three"
    with pytest.raises(Damaged, match="not a test 2"):
        read_seal(sealed, "test 2")


@pytest.mark.parametrize("name", [MANIFEST, "a.bin", "inner/b.bin"])
def test_every_changed_byte_is_found(sealed: Path, name: str) -> None:
    good = (sealed / name).read_bytes()
    harmless = []
    for i in range(len(good)):
        (sealed / name).write_bytes(good[:i] + bytes([good[i] ^ 1]) + good[i + 1 :])
        try:
            verify(sealed, read_seal(sealed, "test 1"))
            harmless.append(good[i : i + 1])
        except Damaged:
            pass
    assert set(harmless) <= ({b" ", b"\n"} if name == MANIFEST else set()), "blanks say nothing"


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"3", b"\0" * 50, b"[" * 100_000])
def test_a_manifest_that_is_none_is_damage(sealed: Path, data: bytes) -> None:
    (sealed / MANIFEST).write_bytes(data)
    with pytest.raises(Damaged):
        read_seal(sealed, "test 1")
