from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from rrd.durable import DISK, Bytes, Disk
from rrd.errors import BadJob, DiskTrouble
from rrd.train.publish import Publication


def publish(out: Path, text: str, name: str = "a.txt", disk: Disk = DISK) -> list[str]:
    with Publication(out, disk=disk) as new:
        new.add(name, [text.encode()])
        new.link("link", name)
        return new.publish({"n": 1})


def test_only_what_is_ours_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, "one", "merged/old.txt")
    for left in (".trash-out-0badcafe", ".tmp-out-0badcafe", ".tmp-out2-0badcafe"):
        (tmp_path / left).mkdir()
    assert publish(out, "two") == []
    assert sorted(p.name for p in out.iterdir()) == ["MANIFEST.json", "a.txt", "link"]
    assert (out / "link").read_text() == "two"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp-out2-0badcafe", "out"], "another output's is left alone"


@pytest.mark.parametrize("what", ["directory", "file", "older tool", "forged"])
def test_what_is_not_ours_is_refused(tmp_path: Path, what: str) -> None:
    out = tmp_path / "out"
    if what == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / ("adapter.safetensors" if what == "older tool" else "notes.txt")).write_text("mine")
        if what == "forged":
            (out / "MANIFEST.json").write_text('{"kind": "theirs"}')
    with pytest.raises(BadJob, match=r"rrd did not write|no directory") as e:
        publish(out, "one")
    assert "another output" in e.value.hint
    assert "mine" in (out if what == "file" else next(p for p in out.iterdir() if p.suffix != ".json")).read_text()


def test_an_empty_directory_and_a_link_to_one_are_fine(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    publish(tmp_path / "link", "one")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "a.txt").read_text() == "one"


def test_what_others_put_into_our_directory_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    publish(out, "one")
    (out / "notes.txt").write_text("mine")
    (out / "a.txt").write_text("edited")
    [note] = publish(out, "two")
    [aside] = [p for p in tmp_path.iterdir() if p.name.startswith("out.before-")]
    assert str(aside) in note
    assert (aside / "notes.txt").read_text() == "mine"
    assert publish(out, "three") == []


class Failing(Disk):
    """A disk whose n-th change of the filesystem fails: it was full."""

    def __init__(self, n: int) -> None:
        self.left = n

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(errno.ENOSPC, "full")

    def write(self, fd: int, data: Bytes) -> int:
        self._count()
        return super().write(fd, data)

    def fsync(self, fd: int) -> None:
        self._count()
        super().fsync(fd)

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)


def test_a_failure_anywhere_leaves_the_old_output_or_the_new_one(tmp_path: Path) -> None:
    out, failures = tmp_path / "deep" / "out", 0
    publish(out, "one")
    while True:
        disk = Failing(failures + 1)
        try:
            publish(out, "two", disk=disk)
        except DiskTrouble as e:
            assert "the disk is full" in e.message  # noqa: PT017 (which of them fail is not known beforehand)
            failures += 1
        if disk.left > 0:
            break
        found = [p for p in out.parent.iterdir() if (p / "a.txt").exists()]
        assert (out / "a.txt").exists() or len(found) == 1, "between two renames it lies in the trash, whole"
        publish(out, "one")
        assert (out / "a.txt").read_text() == "one"
        assert [p.name for p in out.parent.iterdir()] == ["out"]
    assert failures >= 6
    assert (out / "a.txt").read_text() == "two"


def test_what_a_unit_makes_read_only_is_said_with_the_drop_in_to_write(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    read_only = os.statvfs_result((*real[:8], real.f_flag | os.ST_RDONLY, real.f_namemax))
    monkeypatch.setattr(os, "statvfs", lambda path: read_only)
    with pytest.raises(BadJob, match=f"{tmp_path} is read-only to this service") as refused:
        Publication(tmp_path / "below" / "out")
    assert f"[Service] and ReadWritePaths={tmp_path};" in refused.value.hint
