"""The peer: RWKV-7 in plain torch with the recurrence token by token, as public training code falls back to on CPUs.

BlinkDL's RWKV-LM (``RWKV-v7/train_temp/src/model.py``), reduced to what trains: autograd, torch.optim.AdamW, logits
whole. LoRA as PEFT computes it. The recurrence is, operation by operation, what ``rwkv_v7_demo.py`` and the trainers
that descend from it (RWKV-PEFT and others) run without CUDA: products of matrices, results written into one tensor.
flash-linear-attention's may take its place.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Recurrence = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""r, w, k, v, a, b -> y, all [B, T, C]; a channel decays by exp(-exp(w))."""


class Peer(nn.Module):
    """``tensors`` by BlinkDL's names. ``rank`` > 0: only adapters on all linears of the blocks are trained."""

    def __init__(self, tensors: dict[str, Tensor], rank: int, recur: Recurrence) -> None:
        super().__init__()
        self.recur = recur
        self.C = tensors["emb.weight"].shape[1]
        self.L = 1 + max(int(n.split(".")[1]) for n in tensors if n.startswith("blocks."))
        self.w = nn.ParameterDict({n.replace(".", "_"): nn.Parameter(t.clone(), requires_grad=not rank)
                                   for n, t in tensors.items()})
        self.lora = nn.ParameterDict()
        for name, t in tensors.items():
            if rank and name.startswith("blocks.") and t.dim() == 2 and name.endswith(".weight"):
                key = name.replace(".", "_")
                self.lora[key + "_A"] = nn.Parameter(torch.randn(rank, t.shape[1]) / math.sqrt(t.shape[1]))
                self.lora[key + "_B"] = nn.Parameter(torch.zeros(t.shape[0], rank))

    def get(self, name: str) -> Tensor:
        return self.w[name.replace(".", "_")]

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.get(f"{name}.weight").T
        key = f"{name}.weight".replace(".", "_")
        if key + "_A" in self.lora:
            y = y + (x @ self.lora[key + "_A"].T) @ self.lora[key + "_B"].T * 2.0
        return y

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (self.C,), self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def forward(self, idx: Tensor) -> Tensor:
        x, v_first = self.norm("blocks.0.ln0", F.embedding(idx, self.get("emb.weight"))), None
        for i in range(self.L):
            at = f"blocks.{i}"
            y, v_first = self.time_mix(f"{at}.att", self.norm(f"{at}.ln1", x), v_first)
            x = x + y
            n = self.norm(f"{at}.ln2", x)
            k = n + (F.pad(n, (0, 0, 1, -1)) - n) * self.get(f"{at}.ffn.x_k")
            x = x + self.linear(f"{at}.ffn.value", torch.relu(self.linear(f"{at}.ffn.key", k)) ** 2)
        return self.norm("ln_out", x) @ self.get("head.weight").T

    def time_mix(self, at: str, x: Tensor, v_first: Tensor | None) -> tuple[Tensor, Tensor]:
        (B, T, C), H, N = x.shape, self.C // 64, 64

        def p(name: str) -> Tensor:
            return self.get(f"{at}.{name}")

        xx = F.pad(x, (0, 0, 1, -1)) - x
        xr, xw, xk, xv, xa, xg = (x + xx * p(f"x_{s}") for s in "rwkvag")
        r, k, v = self.linear(f"{at}.receptance", xr), self.linear(f"{at}.key", xk), self.linear(f"{at}.value", xv)
        w = -F.softplus(-(p("w0") + torch.tanh(xw @ p("w1")) @ p("w2"))) - 0.5
        if v_first is None:
            v_first = v
        else:
            v = v + (v_first - v) * torch.sigmoid(p("v0") + (xv @ p("v1")) @ p("v2"))
        a = torch.sigmoid(p("a0") + (xa @ p("a1")) @ p("a2"))
        g = torch.sigmoid(xg @ p("g1")) @ p("g2")
        kk = F.normalize((k * p("k_k")).view(B, T, H, N), dim=-1)
        k = k * (1 + (a - 1) * p("k_a"))
        y = self.recur(r, w, k, v, -kk.view(B, T, C), (kk * a.view(B, T, H, N)).view(B, T, C))
        y = F.group_norm(y.view(B * T, C), H, p("ln_x.weight"), p("ln_x.bias"), 64e-5).view(B, T, C)
        rk = (r.view(B, T, H, N) * k.view(B, T, H, N) * p("r_k")).sum(-1, keepdim=True)
        return self.linear(f"{at}.output", (y + (rk * v.view(B, T, H, N)).view(B, T, C)) * g), v_first


def recurrence(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    B, T, C = r.shape
    H, N = C // 64, 64
    r, k, v, a, b = (t.view(B, T, H, N) for t in (r, k, v, a, b))
    w = torch.exp(-torch.exp(w.view(B, T, H, N)))
    y, state = torch.zeros(B, T, H, N), torch.zeros(B, H, N, N)

    def column(x: Tensor, t: int) -> Tensor:
        return x[:, t].view(B, H, N, 1)

    def row(x: Tensor, t: int) -> Tensor:
        return x[:, t].view(B, H, 1, N)

    for t in range(T):
        state = state * row(w, t) + state @ column(a, t) @ row(b, t) + column(v, t) @ row(k, t)
        y[:, t] = (state @ column(r, t)).view(B, H, N)
    return y.view(B, T, C)


def careful_recurrence(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The same as one would write it for speed: outer products elementwise, results put together at the end."""
    B, T, C = r.shape
    H, N = C // 64, 64
    r, w, k, v, a, b = (t.view(B, T, H, N) for t in (r, torch.exp(-torch.exp(w)), k, v, a, b))
    state, ys = torch.zeros(B, H, N, N), []
    for t in range(T):
        sa = state @ a[:, t, :, :, None]
        state = state * w[:, t, :, None, :] + sa @ b[:, t, :, None, :] + v[:, t, :, :, None] @ k[:, t, :, None, :]
        ys.append((state @ r[:, t, :, :, None]).view(B, 1, C))
    return torch.cat(ys, 1)


def fla_naive(where: Path) -> Recurrence:
    """flash-linear-attention's plain recurrence, which is of one file (and wants einops); the package wants Triton.

    ``where`` its wheel is unpacked.
    """
    file = where / "fla" / "ops" / "generalized_delta_rule" / "dplr" / "naive.py"
    spec = importlib.util.spec_from_file_location("fla_naive", file)
    assert spec and spec.loader
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))

    def step(r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> Tensor:
        B, T, C = r.shape
        r, w, k, v, a, b = (t.view(B, T, C // 64, 64).transpose(1, 2) for t in (r, w, k, v, a, b))
        y, _ = module.dplr_recurrence(r * 8.0, k, v, a, b, -torch.exp(w))  # it divides by the root of 64
        return y.transpose(1, 2).reshape(B, T, C)

    return step
