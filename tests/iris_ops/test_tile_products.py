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

BF16, FP16, FP32, LINE = torch.bfloat16, torch.float16, torch.float32, 128
pointer, shared, value = gluon_on_cpu.Pointer.of, gluon_on_cpu.Shared, gluon_on_cpu.value


def sums(mma: Any, A: torch.Tensor, B: torch.Tensor, col: int, steps: range, deep: int) -> torch.Tensor:
    """Multiply the steps `steps` along K: of A, and of B from column `col` on, `deep` elements of it a step."""
    acc = mma.begin(col, value(steps.start))
    for step in steps:
        rows = A[:, mma.BLOCK_K * step : mma.BLOCK_K * (step + 1)]
        columns = torch.zeros(mma.BLOCK_N, deep, dtype=B.dtype)
        found = B[col : col + mma.BLOCK_N, deep * step : deep * (step + 1)]
        columns[: len(found), : found.shape[1]] = found
        if mma.BLOCKS > 1:
            columns = columns[None]  # a line
        for i, block in enumerate(rows.chunk(mma.BLOCKS, 1)):
            acc = mma.await_last_but_one(mma.issue(shared(block), shared(columns), acc, i))
    return mma.result(acc).as_subclass(torch.Tensor)


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


def codes_of(scale: torch.Tensor, form: Any, cols: int, last: int) -> Any:
    """Return the codes of a weight with these scales, as `hopper/operands.py` describes them."""
    _, widened_mma = gluon_on_cpu.products()
    groups, policy = LINE // form.group if form.group else 0, gluon_on_cpu.Policy(named(form.widening))
    words = scale.flatten(1).view(torch.int32) if groups else None
    scales = (None, None) if words is None else (pointer(words), words.stride(0))
    return widened_mma.Codes(
        *scales, cols=cols, last=value(last), GROUPS=groups, ZEROS=form.zeros, WIDEN=policy, DTYPE=scale.dtype,
        WORDS=groups * (1 + form.zeros) * scale.itemsize // 4,
    )  # fmt: skip


@pytest.mark.parametrize("name", [name for name, form in BY_NAME.items() if form.widened_in_tiles])
def test_codes_widened(name: str) -> None:
    """To the same numbers as those of a restored weight."""
    _, widened_mma = gluon_on_cpu.products()
    form, N, K, col = BY_NAME[name], 200, 608, 90
    (weight, scale), numbers = stored(name, N, K, 7, "cpu")
    codes, policy = weight.view(torch.int32), gluon_on_cpu.Policy(named(form.widening))
    draw = torch.Generator().manual_seed(1)
    A = torch.zeros(64, 768, dtype=BF16)
    A[:, :K] = torch.randn(64, K, generator=draw).to(BF16)
    tile = SimpleNamespace(BLOCK_M=64, BLOCK_N=128, BLOCK_K=LINE)
    mma = widened_mma.WidenedMma(codes_of(scale, form, N, 4), tile, pipeline(8))
    for steps in (range(5), range(1, 3)):
        ends = slice(LINE * steps.start, min(K, LINE * steps.stop))
        part = (
            numbers[col : col + 128, ends] if form.group else (numbers / scale.double()[:, None])[col : col + 128, ends]
        )
        exact = A.double()[:, ends] @ part.to(BF16).double().t()
        product = sums(mma, A, codes, col, steps, policy.WORDS)[:, : part.shape[0]]
        assert (product - exact).abs().max() <= 1e-5 * exact.abs().max()


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("int4/128", FP32), ("int4", FP16), ("fp8_block/64", FP32), ("nvfp4", FP32), ("int8/64", FP16),
        ("int8_zeros", FP32), ("int8_zeros", FP16), ("int4_zeros", BF16), ("int8_zeros/32", BF16),
    ],
)  # fmt: skip
def test_scales_that_bf16_cannot_hold_cost_no_accuracy(name: str, dtype: torch.dtype) -> None:
    """The error is that of weights rounded to bf16 once."""
    _, widened_mma = gluon_on_cpu.products()
    form, N, K = BY_NAME[name], 128, 512
    packing, policy = PACKINGS[form.packing], gluon_on_cpu.Policy(named(form.widening))
    draw = torch.Generator().manual_seed(3)
    codes, scales = packing.quantise(torch.randn(N, K, generator=draw), form.group, dtype)
    (scales[..., 0] if form.zeros else scales).mul_(torch.rand(N, K // form.group, generator=draw) + 0.5)
    if form.zeros:
        scales[..., 1] = torch.randint(-9, 9, (N, K // form.group), generator=draw)
    weight, scale = packing.pack(codes, scales.to(dtype).float(), form.group, dtype)
    exact = packing.unpack(weight, scale, K, torch.float64)
    A = torch.randn(64, K, generator=draw).to(BF16)
    tile = SimpleNamespace(BLOCK_M=64, BLOCK_N=N, BLOCK_K=LINE)
    mma = widened_mma.WidenedMma(codes_of(scale, form, N, 3), tile, pipeline(8))
    product = sums(mma, A, weight.view(torch.int32), 0, range(4), policy.WORDS).double()
    true = A.double() @ exact.t()
    rounded = A.double() @ exact.to(BF16).double().t()
    assert (product - true).norm() <= 1.05 * (rounded - true).norm()
