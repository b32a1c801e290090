"""The helper's own configuration, ``/etc/rrd/gate.toml``: checked by hand, since a root process should need nobody."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rrd.helper.base import BadSetup
from rrd.helper.space import is_address

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same code, from before the standard library had it
    import tomli as tomllib

PATH = "/etc/rrd/gate.toml"
BACKENDS = ("pci", "command")


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Dies of which one is open at a time."""

    name: str
    """For sentences."""
    backend: str
    """"pci": swap BARs; "command": run programs."""
    dies: Mapping[str, str]
    """PCI address by the die's name, which is its number in rrd; empty addresses for "command"."""
    window: Mapping[int, int]
    """For "pci": the address that the open die's BAR gets, by the BAR's number."""
    switch_bridges: bool
    """For "pci": turn off the bridges that only closed dies are behind."""
    acquire: tuple[str, ...]
    """For "command": the program that opens `{die}`."""
    release: tuple[str, ...]
    """For "command": the program that closes it."""
    timeout: float
    """Seconds that an acquire may take, for "command" each program. An answer comes within 4 times that and a second,
    which should be less than `gate.timeout` of rrd.toml. Left out: 1 for "pci", 2 for "command"."""


@dataclass(frozen=True, kw_only=True)
class HelperConfig:
    """What /etc/rrd/gate.toml says."""

    allow_users: tuple[str, ...] = ("rrd",)
    """Users that may ask, besides root."""
    allow_groups: tuple[str, ...] = ("rrd",)
    """Groups that may ask: processes that run as one of them, not all that its members run."""
    grace: float = 20.0
    """Seconds that a stop waits for the open die to come back before it is taken."""
    groups: tuple[GroupConfig, ...] = ()
    """The tables `[[group]]`."""

    @property
    def uids(self) -> set[int]:
        """Of the users, as far as there are such users."""
        return {uid for name in self.allow_users if (uid := _id(lambda n: pwd.getpwnam(n).pw_uid, name)) is not None}

    @property
    def gids(self) -> set[int]:
        """Of the groups, as far as there are such groups."""
        return {gid for name in self.allow_groups if (gid := _id(lambda n: grp.getgrnam(n).gr_gid, name)) is not None}


def _id(find: Callable[[str], int], name: str) -> int | None:
    try:
        return find(name)
    except KeyError:
        return None


def load(path: str) -> HelperConfig:
    """The configuration at ``path``. Raises BadSetup: one sentence, with the key."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise BadSetup("not a file")
            values = tomllib.load(file)
        return _config(values)
    except FileNotFoundError:
        raise BadSetup(f"there is no {path}", hint="it names the dies and their window: docs/gate.md") from None
    except OSError as e:
        raise BadSetup(f"{path} cannot be read: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadSetup(f"{path}: not TOML: {e}") from None
    except BadSetup as e:
        raise BadSetup(f"{path}: {e}") from None


def _config(values: dict[str, Any]) -> HelperConfig:
    table = _Table(values, "")
    config = HelperConfig(
        allow_users=table.words("allow_users", ("rrd",)), allow_groups=table.words("allow_groups", ("rrd",)),
        grace=table.seconds("grace", 20.0, least=0.0), groups=tuple(map(_group, table.tables("group"))))
    table.done()
    if not config.groups:
        raise BadSetup("`group` is missing", hint="a table [[group]] names the dies that share a window")
    for what, found in (("die", [d for g in config.groups for d in g.dies]),
                        ("PCI address", [a for g in config.groups for a in g.dies.values() if a]),
                        ("window address", [f"0x{a:x}" for g in config.groups for a in g.window.values()])):
        if twice := [f for n, f in enumerate(found) if f in found[:n]]:
            raise BadSetup(f"{what} {twice[0]} stands twice")
    return config


def _group(table: _Table) -> GroupConfig:
    backend = table.text("backend", "pci")
    if backend not in BACKENDS:
        raise table.fault("backend", 'must be "pci" or "command"')
    pci = backend == "pci"
    group = GroupConfig(
        name=table.text("name", table.where), backend=backend,
        dies=_addresses(table) if pci else dict.fromkeys(table.words("dies"), ""),
        window=_window(table) if pci else {}, switch_bridges=table.flag("switch_bridges", False) if pci else False,
        acquire=() if pci else _program(table, "acquire"), release=() if pci else _program(table, "release"),
        timeout=table.seconds("timeout", 1.0 if pci else 2.0))
    table.done()
    if bad := [d for d in group.dies if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_:.-]{0,63}", d)]:
        raise table.fault("dies", f"has a die {bad[0][:40]!r}, which is no name: rrd's dies are numbers from 0")
    return group


def _addresses(table: _Table) -> dict[str, str]:
    dies: dict[str, str] = table.take("dies", dict, "a table of PCI addresses by die")
    for die, address in dies.items():
        full = f"0000:{address}" if isinstance(address, str) and address.count(":") == 1 else address
        dies[die] = full.lower() if isinstance(full, str) else full
        if not isinstance(full, str) or not is_address(dies[die]):
            raise table.fault(f"dies.{die}", f'must be a PCI address such as "0000:05:00.0", not {address!r}')
    if not dies:
        raise table.fault("dies", "names no die")
    return dies


def _window(table: _Table) -> dict[int, int]:
    window = table.take("window", dict, "a table of addresses by BAR")
    for key, address in window.items():
        if not re.fullmatch(r"bar[0-5]", key):
            raise table.fault(f"window.{key}", "is no BAR: they are bar0 to bar5")
        if type(address) is not int or not 0 < address < 1 << 63:
            raise table.fault(f"window.{key}", f"must be an address such as 0xf0000000, no quotes, not {address!r}")
    return {int(key[3]): address for key, address in window.items()}


def _program(table: _Table, key: str) -> tuple[str, ...]:
    argv = table.words(key)
    if not argv or not argv[0].startswith("/"):
        raise table.fault(key, "must begin with the full path of a program")
    return argv


class _Table:
    """A table whose keys are taken one by one; what is left over is a mistake."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self._left, self.where = dict(values), where
        self._known: list[str] = []

    def take(self, key: str, kind: type, what: str, default: Any = None) -> Any:
        """The value of ``key``, which must be of ``kind``: ``what``, in words."""
        self._known.append(key)
        value = self._left.pop(key, default)
        if value is None:
            raise self.fault(key, f"is missing: {what}")
        if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
            raise self.fault(key, f"must be {what}")
        return value

    def text(self, key: str, default: str) -> str:
        return str(self.take(key, str, "text in quotes", default))

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.take(key, bool, "true or false", default))

    def seconds(self, key: str, default: float, *, least: float = 0.001) -> float:
        value = self.take(key, object, "a number of seconds", default)
        if type(value) not in (int, float) or not least <= value <= 600:
            raise self.fault(key, f"must be a number of seconds from {least:g} to 600")
        return float(value)

    def words(self, key: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        what = "a list of texts in quotes"
        value = self.take(key, list, what, None if default is None else list(default))
        if not all(isinstance(word, str) and "\0" not in word for word in value):
            raise self.fault(key, f"must be {what}")
        return tuple(value)

    def tables(self, key: str) -> list[_Table]:
        """An array of tables, ``[[key]]``; none at all is an empty one."""
        what = f"written as [[{key}]]"
        value = self.take(key, list, what, [])
        if not all(isinstance(table, dict) for table in value):
            raise self.fault(key, f"must be {what}")
        return [_Table(table, f"{key}[{n}]") for n, table in enumerate(value)]

    def done(self) -> None:
        """Raises BadSetup for a key that nobody took."""
        for key in self._left:
            import difflib

            near = difflib.get_close_matches(key, self._known, n=1)
            raise self.fault(key, "is no key of this table", f"did you mean `{near[0]}`?" if near else "")

    def fault(self, key: str, must: str, hint: str = "") -> BadSetup:
        return BadSetup(f"`{self.where}{'.' if self.where else ''}{key}` {must}", hint=hint)
