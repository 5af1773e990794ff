"""Norms that work row by row: against float64, and the same bits for a row among any others."""

from __future__ import annotations

import iris
from iris_ops.local import norm
import pytest
import torch

from tests.checks import poison
from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [1])]

ULP = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-20}
SIZES = [(1, 4096), (3, 64), (70, 100), (2, 5120), (5, 1), (300, 128), (0, 64), (2, 20000)]
EPS = 1e-5


def drawn(device: torch.device, dtype: torch.dtype, *size: int) -> torch.Tensor:
    return torch.randn(*size).mul_(torch.rand(*size[:1], *[1] * (len(size) - 1)) * 3).to(device, dtype)


def reference(h: torch.Tensor, weight: torch.Tensor, offset: float) -> torch.Tensor:
    h, weight = h.double(), weight.double() + offset
    return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * weight


def body(ctx: iris.Iris, dtype: torch.dtype) -> None:
    for rows, N in SIZES:
        x, residual, weight = (drawn(ctx.device, dtype, *size) for size in ((rows, N), (rows, N), (N,)))
        for offset in (0.0, 1.0):
            for h, (total, out) in (
                (x, norm.normed(x, weight, EPS, offset=offset)),
                (x + residual, norm.normed(x, weight, EPS, residual, offset)),
                (x + residual, norm.add_rms_norm(x, residual, weight, EPS, offset)),
                (x, (None, norm.rms_norm(x, weight, EPS, offset))),
            ):
                assert total is None or torch.equal(total, h), (rows, N)
                exact = reference(h, weight, offset)
                assert (out.double() - exact).abs().le(ULP[dtype] * exact.abs() + 1e-6).all(), (rows, N, offset)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_against_float64(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, body, dtype)


def layer_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm in float64, the largest terms that it is made of, which may cancel)."""
    x, weight = x.double(), weight.double()
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + EPS)
    added = torch.zeros_like(weight) if bias is None else bias.double()
    terms = x.abs().amax(-1, keepdim=True) * scale * weight.abs() + added.abs()
    return centred * scale * weight + added, terms


def layer_norm_body(ctx: iris.Iris, dtype: torch.dtype) -> None:
    for rows, N in SIZES:
        x, weight, bias = (drawn(ctx.device, dtype, *size) for size in ((rows, N), (N,), (N,)))
        for added in (None, bias):
            out, (exact, terms) = norm.layer_norm(x, weight, added, EPS), layer_norm_reference(x, weight, added)
            allowed = ULP[dtype] * exact.abs() + 2**-18 * terms + 1e-7  # the last: half of float16's least number
            assert (out.double() - exact).abs().le(allowed).all(), (rows, N, added is None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layer_norms_against_float64(world_size: int, dtype: torch.dtype) -> None:
    run_ranks(world_size, layer_norm_body, dtype)


def rows_body(ctx: iris.Iris, dtype: torch.dtype) -> list[str]:
    """List cases in which a row's bits differ from a row alone: with others, at another address, in a view."""
    differences = []
    for N in (64, 96, 2048):
        row, other, weight, bias = (drawn(ctx.device, dtype, *size) for size in ((1, N), (1, N), (N,), (N,)))
        alone = norm.normed(row + other, weight, EPS)[1].view(torch.uint8)
        centred = [norm.layer_norm(row + other, weight, added, EPS).view(torch.uint8) for added in (None, bias)]
        for rows in (1, 2, 3, 17, 65, 130):
            for place in {0, rows // 2, rows - 1}:
                held = poison(torch.empty(rows * N + 1, dtype=dtype, device=ctx.device))
                for begin in (0, 1):  # bytes 0 and 2 or 4: between vectors, which other code would load
                    x = held[begin : begin + rows * N].view(rows, N)
                    poison(x)[place] = row[0]
                    residual = torch.zeros_like(x)
                    residual[place] = other[0]
                    total = x + residual
                    x.copy_(total)
                    for name, result, expected in (
                        ("norm", norm.normed(x, weight, EPS)[1], alone),
                        ("layer norm", norm.layer_norm(x, weight, None, EPS), centred[0]),
                        ("layer norm with a bias", norm.layer_norm(x, weight, bias, EPS), centred[1]),
                    ):
                        if not result[place : place + 1].view(torch.uint8).equal(expected):
                            differences.append(f"{name} of {rows} rows of {N}, place {place}, begin {begin}")
                    poison(x)[place] = row[0]
                    result = norm.normed(x, weight, EPS, residual)[1]
                    if not result[place : place + 1].view(torch.uint8).equal(alone):
                        differences.append(f"sum of {rows} rows of {N}, place {place}, begin {begin}")
    return differences


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_among_any_others(world_size: int, dtype: torch.dtype) -> None:
    for differences in run_ranks(world_size, rows_body, dtype):
        assert not differences
