"""Models through transformers in a real daemon: from job file to adapter, one of them over an int8 base."""

from __future__ import annotations

import json
from pathlib import Path

from boxes import box, toy_keys, write_job
from bridge_toys import FUSED, make_bridged


def test_a_daemon_trains_models_that_transformers_brings(tmp_path: Path) -> None:
    gpt2, mixture = make_bridged(tmp_path / "gpt2", "gpt2"), make_bridged(tmp_path / "mixture", "mixtral")
    with box(tmp_path, "cpu_dies = 1\n") as b:
        b.start()
        write_job(b.jobs_dir, "g", **toy_keys(tmp_path, model=str(gpt2), max_steps=4, steps_per_visit=2))
        write_job(b.jobs_dir, "q", **toy_keys(tmp_path, model=str(mixture), max_steps=4, steps_per_visit=2,
                                              quantize=True, export_merged=True))
        b.wait_done("g", "q")
        adapters = b.state / "adapters"
        config = json.loads((adapters / "g" / "adapter_config.json").read_text())
        assert config["fan_in_fan_out"]
        assert set(config["target_modules"]) == {"c_attn", "c_proj", "c_fc"}
        left = "q: 99 % of the block weights are held in 8 bits; model.layers.*.mlp.gate.weight are not"
        assert (left in b.tail()) == FUSED
        assert (adapters / "q" / "merged" / "model.safetensors").exists()
        assert len((b.state / "jobs" / "q" / "history.jsonl").read_text().splitlines()) == 4
