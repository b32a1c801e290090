"""The swap: never two dies in the window, everything verified, everything put back."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from boxes_of_dies import BAR0, BAR1, BAR3, GIB, MIB, WINDOW, flat_box, k80_bars, tree_box, window_over
from fake_bus import MASTER, MEMORY, FakeBar, FakeBus, FakeDevice, Killed

from rrd.helper.base import BadSetup, Refusal
from rrd.helper.kept import Kept
from rrd.helper.restore import restore
from rrd.helper.window import Window

Box = Callable[[], tuple[FakeBus, dict[str, str]]]
boxes = pytest.mark.parametrize("box", [flat_box, tree_box])

EDGES = (BAR0, BAR0 + 16 * MIB - 1, BAR1, BAR1 + 16 * GIB - 1, BAR3, BAR3 + 32 * MIB - 1)


def never_two(bus: FakeBus, names: dict[str, str]) -> Callable[[FakeDevice], None]:
    """When the helper has turned a die on, no other die is; and nobody fights for the window."""

    def watch(device: FakeDevice) -> None:
        if device.address in names.values():
            assert [a for a in names.values() if bus.devices[a].on] == [device.address]
        assert all(len(bus.answers(address)) <= 1 for address in EDGES)

    return watch


@boxes
def test_the_open_die_alone_answers_in_the_window(box: Box, tmp_path: Path) -> None:
    bus, names = box()
    boot = bus.boot_states()
    window = window_over(bus, names, tmp_path)
    window.start()
    bus.turned_on = never_two(bus, names)
    assert not any(bus.devices[a].on for a in names.values())
    for die in ("0", "3", "3", "5", "0", "1"):
        window.open(die)
        assert [bus.answers(a) for a in EDGES] == [[names[die]]] * len(EDGES)
        window.close(die)
        assert [bus.answers(a) for a in EDGES] == [[]] * len(EDGES)
        assert bus.devices[names[die]].boot_state()[1] == boot[names[die]][1]


@boxes
def test_other_bits_and_windows_of_bridges_are_left_alone(box: Box, tmp_path: Path) -> None:
    """The driver's bus mastering, the I/O BAR, status bits that a write would clear."""
    bus, names = box()
    before = {a: bytes(d.regs) for a, d in bus.devices.items()}
    window = window_over(bus, names, tmp_path)
    window.start()
    die = bus.devices[names["2"]]
    window.open("2")
    die._put(0x04, 2, die.get(0x04, 2) & ~MASTER | 0x400)  # a driver changes its mind meanwhile
    window.close("2")
    assert die.get(0x04, 2) == 0x400
    window.open("0")
    window.close("0")
    for address, regs in before.items():
        now = bus.devices[address].regs
        same = [n for n in range(64) if n not in (0x04, 0x05)]
        assert [now[n] for n in same] == [regs[n] for n in same], address


def test_one_write_is_one_register(tmp_path: Path) -> None:
    bus, names = flat_box()
    bus.devices[names["1"]]._put(0x06, 2, 0xF910)  # errors that somebody wants to read
    window = window_over(bus, names, tmp_path)
    window.start()
    window.open("1")
    window.close("1")
    assert bus.devices[names["1"]].get(0x06, 2) == 0xF910


def test_a_die_that_a_driver_turned_on_is_turned_off_before_another_is_opened(tmp_path: Path) -> None:
    bus, names = flat_box()
    window = window_over(bus, names, tmp_path)
    window.start()
    bus.turned_on = never_two(bus, names)
    for other in ("1", "2"):
        bus.devices[names[other]].place(BAR0, BAR1, BAR3, 0xE000)
        window.open("1")
        assert bus.answers(BAR1) == [names["1"]]
        window.close("1")


@pytest.mark.parametrize("which", ["holder", "other"])
def test_a_die_that_does_not_let_go_blocks_the_window_and_is_named(which: str, tmp_path: Path) -> None:
    bus, names = flat_box()
    window = window_over(bus, names, tmp_path)
    window.start()
    bus.turned_on = never_two(bus, names)
    stuck = bus.devices[names["1"]]
    if which == "holder":
        window.open("1")
        stuck.stuck[0x04] = MEMORY
        with pytest.raises(Refusal, match=r"die 1 .* does not let go of the bus"):
            window.close("1")
    else:
        stuck.place(BAR0, BAR1, BAR3, 0xE000)
        stuck.stuck[0x04] = MEMORY
    for die in ("0", "1", "2"):
        with pytest.raises(Refusal, match=r"die 1 .* does not let go of the bus") as refusal:
            window.open(die)
        assert not refusal.value.later
    stuck.stuck.clear()
    window.open("2")
    assert bus.answers(BAR1) == [names["2"]]


def test_a_die_that_falls_off_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    bus, names = flat_box()
    window = window_over(bus, names, tmp_path)
    window.start()
    bus.turned_on = never_two(bus, names)
    for how in ("fallen", "gone"):
        window.open("1")
        setattr(bus.devices[names["1"]], how, True)
        with pytest.raises(Refusal, match="fallen off the bus" if how == "fallen" else "not on the bus") as refusal:
            window.close("1")
        assert refusal.value.lost and not refusal.value.later
        with pytest.raises(Refusal, match="die 1"):
            window.open("1")
        window.open("2")
        window.close("2")
        bus.devices[names["1"]].come_back()
        window.open("1")
        assert bus.answers(BAR1) == [names["1"]]
        window.close("1")


def test_a_die_that_comes_back_in_the_middle_of_a_swap_is_turned_off_first(tmp_path: Path) -> None:
    bus, names = flat_box()
    window = window_over(bus, names, tmp_path)
    window.start()
    bus.turned_on = never_two(bus, names)
    die, accesses = bus.devices[names["1"]], []
    die.place(BAR0, BAR1, BAR3, 0xE000)
    die.fall()

    def back_at_the_third(device: FakeDevice) -> None:
        accesses.append(device)
        die.fallen = accesses.count(die) < 3

    bus.on_access = back_at_the_third
    window.open("1")
    assert bus.answers(BAR1) == [names["1"]]


def test_another_device_in_its_place_is_not_opened(tmp_path: Path) -> None:
    bus, names = flat_box()
    window = window_over(bus, names, tmp_path)
    window.start()
    bus.devices[names["1"]]._put(0, 4, 0x1234_8086)
    with pytest.raises(Refusal, match="another device now: 8086:1234, it was 10de:102d"):
        window.open("1")


def test_a_die_that_does_not_fit_the_window_stays_off_and_the_others_go_on(tmp_path: Path) -> None:
    bus, names = flat_box()
    del bus.devices[names["2"]]
    bars = [FakeBar(0, 16 * MIB), FakeBar(1, 1024 * GIB, wide=True), FakeBar(3, 32 * MIB, wide=True)]
    larger = bus.die(names["2"], bars)
    larger.place(0, 0, 0, on=True)
    window = window_over(bus, names, tmp_path)
    window.start()
    bus.turned_on = never_two(bus, names)
    for die in ("0", "5"):
        larger._put(0x04, 2, MEMORY)  # a driver has woken it
        window.open(die)
        assert not larger.on
        window.close(die)
    with pytest.raises(Refusal, match="is not a multiple of the 0x10000000000 bytes that die 2"):
        window.open("2")


@pytest.mark.parametrize(("byte", "bits", "says"), [
    (0x13, 0x40, r"BAR 0 was given 0xf8000000 and reads 0xb8000000"),
    (0x18, 0x38, r"BAR 2 was given 0x00000038 and reads 0x00000000"),
    (0x04, MEMORY, r"does not come onto the bus"),
])
def test_an_address_that_does_not_stay_is_no_grant(byte: int, bits: int, says: str, tmp_path: Path) -> None:
    bus, names = flat_box()
    window = window_over(bus, names, tmp_path)
    window.start()
    bus.turned_on = never_two(bus, names)
    die = bus.devices[names["4"]]
    die.stuck[byte] = bits
    before = die.boot_state()
    with pytest.raises(Refusal, match=says):
        window.open("4")
    assert die.boot_state() == before
    window.open("3")
    window.close("3")


def test_a_die_that_was_missing_at_the_start_may_come_later(tmp_path: Path) -> None:
    bus, names = flat_box()
    late = bus.devices[names["3"]]
    late.gone = True
    window = window_over(bus, names, tmp_path)
    window.start()
    with pytest.raises(Refusal, match=r"die 3 \(0000:07:00.0\) is not on the bus"):
        window.open("3")
    window.open("2")
    window.close("2")
    late.come_back()
    late.place(BAR0, BAR1, BAR3, 0xE000)  # and its driver has turned it on
    bus.turned_on = never_two(bus, names)
    window.open("2")
    assert bus.answers(BAR1) == [names["2"]]
    window.close("2")
    window.open("3")
    assert bus.answers(BAR1) == [names["3"]]
    window.close("3")
    assert restore(Kept.load(str(tmp_path / "state.json")), bus)
    assert bus.answers(BAR1) == [names["0"]], "put back, but for the fight"


def test_a_slow_bus_is_given_up_and_what_was_half_done_is_undone(tmp_path: Path) -> None:
    bus, names = flat_box()
    now = [0.0]
    window = window_over(bus, names, tmp_path, timeout=1.0, clock=lambda: now[0])
    window.start()
    boot = bus.boot_states()

    def slowly(device: FakeDevice) -> None:
        now[0] += 0.09

    bus.on_access = slowly
    with pytest.raises(Refusal, match="answers too slowly"):
        window.open("3")
    assert bus.boot_states() == boot
    bus.on_access = lambda device: None
    window.open("3")
    bus.on_access = slowly
    with pytest.raises(Refusal, match="answers too slowly") as refusal:
        window.close("3")
    assert bus.boot_states() == boot and not refusal.value.lost


def test_a_right_that_is_taken_away_is_a_refusal(tmp_path: Path) -> None:
    """Kernel lockdown may come while the helper runs."""
    bus, names = flat_box()
    window = window_over(bus, names, tmp_path)
    window.start()
    boot = bus.boot_states()

    def locked(device: FakeDevice) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    bus.on_access = locked
    with pytest.raises(Refusal, match="may not be touched"):
        window.open("3")
    bus.on_access = lambda device: None
    window.open("3")
    bus.on_access = locked
    with pytest.raises(Refusal, match="may not be touched"):
        window.close("3")
    bus.on_access = lambda device: None
    window.close("3")
    assert bus.boot_states() == boot


# --- everything is put back ---


@boxes
def test_put_back_after_a_kill_before_and_after_any_write(box: Box, tmp_path: Path) -> None:
    """A start, a swap, another, and an end; killed at every step there is."""
    n = 0
    while True:
        path = tmp_path / str(n)
        path.mkdir()
        bus, names = box()
        boot = bus.boot_states()
        bus.die_at = n
        if not _killed(lambda b=bus, d=names, p=path: _life(b, d, p)):
            break
        bus.die_at = -1
        if n % 3 == 0:  # and whoever puts it back is killed, too
            bus.die_at, bus.steps = n % 11, 0
            _killed(lambda b=bus, p=path: restore(Kept.load(str(p / "state.json")), b))
            bus.die_at = -1
        assert restore(Kept.load(str(path / "state.json")), bus)
        assert bus.boot_states() == boot, f"killed at step {n}"
        assert not (path / "state.json").exists()
        n += 1
    assert bus.boot_states() == boot
    assert n > 120


def _life(bus: FakeBus, names: dict[str, str], path: Path) -> None:
    window = window_over(bus, names, path)
    window.start()
    for die in ("2", "0"):
        window.open(die)
        window.close(die)
    window.open("1")
    restore(Kept.load(str(path / "state.json")), bus)


def _killed(work: Callable[[], object]) -> bool:
    try:
        work()
    except Killed:
        return True
    return False


def test_a_second_start_takes_no_mess_for_the_boot_state(tmp_path: Path) -> None:
    """Killed in the middle of a swap, and started again without anybody putting things back."""
    bus, names = flat_box()
    boot = bus.boot_states()
    window = window_over(bus, names, tmp_path)
    window.start()
    window.open("3")
    again = window_over(bus, names, tmp_path)
    again.start()
    again.open("1")
    assert bus.answers(BAR1) == [names["1"]]
    assert restore(Kept.load(str(tmp_path / "state.json")), bus)
    assert bus.boot_states() == boot


@boxes
@pytest.mark.parametrize("seed", range(25))
def test_any_history(box: Box, seed: int, tmp_path: Path) -> None:
    """Swaps among drivers that meddle, dies that fall and come back, bits that stick, accesses that are slow, kills.
    Never two dies in the window by our hand; what answers and was not reset is as it was, in the end."""
    dice = random.Random(seed)
    bus, names = box()
    now = [0.0]
    boot, changed = bus.boot_states(), set()
    bus.turned_on = never_two(bus, names)
    window, held = window_over(bus, names, tmp_path, clock=lambda: now[0]), None
    window.start()
    for _ in range(120):
        name = dice.choice(list(names))
        die = bus.devices[names[name]]
        what = dice.choice(["swap"] * 8 + ["driver", "fall", "gone", "back", "stick", "free", "slow", "kill"])
        if what == "swap":
            held = _swap(window, bus, names, held, name)
        elif what == "driver" and held is None and name in window._known and not (die.fallen or die.gone):
            die.place(BAR0, BAR1, BAR3, 0xE000, on=True)
        elif what in ("fall", "gone"):
            die.fallen, die.gone = what == "fall", what == "gone"
            changed.add(die.address)
        elif what == "back" and (die.fallen or die.gone):
            die.come_back()
        elif what == "stick":
            die.stuck[dice.choice([0x04, 0x13, 0x17])] = 0xFF
        elif what == "free":
            die.stuck.clear()
        elif what == "slow":
            slow = dice.random() * 0.1
            bus.on_access = lambda device, s=slow: now.__setitem__(0, now[0] + s)  # type: ignore[misc]
        elif what == "kill":
            bus.die_at = bus.steps + dice.randrange(40)
            _killed(lambda w=window, h=held, n=name: _swap(w, bus, names, h, n))
            bus.die_at, held = -1, None
            restore(Kept.load(str(tmp_path / "state.json")), bus)
            window = window_over(bus, names, tmp_path, clock=lambda: now[0])
            window.start()
    for die in bus.devices.values():
        die.stuck.clear()
        die.bars and die.address in changed and die.come_back()
    assert restore(Kept.load(str(tmp_path / "state.json")), bus)
    untouched = {a: s for a, s in boot.items() if a not in changed}
    assert {a: s for a, s in bus.boot_states().items() if a in untouched} == untouched


def _swap(window: Window, bus: FakeBus, names: dict[str, str], held: str | None, name: str) -> str | None:
    try:
        if held is not None:
            window.close(held)
        window.open(name)
    except Refusal:
        return None
    assert [bus.answers(a) for a in EDGES] == [[names[name]]] * len(EDGES)
    return name


# --- what the configuration gets wrong ---


@pytest.mark.parametrize(("window", "says"), [
    ({0: BAR0, 1: BAR1}, r"the window has no bar3, but die 0 .* would answer there, too"),
    ({**WINDOW, 2: 0xD000_0000}, r"has no memory BAR 2 \(it has bar0 of 0x1000000 bytes, bar1 of 0x400000000 bytes"),
    ({**WINDOW, 5: 0xD000_0000}, r"has no memory BAR 5"),
    ({**WINDOW, 1: BAR1 + GIB}, r"bar1 of the window, 0x3840000000, is not a multiple of the 0x400000000 bytes"),
    ({**WINDOW, 0: 1 << 33}, r"bar0 of the window, 0x200000000, is above 4 GiB, and die 0 .* has 32 bits there"),
    ({**WINDOW, 3: BAR1 + 32 * MIB}, r"bar1 and bar3 of the window overlap"),
])
def test_a_window_that_does_not_fit_is_said(window: dict[int, int], says: str, tmp_path: Path) -> None:
    bus, names = flat_box()
    backend = window_over(bus, names, tmp_path)
    backend._window = window
    with pytest.raises(BadSetup, match=says):
        backend.start()
    assert restore(Kept.load(str(tmp_path / "state.json")), bus)


def test_bridges_must_pass_the_window_on(tmp_path: Path) -> None:
    bus, names = FakeBus(), {"0": "0000:02:00.0"}
    bus.bridge("0000:00:01.0", (BAR0, BAR0 + 16 * MIB - 1), (BAR1, BAR3 - 1))
    bus.die(names["0"], k80_bars(), parent="0000:00:01.0")
    with pytest.raises(BadSetup, match=r"bridge 0000:00:01.0, above die 0, does not pass on bar3 of the window, "
                                       r"0x3c00000000-0x3c01ffffff"):
        window_over(bus, names, tmp_path).start()
    bus.devices["0000:00:01.0"].regs[0x09] = 1  # one that passes on all that nobody else claims
    window_over(bus, names, tmp_path).start()


def test_bridges_of_their_own_need_to_be_switched(tmp_path: Path) -> None:
    bus, names = tree_box()
    with pytest.raises(BadSetup, match="switch_bridges = true"):
        window_over(bus, names, tmp_path, switch_bridges=False).start()


def test_a_wrong_address_is_not_touched(tmp_path: Path) -> None:
    """It may be that of the disk."""
    bus, names = flat_box()
    disk = bus.die("0000:01:00.0", k80_bars(), ids=0xA808_144D)
    disk.place(0xE000_0000, 0x60_0000_0000, 0x70_0000_0000, 0xE100)
    with pytest.raises(BadSetup, match=r"of one kind: die 0 \(0000:01:00.0\) is 144d:a808, die 1 .* is 10de:102d"):
        window_over(bus, names | {"0": disk.address}, tmp_path).start()
    assert bus.writes == 0


def test_a_kernel_that_forbids_it_is_said(tmp_path: Path) -> None:
    bus, names = flat_box()
    for die in bus.devices.values():
        die.locked = True
    with pytest.raises(BadSetup, match=r"die 0 .* may not be touched: Operation not permitted .*lockdown"):
        window_over(bus, names, tmp_path).start()


def test_a_bridge_is_no_die(tmp_path: Path) -> None:
    bus, _ = tree_box()
    with pytest.raises(BadSetup, match=r"die 0 \(0000:10:00.0\) is a bridge"):
        window_over(bus, {"0": "0000:10:00.0"}, tmp_path).start()


RAM_THERE = f"{BAR0:#x}-{BAR0 + MIB - 1:#x}"


def test_a_window_over_memory_or_another_device_is_refused(tmp_path: Path) -> None:
    bus, names = flat_box()
    boot = bus.boot_states()
    bus.ram = [(0, BAR0 - 1), (BAR0, BAR0 + MIB - 1)]
    with pytest.raises(BadSetup, match=f"bar0 of the window, .*, overlaps the machine's memory, {RAM_THERE}"):
        window_over(bus, names, tmp_path).start()
    assert restore(Kept.load(str(tmp_path / "state.json")), bus)
    assert bus.boot_states() == boot
    bus.ram.pop()
    bus.die("0000:0b:00.0", k80_bars())
    bus.seen["0000:0b:00.0"] = [(BAR3 + 1, BAR3 + 2, 0x200)]
    with pytest.raises(BadSetup, match=r"bar3 of the window, .*, overlaps what 0000:0b:00.0 has, 0x3c00000001-"):
        window_over(bus, names, tmp_path).start()
    bus.seen["0000:0b:00.0"] = [(0, BAR3, 0x2000_0200), (BAR3, BAR3, 0x100)]  # without an address; of I/O space
    window_over(bus, names, tmp_path).start()
