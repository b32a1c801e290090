"""``rrd-gate``: serve, check, or put everything back.

Exit status 0: done. 1: a device would not go back as it was. 2: usage. 78: a configuration that cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import stat
from collections.abc import Sequence

from rrd.helper.base import ERROR, INFO, NOTICE, Backend, BadSetup, say
from rrd.helper.config import PATH, GroupConfig, HelperConfig, load
from rrd.helper.group import Group
from rrd.helper.kept import Kept
from rrd.helper.programs import Programs
from rrd.helper.restore import restore
from rrd.helper.server import Server, Signals, refuse_all
from rrd.helper.space import Bus, Sysfs
from rrd.helper.window import Window

BAD_CONFIG = 78
FIRST_FD = 3


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point."""
    args = _arguments().parse_args(argv)
    os.umask(0o077)
    try:
        if args.restore:
            return 0 if restore(Kept.load(args.state), Sysfs(args.sysfs)) else 1
        if args.check:
            from rrd.helper.check import check

            return check(load(args.config), Sysfs(args.sysfs, writable=False))
        return serve(args)
    except BadSetup as e:
        say(ERROR, f"rrd-gate: {e}")
        return BAD_CONFIG


def _arguments() -> argparse.ArgumentParser:
    run = os.environ.get("RUNTIME_DIRECTORY", "/run/rrd-gate")
    parser = argparse.ArgumentParser(
        prog="rrd-gate", allow_abbrev=False,
        description="Grants the dies of a group one at a time: the privileged helper behind rrd's socket gate. "
                    "Without a flag it serves the socket that systemd hands it.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true",
                      help="show what the configuration means on this machine, and change nothing")
    what.add_argument("--restore", action="store_true", help="put back what a helper that has crashed left behind")
    what.add_argument("--socket", metavar="PATH", help="serve this socket, without systemd")
    parser.add_argument("--config", metavar="FILE", default=PATH, help="default: %(default)s")
    parser.add_argument("--state", metavar="FILE", default=f"{run}/state.json", help="default: %(default)s")
    parser.add_argument("--sysfs", metavar="DIR", default="/sys", help="a tree that looks like /sys, to try things out")
    return parser


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal. Whoever has asked already is told what makes that impossible."""
    if args.socket is not None:
        config = load(args.config)
        with Signals() as signals, _bound(args.socket, config) as listener:
            return _serve(config, args, listener, signals)
    with Signals() as signals, _handed_over() as listener:
        try:
            return _serve(load(args.config), args, listener, signals)
        except BadSetup as e:
            refuse_all(listener, f"rrd-gate cannot start: {e}")
            raise


def _serve(config: HelperConfig, args: argparse.Namespace, listener: socket.socket, signals: Signals) -> int:
    """What a helper before this one left behind is put back first; at the end, everything is."""
    bus, kept = Sysfs(args.sysfs), Kept.load(args.state)
    if kept.devices or kept.undo:
        say(NOTICE, "the helper before this one did not end well: putting back what it left")
        restore(kept, bus)
    closed = True
    try:
        groups = [_group(g, bus, kept) for g in config.groups]
        for group in groups:
            group.start()
        _tell_systemd("READY=1")
        say(INFO, f"ready: {', '.join(f'{g.name} with dies {chr(32).join(g.dies)}' for g in groups)}")
        server = Server(listener, groups, users=config.uids | {os.geteuid()}, gids=config.gids, grace=config.grace)
        closed = server.run(signals)
        _tell_systemd("STOPPING=1")
    finally:
        back = closed and restore(kept, bus)
    return 0 if back else 1


def _group(config: GroupConfig, bus: Bus, kept: Kept) -> Group:
    backend: Backend
    if config.backend == "pci":
        backend = Window(config.dies, config.window, bus, kept, switch_bridges=config.switch_bridges,
                         timeout=config.timeout)
    else:
        backend = Programs(config.name, list(config.dies), config.acquire, config.release, kept, timeout=config.timeout)
    return Group(config.name, backend, patience=2 * config.timeout + 0.5)


def _handed_over() -> socket.socket:
    """The socket that systemd has bound. Raises BadSetup."""
    ours = os.environ.pop("LISTEN_PID", "") == str(os.getpid())
    count = os.environ.pop("LISTEN_FDS", "0")
    if not ours or count != "1":
        raise BadSetup("no socket was handed over", hint="systemctl start rrd-gate.socket; or, by hand: --socket PATH")
    os.set_inheritable(FIRST_FD, False)
    return socket.socket(fileno=FIRST_FD)


def _bound(path: str, config: HelperConfig) -> socket.socket:
    """One of our own at ``path``. Raises BadSetup."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # of a helper before this one
        listener.bind(path)
        os.chmod(path, 0o660)
        if os.geteuid() == 0 and config.gids:
            os.chown(path, 0, min(config.gids))
        listener.listen()
    except OSError as e:
        listener.close()
        raise BadSetup(f"no socket at {path}: {e.strerror or e}") from None
    return listener


def _tell_systemd(state: str) -> None:
    """The notify protocol: one datagram to the socket that the environment names, if it does."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if path:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
            sock.connect("\0" + path[1:] if path.startswith("@") else path)
            sock.send(state.encode())
