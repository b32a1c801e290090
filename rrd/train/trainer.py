"""One job in training: model, optimizer, data and position; a step; the state that a checkpoint holds.

Everything a step does is a function of the job, the trainable state and the step's number: the batch comes from the
position, the learning rate and all randomness from the step. So there is no generator state to carry, a step may be
repeated, and who else trains in between makes no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from rrd import inputs
from rrd.edits import identity_keys
from rrd.job import JobSpec
from rrd.lora import attach
from rrd.models import Base, build
from rrd.models.registry import Recipe, facts_of, lora_targets_of, recipe_of
from rrd.ops import choice, pulse
from rrd.optim.adamw import AdamW, matrices_decay
from rrd.savings import Rung, in_force, united
from rrd.train import start
from rrd.train.data import Dataset
from rrd.train.schedule import lr_at
from rrd.train.state import FORMAT, machine_facts
from rrd.train.step import Batch, NotFinite, StepResult, eval_loss, train_step

NORMS = 5
"""Gradient norms that are remembered, for the sentence about a step that is no number."""


class Trainer:
    """A job's training. ``step`` steps are done; ``position`` samples were consumed by them."""

    def __init__(self, spec: JobSpec, base: Base, data: Dataset, held_out: Dataset | None, *, threads: int) -> None:
        self.spec, self.base, self.data, self.held_out, self.threads = spec, base, data, held_out, threads
        self.model = build(base)
        self.began_as = ""
        """The digest of the adapter that training began from; empty for a new one."""
        if spec.chunk_len is not None:
            self._limit(spec.chunk_len)
        self.named = self._trainable()
        recipe = recipe_of(base.family) if spec.method == "full" else Recipe()
        self.optimizer = AdamW(self.named, betas=spec.betas or recipe.betas, eps=spec.eps or recipe.eps,
                               weight_decay=spec.weight_decay, rule=recipe.rule or matrices_decay)
        self.by_torch: tuple[str, ...] = ()
        """Ops that have kernels here, and that the job began without: it goes on as it began."""
        self._beats = 0
        """Signs of life that the last step gave."""
        self.step = 0
        self.tokens = 0
        self.seconds = 0.0
        self.skipped = 0
        """Steps left out because their loss or gradient was no number."""
        self.norms: deque[float] = deque(maxlen=NORMS)
        self.rungs: tuple[Rung, ...] = ()
        """How its steps were run with less memory: part of the state, since it decides bits."""
        self.evaluated: int | None = None if held_out is None else -1
        """The step at which the held-out loss was last taken; -1 before the first; None: there is nothing to take."""

    def _limit(self, chunk_len: int) -> None:
        if self.model.longest is None:
            raise inputs.no_pieces(self.base.family.name)
        self.model.longest = chunk_len

    def _trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        spec = self.spec
        if spec.method == "full":
            return list(self.model.named_parameters())
        targets = spec.lora_targets or lora_targets_of(self.base.family, self.base.config)
        named = attach(self.model, targets=targets, rank=spec.lora_rank, alpha=spec.alpha, dropout=spec.lora_dropout,
                       rs=spec.lora_rs, ranks=spec.lora_ranks, alphas=spec.lora_alphas, seed=spec.seed)
        if spec.init_adapter:
            self.began_as = start.fill(named, Path(spec.init_adapter))
        return named

    @property
    def device(self) -> torch.device:
        return self.optimizer.flat["param"].device

    @property
    def samples_per_step(self) -> int:
        return self.spec.batch_size * self.spec.grad_accum

    @property
    def position(self) -> int:
        return self.step * self.samples_per_step

    def lr(self, total: int) -> float:
        """The learning rate of the next step, in a job of ``total`` steps."""
        s = self.spec
        return lr_at(self.step, lr=s.lr, min_lr=s.min_lr, warmup_steps=s.warmup_steps, total=total, schedule=s.schedule)

    @property
    def recomputes(self) -> bool:
        """Whether computing activations again in the backward pass would be new, and can be done."""
        return self.model.recomputes and not self.spec.gradient_checkpointing

    @property
    def most_parts(self) -> int:
        """In how many parts a micro-batch can be run without becoming another step."""
        s = self.spec
        in_pieces = self.model.longest is not None and s.seq_len > self.model.longest
        drops = s.method == "lora" and s.lora_dropout > 0
        return 1 if not self.model.splits or (in_pieces and drops) else s.batch_size

    def run_step(self, total: int, on_nan: Literal["stop", "skip"], rungs: Sequence[Rung] = (),
                 alive: Callable[[float], None] = lambda _: None) -> StepResult:
        """The next step, with what ``rungs`` say of it; ``alive`` hears the share done as it goes on, and may raise.

        Raises NotFinite, with nothing changed, for a loss that is no number and ``on_nan="stop"``.
        """
        self.rungs = united(self.rungs, rungs)
        s, savings = self.spec, in_force(self.rungs, self.step + 1)
        batches = [self.data.batch_at(self.position + i * s.batch_size, s.batch_size, s.seed)
                   for i in range(s.grad_accum)]
        try:
            with choice.by_torch(self.by_torch), pulse.heard(alive, self.device, total=self._beats) as beats:
                result = train_step(
                    self.model, self.optimizer, batches, lr=self.lr(total), clip_norm=s.clip_norm,
                    seeds=[seed_of(s.seed, self.step, i) for i in range(s.grad_accum)],
                    savings=savings._replace(checkpointing=savings.checkpointing or s.gradient_checkpointing),
                    on_nan=on_nan)
        except NotFinite as e:
            of_the_model, hint = self._of_the_model()
            where = self._circumstances() + of_the_model
            raise NotFinite(loss=e.loss, grad_norm=e.grad_norm, where=where, hint=hint) from None
        self.step, self._beats = self.step + 1, beats.count
        self.tokens += result.tokens
        self.skipped += result.skipped
        if result.applied:
            self.norms.append(result.grad_norm)
        return result

    def _circumstances(self) -> str:
        """Of a step that is no number: which it is, on what, and what came before."""
        ids = [self.data.at(self.position + k, self.spec.seed) + 1 for k in range(self.samples_per_step)]
        more = f" and {len(ids) - 16} more" if len(ids) > 16 else ""
        norms = ", ".join(f"{n:.3g}" for n in self.norms) or "none yet"
        return (f" at step {self.step + 1}, on sample {', '.join(map(str, ids[:16]))}{more} of the data; "
                f"the gradient's norms before: {norms}")

    def _of_the_model(self) -> tuple[str, str]:
        """Whether it is the model's own doing, as half a sentence and a hint; both empty if nothing says so."""
        tensors = self.base.tensors or dict(self.named)
        bad = next((n for n, t in tensors.items() if t.is_floating_point() and not torch.isfinite(t).all()), None)
        untrained = self.optimizer.steps == 0
        if bad is not None and (untrained or self.base.tensors):
            name = bad.removesuffix("scale") + "weight" if self.spec.quantize and bad.endswith(".scale") else bad
            return f"; in the model's files, {name} holds what is no number", "fetch the model again, all of its files"
        if untrained:
            return ("; that is before anything was trained, and its weights are all numbers: its sums overflow",
                    f"is it a model for {_name(self.base.compute)}? Try another dtype, or another model")
        return "", ""

    def evaluation(self) -> Evaluation:
        """A pass over the held-out data, to be gone through."""
        assert self.held_out is not None
        return Evaluation(self, self.held_out)

    def _to_die(self, batch: Batch) -> Batch:
        return Batch(batch.idx.to(self.device), batch.labels.to(self.device))

    def identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to give the same bits."""
        kernels = {"kernels": self.model.kernels} if self.model.kernels else {}
        began = {"init_adapter": self.began_as} if self.began_as else {}
        with choice.by_torch(self.by_torch):
            machine = machine_facts(self.device, self.threads)
        return {"job": identity_keys(self.spec), "base": self.base.digest, "data": self.data.digest,
                "dtype": _name(self.base.dtype), "compute": _name(self.base.compute), **facts_of(self.base.family),
                **machine, **kernels, **began}

    def state(self, total: int, history_bytes: int) -> dict[str, Any]:
        """All of a checkpoint but the tensors."""
        s = self.spec
        return {
            "format": FORMAT, "step": self.step, "tokens": self.tokens, "seconds": self.seconds,
            "history_bytes": history_bytes, "skipped": self.skipped, "norms": list(self.norms),
            "evaluated": self.evaluated, "rungs": [r.model_dump() for r in self.rungs],
            "schedule": {"total": total, "lr": self.lr(total).hex()},
            "optimizer": {"steps": self.optimizer.steps, "betas": list(self.optimizer.betas), "eps": self.optimizer.eps,
                          "weight_decay": s.weight_decay, "clip_norm": s.clip_norm},
            "rng": {"kind": "counter", "seed": s.seed, "next": seed_of(s.seed, self.step, 0)},
            "data": {"digest": self.data.digest, "samples": len(self.data), "position": self.position,
                     "epoch": self.position // len(self.data), "seed": s.seed},
            "identity": self.identity(),
        }

    def resume(self, state: dict[str, Any]) -> str:
        """Take over the counters of a saved state; the tensors are restored apart.

        Returns what will not be the same, as half a sentence: the learning rate, where this machine's arithmetic gives
        another one. Usually empty.
        """
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.optimizer.steps = state["optimizer"]["steps"]
        self.skipped, self.norms = state.get("skipped", 0), deque(state.get("norms", ()), NORMS)  # not in the oldest
        self.rungs = tuple(Rung.model_validate(r) for r in state.get("rungs", ()))
        if self.held_out is not None:
            self.evaluated = state.get("evaluated", self.step)
            self.evaluated = -1 if self.evaluated is None else self.evaluated
        was, now = float.fromhex(state["schedule"]["lr"]), self.lr(state["schedule"]["total"])
        return "" if was == now else f"the next learning rate was {was!r} and is {now!r}"


class Evaluation:
    """The mean loss over the labels of the held-out data, batch by batch: interrupted and gone on with, it is the same
    number. The trainable state must not change meanwhile."""

    def __init__(self, trainer: Trainer, held_out: Dataset) -> None:
        self.trainer, self.held_out, self.step = trainer, held_out, trainer.step
        self.at, self.total, self.labels = 0, 0.0, 0

    def go_on(self, rungs: Sequence[Rung], enough: Callable[[float], bool],
              alive: Callable[[float], None] = lambda _: None) -> float | None:
        """The loss; or None, if ``enough``, which hears the share done after each batch, says so before the end.
        ``alive`` hears it within batches, too, and may raise: that batch is then taken again."""
        t, size = self.trainer, self.trainer.spec.batch_size
        finer = in_force(rungs, t.step + 1).finer
        while self.at < len(self.held_out):
            with choice.by_torch(t.by_torch), pulse.heard(lambda _: alive(self.at / len(self.held_out)), t.device):
                loss, n = eval_loss(t.model, [t._to_die(self.held_out.in_file(self.at, size))], finer=finer)
            self.at, self.total, self.labels = self.at + size, self.total + loss, self.labels + n
            if enough(min(1.0, self.at / len(self.held_out))) and self.at < len(self.held_out):
                return None
        t.evaluated = t.step
        return self.total / max(1, self.labels)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def seed_of(seed: int, step: int, micro: int) -> int:
    """The seed of all randomness in one micro-step: 63 bits of sha256 over (seed, step, micro-step)."""
    text = json.dumps([seed, step, micro]).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1
