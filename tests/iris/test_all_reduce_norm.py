"""`ctx.ccl.all_reduce_norm`: all-reduce, residual sum and RMSNorm in one kernel, compared with float64."""

from __future__ import annotations

from unittest.mock import patch

import iris
from iris.ccl import norm
from iris.errors import ArgumentError, DtypeError, ShapeError
import pytest
import torch

from tests.checks import poison
from tests.harness import WORLDS, both, run_ranks

pytestmark = both

FP8 = torch.float8_e4m3fn
STEPS = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-22}
SHAPES = [(1, 8), (3, 96), (5, 130), (2, 1000), (7, 33)]


def parts_of(world: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Return each rank's part, residual and weight, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world + 1)]
    return [*parts, (1 + 0.3 * torch.randn(shape[-1], generator=generator)).to(dtype)]


def check_call(
    ctx: iris.Iris, shape: tuple[int, ...], dtype: torch.dtype, seed: int, fp8: bool = False, in_place: bool = True
) -> torch.Tensor:
    *parts, before, weight = (t.to(ctx.device) for t in parts_of(ctx.num_ranks, shape, dtype, seed))
    scale = torch.tensor([0.03], device=ctx.device) if fp8 else None
    inp, residual = parts[ctx.cur_rank].clone(), before.clone()
    out = torch.empty(shape, dtype=FP8 if fp8 else dtype, device=ctx.device)
    poison(out.view(torch.uint8) if fp8 else out)
    if in_place:
        ctx.ccl.all_reduce_norm(out, residual, inp, weight, 1e-5, scale)
    else:
        total = torch.empty_like(residual)
        poison(total)
        ctx.ccl.all_reduce_norm(out, residual, inp, weight, 1e-5, scale, total=total)
        assert torch.equal(residual, before), "residual was written"
        residual = total
    h = sum(t.double() for t in parts) + before.double()
    size = sum(t.double().abs() for t in parts) + before.double().abs()
    assert ((residual.double() - h).abs() <= 2 * STEPS[dtype] * size + 1e-30).all()
    h = residual.double()  # the norm's error is judged by what it normalises
    expected = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    if fp8:
        expected = (expected / scale.double()).clamp(-448, 448)
        assert ((out.double() - expected).abs() <= 2**-4 * expected.abs() * 1.001 + 2**-10).all()
    else:
        assert ((out.double() - expected).abs() <= 2 * STEPS[dtype] * expected.abs() + 1e-6).all()
    assert torch.equal(inp, parts[ctx.cur_rank]), "inp was written"
    return torch.cat([out.float().flatten(), residual.float().flatten()])


def random_calls(ctx: iris.Iris, dtype: torch.dtype, two_shot: bool) -> torch.Tensor:
    with patch.object(norm, "two_shot", lambda *_: two_shot and ctx.num_ranks > 2):
        seen = [
            check_call(ctx, shape, dtype, seed, in_place=seed < len(SHAPES)) for seed, shape in enumerate(SHAPES * 2)
        ]
    return torch.cat(seen).cpu()


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", STEPS)
def test_matches_float64(world: int, dtype: torch.dtype) -> None:
    actual = run_ranks(world, random_calls, dtype, False)
    assert all(torch.equal(actual[0], other) for other in actual[1:])


def test_two_shot_gives_the_bits_of_one_shot() -> None:
    one, two = (run_ranks(3, random_calls, torch.bfloat16, two_shot) for two_shot in (False, True))
    assert torch.equal(one[0], two[0])
    assert all(torch.equal(two[0], other) for other in two[1:])


def fp8_and_shapes(ctx: iris.Iris) -> None:
    check_call(ctx, (6, 260), torch.bfloat16, 3, fp8=True)
    check_call(ctx, (2, 3, 64), torch.bfloat16, 4)
    with patch.object(norm, "_MAX_STAGED", 1 << 12):  # rows of several launches
        check_call(ctx, (9, 130), torch.bfloat16, 5)
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=ctx.device)
    ctx.ccl.all_reduce_norm(empty.clone(), empty.clone(), empty, empty.new_ones(64))


def test_fp8_pieces_and_empty() -> None:
    run_ranks(2, fp8_and_shapes)


def bad_input(ctx: iris.Iris) -> None:
    def rows(dtype: torch.dtype = torch.bfloat16, n: int = 64) -> torch.Tensor:
        return torch.ones(2, n, dtype=dtype, device=ctx.device)

    weight = rows()[0].clone()
    cases = [
        (ShapeError, "residual is", (rows(), rows(n=32), rows(), weight)),
        (ShapeError, "weight is", (rows(), rows(), rows(), weight[:8])),
        (DtypeError, "out has dtype", (rows(torch.float32), rows(), rows(), weight)),
        (DtypeError, "inp has dtype", (rows(), rows(), rows(torch.int32), weight)),
        (ArgumentError, "eps is -1", (rows(), rows(), rows(), weight, -1)),
        (ArgumentError, "strides", (rows(), rows(), rows().t().contiguous().t(), weight)),
        (DtypeError, "since scale is given", (rows(), rows(), rows(), weight, 1e-6, torch.ones(1, device=ctx.device))),
    ]  # fmt: skip
    for error, words, args in cases:
        with pytest.raises(error, match=words):
            ctx.ccl.all_reduce_norm(*args)
    same = rows()
    with pytest.raises(ArgumentError, match="out overlaps residual"):
        ctx.ccl.all_reduce_norm(same, same, rows(), weight)
    with pytest.raises(ArgumentError, match="total overlaps inp"):
        ctx.ccl.all_reduce_norm(rows(), rows(), same, weight, total=same)
    with pytest.raises(ShapeError, match="total is"):
        ctx.ccl.all_reduce_norm(rows(), rows(), rows(), weight, total=rows(n=32))
    check_call(ctx, (2, 64), torch.bfloat16, 1)  # the context still serves


def test_bad_input_is_refused() -> None:
    run_ranks(2, bad_input)
