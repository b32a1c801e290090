"""What grants and takes back a lane's dies."""

from __future__ import annotations

from rrd.config import GateConfig
from rrd.gate.base import Gate, GateRefused
from rrd.gate.command import CommandGate
from rrd.gate.helper import SocketGate
from rrd.gate.none import NoGate
from rrd.gate.simulated import SimulatedGate

__all__ = ["CommandGate", "Gate", "GateRefused", "NoGate", "SimulatedGate", "SocketGate", "make_gate"]


def make_gate(config: GateConfig) -> Gate:
    """The gate that ``config`` asks for. Nothing is opened or run yet."""
    if config.kind == "command":
        return CommandGate(config.acquire, config.release, timeout=config.timeout)
    if config.kind == "socket":
        return SocketGate(config.socket, timeout=config.timeout)
    if config.kind == "simulated":
        return SimulatedGate(timeout=config.timeout)
    return NoGate()
