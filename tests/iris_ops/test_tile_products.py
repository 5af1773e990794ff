"""The products of warp-specialised programs by weights with scales of groups, against float64, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from iris_ops.named import named
from iris_ops.planning.weights import BY_NAME
from iris_ops.quantised.packing import PACKINGS
import pytest
import torch

from tests import gluon_on_cpu
from tests.iris_ops.test_quantised import stored

BF16, LINE = torch.bfloat16, 128
pointer, shared, value = gluon_on_cpu.Pointer.of, gluon_on_cpu.Shared, gluon_on_cpu.value


def sums(mma: Any, A: torch.Tensor, B: torch.Tensor, col: int, steps: range, deep: int) -> torch.Tensor:
    """Multiply the blocks `steps` along K: of A, and of B from column `col` on, whose blocks are `deep` elements.

    Codes are widened before, as the widening warps do it, and the MMA warps multiply both halves of a line.
    """
    acc = mma.begin(col, value(steps.start))
    widens = hasattr(mma, "widen")
    places = mma.scales_at(col, steps.start) if widens else ()
    for step in steps:
        rows = A[:, LINE * step : LINE * (step + 1)]
        columns = torch.zeros(mma.BLOCK_N, deep, dtype=B.dtype)
        found = B[col : col + mma.BLOCK_N, deep * step : deep * (step + 1)]
        columns[: len(found), : found.shape[1]] = found
        if widens:
            mma.widen(shared(columns), mma.load_scales(places), step & 1)
            places = mma.after(places, step)
        acc = mma.await_last_but_one(mma.issue(shared(rows), shared(columns), acc, step & 1))
    return mma.result(acc).as_subclass(torch.Tensor)


def widened(policy: Any, scale: torch.Tensor, form: Any, N: int, high: int) -> Any:
    """Return the products of tiles of `high` rows by 128 of N columns in codes, with these scales."""
    _, widened_mma = gluon_on_cpu.products()
    groups, rows = LINE // form.group if form.group else 0, scale.flatten(1) if form.group else None
    scales = dict(scales=None, stride=None) if rows is None else dict(scales=pointer(rows), stride=rows.stride(0))
    last = value(scale.shape[1] * (form.group or 0) // LINE - 1 if groups else 0)
    codes = widened_mma.Codes(**scales, cols=N, last=last, GROUPS=groups, ZEROS=form.zeros, WIDEN=policy)
    barriers = shared(torch.zeros(2, 3, dtype=torch.int64)), shared(torch.zeros(2, 3, dtype=torch.int64))
    tile = SimpleNamespace(BLOCK_M=high, BLOCK_N=128, BLOCK_K=LINE)
    wide = shared(torch.full((2, 128, LINE // 2), torch.nan, dtype=BF16))
    return widened_mma.WidenedMma(SimpleNamespace(dtype=BF16), codes, wide, *barriers, tile, pipeline(8))


def pipeline(warps: int, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(ACC=SimpleNamespace(warps_per_cta=[warps, 1]), **more)


@pytest.mark.parametrize("high, wide", [(128, 256), (128, 128), (64, 128)])
def test_blocks_with_scales(high: int, wide: int) -> None:
    """Scales are far apart, and some are 0 or NaN."""
    scaled_mma, _ = gluon_on_cpu.products()
    N, K, col = 300, 640, 100
    draw = torch.Generator().manual_seed(high + wide)
    A, B = (torch.randn(n, K, generator=draw).mul_(20).to(torch.float8_e4m3fn) for n in (high, N))
    scales = torch.rand(N, 8, generator=draw) * 2.0 ** torch.randint(-30, 30, (N, 8), generator=draw)
    scales[col + 1, 2], scales[col + 2, 0], scales[col + 3] = 0, 0, 0
    scales[col + 5, 1:3] = torch.tensor([1e-38, 1e-38])
    scales[col + 7, 3] = torch.nan
    tile = SimpleNamespace(BLOCK_M=high, BLOCK_N=wide, BLOCK_K=LINE)
    described = SimpleNamespace(dtype=A.dtype)
    mma = scaled_mma.ScaledMma(
        described, described, pointer(scales), 8, N, value(4), tile, pipeline(8, TOGETHER=4)
    )  # fmt: skip
    for steps in (range(5), range(1, 4)):
        ends = slice(LINE * steps.start, LINE * steps.stop)
        numbers = (B.double() * scales.double().repeat_interleave(LINE, 1)[:, :K])[col : col + wide, ends]
        exact = A.double()[:, ends] @ numbers.t()
        bound = A.double()[:, ends].abs() @ numbers.abs().t()
        product = sums(mma, A, B, col, steps, LINE)[:, : numbers.shape[0]]
        has_nan = 3 in steps
        assert torch.equal(product.isnan(), exact.isnan()) and exact.isnan().any() == has_nan
        assert ((product - exact).abs() <= 1e-5 * bound)[~exact.isnan()].all()


@pytest.mark.parametrize("name", [name for name, form in BY_NAME.items() if form.widened_in_tiles])
def test_codes_widened(name: str) -> None:
    """To the same numbers as those of a restored weight."""
    form, N, K, col = BY_NAME[name], 200, 608, 90
    (weight, scale), numbers = stored(name, N, K, 7, "cpu")
    policy = gluon_on_cpu.Policy(named(form.widening))
    draw = torch.Generator().manual_seed(1)
    A = torch.zeros(64, 640, dtype=BF16)
    A[:, :K] = torch.randn(64, K, generator=draw).to(BF16)
    mma = widened(policy, scale, form, N, 64)
    for steps in (range(5), range(2, 4)):
        ends = slice(LINE * steps.start, min(K, LINE * steps.stop))
        part = (
            numbers[col : col + 128, ends] if form.group else (numbers / scale.double()[:, None])[col : col + 128, ends]
        )
        exact = A.double()[:, ends] @ part.to(BF16).double().t()
        product = sums(mma, A, weight.view(torch.int32), col, steps, policy.WORDS)[:, : part.shape[0]]
        assert (product - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize("name", ["int4/128", "fp8_block/64", "nvfp4", "int8_zeros"])
def test_scales_that_bf16_cannot_hold_cost_no_accuracy(name: str) -> None:
    """The error is that of weights rounded to bf16 once."""
    form, N, K = BY_NAME[name], 128, 512
    packing, policy = PACKINGS[form.packing], gluon_on_cpu.Policy(named(form.widening))
    draw = torch.Generator().manual_seed(3)
    codes, scales = packing.quantise(torch.randn(N, K, generator=draw), form.group, torch.float32)
    (scales[..., 0] if form.zeros else scales).mul_(torch.rand(N, K // form.group, generator=draw) + 0.5)
    if form.zeros:
        scales[..., 1] = torch.randint(-9, 9, (N, K // form.group), generator=draw)
    weight, scale = packing.pack(codes, scales, form.group, torch.float32)
    exact = packing.unpack(weight, scale, K, torch.float64)
    A = torch.randn(64, K, generator=draw).to(BF16)
    mma = widened(policy, scale, form, N, 64)
    product = sums(mma, A, weight.view(torch.int32), 0, range(4), policy.WORDS).double()
    true = A.double() @ exact.t()
    rounded = A.double() @ exact.to(BF16).double().t()
    assert (product - true).norm() <= 1.05 * (rounded - true).norm()
