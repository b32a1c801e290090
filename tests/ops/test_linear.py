"""Groups of linears against the same products written plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rrd.models.layers import Linear, Lora
from rrd.ops import stored
from rrd.ops.grad import place_of
from rrd.ops.linear import Group
from rrd.optim import AdamW


def linears(widths: tuple[int, ...], *, bias: bool = False, trained: bool = False, rank: int = 0,
            dtype: torch.dtype = torch.float32, neighbours: bool = True) -> list[Linear]:
    g = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(widths), 6, generator=g).to(dtype)
    modules = []
    for rows in whole.split(list(widths)):
        m = Linear(6, len(rows), bias=bias)
        m.weight = nn.Parameter(rows if neighbours else rows.clone(), requires_grad=trained)
        if bias:
            m.bias = nn.Parameter(torch.randn(len(rows), generator=g), requires_grad=trained)
        if rank:
            m.lora = Lora(torch.randn(rank, 6, generator=g), torch.randn(len(rows), rank, generator=g), scale=0.5,
                          dropout=0.0)
        modules.append(m)
    return modules


def plain(modules: list[Linear], x: Tensor) -> Tensor:
    ys = []
    for m in modules:
        y = x @ m.weight.to(x.dtype).t()
        if m.bias is not None:
            y = y + m.bias
        if m.lora is not None:
            y = y + m.lora.scale * (x @ m.lora.a.t() @ m.lora.b.t())
        ys.append(y)
    return torch.cat(ys, -1)


CASES: list[dict[str, Any]] = [
    {"widths": (4,)}, {"widths": (4, 3, 3), "bias": True}, {"widths": (4, 3), "rank": 2},
    {"widths": (4, 3), "rank": 2, "bias": True, "neighbours": False}, {"widths": (5,), "trained": True, "bias": True},
    {"widths": (4, 3, 2), "trained": True}, {"widths": (4, 3), "trained": True, "neighbours": False},
    {"widths": (4, 3), "rank": 2, "dtype": torch.bfloat16}]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_products_and_gradients_are_the_plain_ones(case: dict[str, Any], with_residual: bool, flat: bool,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "BLOCK", 12)  # two rows of a bf16 weight at a time
    ours, theirs = linears(**case), linears(**case)
    trained = [p for m in ours for p in m.parameters() if p.requires_grad]
    if flat and trained:
        AdamW([(str(i), p) for i, p in enumerate(trained)])
    group = Group(*ours)
    for accumulated in (1, 2):
        x = torch.randn(2, 5, 6, requires_grad=True)
        z = x.detach().requires_grad_()
        residual = torch.randn(2, 5, sum(case["widths"]), requires_grad=True) if with_residual else None
        y, expected = group(x, residual), plain(theirs, z)
        if residual is not None:
            expected = expected + residual
        torch.testing.assert_close(y, expected)
        dy = torch.randn_like(y)
        y.backward(dy)
        expected.backward(dy)
        torch.testing.assert_close(x.grad, z.grad)
        for m, n in zip(ours, theirs, strict=True):
            for p, q in zip(m.parameters(), n.parameters(), strict=True):
                if q.requires_grad:
                    torch.testing.assert_close(place_of(p).view, q.grad, msg=f"after {accumulated}")


def test_a_frozen_input_gets_no_gradient_and_costs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from rrd.ops import linear

    def never(*_: object) -> Tensor:
        raise AssertionError("the gradient of a frozen input was computed")

    monkeypatch.setattr(linear, "_input_grad", never)
    modules = linears((4,), rank=2)
    Group(*modules)(torch.randn(3, 6)).sum().backward()
    assert place_of(modules[0].lora.a).begun  # type: ignore[union-attr]


def test_a_group_follows_parameters_that_move() -> None:
    modules = linears((4, 3), rank=2)
    group, x = Group(*modules), torch.randn(3, 6)
    before = group(x)
    optimizer = AdamW([(f"{i}{n}", p) for i, m in enumerate(modules) for n, p in m.named_parameters() if "lora" in n])
    assert torch.equal(group(x), before)
    optimizer.flat["param"].zero_()
    torch.testing.assert_close(group(x), x @ torch.cat([m.weight for m in modules]).t())
