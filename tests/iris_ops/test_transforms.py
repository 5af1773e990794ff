"""Tensors of forward-mode differentiation and of torch.func: refused by every op, also where the call came before."""

from __future__ import annotations

from iris.errors import ArgumentError
import pytest
import torch
from torch.autograd import forward_ad

from tests.harness import WORLDS, both, run_ranks

pytestmark = both


def transformed(ctx) -> None:
    A, B = torch.ones(4, 5, device=ctx.device), torch.ones(5, 6, device=ctx.device)
    out, rows = ctx.empty(4, 6), ctx.empty(4 * ctx.num_ranks, 6)
    calls = {
        "matmul_all_reduce": lambda x: ctx.ops.matmul_all_reduce(out, x, B),
        "matmul_all_gather": lambda x: ctx.ops.matmul_all_gather(rows, x, B),
        "all_gather_matmul": lambda x: ctx.ops.all_gather_matmul(rows, x, B),
        "matmul_reduce_scatter": lambda x: ctx.ops.matmul_reduce_scatter(rows[:1], x[: ctx.num_ranks], B),
    }
    with torch.no_grad():
        for name, call in calls.items():
            for _ in range(2):
                call(A)  # what is known of such a call must not serve the transformed one
            with forward_ad.dual_level(), pytest.raises(ArgumentError, match=f"{name}: A has a tangent"):
                call(forward_ad.make_dual(A, torch.ones_like(A)))
            with pytest.raises(ArgumentError, match=f"{name}: A has a tangent"):
                torch.func.jvp(lambda x, call=call: (call(x), x)[1], (A,), (A,))
            with pytest.raises(ArgumentError, match=f"{name}: A is batched by torch.func.vmap"):
                torch.func.vmap(lambda x, call=call: (call(x), x)[1])(A.expand(3, 4, 5))
            with forward_ad.dual_level():
                call(A)  # without a tangent
    ctx.barrier()
    assert (out == 5 * ctx.num_ranks).all()


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_transformed_tensors_are_refused(world_size: int) -> None:
    run_ranks(world_size, transformed)
