"""``rrd bench ops``: how fast this box's dies run the parts of a step. Needs no daemon, and no die may be busy."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import click

from rrd.cli import show
from rrd.errors import RrdError
from rrd.text import one_line


def _device(ctx: click.Context, param: click.Parameter, value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
        raise click.BadParameter("a device is cpu, cuda:0, cuda:1, …")
    return value


@click.group()
def bench() -> None:
    """Measure this box."""


@bench.command()
@click.option("--device", default="cpu", show_default=True, metavar="NAME", callback=_device,
              help="cpu, cuda:0, …")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Of a CPU die.")
@click.option("--seconds", type=click.FloatRange(0.0, 60.0), default=0.5, show_default=True, help="For each op.")
@click.option("--small", is_flag=True, help="Tiny shapes: does everything run at all?")
@click.option("--markdown", is_flag=True, help="As a table to paste.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def ops(device: str, threads: int, seconds: float, small: bool, markdown: bool, as_json: bool) -> None:
    """Measure every op of a step against the die's memory and GEMM rates.

    BY says who computes it on this die: torch, a compiled CPU kernel or a CUDA kernel. LIMIT is the larger of the
    op's shares of the two rates: 100 % cannot be beaten by much. Let no job run on the die meanwhile.
    """
    found = _measure(device, threads, seconds, small)
    if as_json:
        show.as_json(found)
    elif markdown:
        click.echo("\n".join(_markdown(found)))
    else:
        click.echo(_title(found))
        columns = [show.Column(t, right=i > 2) for i, t in enumerate(TITLES)]
        click.echo("\n".join(show.table(columns, [show.Row(r) for r in _rows(found)], show.terminal_width())))


TITLES = ("OP", "SHAPE", "BY", "MS", "GB/S", "GFLOP/S", "LIMIT")


def _measure(device: str, threads: int, seconds: float, small: bool) -> dict[str, Any]:
    """Torch runs in a process of its own; its last words are the error's sentence."""
    command = [sys.executable, "-m", "rrd.worker.bench", "--device", device, "--threads", str(threads),
               "--seconds", str(seconds), *(["--small"] if small else [])]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="backslashreplace")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
        raise RrdError(f"{device} cannot be measured: {one_line(last.partition('Error: ')[2] or last, 300)}",
                       hint="`rrd dies` lists the dies; is there a free one, and memory for it?")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _title(found: dict[str, Any]) -> str:
    threads = "" if "sm_" in found["die"] else f", {found['threads']} thread{'s' * (found['threads'] > 1)}"
    return one_line(f"{found['die']}{threads}, torch {found['torch']}; memory {found['copy'] / 1e9:.1f} GB/s, "
                    f"GEMM {found['gemm'] / 1e9:.0f} GFLOP/s; {found['clock']}", 400)


def _rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    return [(o["op"], o["shape"], o["by"], f"{o['seconds'] * 1e3:.2f}", f"{o['bytes'] / 1e9:.1f}",
             f"{o['flops'] / 1e9:.1f}" if o["flops"] else "-",
             f"{max(o['bytes'] / found['copy'], o['flops'] / found['gemm']):.0%}") for o in found["ops"]]


def _markdown(found: dict[str, Any]) -> list[str]:
    rows = [TITLES, ("---", "---", "---", "--:", "--:", "--:", "--:"), *_rows(found)]
    return [_title(found), "", *("| " + " | ".join(r) + " |" for r in rows)]
