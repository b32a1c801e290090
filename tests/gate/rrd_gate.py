"""The real rrd-gate as a process, over a tree that looks like /sys or over programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ADDRESSES = {str(n): f"0000:{n + 4:02x}:00.0" for n in range(6)}
WINDOW = {0: 0xF800_0000, 1: 0x38_0000_0000}
"""Of the fake trees: a BAR of 32 bits, one of 64."""

AS_SYSTEMD_DOES = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.set_inheritable(3, True)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS="1")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def fake_sysfs(path: Path, *, boards: bool = False) -> Path:
    """Six dies as plain files, so every bit can be written: the first is at the window, and on. With ``boards``, two
    each are behind a root port and a switch, whose windows hold the shared one."""
    for n, address in ADDRESSES.items():
        device = path / "devices" / "pci0000:00"
        board, side = divmod(int(n), 2)
        for bridge in (f"0000:00:{board + 1:02x}.0", f"0000:a{board}:00.0", f"0000:b{board}:{side:02x}.0") * boards:
            device /= bridge
            if not device.exists():
                _make_bridge(path, device)
        device /= address
        device.mkdir(parents=True)
        regs = bytearray(64)
        regs[0:4] = (0x102D_10DE).to_bytes(4, "little")
        regs[4:6] = (0x0007 if n == "0" else 0x0004).to_bytes(2, "little")
        for at, bar, kind in ((0x10, WINDOW[0], 0x0), (0x14, WINDOW[1], 0xC)):
            value = bar | kind if n == "0" else kind
            regs[at : at + 8] = value.to_bytes(8, "little")
        regs[0x1C] = regs[0x20] = regs[0x24] = 0x1  # in a file every bit can be written: I/O BARs are left alone
        (device / "config").write_bytes(regs)
        (device / "resource").write_text(
            f"{WINDOW[0]:#018x} {WINDOW[0] + 15:#018x} 0x0000000000040200\n"
            f"{WINDOW[1]:#018x} {WINDOW[1] + 15:#018x} 0x000000000014220c\n" + f"{0:#018x} {0:#018x} {0:#018x}\n" * 5)
        _link(path, device)
    return path


def _make_bridge(path: Path, device: Path) -> None:
    device.mkdir(parents=True)
    regs = bytearray(64)
    regs[0:6] = bytes.fromhex("b5104787 0600")
    regs[0x0E] = 0x01
    regs[0x20:0x30] = bytes.fromhex("00f800f8 01000100 38000000 39000000")
    (device / "config").write_bytes(regs)
    (device / "resource").write_text(f"{0:#018x} {0:#018x} {0:#018x}\n" * 17)
    _link(path, device)


def _link(path: Path, device: Path) -> None:
    link = path / "bus" / "pci" / "devices" / device.name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)


def memory_map(sysfs: Path, *stretches: tuple[int, int]) -> None:
    """What the firmware has told of the machine's memory: ``stretches`` of RAM, and one that is none."""
    for n, (first, last, kind) in enumerate([*((*s, "System RAM") for s in stretches), (0, 1 << 40, "Reserved")]):
        entry = sysfs / "firmware/memmap" / str(n)
        entry.mkdir(parents=True)
        for name, text in (("start", f"{first:#x}"), ("end", f"{last:#x}"), ("type", kind)):
            (entry / name).write_text(text + "\n")


def open_dies(sysfs: Path) -> list[str]:
    """The dies whose memory is on."""
    return [n for n, address in ADDRESSES.items()
            if (sysfs / "bus" / "pci" / "devices" / address / "config").read_bytes()[4] & 0x2]


def registers(sysfs: Path) -> list[bytes]:
    return [(sysfs / "bus" / "pci" / "devices" / address / "config").read_bytes() for address in ADDRESSES.values()]


def pci_config() -> str:
    """gate.toml for the fake tree."""
    dies = "".join(f'{n} = "{address}"\n' for n, address in ADDRESSES.items())
    window = "".join(f"bar{n} = {address:#x}\n" for n, address in WINDOW.items())
    return f'allow_users = []\nallow_groups = []\n[[group]]\nname = "k80"\n[group.dies]\n{dies}[group.window]\n{window}'


class RrdGate:
    """``config`` is gate.toml. ``start`` is what systemd does: the socket as file 3, and a notify socket."""

    def __init__(self, path: Path, config: str, *, sysfs: Path | None = None) -> None:
        self.socket = path / "gate.sock"
        self.state = path / "state.json"
        (path / "gate.toml").write_text(config)
        self.args = ["--config", str(path / "gate.toml"), "--state", str(self.state),
                     *(["--sysfs", str(sysfs)] if sysfs else [])]
        self.said: list[str] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket))
        self._listener.listen(16)
        self.process: subprocess.Popen[str] | None = None

    def start(self, *program: str, ready: bool = True) -> RrdGate:
        """Start it and wait until it is ready. ``program`` stands in the place of ``-m rrd.helper``."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.bind("")  # the kernel makes up a name
            notify.settimeout(0.2)
            env = dict(os.environ, NOTIFY_SOCKET=f"@{notify.getsockname()[1:].decode()}", PYTHONPATH=str(ROOT))
            fd = self._listener.fileno()
            self.process = subprocess.Popen(
                [sys.executable, "-c", AS_SYSTEMD_DOES, str(fd), *(program or ("-m", "rrd.helper")), *self.args],
                env=env, stderr=subprocess.PIPE, text=True, pass_fds=[fd])
            self._reader = threading.Thread(target=self._listen, args=(self.process,), daemon=True)
            self._reader.start()
            while ready:
                assert self.process.poll() is None, self.said
                with contextlib.suppress(TimeoutError):
                    assert notify.recv(100) == b"READY=1"
                    break
        return self

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        """``rrd-gate --check`` and the like, beside it."""
        return subprocess.run([sys.executable, "-m", "rrd.helper", *self.args, *args], cwd=ROOT, capture_output=True,
                              text=True, timeout=60, check=False)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def end(self) -> int:
        """SIGTERM; the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        assert self.process is not None
        status = self.process.wait(60)
        self._reader.join(10)
        return status

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.wait()
        self._listener.close()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with contextlib.closing(process.stderr):
            for line in process.stderr:
                self.said.append(line.rstrip())


class Peer:
    """One that speaks the protocol by hand; each answer has 20 s."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(str(path))
        self._last_id = 0
        self._in = self.sock.makefile("rb")

    def ask(self, verb: str, die: str) -> dict[str, object]:
        self.send(verb, die)
        return self.answer()

    def send(self, verb: str, die: str) -> None:
        self._last_id += 1
        self.sock.sendall(json.dumps({"id": self._last_id, "verb": verb, "die": die}).encode() + b"\n")

    def answer(self) -> dict[str, object]:
        reply = json.loads(self._in.readline())
        assert reply.pop("id") == self._last_id
        return reply

    def hung_up(self) -> bool:
        """Whether the other side ends the connection, without a word."""
        try:
            return self._in.readline() == b""
        except ConnectionResetError:  # it left something unread
            return True

    def close(self) -> None:
        self._in.close()
        self.sock.close()
