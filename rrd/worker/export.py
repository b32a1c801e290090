"""``python -m rrd.worker.export JOB_DIR OUT``: the adapter of a job's checkpoint, written without a daemon.

Reads the newest valid checkpoint (or the one of ``--step``) and needs no die. Errors are one sentence on stderr, and
the exit code is that of the error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from rrd import checkpoint
from rrd.errors import BadJob, Damaged, RrdError
from rrd.job import JOB_FILE, JobSpec, parse_job
from rrd.train import export
from rrd.train.state import TENSORS, named_parameters


def main(argv: list[str]) -> int:
    args = _arguments().parse_args(argv)
    try:
        spec = parse_job(JOB_FILE, (args.job_dir / JOB_FILE).read_bytes())
        step, tensors = _tensors(args.job_dir, args.step)
        for note in _write(spec, tensors, args.output, step, merged=args.merged):
            print(note, file=sys.stderr)
    except RrdError as e:
        print(f"rrd: {e}", file=sys.stderr)
        return e.exit_code
    except OSError as e:
        print(f"rrd: {e}", file=sys.stderr)
        return 1
    print(f"{args.output}: step {step}")
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rrd export", description=__doc__)
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--merged", action="store_true")
    parser.add_argument("--step", type=int)
    return parser


def _tensors(job_dir: Path, step: int | None) -> tuple[int, dict[str, Tensor]]:
    """The trained tensors of one checkpoint, every byte checked. Nothing is put aside: the daemon may be at work."""
    found = [(n, p) for n, p in checkpoint.listing(job_dir) if step is None or n == step]
    if not found:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise BadJob(f"{job_dir} has {which}", hint=f"`rrd checkpoints {job_dir.name}` lists them")
    faults = []
    for n, path in found:
        try:
            manifest = checkpoint.read_manifest(path)
            data = checkpoint.read_bytes(path, manifest, TENSORS)
            return n, named_parameters(memoryview(data), str(path / TENSORS))
        except Damaged as e:
            faults.append(e.message)
    raise Damaged(f"no checkpoint of {job_dir.name} can be read: {faults[0]}")


def _write(spec: JobSpec, tensors: dict[str, Tensor], output: Path, step: int, *, merged: bool) -> list[str]:
    if spec.method == "full":
        return export.export_full(tensors, output, spec.model, step=step)
    adapter = export.AdapterSpec.of(spec)
    if merged:
        return export.export_merged(tensors, output, adapter, step=step)
    return export.export_adapter(tensors, output, adapter, step=step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
