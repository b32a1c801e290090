from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rrd.ops.grad import place_of
from rrd.optim import adamw
from rrd.optim.adamw import AdamW


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    g = torch.Generator().manual_seed(0)
    shapes = {"norm": (5,), "w": (4, 3), "bias": (3,), "v": (2, 7)}
    return [(n, nn.Parameter(torch.randn(s, generator=g).to(dtype))) for n, s in shapes.items()]


def set_grads(optimizer: AdamW, seed: int) -> None:
    optimizer.zero_grad()
    g = torch.Generator().manual_seed(seed)
    by_name = dict(zip(optimizer.names, optimizer._params, strict=True))
    for name in sorted(by_name):
        by_name[name].grad = torch.randn(by_name[name].shape, generator=g).to(by_name[name].dtype)


def test_matrices_stand_first_and_parameters_become_views() -> None:
    named = parameters()
    before = {n: p.clone() for n, p in named}
    optimizer = AdamW(named)
    assert optimizer.names == ["w", "v", "norm", "bias"]
    assert [s.offset for s in optimizer.layout] == [0, 12, 26, 31]
    assert optimizer.flat["param"].numel() == 34
    optimizer.flat["param"][0] = 42.0
    assert named[1][1][0, 0] == 42.0
    assert all(torch.equal(p.flatten()[1:], before[n].flatten()[1:]) for n, p in named)


@pytest.mark.parametrize("fused", [True, False])
def test_steps_equal_torchs(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if fused and not adamw._FUSED:
        pytest.skip("this torch has no fused AdamW for CPUs")
    monkeypatch.setattr(adamw, "_FUSED", fused)
    ours, theirs = parameters(), parameters()
    optimizer = AdamW(ours, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    reference = torch.optim.AdamW(
        [{"params": [p for _, p in theirs if p.dim() > 1], "weight_decay": 0.1},
         {"params": [p for _, p in theirs if p.dim() == 1], "weight_decay": 0.0}], betas=(0.8, 0.95), eps=1e-6)
    for step in range(5):
        lr = 0.1 / (step + 1)
        set_grads(optimizer, step)
        for name, p in theirs:
            p.grad = dict(ours)[name].grad.clone()
        norm = optimizer.grad_norm()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_([p for _, p in theirs], 1.0)), rel=1e-6)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        optimizer.step(lr, scale=min(1.0, 1.0 / (norm + 1e-6)))
        for (_, p), (_, q) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    assert optimizer.steps == 5


def test_written_and_autograd_gradients_add_up_and_missing_ones_are_zero() -> None:
    named = parameters()
    w, v = named[1][1], named[3][1]
    optimizer = AdamW(named)
    optimizer.grad.fill_(float("nan"))  # left over from the last window
    optimizer.zero_grad()
    place_of(w).view.fill_(2.0)
    place_of(w).begun = True
    (3.0 * w.sum() + v.sum()).backward()
    optimizer.gather()
    got = {s.name: optimizer.view("grad", s) for s in optimizer.layout}
    assert torch.equal(got["w"], torch.full((4, 3), 5.0))
    assert torch.equal(got["v"], torch.ones(2, 7))
    assert not got["norm"].any()
    assert optimizer.grad_norm() == pytest.approx((12 * 25 + 14) ** 0.5)


def test_restoring_the_flat_buffers_restores_everything() -> None:
    one, two = AdamW(parameters()), AdamW(parameters())
    for step in range(3):
        set_grads(one, step)
        one.gather()
        one.step(0.1)
    for key, buffer in one.flat.items():
        two.flat[key].copy_(buffer)
    two.steps = one.steps
    for optimizer in (one, two):
        set_grads(optimizer, 9)
        optimizer.gather()
        optimizer.step(0.1, scale=0.5)
    assert all(torch.equal(one.flat[k], two.flat[k]) for k in one.flat)


def test_bf16_parameters_follow_an_fp32_master() -> None:
    named = parameters(torch.bfloat16)
    optimizer = AdamW(named)
    w = named[1][1]
    assert w.dtype == torch.bfloat16
    start = optimizer.flat["param"].clone()
    for step in range(50):  # each far below what bf16 can add
        set_grads(optimizer, step)
        for p in optimizer._params:
            p.grad = torch.ones_like(p)
        optimizer.gather()
        optimizer.step(1e-5)
    moved = optimizer.flat["param"] - start
    torch.testing.assert_close(moved, torch.full_like(moved, -50e-5), atol=1e-5, rtol=0.05)
    assert all(torch.equal(p, optimizer.view("param", s).bfloat16())
               for p, s in zip(optimizer._params, optimizer.layout, strict=True))
    optimizer.flat["param"].fill_(1.0)
    optimizer.refresh()
    assert torch.equal(w, torch.ones_like(w))


def test_a_parameter_given_twice_is_our_own_mistake() -> None:
    p = nn.Parameter(torch.ones(2))
    with pytest.raises(AssertionError):
        AdamW([("a", p), ("b", p)])


def test_the_norm_of_many_elements_is_right_whoever_adds_them_up() -> None:
    """Of 8 million elements, torch's own norm of a vector is 0.02 % off."""
    optimizer = AdamW([("w", nn.Parameter(torch.zeros(8_000_001)))])
    optimizer.grad.copy_(torch.randn(8_000_001, generator=torch.Generator().manual_seed(0)))
    place_of(optimizer._params[0]).begun = True
    expected = float(optimizer.grad.double().square().sum().sqrt())
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += [optimizer.grad_norm(), optimizer.update(0.0, 0.0, []).norm]
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 1
    assert found[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("size", [1, 4097, 1 << 18, (1 << 18) + 1, (1 << 18) + 4095, (1 << 18) + 4096])
def test_the_norm_of_any_number_of_elements(size: int) -> None:
    flat = torch.arange(1.0, size + 1)
    assert float(adamw._norm(flat)) == pytest.approx(math.sqrt(size * (size + 1) * (2 * size + 1) / 6), rel=1e-5)
