"""What an edit of a job file may change.

Keys are of several kinds (``docs/job-file.md``): *live* keys apply to a running job at its next step; *restart* keys,
and those that name inputs, at ``rrd restart JOB``, which carries on from the checkpoint; *identity* keys say which
numbers come out, so that changing one means training from step 0.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from rrd import toml
from rrd.errors import BadJob
from rrd.job import INPUT_KEYS, JobSpec
from rrd.toml import Fault

LIVE_KEYS = frozenset({"steps_per_visit", "visit_seconds", "weight", "max_steps", "epochs", "checkpoint_every", "keep",
                       "on_nan", "paused", "eval_every", "export_every"})
"""Keys whose new value a running job takes over at its next step."""

PLACE_KEYS = frozenset({"die"})
"""Keys whose new value counts when the job is next given a place."""

RESTART_KEYS = frozenset({"output", "eval_data", "export_merged", "resume", "tensorboard"})
"""Keys that ``rrd restart`` takes over while carrying on from the checkpoint: no training step depends on them."""


def identity_keys(spec: JobSpec) -> dict[str, Any]:
    """The keys that decide, together with what the inputs hold, which numbers training produces; normalized: what means
    the same is the same.

    Keys at their default are left out, so that a key added by a later rrd does not orphan older checkpoints (and
    therefore a default, once released, never changes).
    """
    others = {*LIVE_KEYS, *PLACE_KEYS, *RESTART_KEYS, *INPUT_KEYS}
    kept = spec.model_dump(mode="json", exclude=others, exclude_defaults=True)
    if spec.method == "full":
        return {k: v for k, v in kept.items() if not k.startswith("lora_")}
    targets = {"lora_targets": sorted(spec.lora_targets)} if spec.lora_targets else {}
    return {**kept, "lora_alpha": spec.alpha, **targets}


def identity(spec: JobSpec) -> str:
    """sha256, in hex, of ``identity_keys``: a checkpoint of another identity is never silently continued."""
    text = json.dumps(identity_keys(spec), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def changes(old: JobSpec, new: JobSpec) -> tuple[set[str], set[str]]:
    """Keys that differ: those a running job takes over by itself (live, and ``die``), and those it refuses.

    The second set needs ``rrd restart``; it starts from step 0 where ``identity`` differs. It holds live keys too
    when they only fit together with the others, such as an ``eval_every`` that comes with the first ``eval_data``.
    """
    if old == new:
        return set(), set()
    a, b = old.model_dump(), new.model_dump()
    differ = {k for k in a if a[k] != b[k]}
    differ -= {"lora_alpha"} if old.alpha == new.alpha else set()
    taken = differ & (LIVE_KEYS | PLACE_KEYS)
    try:
        with_live(old, new)
    except BadJob:
        return set(), differ
    return taken, differ - taken


def with_live(old: JobSpec, new: JobSpec) -> JobSpec:
    """``old`` with the live keys (and ``die``) of ``new``: what a running job becomes after an edit.

    Raises ``BadJob`` where they do not fit the keys that stay; ``changes`` says beforehand.
    """
    live = {k: v for k, v in new.model_dump().items() if k in LIVE_KEYS | PLACE_KEYS}
    try:
        return toml.check(JobSpec, {**old.model_dump(), **live})
    except Fault as e:
        raise BadJob(e.message, hint=e.hint, key=e.key) from None
