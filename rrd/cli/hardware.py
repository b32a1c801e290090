"""The part of ``rrd doctor`` about dies: chips, driver, torch, and whether they fit each other."""

from __future__ import annotations

from collections.abc import Iterator

from rrd import boards
from rrd.boards import FLAVOURS, Board
from rrd.cli.checkup import Check, Finding, Patient
from rrd.text import count, one_line

LAST_FOR_KEPLER = 470
"""The last branch of NVIDIA's driver that knows Kepler chips."""


def sm(number: int) -> str:
    return f"sm_{number}"


def _chips(found: list[Board]) -> str:
    names = {f"{b.name} ({sm(b.sm)})" if b.sm else b.name: 0 for b in found}
    for b in found:
        names[f"{b.name} ({sm(b.sm)})" if b.sm else b.name] += 1
    return ", ".join(f"{n} x {name}" for name, n in names.items())


def dies(p: Patient) -> Iterator[Finding]:
    """Whether rrd.toml uses the chips that are there, and only those."""
    found = p.host.boards
    wanted = [d.device for d in p.config.dies if d.device != "cpu"]
    if not found and not wanted:
        yield Finding("dies", "ok", f"no NVIDIA chips; {count(len(p.config.dies), 'die')} on CPU cores")
    elif not wanted:
        listed = ", ".join(f'"cuda:{i}"' for i in range(len(found)))
        yield Finding("dies", "warn", f"this box has {_chips(found)}, and rrd.toml uses none: jobs train on CPU cores",
                      f"in rrd.toml: [[lane]], and dies = [{listed}]; a lane for each where no bus is shared")
    elif beyond := [d for d in wanted if int(d.rpartition(":")[2]) >= len(found)]:
        yield Finding("dies", "bad", f"rrd.toml names {beyond[0]}, and this box has {count(len(found), 'NVIDIA chip')}",
                      "correct `dies` in rrd.toml; `lspci -d 10de:` lists what the bus shows")
    else:
        yield Finding("dies", "ok", f"{_chips(found)}; {len(wanted)} in use")


def driver(p: Patient) -> Iterator[Finding]:
    found = p.host.boards
    if not found:
        return
    version = p.host.driver_version()
    if others := sorted({b.driver for b in found if b.driver and b.driver != "nvidia"}):
        yield Finding("driver", "bad", f"the kernel's driver {others[0]} holds the chips, not NVIDIA's",
                      "install NVIDIA's driver, which keeps nouveau away, and reboot")
    elif not version:
        fix = f"install its branch {LAST_FOR_KEPLER}, the last for Kepler" if _kepler(found) else "install it"
        yield Finding("driver", "bad", "NVIDIA's driver is not loaded", f"{fix}; `dmesg` says if it was refused")
    elif _kepler(found) and int(version.split(".")[0]) > LAST_FOR_KEPLER:
        yield Finding("driver", "bad", f"the driver {version} knows no Kepler chips any more",
                      f"install branch {LAST_FOR_KEPLER}")
    else:
        yield Finding("driver", "ok", f"NVIDIA {version}")


def _kepler(found: list[Board]) -> bool:
    return any(30 <= b.sm < 50 for b in found)


def uvm(p: Patient) -> Iterator[Finding]:
    if not p.host.boards or not p.host.driver_version():
        return
    if p.host.has_uvm():
        yield Finding("uvm", "ok", "/dev/nvidia-uvm is there")
    else:
        yield Finding("uvm", "bad", "nvidia_uvm is not loaded: CUDA will find no device",
                      "`modprobe nvidia_uvm`, or `nvidia-modprobe -u -c 0`, before the service starts")


def torch(p: Patient) -> Iterator[Finding]:
    """Whether this torch has kernels for the chips."""
    t, found = p.host.torch, p.host.boards
    if "error" in t:
        yield Finding("torch", "bad", f"torch cannot be imported: {one_line(str(t['error']), 300)}", _install(found))
        return
    version = f"torch {t['version']}" + (f" with CUDA {t['cuda']}" if t["cuda"] else " for CPUs")
    uses_cuda = any(d.device != "cpu" for d in p.config.dies)
    if not found or not (uses_cuda or t["cuda"]):
        yield Finding("torch", "ok", version)
        return
    if not t["cuda"]:
        yield Finding("torch", "bad", f"{version}, and rrd.toml names CUDA dies", _install(found))
        return
    for number in sorted({b.sm for b in found if b.sm}):
        name = next(b.name for b in found if b.sm == number)
        if not boards.serves(t["archs"], number):
            yield Finding("torch", "bad", f"{sm(number)} ({name}) is not in this {version} ({' '.join(t['archs'])})",
                          _install(found))
            return
    if uses_cuda and not t["dies"]:
        yield Finding("torch", "bad", f"{version} finds no device", "is the driver older than this CUDA needs?")
        return
    yield Finding("torch", "ok", f"{version} has kernels for all chips ({' '.join(t['archs'])})")


def _install(found: list[Board]) -> str:
    """The command that brings the torch for these chips."""
    f = FLAVOURS[boards.flavour_for(found)]
    words = " ".join(f"'{a}'" if set(a) & set("<>=") else a for a in boards.pip_arguments(f.name))
    most = f"{f.most_python[0]}.{f.most_python[1]}"
    return f"`rrd-setup --torch {f.name}`, or pip install {words}, on Python 3.10 to {most} ({f.why})"


def order(p: Patient) -> Iterator[Finding]:
    """Workers count dies by PCI address, whatever the environment says; people may count otherwise."""
    if len(p.host.boards) < 2:
        return
    unit = dict(w.split("=", 1) for w in p.unit.get("Environment", "").split() if "=" in w)
    if "CUDA_VISIBLE_DEVICES" in {**unit, **({} if p.unit else p.host.environ)}:
        yield Finding("order", "warn", "CUDA_VISIBLE_DEVICES hides dies from rrd, and renumbers the others",
                      "unset it; choose dies in rrd.toml")
    elif len({b.name for b in p.host.boards}) > 1 and p.host.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        yield Finding("order", "warn", "chips differ, and CUDA_DEVICE_ORDER is not PCI_BUS_ID here: other programs may "
                      "number them otherwise than rrd and nvidia-smi do, by PCI address",
                      "export CUDA_DEVICE_ORDER=PCI_BUS_ID in /etc/environment")
    else:
        yield Finding("order", "ok", "dies are counted by PCI address, as nvidia-smi does")


CHECKS: dict[str, Check] = {c.__name__: c for c in (dies, driver, uvm, torch, order)}
"""The checks of this module."""
