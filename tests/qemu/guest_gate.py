"""The first process of a machine whose dies share windows. It wires them as somebody with such a box would, starts the
real rrd-gate, and asks it through the real gate of rrd. What it finds it reports on the console, a line of JSON each.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from rrd.gate import SocketGate
from rrd.helper.space import Sysfs

SOCKET = "/run/rrd-gate.sock"
DEVICES = Path("/sys/bus/pci/devices")
IVSHMEM = 0x1110_1AF4
SIZE = 1 << 20
PATIENCE = 600
"""Seconds for an answer: a Python that is emulated on a busy machine may take a minute to start."""
libc = ctypes.CDLL(None, use_errno=True)


def report(**what: object) -> None:
    print("RRD-REPORT " + json.dumps(what), flush=True)


def mount(kind: str, at: str) -> None:
    assert libc.mount(kind.encode(), at.encode(), kind.encode(), 0, None) == 0, at


# --- the box ---


def groups() -> dict[str, list[str]]:
    """The dies' addresses by the slot of the root bus that they are in or behind."""
    found: dict[str, list[str]] = {}
    for device in sorted(DEVICES.iterdir()):
        if Sysfs().space(device.name).read(0, 4) != IVSHMEM:
            continue
        top = Path(os.path.realpath(device)).parts[4]
        slot = int(top.split(":")[2].split(".")[0], 16)
        found.setdefault({4: "flat", 5: "boards", 6: "bus"}[slot >> 2], []).append(device.name)
    return found


def share_windows(ports: list[str]) -> None:
    """What the owner of boards does once: every port passes on the windows of the first."""
    bus = Sysfs()
    first = bus.space(ports[0])
    for port in ports[1:]:
        for at in (0x20, 0x24, 0x28, 0x2C):
            bus.space(port).write(at, 4, first.read(at, 4))


def window(name: str, addresses: list[str]) -> tuple[int, int]:
    """For BAR 0 and BAR 2: where the first die of the group is. Without a bridge above, BAR 2 goes above 4 GiB."""
    rows = Sysfs().resources(addresses[0])
    return rows[0][0], 1 << 35 if name == "flat" else rows[2][0]


def configuration(dies: dict[str, list[str]]) -> str:
    """gate.toml."""
    text, number = "allow_users = []\nallow_groups = []\n", 0
    for name, addresses in dies.items():
        bar0, bar2 = window(name, addresses)
        lines = "".join(f'{number + n} = "{a}"\n' for n, a in enumerate(addresses))
        number += len(addresses)
        switch = "true" if name == "boards" else "false"
        text += (f'[[group]]\nname = "{name}"\nswitch_bridges = {switch}\n[group.dies]\n{lines}'
                 f"[group.window]\nbar0 = {bar0:#x}\nbar2 = {bar2:#x}\n")
    return text


def boot_state() -> dict[str, str]:
    """Command and address registers of everything on the bus."""
    state = {}
    for device in sorted(DEVICES.iterdir()):
        data = (device / "config").read_bytes()[:64]
        state[device.name] = (data[4:6] + data[0x0E:0x3C]).hex()
    return state


# --- the helper ---


def start_gate() -> int:
    """As systemd does: a socket as file 3, user root, and not one capability."""
    listener = socket.socket(socket.AF_UNIX)
    Path(SOCKET).unlink(missing_ok=True)
    listener.bind(SOCKET)
    listener.listen(16)
    pid = os.fork()
    if pid == 0:
        os.dup2(listener.fileno(), 3)
        os.set_inheritable(3, True)
        for capability in range(64):
            libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
        env = dict(os.environ, LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
        os.execve(sys.executable, [sys.executable, "-S", "-m", "rrd.helper", "--state", "/run/state.json"], env)
    listener.close()
    return pid


def capabilities(pid: int) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1] for line in lines if line.startswith("CapEff"))


def rrd_gate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-S", "-m", "rrd.helper", "--state", "/run/state.json", *args],
                          capture_output=True, text=True, check=False)


# --- the swaps ---


class Group:
    """A window, mapped once, and what each die's memory must hold."""

    def __init__(self, name: str, first_number: int, addresses: list[str]) -> None:
        self.name = name
        self.dies = [str(first_number + n) for n in range(len(addresses))]
        with open("/dev/mem", "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), SIZE, offset=window(name, addresses)[1])
        self.shadow = {die: bytearray(SIZE) for die in self.dies}
        self.last: dict[str, int] = dict.fromkeys(self.dies, 0)

    def write_and_check(self, die: str, dice: random.Random) -> None:
        """What this die was given last is there, and so is what it was given anywhere else; then something new."""
        shadow = self.shadow[die]
        for at in (self.last[die], dice.randrange(0, SIZE, 64)):
            assert self.memory[at : at + 64] == shadow[at : at + 64], f"die {die} at {at}"
        self.last[die] = at = dice.randrange(0, SIZE, 64)
        shadow[at : at + 64] = self.memory[at : at + 64] = dice.randbytes(64)

    def nobody_takes(self, dice: random.Random) -> bool:
        """Whether what is written into the closed window is lost; that it reached no die, the end shows."""
        at, data = dice.randrange(0, SIZE, 64), dice.randbytes(64)
        self.memory[at : at + 64] = data
        return self.memory[at : at + 64] != data


async def swaps(group: Group, count: int, dice: random.Random) -> float:
    """Seconds that the swaps themselves took: acquire and release, through the socket."""
    gate, spent = SocketGate(SOCKET, timeout=PATIENCE), 0.0
    for n in range(count):
        die = group.dies[n % len(group.dies)] if n % 3 else dice.choice(group.dies)
        start = time.perf_counter()
        await gate.acquire(die)
        spent += time.perf_counter() - start
        group.write_and_check(die, dice)
        start = time.perf_counter()
        await gate.release(die)
        spent += time.perf_counter() - start
        if n % 10 == 0:
            assert group.nobody_takes(dice), "somebody answers in a closed window"
    await gate.close()
    return spent


async def kill_in_a_swap(pid: int, group: Group, dice: random.Random) -> None:
    gate = SocketGate(SOCKET, timeout=PATIENCE)
    await gate.acquire(group.dies[-1])
    if dice.random() < 0.7:
        await gate.release(group.dies[-1])
        asking = asyncio.ensure_future(gate.acquire(group.dies[0]))
        await asyncio.sleep(dice.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait({asking})
        asking.exception()
    else:
        os.kill(pid, signal.SIGKILL)
    await gate.close()


def wire(check: Callable[[], subprocess.CompletedProcess[str]]) -> tuple[list[Group], dict[str, str]]:
    """Share the windows, write gate.toml, and see that ``check`` is content and only looks. The boot state, too."""
    dies = groups()
    share_windows([Path(os.path.realpath(DEVICES / a)).parts[-2] for a in dies["boards"]])
    Path("/etc/rrd/gate.toml").write_text(configuration(dies))
    boot = boot_state()
    checked = check()
    report(dies=dies, check=checked.stdout.splitlines(), status=checked.returncode)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert boot_state() == boot, "--check only looks"
    number, worlds = 0, []
    for name, addresses in dies.items():
        worlds.append(Group(name, number, addresses))
        number += len(addresses)
    return worlds, boot


def swap_all(worlds: list[Group], counts: dict[str, int], dice: random.Random, pid: Callable[[], int]) -> None:
    for group in worlds:
        asyncio.run(swaps(group, 1, dice))  # the first may wait for the helper's start
        spent, count = asyncio.run(swaps(group, counts[group.name], dice)), counts[group.name]
        report(group=group.name, swaps=count, ms_a_swap=1000 * spent / count, capabilities=capabilities(pid()))


def report_memory(worlds: list[Group]) -> None:
    report(memory=[_digest(group.shadow[die]) for group in worlds for die in group.dies])


def play(counts: dict[str, int], kills: int) -> None:
    """The helper started by hand, killed again and again."""
    dice = random.Random(0)
    worlds, boot = wire(lambda: rrd_gate("--check"))
    pid = start_gate()
    swap_all(worlds, counts, dice, lambda: pid)
    for _ in range(kills):
        asyncio.run(kill_in_a_swap(pid, dice.choice(worlds), dice))
        os.waitpid(pid, 0)
        put_back = rrd_gate("--restore")
        assert put_back.returncode == 0, put_back.stderr
        assert boot_state() == boot, "not as it was, after a kill"
        pid = start_gate()
        for group in worlds:
            asyncio.run(swaps(group, 5, dice))
    os.kill(pid, signal.SIGTERM)
    assert os.waitpid(pid, 0)[1] == 0
    assert boot_state() == boot, "not as it was, in the end"
    report_memory(worlds)


def _digest(data: bytes) -> str:
    import hashlib

    return hashlib.sha256(data).hexdigest()


def systemctl(*args: str) -> str:
    done = subprocess.run(["/usr/bin/systemctl", *args], capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).strip()


def unit_is(state: str) -> None:
    """Wait until rrd-gate.service is in ``state``; that may take a minute here."""
    for _ in range(600):
        if (now := systemctl("is-active", "rrd-gate.service")) == state:
            return
        time.sleep(0.1)
    raise AssertionError(f"rrd-gate.service is {now}: {systemctl('status', 'rrd-gate.service')}")


def play_under_systemd(counts: dict[str, int]) -> None:
    """The units as they are installed: the first question starts the helper; a crash is put back, and so is the end."""
    dice = random.Random(0)
    report(unconfigured=systemctl("start", "rrd-gate.socket"), socket=os.path.exists(SOCKET))
    worlds, boot = wire(lambda: subprocess.run(["/usr/lib/rrd/venv/bin/rrd-gate", "--check"], capture_output=True,
                                               text=True, check=False))
    started, seen = systemctl("start", "rrd-gate.socket"), os.stat(SOCKET)
    report(start=started, mode=oct(seen.st_mode & 0o777), group=seen.st_gid)
    swap_all(worlds, counts, dice, main_pid)
    asyncio.run(kill_in_a_swap(main_pid(), worlds[1], dice))
    for _ in range(600):  # ExecStopPost=
        if boot_state() == boot and not os.path.exists("/run/rrd-gate/state.json"):
            break
        time.sleep(0.05)
    report(put_back=boot_state() == boot)
    unit_is("active")  # Restart=on-failure
    for group in worlds:
        asyncio.run(swaps(group, 5, dice))
    report(stop=systemctl("stop", "rrd-gate.socket", "rrd-gate.service"), boot=boot_state() == boot,
           result=systemctl("show", "--property=Result", "--value", "rrd-gate.service"), socket=os.path.exists(SOCKET))
    report_memory(worlds)


def main_pid() -> int:
    return int(systemctl("show", "--property=MainPID", "--value", "rrd-gate.service"))


def main() -> None:
    under_systemd = os.getpid() != 1
    mounts = (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/run"), ("tmpfs", "/tmp"))
    for kind, at in () if under_systemd else mounts:
        mount(kind, at)
    words = Path("/proc/cmdline").read_text().split()
    numbers = {k.removeprefix("rrd."): int(v) for k, _, v in (w.partition("=") for w in words) if k.startswith("rrd.")}
    try:
        if under_systemd:
            play_under_systemd(numbers)
        else:
            play(numbers, numbers["kills"])
        report(end="well")
    except BaseException:
        said = systemctl("status", "rrd-gate.service") if under_systemd else ""
        report(end="badly", why=[*traceback.format_exc().splitlines(), *said.splitlines()])
    finally:
        sys.stdout.flush()
        libc.reboot(0x01234567)  # -no-reboot makes this the end


if __name__ == "__main__":
    main()
