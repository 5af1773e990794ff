"""Ops refuse wrong fp8 weights: each error names the argument, and the next correct call works."""

from __future__ import annotations

import iris
from iris.errors import ArgumentError, DtypeError, ShapeError
from iris_ops import FusedConfig, torch_ops
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks
from tests.iris_ops.test_fp8 import BF16, operands

pytestmark = both


WRONG = {
    "no scale": (dict(scale=None), DtypeError, r"B has dtype torch.float8_e4m3fn; expected one of .* with a scale"),
    "B in bf16": (dict(B=lambda t: t.bfloat16()), DtypeError, "B has dtype torch.bfloat16 and there is a scale"),
    "a short scale": (dict(scale=lambda t: t[1:]), ShapeError, r"scale is \(63,\); expected \(64,\), one for each col"),
    "a scale in bf16": (dict(scale=lambda t: t.bfloat16()), DtypeError, "scale has dtype torch.bfloat16; expected"),
    "a scale by steps": (dict(scale=lambda t: t.repeat(2)[::2]), ArgumentError, r"scale has strides \(2,\)"),
    "a number": (dict(scale=lambda t: 2.0), ArgumentError, "scale is float; expected a torch.Tensor"),
    "a negated scale": (
        dict(scale=torch._neg_view),
        ArgumentError,
        "scale is a negated view; expected",
    ),
    "out in its scale": (dict(out=lambda t: t), ArgumentError, "out overlaps scale in memory"),
    "rows to gather": (
        dict(config=lambda t: FusedConfig(algorithm="copy_gather")),
        ArgumentError,
        "'copy_gather'; expected ano",
    ),
}


@torch.no_grad()
def refused_body(ctx: iris.Iris, name: str) -> None:
    A, B, scales, _ = operands(ctx, 2, 64, 128, False, BF16)
    given = dict(out=torch.empty(2, 64, dtype=BF16, device=ctx.device), A=A[ctx.cur_rank], B=B[ctx.cur_rank])
    given |= dict(scale=scales[ctx.cur_rank], config=None)
    changes, error, message = WRONG[name]
    ctx.ops.matmul_all_reduce(**given)  # what is known of it must not serve what differs
    wrong = {key: change and change(given[key]) for key, change in changes.items()}
    if "out" in changes:
        both_in = torch.zeros(64, device=ctx.device)
        wrong = dict(scale=both_in, out=both_in.view(BF16).view(2, 64))
    with pytest.raises(error, match=message):
        ctx.ops.matmul_all_reduce(**given | wrong)
    ctx.ops.matmul_all_reduce(**given)
    assert given["out"].isfinite().all()


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_what_is_refused(world_size: int, name: str) -> None:
    run_ranks(world_size, refused_body, name)


def others_body(ctx: iris.Iris) -> None:
    A, B, scales, _ = operands(ctx, 2, 64, 128, False, BF16)
    out = torch.empty(2, 64 * ctx.num_ranks, dtype=BF16, device=ctx.device)
    with pytest.raises(DtypeError, match=r"B has dtype torch.float8_e4m3fn; expected one of .*float32$"):
        ctx.ops.matmul_all_gather(out, A[0], B[0])
    with pytest.raises(ArgumentError, match="matmul_all_gather: scale is given; expected None"):
        torch_ops.product("matmul_all_gather", ctx, A[0], B[0], None, tuple(out.shape), scale=scales[0])
    with pytest.raises(ArgumentError, match="fp8 is True for matmul_all_gather; expected False, or one of"):
        ctx.ops.plan("matmul_all_gather", 2, 64, 128, BF16, fp8=True)


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_a_gather_of_products_takes_no_fp8(world_size: int) -> None:
    run_ranks(world_size, others_body)
