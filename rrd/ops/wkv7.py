"""RWKV-7's recurrence as products of matrices, a chunk of tokens at a time, with a backward pass of its own.

Within a chunk of C tokens that begins at state S0 (rows are tokens, hats carry the decay since the chunk's start):

    A^ = a e^E   R^ = r e^G   K~ = k e^-G   B~ = b e^-G       G = cumsum log d,  E = G - log d
    U = M (A^ S0^T + A_ak V)                M = (I - A_ab)^-1,  A_xy = tril(X^ Y~^T), strictly where x is a
    Y = R^ S0^T + A_rk V + A_rb U
    S' = S0 diag(e_C) + V^T Ke + U^T Be     e_C = e^G at the last token,  Ke = K~ e_C,  Be = B~ e_C

Only U and S' wait for the chunk before; all else is done for every chunk at once. That is the delta rule of Yang et
al., 2024, generalized. RWKV-7's decay is bounded (log d > -e^-1/2), so e^-G stays far from fp32's limit at C = 32.
The reference is ``rrd.ops.reference.wkv7``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rrd.ops import choice, reference
from rrd.ops.cuda import wkv7 as kernel

CHUNK = 32


class _Chunks(NamedTuple):
    """What both passes need of all chunks: [B, H, n, C, K] or, for A_xy and M, [B, H, n, C, C]; e_C [B, H, n, 1, K]."""

    R: Tensor
    A: Tensor
    K: Tensor
    B: Tensor
    V: Tensor
    e_G: Tensor
    e_E: Tensor
    e_mG: Tensor
    e_C: Tensor
    A_ab: Tensor
    A_ak: Tensor
    A_rk: Tensor
    A_rb: Tensor
    M: Tensor


def _split(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, N] -> [B, H, n, C, N], zeros behind the end: with them the state stays as it is."""
    B, T, H, N = x.shape
    n = -(-T // chunk)
    if n * chunk != T:
        x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, n * chunk - T))
    return x.view(B, n, chunk, H, N).permute(0, 3, 1, 2, 4).contiguous()


def _join(x: Tensor, T: int) -> Tensor:
    """[B, H, n, C, N] -> [B, T, H, N]."""
    B, H, n, C, N = x.shape
    return x.permute(0, 2, 3, 1, 4).reshape(B, n * C, H, N)[:, :T]


def _prepare(r: Tensor, log_d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, chunk: int) -> _Chunks:
    r, w, k, v, a, b = (_split(x, chunk) for x in (r, log_d, k, v, a, b))
    G = w.cumsum(-2)
    e_G, e_E, e_mG = G.exp(), (G - w).exp_(), G.neg().exp_()
    A, R, K, B = a * e_E, r * e_G, k * e_mG, b * e_mG  # not in place: these may be the caller's own
    Kt, Bt = K.transpose(-1, -2), B.transpose(-1, -2)
    A_ab, A_ak = (A @ Bt).tril_(-1), (A @ Kt).tril_(-1)
    A_rb, A_rk = (R @ Bt).tril_(), (R @ Kt).tril_()
    eye = torch.eye(chunk, dtype=A.dtype, device=A.device)
    M = torch.linalg.solve_triangular(eye - A_ab, eye.expand_as(A_ab), upper=False, unitriangular=True)
    return _Chunks(R, A, K, B, v, e_G, e_E, e_mG, e_G[..., -1:, :], A_ab, A_ak, A_rk, A_rb, M)


def _states(c: _Chunks, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(S0 of every chunk [B, H, n, V, K], U [B, H, n, C, V], the state after the last one)."""
    Ke, Be = c.K * c.e_C, c.B * c.e_C
    MA, MV = c.M @ c.A, c.M @ (c.A_ak @ c.V)
    fresh = c.V.transpose(-1, -2) @ Ke  # what the chunk's own values bring in
    S0, U = torch.empty_like(fresh), torch.empty_like(c.V)
    for i in range(S0.shape[2]):
        S0[:, :, i] = state
        U[:, :, i] = MV[:, :, i] + MA[:, :, i] @ state.transpose(-1, -2)
        state = state * c.e_C[:, :, i] + fresh[:, :, i] + U[:, :, i].transpose(-1, -2) @ Be[:, :, i]
    return S0, U, state


def _state_grads(c: _Chunks, dY: Tensor, dS: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(gradient of the state after every chunk, of X = A^ S0^T + A_ak V, and of the first state)."""
    Be, Mt = c.B * c.e_C, c.M.transpose(-1, -2)
    dU_y, dS_y = c.A_rb.transpose(-1, -2) @ dY, dY.transpose(-1, -2) @ c.R
    after, dX = torch.empty_like(dS_y), torch.empty_like(dY)
    for i in reversed(range(after.shape[2])):
        after[:, :, i] = dS
        dX[:, :, i] = Mt[:, :, i] @ (dU_y[:, :, i] + Be[:, :, i] @ dS.transpose(-1, -2))
        dS = dS * c.e_C[:, :, i] + dS_y[:, :, i] + dX[:, :, i].transpose(-1, -2) @ c.A[:, :, i]
    return after, dX, dS


class _WKV7(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, r: Tensor, log_d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor,
                chunk: int) -> tuple[Tensor, Tensor]:
        c = _prepare(r, log_d, k, v, a, b, chunk)
        S0, U, last = _states(c, state)
        y = c.R @ S0.transpose(-1, -2) + c.A_rk @ c.V + c.A_rb @ U
        ctx.chunk = chunk
        ctx.save_for_backward(r, log_d, k, v, a, b, S0, last)
        return _join(y, r.shape[1]), last

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dlast: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, S0, last = ctx.saved_tensors
        T = inputs[0].shape[1]
        r, log_d, k, v, a, b = inputs
        c = _prepare(r, log_d, k, v, a, b, ctx.chunk)
        U = c.M @ (c.A @ S0.transpose(-1, -2) + c.A_ak @ c.V)
        dY = _split(dy, ctx.chunk)
        after, dX, dfirst = _state_grads(c, dY, dlast)
        grads = _chunk_grads(c, S0, U, dY, dX, after, last)
        return (*(_join(g, T) for g in grads), dfirst, None)


def _chunk_grads(c: _Chunks, S0: Tensor, U: Tensor, dY: Tensor, dX: Tensor, after: Tensor, last: Tensor
                 ) -> tuple[Tensor, ...]:
    """Gradients of r, log_d, k, v, a, b in every chunk, given those of its output, of X and of the state after it."""
    Vt, Ut = c.V.transpose(-1, -2), U.transpose(-1, -2)
    dA_ab, dA_ak, dA_rk, dA_rb = (dX @ Ut).tril_(-1), (dX @ Vt).tril_(-1), (dY @ Vt).tril_(), (dY @ Ut).tril_()
    t = torch.transpose
    dV = t(c.A_rk, -1, -2) @ dY + t(c.A_ak, -1, -2) @ dX + (c.K * c.e_C) @ t(after, -1, -2)
    dR = dY @ S0 + dA_rk @ c.K + dA_rb @ c.B
    dA = dX @ S0 + dA_ab @ c.B + dA_ak @ c.K
    dK = t(dA_rk, -1, -2) @ c.R + t(dA_ak, -1, -2) @ c.A + (c.V @ after).mul_(c.e_C)
    dB = t(dA_rb, -1, -2) @ c.R + t(dA_ab, -1, -2) @ c.A + (U @ after).mul_(c.e_C)
    ends = torch.cat([S0[:, :, 1:], last[:, :, None]], 2)  # the state after each chunk
    dG, dE = dR * c.R - dK * c.K - dB * c.B, dA * c.A
    d_log = _from_here_on(dG + dE) - dE + (ends * after).sum(-2, keepdim=True)
    return dR * c.e_G, d_log, dK * c.e_mG, dV, dA * c.e_E, dB * c.e_mG


def _from_here_on(x: Tensor) -> Tensor:
    """Sums over tokens t, t+1, … of the chunk."""
    return x.flip(-2).cumsum(-2).flip(-2)


def wkv7_chunked(
    r: Tensor, log_d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None, *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """y [B, T, H, V] and the state after the last token [B, H, V, K]. Shapes as in ``rrd.ops.reference.wkv7``.

    Gradients are exact in all seven, states included: a sequence may be run in pieces. All of one dtype, fp32 or fp64.
    """
    if state is None:
        state = r.new_zeros(r.shape[0], r.shape[2], v.shape[3], r.shape[3])
    y, last = _WKV7.apply(r, log_d, k, v, a, b, state, chunk)  # type: ignore[no-untyped-call]
    return y, last


def wkv7_as_chosen(r: Tensor, log_d: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor | None = None
                   ) -> tuple[Tensor, Tensor]:
    """The same by what ``rrd.ops.choice`` says for the die: kernel, chunks or reference."""
    if choice.wished("wkv7", r.device) == "reference":
        return reference.wkv7(r, log_d, k, v, a, b, state)
    heads_fit = r.dtype == torch.float32 and r.shape[-1] == v.shape[-1] == kernel.HEAD
    go = choice.launcher("wkv7", r.device) if heads_fit else None
    if go is None:
        return wkv7_chunked(r, log_d, k, v, a, b, state)
    return kernel.wkv7(go, r, log_d, k, v, a, b, state)
