"""gate.toml: a sentence for every mistake, before anything is touched."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from rrd.helper.base import ERROR, BadSetup, say
from rrd.helper.check import check
from rrd.helper.config import GroupConfig, HelperConfig, load
from rrd.helper.space import Sysfs

ROOT = Path(__file__).parent.parent.parent
GOOD = """
[[group]]
[group.dies]
0 = "0000:06:00.0"
1 = "07:00.0"
[group.window]
bar0 = 0xf8000000
bar1 = 0x38_0000_0000
"""
PROGRAMS = '[[group]]\nbackend = "command"\ndies = ["2"]\nacquire = ["/bin/true", "{die}"]\nrelease = ["/bin/true"]\n'


def of(tmp_path: Path, text: str) -> HelperConfig:
    (tmp_path / "gate.toml").write_text(text)
    return load(str(tmp_path / "gate.toml"))


def test_a_short_file_is_enough(tmp_path: Path) -> None:
    config = of(tmp_path, GOOD + PROGRAMS)
    pci, programs = config.groups
    assert pci == GroupConfig(
        name="group[0]", backend="pci", dies={"0": "0000:06:00.0", "1": "0000:07:00.0"},
        window={0: 0xF800_0000, 1: 0x38_0000_0000}, switch_bridges=False, acquire=(), release=(), timeout=1.0)
    assert (programs.dies, programs.acquire, programs.timeout) == ({"2": ""}, ("/bin/true", "{die}"), 2.0)
    assert (config.allow_users, config.allow_groups, config.grace) == (("rrd",), ("rrd",), 20.0)


def test_users_and_groups_that_are_not_there_let_nobody_in(tmp_path: Path) -> None:
    config = of(tmp_path, 'allow_users = ["root", "nobody-of-that-name"]\nallow_groups = ["none-such"]\n' + GOOD)
    assert (config.uids, config.gids) == ({0}, set())


@pytest.mark.parametrize(("text", "says"), [
    ("", "`group` is missing (a table [[group]] names the dies"),
    ("group = 3", "`group` must be written as [[group]]"),
    ("x = [", "not TOML: "),
    ("grace = -1\n" + GOOD, "`grace` must be a number of seconds from 0 to 600"),
    ("grace = true\n" + GOOD, "`grace` must be a number of seconds"),
    ("grace = nan\n" + GOOD, "`grace` must be a number of seconds"),
    ("allow_user = []\n" + GOOD, "`allow_user` is no key of this table (did you mean `allow_users`?)"),
    ('allow_users = "rrd"\n' + GOOD, "`allow_users` must be a list of texts in quotes"),
    (GOOD + "bar6 = 1", "`group[0].window.bar6` is no BAR: they are bar0 to bar5"),
    (GOOD + 'bar3 = "0x1000"', "`group[0].window.bar3` must be an address such as 0xf0000000, no quotes, not '0x1000'"),
    (GOOD + "bar3 = 0", "`group[0].window.bar3` must be an address"),
    (GOOD.replace("07:00.0", "7:0"), "`group[0].dies.1` must be a PCI address such as \"0000:05:00.0\", not '7:0'"),
    (GOOD.replace("07:00.0", "06:00.0"), "PCI address 0000:06:00.0 stands twice"),
    (GOOD + GOOD.replace("06:00", "08:00").replace("07:00", "09:00").replace("0 =", "2 =").replace("1 = \"", "3 = \""),
     "window address 0xf8000000 stands twice"),
    (GOOD.replace("07:00.0", "../../../../etc"), "`group[0].dies.1` must be a PCI address"),
    (GOOD.replace('1 = "07', '"../1" = "07'), "`group[0].dies` has a die '../1', which is no name"),
    (GOOD + PROGRAMS.replace('"2"', '"0"'), "die 0 stands twice"),
    (GOOD.replace("[[group]]", '[[group]]\nbackend = "pcie"'), '`group[0].backend` must be "pci" or "command"'),
    ("[[group]]\n", "`group[0].dies` is missing: a table of PCI addresses by die"),
    ("[[group]]\n[group.dies]\n[group.window]\n", "`group[0].dies` names no die"),
    (GOOD.split("[group.window]")[0], "`group[0].window` is missing"),
    (PROGRAMS.replace("/bin/true", "true"), "`group[0].acquire` must begin with the full path of a program"),
    (PROGRAMS + "switch_bridges = true", "`group[0].switch_bridges` is no key of this table"),
    (GOOD.replace("[[group]]", "[[group]]\ntimeout = 0"), "`group[0].timeout` must be a number of seconds"),
    (GOOD.replace("[[group]]", '[[group]]\nswitch_bridges = "yes"'), "`group[0].switch_bridges` must be true or false"),
])
def test_every_mistake_has_its_sentence(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(BadSetup) as caught:
        of(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path}/gate.toml: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadSetup, match="there is no "):
        load(str(tmp_path / "none"))
    with pytest.raises(BadSetup, match="cannot be read: Is a directory"):
        load(str(tmp_path))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(BadSetup, match="not TOML"):
        load(str(tmp_path / "bytes"))


def test_the_example_shows_every_key(tmp_path: Path) -> None:
    text = (ROOT / "etc" / "gate.example.toml").read_text()
    shown = set(re.findall(r"^#?([a-z_]+) = ", text, re.M)) | set(re.findall(r"^\[group\.([a-z]+)\]", text, re.M))
    keys = {f.name for table in (HelperConfig, GroupConfig) for f in dataclasses.fields(table)} - {"groups"}
    assert keys <= shown
    config = of(tmp_path, text)
    assert len(config.groups[0].dies) == 6
    whole = re.sub(r"^#(?=[^ \n])", "", text, flags=re.M).replace('dies = ["0", "1"]', 'dies = ["6"]')
    uncommented = of(tmp_path, whole)
    plain = {f.name: f.default for f in dataclasses.fields(HelperConfig) if f.name != "groups"}
    assert {key: getattr(uncommented, key) for key in plain} == plain
    assert uncommented.groups[0].timeout == config.groups[0].timeout


def test_priorities_are_for_the_journal_alone(monkeypatch: pytest.MonkeyPatch,
                                              capfd: pytest.CaptureFixture[str]) -> None:
    at = os.fstat(2)
    ours, another = f"{at.st_dev}:{at.st_ino}", f"{at.st_dev}:{at.st_ino + 1}"
    for stream, says in (("", "no\n"), (another, "no\n"), (ours, "<3>no\n")):
        monkeypatch.setenv("JOURNAL_STREAM", stream)
        say(ERROR, "no")
        assert capfd.readouterr().err == says


def test_check_names_who_may_ask_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(of(tmp_path, 'allow_users = ["root", "rrd"]\n' + PROGRAMS), Sysfs(str(tmp_path)))
    assert capsys.readouterr().out.splitlines()[0] == "may ask: user root, user rrd, group rrd"
