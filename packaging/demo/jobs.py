"""Write the demo's job files: ``python packaging/demo/jobs.py .demo``, once before they run and once after.

They differ in what a first reader would like to see at work: rank, targets, data format, full training, cadence.
Their sizes are chosen so that all end within a few minutes on two CPU cores.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import fetch

COMMON = """\
max_steps = {steps}
warmup_steps = 5
seq_len = {seq_len}
eval_every = {eval_every}           # steps between held-out losses; the first is of the untouched base
visit_seconds = 3.0       # a turn on the die
checkpoint_every = "30s"  # short, so that a demo that is killed loses little
keep = {keep}                  # checkpoints
"""

JOBS = {
    "stdlib-r32": """\
# Python's standard library: from a function's signature and docstring to its body. An adapter on every linear.
{model}
{stdlib}
lora_rank = 32
lr = 1e-3
""",
    "stdlib-attn-r64": """\
# The same text; attention only, at a higher rank, rank-stabilized, scaled by alpha / sqrt(rank).
{model}
{stdlib}
lora_rank = 64
lora_targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
lora_rs = true
lora_alpha = 16
lr = 1e-3
""",
    "jargon-r16": """\
# The Jargon File: from a word to what hackers mean by it.
{model}
{jargon}
lora_rank = 16
lr = 1e-3
""",
    "chat-r8": """\
# Small talk, as chat messages; a very small adapter, with dropout, two conversations a step.
{model}
{chat}
lora_rank = 8
lora_dropout = 0.05
lr = 1e-3
batch_size = 2
""",
    "problems-r16": """\
# Programming problems and solutions, as instructions; gradients of two micro-steps make one step.
{model}
{problems}
lora_rank = 16
lr = 5e-4
grad_accum = 2
""",
    "jargon-full": """\
# All weights of a small model (SmolLM2's first layers), on the Jargon File as plain text.
{small_model}
{jargon-text}
method = "full"
lr = 1e-3
weight_decay = 0.01
""",
    "rwkv-new": """\
# An RWKV-7 from scratch, on the same text: it begins with random weights and RWKV-LM's recipe.
{new_model}
{jargon-text}
method = "full"
lr = 3e-3
weight_decay = 0.1
batch_size = 4
""",
}

THEN = {
    "rwkv-lora": """\
# An adapter on what the job rwkv-new has trained: from the Jargon File's words to Python functions.
{trained_model}
{stdlib}
lora_rank = 16
lr = 3e-3
batch_size = 4
export_merged = true
""",
}
"""What needs another job's result."""

STEPS = {"problems-r16": 30, "jargon-full": 75, "rwkv-new": 90}  # where a step is dearer or cheaper than the others'
USUAL_STEPS = 60
KEEP = {"jargon-full": 1}  # its checkpoints hold every weight and both moments: half a gigabyte
USUAL_KEEP = 2
SEQ_LEN = {"rwkv-new": 128, "rwkv-lora": 128}
USUAL_SEQ_LEN = 256


def write_jobs(demo: Path) -> list[Path]:
    """Put the job files into ``demo/jobs.d``, those of THEN once they can run; what is there, and the same, stays."""
    ready = JOBS | (THEN if trained_model(demo).exists() else {})
    return [_write(demo / "jobs.d" / f"{job}.toml", job_file(demo, job)) for job in ready]


def trained_model(demo: Path) -> Path:
    """What the job rwkv-new brings."""
    return demo / "state" / "adapters" / "rwkv-new"


def job_file(demo: Path, job: str) -> str:
    """The text of one job file, with absolute paths."""
    steps, keep = STEPS.get(job, USUAL_STEPS), KEEP.get(job, USUAL_KEEP)
    paths = {name: _data_keys(demo, name) for name in fetch.TEXTS}
    paths["model"] = _key("model", fetch.model_dir(demo))
    paths["small_model"] = _key("model", fetch.small_model_dir(demo))
    paths["new_model"] = _key("model", fetch.new_model_dir(demo))
    paths["trained_model"] = _key("model", trained_model(demo))
    return (JOBS | THEN)[job].format_map(paths) + COMMON.format(
        steps=steps, eval_every=steps // 3, keep=keep, seq_len=SEQ_LEN.get(job, USUAL_SEQ_LEN))


def _data_keys(demo: Path, name: str) -> str:
    train, heldout = fetch.data_file(demo, name, "train"), fetch.data_file(demo, name, "heldout")
    return _key("data", train) + "\n" + _key("eval_data", heldout)


def _key(key: str, path: Path) -> str:
    return f"{key} = {json.dumps(str(path.absolute()), ensure_ascii=False)}"  # a JSON string is a TOML string, too


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        beside = path.with_suffix(".part")
        beside.write_text(text, encoding="utf-8")
        beside.chmod(0o644)  # whatever the umask: the spool takes no file that others may write
        os.replace(beside, path)
    return path


if __name__ == "__main__":
    written = write_jobs(Path(sys.argv[1]).absolute())
    fetch.say(f"{len(written)} jobs in {written[0].parent}: {', '.join(p.stem for p in written)}")
