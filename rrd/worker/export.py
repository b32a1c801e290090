"""``python -m rrd.worker.export JOB_DIR OUT``: the adapter of a job's checkpoint, written without a daemon.

Reads the newest valid checkpoint (or the one of ``--step``) and needs no die. Errors are one sentence on stderr, and
the exit code is that of the error.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from rrd import checkpoint
from rrd.errors import BadJob, Damaged, Denied, DiskTrouble, RrdError
from rrd.job import JOB_FILE, JobSpec, parse_job
from rrd.train import export
from rrd.train.state import TENSORS, named_parameters


def main(argv: list[str]) -> int:
    args = _arguments().parse_args(argv)
    try:
        spec = parse_job(JOB_FILE, (args.job_dir / JOB_FILE).read_bytes())
        _check_may_write(args.output)
        step, tensors = _tensors(args.job_dir, args.step)
        for note in _write(spec, tensors, args.output, step, "merged" if args.merged else args.format):
            print(note, file=sys.stderr)
    except (RrdError, OSError) as e:
        fault = _blame(e, args.output)
        print(f"rrd: {fault}", file=sys.stderr)
        return fault.exit_code
    print(f"{args.output}: step {step}")
    return 0


def _blame(e: RrdError | OSError, output: Path) -> RrdError:
    """The fault as the person who exports meets it: there is no daemon here whose disk or rights it could be."""
    cause = e if isinstance(e, OSError) else e.__cause__
    if isinstance(cause, PermissionError):
        return Denied(f"no permission: {cause.filename or output}", hint="name a directory of your own, or use sudo")
    if isinstance(cause, OSError) and not isinstance(e, (BadJob, Damaged)):
        return DiskTrouble(f"{(cause.strerror or str(cause)).lower()}: {cause.filename or output}",
                           hint="free space or mend the disk, and export again")
    assert isinstance(e, RrdError)
    return e


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="rrd export", description=__doc__)
    parser.add_argument("job_dir", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--merged", action="store_true")
    parser.add_argument("--format", choices=["peft", "rwkv"], default="peft")
    parser.add_argument("--step", type=int)
    return parser


def _check_may_write(output: Path) -> None:
    """Asked before the tensors are read, which may take minutes. Raises PermissionError."""
    above = next(p for p in Path(os.path.realpath(output)).parents if os.path.lexists(p))
    if not os.access(above, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(above))


def _tensors(job_dir: Path, step: int | None) -> tuple[int, dict[str, Tensor]]:
    """The trained tensors of the newest whole checkpoint, every byte checked; on stderr, which newer ones are damaged.

    Nothing is put aside: the daemon may be at work.
    """
    found = [(n, p) for n, p in checkpoint.listing(job_dir) if step is None or n == step]
    if not found:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise BadJob(f"{job_dir} has {which}", hint=f"`rrd checkpoints {job_dir.name}` lists them")
    faults = []
    for n, path in found:
        try:
            manifest = checkpoint.read_manifest(path)
            data = checkpoint.read_bytes(path, manifest, TENSORS)
            tensors = named_parameters(memoryview(data), str(path / TENSORS))
        except Damaged as e:
            faults.append((n, e.message))
            continue
        for newer, fault in faults:
            print(f"the checkpoint of step {newer} is damaged and was skipped: {fault}", file=sys.stderr)
        return n, tensors
    raise Damaged(f"no checkpoint of {job_dir.name} can be read: {faults[0][1]}")


def _write(spec: JobSpec, tensors: dict[str, Tensor], output: Path, step: int, form: str) -> list[str]:
    if spec.method == "full":
        return export.export_full(tensors, output, spec.model, step=step)
    write = {"merged": export.export_merged, "rwkv": export.export_rwkv, "peft": export.export_adapter}[form]
    return write(tensors, output, export.AdapterSpec.of(spec), step=step)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
