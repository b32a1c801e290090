"""The compiled ops against torch's, in outputs, states and every gradient, trained parameters included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rrd.ops import native, rwkv7, rwkv7_torch
from rrd.ops.grad import opened, place_of
from rrd.ops.rwkv7_torch import Core

if native.kernels() is None:
    pytest.skip(native.why_not(), allow_module_level=True)

Op = Callable[..., Any]


class Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64) * scale + mean


def outcome(op: Op, inputs: Sequence[Tensor | None], params: Sequence[Tensor | None], dtype: torch.dtype,
            wide: torch.dtype) -> list[Tensor]:
    """Outputs and all gradients of ``op(inputs, params)``, each output weighed by random numbers."""
    xs = [None if x is None else x.detach().clone().to(dtype).requires_grad_() for x in inputs]
    ps = [None if p is None else nn.Parameter(p.detach().clone().to(wide)) for p in params]
    outputs = op(xs, ps)
    g = Random(9)
    torch.autograd.backward(outputs, [g(*y.shape).to(y.dtype) for y in outputs])
    found = [y.detach() for y in outputs] + [x.grad for x in xs if x is not None]
    for p in ps:
        if p is not None:
            found.append((p.grad if p.grad is not None else place_of(p).view).reshape(-1))
    return found


def assert_same(op: Op, reference: Op, inputs: Sequence[Tensor | None], params: Sequence[Tensor | None],
                dtype: torch.dtype = torch.float32, tolerance: float = 2e-5) -> None:
    got = outcome(op, inputs, params, dtype, torch.float32)
    expected = outcome(reference, inputs, params, torch.float64, torch.float64)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        error = float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-6))
        assert error <= tolerance, (i, error)


def core_of(params: Sequence[Tensor | None]) -> Core:
    return Core(*params)  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("B", "T", "state"), [(1, 1, False), (2, 40, True), (1, 32, False), (2, 75, True)])
def test_time_mix(first: bool, B: int, T: int, state: bool) -> None:
    H, C, r = 3, 192, Random(T)
    inputs = [r(B, T, C) for _ in range(7)] + [r(B, T, C)]
    if first:
        inputs[5] = inputs[7] = None  # type: ignore[call-overload]
    s = r(B, H, 64, 64, scale=0.3) if state else None
    params = [r(C, mean=-2.0), r(C), None if first else r(C), r(C, mean=1.0), r(C, mean=1.0), r(H, 64), r(C), r(C)]

    def of(module: Any) -> Op:
        return lambda xs, ps: module.time_mix(*xs[:-1], core_of(ps), xs[-1])

    assert_same(of(rwkv7), of(rwkv7_torch), [*inputs, s], params)


def test_time_mix_of_a_key_of_zeros() -> None:
    H, C, r = 1, 64, Random(3)
    inputs: list[Tensor | None] = [r(1, 9, C) for _ in range(8)]
    inputs[2] = torch.zeros(1, 9, C, dtype=torch.float64)
    params = [r(C), r(C), r(C), r(C), r(C), r(H, 64), r(C), r(C)]
    xs = [x.float().requires_grad_() for x in inputs if x is not None]
    y, _ = rwkv7.time_mix(*xs, core_of([p.float() for p in params]), None)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in xs)


@pytest.mark.parametrize("n_mu", [1, 6])
@pytest.mark.parametrize(("T", "before"), [(1, True), (17, False), (17, True), (64, True), (65, False), (200, True)])
def test_norm_shift(n_mu: int, T: int, before: bool) -> None:
    B, C, r = 2, 128, Random(T)
    inputs = [r(B, T, C, scale=2.0, mean=0.5), r(B, C) if before else None]
    params = [r(C), r(C), *(r(1, 1, C) for _ in range(n_mu))]

    def of(module: Any) -> Op:
        def op(xs: Any, ps: Any) -> list[Tensor]:
            mixes, last = module.norm_shift(xs[0], ps[0], ps[1], ps[2:], xs[1], 1e-5)
            return [*mixes, last]
        return op

    assert_same(of(rwkv7), of(rwkv7_torch), inputs, params)


def test_relu2() -> None:
    x = Random(0)(3, 5, 64)
    assert_same(lambda xs, _: [rwkv7.relu2(xs[0] * 1.0)], lambda xs, _: [torch.relu(xs[0]).square()], [x], [])
    assert rwkv7.relu2(torch.tensor([float("nan")] * 64)).isnan().all()


def test_in_bf16_they_are_as_near_as_bf16_is() -> None:
    H, C, r = 2, 128, Random(1)
    inputs = [r(1, 40, C).bfloat16().double() for _ in range(8)]
    params = [r(C, mean=-2.0), r(C), r(C), r(C, mean=1.0), r(C, mean=1.0), r(H, 64), r(C), r(C)]
    assert_same(lambda xs, ps: rwkv7.time_mix(*xs, core_of(ps), None),
                lambda xs, ps: rwkv7_torch.time_mix(*xs, core_of(ps), None), inputs, params, torch.bfloat16, 2e-2)
    x = r(2, 9, C).bfloat16().double()
    assert_same(lambda xs, _: [rwkv7.relu2(xs[0] * 1.0)], lambda xs, _: [torch.relu(xs[0]).square()], [x], [],
                torch.bfloat16, 2e-2)
    assert_same(lambda xs, ps: list(rwkv7.norm_shift(xs[0], ps[0], ps[1], ps[2:], None, 1e-5)[0]),
                lambda xs, ps: list(rwkv7_torch.norm_shift(xs[0], ps[0], ps[1], ps[2:], None, 1e-5)[0]),
                [x], [r(C), r(C), r(C)], torch.bfloat16, 2e-2)


def test_any_number_of_threads_gives_the_same_bits() -> None:
    H, C, r = 3, 192, Random(1)
    xs = [r(2, 150, C).float() for _ in range(8)]
    params = core_of([r(C).float() for _ in range(5)] + [r(H, 64).float(), r(C).float(), r(C).float()])
    weight, bias, *mus = (r(C).float().requires_grad_() for _ in range(5))

    def results() -> list[Tensor | None]:
        ys = [x.clone().requires_grad_() for x in xs]
        y, state = rwkv7.time_mix(*ys, params, None)
        mixes, last = rwkv7.norm_shift(rwkv7.relu2(y * 1.0), weight, bias, mus, None, 1e-5)
        grads = [opened(p) for p in (weight, bias, *mus)]
        for g in grads:
            g.zero_()
        (torch.stack([*mixes]).square().sum() + last.sum() + state.sum()).backward()
        return [y, state, last, *mixes, *(t.grad for t in ys), *(g.clone() for g in grads)]

    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(results())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))  # type: ignore[arg-type]
