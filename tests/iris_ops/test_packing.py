"""Packed weights of each format: exact round trips, parts packed separately, nearest codes, and refusals."""

from __future__ import annotations

from iris.errors import ArgumentError, DtypeError, ShapeError
from iris_ops.quantised import packing
from iris_ops.quantised.packing import PACKINGS, Packing
import pytest
import torch

FORMS = [(each, group) for each in PACKINGS.values() for group in each.groups if not each.zeros]
NAMES = [f"{each.name} {group}" for each, group in FORMS]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def draw(form: Packing, group: int | None, N: int, K: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales. All scales are numbers of the format's first dtype of scales."""
    random = torch.Generator().manual_seed(seed)
    scales = torch.rand(N, *(() if group is None else (-(-K // group),)), generator=random) + 0.01
    scales = 2.0 ** (scales * 40 - 30).round() if form is packing.MXFP4 else scales.bfloat16().float()
    if form.dtype == torch.float8_e4m3fn:
        return torch.randn(N, K, generator=random).mul_(30).to(form.dtype), scales
    return torch.randint(0, 256 if form is packing.INT8 else 16, (N, K), generator=random, dtype=torch.uint8), scales


def numbers(form: Packing, codes: torch.Tensor) -> torch.Tensor:
    """What codes stand for, by the format's definition."""
    if form.dtype == torch.float8_e4m3fn:
        return codes.double()
    if form in (packing.INT4, packing.INT8):
        return codes.double() - (8 if form is packing.INT4 else 128)
    return torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)[codes.long()]


@pytest.mark.parametrize("form, group", FORMS, ids=NAMES)
@pytest.mark.parametrize("N, K", [(3, 256), (16, 96), (5, 2880), (1, 1472), (7, 20), (0, 128), (2, 0)])
def test_there_and_back(form: Packing, group: int | None, N: int, K: int) -> None:
    codes, scales = draw(form, group, N, K, N + K)
    weight, scale = form.pack(codes, scales, group)
    assert [(tuple(each.shape), each.dtype) for each in (weight, scale)] == [*form.stored(N, K, group)]
    assert torch.equal(form.codes(weight, scale, K).view(torch.uint8), codes.view(torch.uint8)) or not codes.numel()
    by_entry = scales[:, None] if group is None else scales.repeat_interleave(group, 1)[:, :K]
    exact = numbers(form, codes) * by_entry.double()
    assert torch.equal(form.unpack(weight, scale, K, torch.float64), exact)
    assert torch.equal(form.unpack(weight, scale, K, torch.bfloat16), exact.float().bfloat16())
    if group is not None and K:
        assert form.group_of(weight, scale) == group
        assert scale.stride(0) * scale.itemsize % 16 == 0 and weight.stride(0) * weight.itemsize % 16 == 0


@pytest.mark.parametrize("form, group", FORMS, ids=NAMES)
def test_rows_are_filled_apart(form: Packing, group: int | None) -> None:
    """Parts of a merged weight, packed at any row, have the same bytes as the whole."""
    codes, scales = draw(form, group, 23, 320, 5)
    whole = form.pack(codes, scales, group)
    filled = [torch.empty(shape, dtype=dtype) for shape, dtype in form.stored(23, 320, group)]
    for first, size in ((0, 3), (3, 13), (16, 7)):
        parts = form.pack(codes.narrow(0, first, size), scales.narrow(0, first, size), group)
        for tensor, part in zip(filled, parts, strict=True):
            tensor.narrow(0, first, size).copy_(part)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, filled, strict=True))


@pytest.mark.parametrize("form, group", FORMS, ids=NAMES)
def test_the_nearest_code(form: Packing, group: int | None) -> None:
    """No other code of the same scale is nearer; entries are of several magnitudes, and some rows are zeros."""
    random = torch.Generator().manual_seed(3)
    exact = torch.randn(12, 320, generator=random) * 2.0 ** torch.randint(-9, 9, (12, 1), generator=random)
    exact[3] = 0
    codes, scales = form.quantise(exact, group)
    by_entry = (scales[:, None] if group is None else scales.repeat_interleave(group, 1)[:, :320]).double()
    error = (numbers(form, codes) * by_entry - exact).abs()
    every = torch.arange(256 if form is packing.INT8 else 16).to(torch.uint8)
    if form.dtype == torch.float8_e4m3fn:
        every = torch.arange(256).to(torch.uint8).view(form.dtype)
        every = every[every.float().isfinite()]
    others = (numbers(form, every)[:, None, None] * by_entry - exact).abs().amin(0)
    assert (error - others <= 1e-6 * others + 2**-16 * by_entry).all()  # the quotient is rounded to float32
    assert not (numbers(form, codes)[3] != 0).any() and scales.isfinite().all()
    packed = form.unpack(*form.pack(codes, scales, group), 320, torch.float64)
    assert torch.equal(packed, numbers(form, codes) * by_entry)


def test_halves_go_to_even_codes() -> None:
    borders = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -5.0] + [0.0] * 22])
    codes, scales = packing.MXFP4.quantise(borders, 32)
    assert scales.item() == 1 and codes[0, :10].tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 14]


def test_refused() -> None:
    codes, scales = draw(packing.INT4, 32, 4, 64, 1)
    with pytest.raises(ArgumentError, match="group is 8 for weights in int4; expected one of 128, 64, 32, 16, None"):
        packing.INT4.pack(codes, scales, 8)
    with pytest.raises(ShapeError, match=r"scales are \(4, 2\); expected \(4, 1\)"):
        packing.INT4.pack(codes, scales, 64)
    with pytest.raises(ArgumentError, match="a scale is 0.1.*, no number of torch.bfloat16"):
        packing.INT4.pack(codes, torch.full_like(scales, 0.1), 32)
    with pytest.raises(DtypeError, match="scale_dtype is torch.uint8 for weights in int4"):
        packing.INT4.pack(codes, scales, 32, torch.uint8)
    with pytest.raises(ArgumentError, match="a scale is 3.0 for weights in mxfp4; expected a power of two"):
        packing.MXFP4.pack(codes, torch.full_like(scales, 3.0), 32)
    with pytest.raises(
        DtypeError, match="codes have dtype torch.uint8 for weights in fp8_block; expected torch.float8"
    ):
        packing.FP8_BLOCK.pack(codes, scales, 32)
    with pytest.raises(ShapeError, match="scale has 7 columns for rows of 1024 entries; expected 8, 16, 32"):
        packing.INT4.group_by(128, 7)
