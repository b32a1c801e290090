"""The held-out loss: measured on the untouched base, every `eval_every` steps and at the end, and it falls."""

from __future__ import annotations

import json
from pathlib import Path

from boxes import box, toy_keys, write_job


def test_the_held_out_loss_is_measured_from_the_base_to_the_end(tmp_path: Path) -> None:
    keys = toy_keys(tmp_path, max_steps=10, lora_dropout=0.0)
    measured = {"eval_data": keys["data"]}
    with box(tmp_path, "cpu_dies = 1\n") as b:
        b.start()
        write_job(b.jobs_dir, "often", **keys, **measured, eval_every=4)
        write_job(b.jobs_dir, "once", **keys, **measured)
        write_job(b.jobs_dir, "never", **keys)
        b.wait_done("often", "once", "never")
        found = {name: held_out(b.state / "jobs" / name) for name in ("often", "once", "never")}
    assert [step for step, _ in found["often"]] == [0, 4, 8, 10]
    assert found["once"] == found["often"][-1:]
    assert found["never"] == []
    losses = [loss for _, loss in found["often"]]
    assert losses == sorted(losses, reverse=True)


def held_out(job_dir: Path) -> list[tuple[int, float]]:
    rows = [json.loads(line) for line in (job_dir / "history.jsonl").open()]
    return [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
