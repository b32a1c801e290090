"""rrd-gate as a process, asked over its socket: who holds what, who may ask, what is put back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gate_benches import CommandBench
from rrd_gate import (
    ADDRESSES,
    ROOT,
    WINDOW,
    Peer,
    RrdGate,
    fake_sysfs,
    memory_map,
    open_dies,
    pci_config,
    registers,
)

from rrd.gate import GateRefused, SocketGate
from rrd.helper.kept import Kept
from rrd.helper.space import Sysfs
from rrd.helper.window import Window

DEADLINE = 20.0
PYTHON = "/usr/bin/python3"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    return fake_sysfs(tmp_path / "sys")


@pytest.fixture
def gate(tmp_path: Path, sysfs: Path) -> Iterator[RrdGate]:
    gate = RrdGate(tmp_path, pci_config(), sysfs=sysfs)
    yield gate
    gate.close()


def until(holds: object, why: str = "") -> None:
    end = time.monotonic() + DEADLINE
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, why
        os.sched_yield()


# --- holding ---


def test_grants_one_die_at_a_time_and_puts_everything_back(gate: RrdGate, sysfs: Path) -> None:
    boot = registers(sysfs)
    gate.start()
    assert open_dies(sysfs) == []

    async def scene() -> None:
        one, other = SocketGate(str(gate.socket)), SocketGate(str(gate.socket))
        for die in ("3", "0", "5"):
            await one.acquire(die)
            await one.acquire(die)
            assert open_dies(sysfs) == [die]
            for wish in ("1", die):
                with pytest.raises(GateRefused, match=f"die {die} has the bus"):
                    await other.acquire(wish)
            await other.release(die)
            assert open_dies(sysfs) == [die]
            await one.release(die)
            assert open_dies(sysfs) == []
        await one.acquire("2")
        await one.close()
        await other.acquire("4")  # the connection's end has released it, whoever has noticed yet
        assert open_dies(sysfs) == ["4"]
        await other.close()

    asyncio.run(scene())
    assert gate.end() == 0
    assert registers(sysfs) == boot
    assert not gate.state.exists()
    assert any("k80 with dies 0 1 2 3 4 5" in line for line in gate.said)


def test_refusals_say_whether_to_come_again(gate: RrdGate, sysfs: Path) -> None:
    gate.start()
    holder, other = Peer(gate.socket), Peer(gate.socket)
    assert holder.ask("acquire", "1") == {"ok": True}
    assert other.ask("acquire", "2") == {"ok": False, "reason": "die 1 has the bus", "later": True}
    assert other.ask("acquire", "17") == {"ok": False, "reason": "no group has a die '17'"}
    assert other.ask("open", "2") == {"ok": False, "reason": "no such verb: 'open'"}
    assert holder.ask("release", "1") == {"ok": True}
    config = sysfs / "bus/pci/devices" / ADDRESSES["2"] / "config"
    before = config.read_bytes()
    config.write_bytes(b"\xff" * 64)
    fallen = other.ask("acquire", "2")
    assert (fallen["ok"], fallen["lost"]) == (False, True) and "later" not in fallen
    assert "die 2 (0000:06:00.0) has fallen off the bus" in str(fallen["reason"])
    assert other.ask("acquire", "3") == {"ok": True}
    assert other.ask("release", "3") == {"ok": True}
    config.write_bytes(before)
    assert other.ask("acquire", "2") == {"ok": True}


@pytest.mark.parametrize("said", [
    b"nonsense\n", b"[1]\n", b"{}\n", b'{"id": 1, "verb": "acquire"}\n', b'{"id": 1, "verb": "acquire", "die": 2}\n',
    b'{"id": [], "verb": "acquire", "die": "2"}\n', b"x" * 10_000, b"\xff\xfe\n", b"[" * 4000 + b"\n", b"\n",
    b'{"id": 1, "verb": "acquire", "die": "2", "x": "' + b"y" * 4096 + b'"}\n',
])
def test_what_is_no_request_ends_the_connection_and_its_grant(gate: RrdGate, sysfs: Path, said: bytes) -> None:
    gate.start()
    peer = Peer(gate.socket)
    assert peer.ask("acquire", "1") == {"ok": True}
    peer.sock.sendall(said)
    assert peer.hung_up()
    until(lambda: open_dies(sysfs) == [])
    assert Peer(gate.socket).ask("acquire", "2") == {"ok": True}


def test_requests_in_pieces_and_in_one_piece(gate: RrdGate) -> None:
    gate.start()
    peer = Peer(gate.socket)
    for byte in b'{"id": "a", "verb": "acquire", "die": "1"}\n':
        peer.sock.sendall(bytes([byte]))
    assert json.loads(peer._in.readline()) == {"id": "a", "ok": True}
    peer.sock.sendall(b'{"id": 1, "verb": "release", "die": "1"}\n{"id": 2, "verb": "acquire", "die": "4"}\n')
    assert [json.loads(peer._in.readline()) for _ in range(2)] == [{"id": 1, "ok": True}, {"id": 2, "ok": True}]


def test_more_connections_than_a_daemon_needs_are_turned_away(gate: RrdGate) -> None:
    gate.start()
    peers = [Peer(gate.socket) for _ in range(16)]
    assert all(peer.ask("release", "1") == {"ok": True} for peer in peers)
    assert Peer(gate.socket).hung_up()
    peers.pop().close()
    end = time.monotonic() + DEADLINE
    while True:  # a moment until the helper has noticed
        late = Peer(gate.socket)
        try:
            assert late.ask("acquire", "1") == {"ok": True}
            return
        except (OSError, ValueError):
            assert time.monotonic() < end


def test_a_peer_that_reads_no_answers_is_left(gate: RrdGate) -> None:
    gate.start()
    deaf = Peer(gate.socket)
    deaf.sock.settimeout(DEADLINE)
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        deaf.sock.sendall(b'{"id": 1, "verb": "acquire", "die": "2"}\n' * 1_000_000)
    assert Peer(gate.socket).ask("acquire", "2") == {"ok": True}


# --- who may ask ---


@pytest.mark.skipif(os.geteuid() != 0 or not os.access(PYTHON, os.X_OK),
                    reason=f"needs root, to be somebody else, and {PYTHON}, which anybody may run")
def test_only_root_and_those_who_are_allowed_may_ask(tmp_path: Path, sysfs: Path) -> None:
    config = pci_config().replace("allow_users = []", 'allow_users = ["daemon"]').replace(
        "allow_groups = []", 'allow_groups = ["games", "no-such-group"]')
    gate = RrdGate(tmp_path, config, sysfs=sysfs)
    gate.start()
    os.chmod(gate.socket, 0o666)
    code = ("import socket, sys\n"
            "s = socket.socket(socket.AF_UNIX); s.connect('gate.sock')\n"
            "s.sendall(b'{\"id\": 1, \"verb\": \"acquire\", \"die\": \"1\"}\\n'); print(s.recv(500).decode())")

    def ask_as(user: int, group: int) -> str:
        def become() -> None:
            os.setgroups([])
            os.setgid(group)
            os.setuid(user)

        return subprocess.run([PYTHON, "-S", "-c", code], preexec_fn=become, capture_output=True, text=True,
                              cwd=tmp_path, check=True).stdout

    try:
        for place in (tmp_path, *tmp_path.parents):  # pytest's own are for their owner alone
            if place.stat().st_mode & 0o011 != 0o011:
                place.chmod(place.stat().st_mode | 0o011)
        assert '"ok": true' in ask_as(1, 65534)  # daemon
        assert '"ok": true' in ask_as(65534, 60)  # games
        assert "user 65534 may not use the gate" in ask_as(65534, 65534)
        until(lambda: any("of user 65534, group 65534 may not use the gate" in line for line in gate.said))
        assert open_dies(sysfs) == []
    finally:
        gate.close()


# --- ends ---


def test_a_stop_waits_for_the_open_die(gate: RrdGate, sysfs: Path) -> None:
    boot = registers(sysfs)
    gate.start()
    holder, other = Peer(gate.socket), Peer(gate.socket)
    assert holder.ask("acquire", "1") == {"ok": True}
    gate.signal(signal.SIGTERM)
    until(lambda: other.ask("acquire", "2").get("reason") == "rrd-gate is stopping")
    assert open_dies(sysfs) == ["1"]
    assert holder.ask("release", "1") == {"ok": True}
    assert gate.wait() == 0
    assert registers(sysfs) == boot


def test_a_second_signal_takes_the_open_die(gate: RrdGate, sysfs: Path) -> None:
    boot = registers(sysfs)
    gate.start()
    holder, other = Peer(gate.socket), Peer(gate.socket)
    assert holder.ask("acquire", "1") == {"ok": True}
    gate.signal(signal.SIGTERM)
    until(lambda: other.ask("acquire", "2").get("reason") == "rrd-gate is stopping")
    gate.signal(signal.SIGINT)
    assert gate.wait() == 0
    assert registers(sysfs) == boot
    assert any("die 1 was not given back, and is taken" in line for line in gate.said)


KILLED_AT = """
import os, signal, sys
left, pwrite = int(sys.argv.pop(1)), os.pwrite
def dying(fd, data, at):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    return pwrite(fd, data, at)
os.pwrite = dying
from rrd.helper.main import main
sys.exit(main())
"""


START_WRITES = 1 + 6 * 6
"""One die was on; each has three registers, which sizing fills with ones and puts back."""


def test_a_killed_helper_leaves_nothing_that_is_not_put_back(tmp_path: Path, sysfs: Path) -> None:
    """SIGKILL before the n-th write of a start and two swaps; then what ExecStopPost= runs, or the next start."""
    boot = registers(sysfs)
    gate = RrdGate(tmp_path, pci_config(), sysfs=sysfs)
    for n in (0, 1, 10, START_WRITES - 1, *range(START_WRITES, START_WRITES + 11, 2)):
        gate.start("-c", KILLED_AT, str(n), ready=n >= START_WRITES)
        if n >= START_WRITES:
            peer = Peer(gate.socket)
            with contextlib.suppress(OSError, ValueError):
                for die in ("2", "0"):
                    peer.ask("acquire", die)
                    peer.ask("release", die)
            peer.close()
        assert gate.wait() == -signal.SIGKILL, f"fewer than {n} writes"
        if n % 4:
            put_back = gate.run("--restore")
            assert (put_back.returncode, put_back.stderr) == (0, "")
        else:
            gate.start()
            assert open_dies(sysfs) == []
            assert gate.end() == 0
        assert registers(sysfs) == boot, f"killed before write {n}"
        assert not gate.state.exists()
    gate.close()


def test_a_helper_of_programs_closes_what_the_one_before_it_left_open(tmp_path: Path) -> None:
    bus = CommandBench(tmp_path)
    argv = {verb: json.dumps([str(tmp_path / "bus"), verb, "{die}", str(tmp_path)]) for verb in ("acquire", "release")}
    gate = RrdGate(tmp_path, f'[[group]]\nbackend = "command"\ndies = ["0", "1"]\nacquire = {argv["acquire"]}\n'
                             f'release = {argv["release"]}\ntimeout = 30\n')
    with contextlib.closing(gate):
        gate.start()
        assert Peer(gate.socket).ask("acquire", "1") == {"ok": True}
        gate.signal(signal.SIGKILL)
        gate.wait()
        assert bus.open() == "1"
        gate.start()
        assert bus.open() is None
        assert gate.end() == 0


def test_restoring_when_there_is_nothing_to_restore(gate: RrdGate) -> None:
    assert gate.run("--restore").returncode == 0
    gate.state.write_text("{")
    damaged = gate.run("--restore")
    assert damaged.returncode == 78
    assert "cannot be read" in damaged.stderr
    gate.state.write_text('{"format": 1, "boot": "another", "devices": [{}], "undo": {}}')
    assert gate.run("--restore").returncode == 0


# --- starting ---


def test_a_configuration_that_cannot_be_used_is_said_and_not_tried_again(tmp_path: Path, sysfs: Path) -> None:
    boot = registers(sysfs)
    gate = RrdGate(tmp_path, pci_config().replace("bar1 = ", "bar4 = "), sysfs=sysfs)
    gate.start(ready=False)
    assert gate.wait() == 78
    assert any("has no memory BAR 4 (it has bar0" in line for line in gate.said), gate.said
    assert registers(sysfs) == boot
    gate.close()


def test_without_a_socket_it_says_how_it_is_started() -> None:
    run = subprocess.run([sys.executable, "-m", "rrd.helper", "--config", "/no/such/file"], cwd=ROOT,
                         capture_output=True, text=True, check=False)
    assert run.returncode == 78
    assert "no socket was handed over (systemctl start rrd-gate.socket; or, by hand: --socket PATH)" in run.stderr


def test_a_socket_of_its_own(tmp_path: Path, sysfs: Path) -> None:
    gate = RrdGate(tmp_path, pci_config(), sysfs=sysfs)
    own = tmp_path / "own.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(own))
    stale.close()
    gate.args += ["--socket", str(own)]
    gate.start()
    assert Peer(own).ask("acquire", "1") == {"ok": True}
    assert own.stat().st_mode & 0o777 == 0o660
    assert gate.end() == 0
    gate.close()


def test_check_shows_the_box_and_touches_nothing(gate: RrdGate, sysfs: Path) -> None:
    boot = registers(sysfs)
    checked = gate.run("--check")
    assert checked.returncode == 0, checked.stdout
    assert "die 0  0000:04:00.0  10de:102d  memory on  bar0 0xf8000000+0x10, bar1 0x3800000000+0x10" in checked.stdout
    assert checked.stdout.endswith("ok\n")
    assert registers(sysfs) == boot
    (sysfs / "bus/pci/devices" / ADDRESSES["5"] / "config").unlink()
    checked = gate.run("--check")
    assert checked.returncode == 78
    assert "WRONG: die 5 (0000:09:00.0) is not on the bus: No such file or directory" in checked.stdout


def test_check_sees_who_has_the_windows_addresses_already(gate: RrdGate, sysfs: Path) -> None:
    memory_map(sysfs, (0x1000, 0x9FBFF), (WINDOW[0] - 4096, WINDOW[0]))
    disk = sysfs / "bus/pci/devices" / "0000:0a:00.0"
    disk.mkdir()
    (disk / "resource").write_text(f"{WINDOW[1] + 8:#018x} {WINDOW[1] + 9:#018x} 0x0000000000040200\n")
    checked = gate.run("--check")
    assert checked.returncode == 78
    said = checked.stdout
    assert "WRONG: bar0 of the window, 0xf8000000-0xf800000f, overlaps the machine's memory, 0xf7fff000-" in said
    assert "WRONG: bar1 of the window, 0x3800000000-0x380000000f, overlaps what 0000:0a:00.0 has" in said


def test_who_asks_is_told_why_it_cannot_start(tmp_path: Path, sysfs: Path) -> None:
    """The daemon, and so `rrd status`: after each of its tries, until somebody has mended it."""
    boot = registers(sysfs)
    memory_map(sysfs, (WINDOW[0] - 4096, WINDOW[0]))
    gate = RrdGate(tmp_path, pci_config(), sysfs=sysfs)
    with contextlib.closing(gate):
        peers = [Peer(gate.socket) for _ in range(3)]
        peers[0].send("acquire", "1")
        peers[1].sock.sendall(b"nonsense\n")
        peers[2].send("acquire", "2")
        gate.start(ready=False)
        for peer in (peers[0], peers[2]):
            said = peer.answer()
            assert said["ok"] is False
            assert said["reason"] == (
                "rrd-gate cannot start: bar0 of the window, 0xf8000000-0xf800000f, overlaps the machine's memory, "
                "0xf7fff000-0xf8000000 (`rrd-gate --check` lists all that is wrong)")
        assert peers[1].hung_up()
        assert gate.wait() == 78
        assert registers(sysfs) == boot
        (tmp_path / "gate.toml").write_text("x = [")
        peer = Peer(gate.socket)
        peer.send("acquire", "1")
        gate.start(ready=False)
        assert f"{tmp_path}/gate.toml: not TOML: " in str(peer.answer()["reason"])
        assert gate.wait() == 78


# --- how small it is ---


def test_a_swap_costs_less_than_its_budget(tmp_path: Path) -> None:
    """0.3 ms for an acquire, 0.1 ms for a release; in time of this thread, so that others on the box do not count."""
    sysfs = fake_sysfs(tmp_path / "boards", boards=True)
    window = Window(ADDRESSES, WINDOW, Sysfs(str(sysfs)), Kept(str(tmp_path / "state.json")), switch_bridges=True)
    window.start()
    taken: dict[str, list[float]] = {"open": [], "close": []}
    for n in range(300):
        for what in taken:
            start = time.thread_time()
            getattr(window, what)(str(n % 6))
            taken[what].append(time.thread_time() - start)
    assert sorted(taken["open"])[150] < 0.0003
    assert sorted(taken["close"])[150] < 0.0001


def test_it_is_small_and_quick_to_start(gate: RrdGate) -> None:
    code = ("import sys, time\nstart = time.process_time()\nimport rrd.helper.main\n"
            "print(time.process_time() - start)\n"
            "print(*{m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names))\n"
            "print(*[m for m in sys.modules if m.startswith('rrd.') and not m.startswith('rrd.helper')])")
    seconds, others, ours = min(
        subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        .stdout.split("\n")[:3] for _ in range(3))
    assert float(seconds) < 0.1
    assert set(others.split()) <= {"rrd", "__main__", "tomli"}
    assert ours == ""
    gate.start()
    Peer(gate.socket).ask("acquire", "1")
    assert gate.process is not None
    status = Path(f"/proc/{gate.process.pid}/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    assert resident < 40_000, f"{resident} kB"
