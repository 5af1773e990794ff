"""The ops as torch operators: the same bits as `ctx.ops`, torch's own checks of a registration, names, gradients."""

from __future__ import annotations

from functools import partial

import iris
from iris.errors import ArgumentError, ClosedError
from iris_ops import torch_ops
from iris_ops.local import gated_matmul
from iris_ops.local.gated_matmul import matmul_gated
from iris_ops.planning.operations import GATED
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, OPS, REDUCE_SCATTER, part_of
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks

# opcheck brings half of torch's compiler with it: one world of several ranks is enough
pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2], scope="session")]

M, N, K = 7, 36, 24  # uneven parts of rows on 2, 3 and 4 ranks
ALL = (*OPS, GATED)


def arguments(ctx, op: str) -> tuple:
    """(A, B, bias, size) of a call on this rank."""
    w, rank, (m, n, k) = ctx.num_ranks, ctx.cur_rank, (M, N, K)
    rows = part_of(m, w, rank)
    a_rows = rows if op in (GATHER_MATMUL, MATMUL_GATHER, GATED) else m
    size = (rows, n) if op == REDUCE_SCATTER else (m, n // 2) if op == GATED else (m, n)
    torch.manual_seed(5 if op in (GATHER_MATMUL, GATED) else 5 + rank)
    B = torch.randn(n, k, device=ctx.device).t()
    return torch.randn(a_rows, k, device=ctx.device), B, torch.randn(n, device=ctx.device), size


def registered(op: str):
    return getattr(torch.ops.iris_ops, op).default


def same_bits_body(ctx) -> None:
    held = []
    for op in ALL:
        A, B, bias, size = arguments(ctx, op)
        for b, mean_part in ((bias, None), (None, N if op in (GATHER_MATMUL, GATED) else K)):
            out = A.new_full(size, torch.nan)
            getattr(ctx.ops, op)(out, A, B, b)
            for result in (
                registered(op)(A, B, b, size, ctx.group_name, mean_part),
                torch_ops.product(op, ctx, A, B, b, size, torch_ops.Parts(mean_part)),
            ):
                held.append((op, result, out))
                for earlier, result, out in held:
                    assert torch.equal(result, out), f"{earlier} on rank {ctx.cur_rank}, after {op}"


@torch.no_grad()
def gated_alone_body(ctx) -> None:
    A, B, bias, _ = arguments(ctx, GATED)
    for b in (bias, None):
        expected = matmul_gated(ctx, A, B, b)
        gate, up = (A @ B + (0 if b is None else b)).chunk(2, 1)
        assert torch.allclose(expected, torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-5)
        assert torch.equal(registered("matmul_gated")(A, B, b, ctx.group_name), expected)
        assert torch.equal(gated_matmul.gated(ctx, A, B, b), expected)
        compiled = torch.compile(partial(gated_matmul.gated, ctx), fullgraph=True, backend="eager")
        assert torch.equal(compiled(A, B, b), expected)


def test_a_gated_product_without_an_exchange_is_an_operator_too(world_size: int) -> None:
    run_ranks(world_size, gated_alone_body)


def gathered_rows_body(ctx) -> None:
    w, m, n = ctx.num_ranks, 3, 5
    whole = torch.randn(w * m, n, generator=torch.Generator().manual_seed(2)).to(ctx.device)
    mine = whole[ctx.cur_rank * m :][:m]
    compiled = torch.compile(partial(torch_ops.gather_rows, ctx), fullgraph=True, backend="eager")
    for result in (torch_ops.gather_rows(ctx, mine), registered("gather_rows")(mine, ctx.group_name), compiled(mine)):
        assert torch.equal(result, whole)
    results = torch.library.opcheck(registered("gather_rows"), (mine, ctx.group_name))
    assert set(results.values()) == {"SUCCESS"}, results
    with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match="gather_rows: rows requires grad"):
        compiled(mine.clone().requires_grad_())


def test_rows_of_all_ranks_are_an_operator_too(world_size: int) -> None:
    run_ranks(world_size, gathered_rows_body)


def test_an_operator_gives_the_bits_of_the_op(world_size: int) -> None:
    run_ranks(world_size, same_bits_body)


def opcheck_body(ctx) -> None:
    for op in ALL:
        A, B, bias, size = arguments(ctx, op)
        results = torch.library.opcheck(registered(op), (A, B, bias, size, ctx.group_name))
        assert set(results.values()) == {"SUCCESS"}, (op, results)
    for b in (bias, None):
        results = torch.library.opcheck(registered("matmul_gated"), (A, B, b, ctx.group_name))
        assert set(results.values()) == {"SUCCESS"}, results


def test_torch_finds_nothing_wrong_with_the_registration(world_size: int) -> None:
    run_ranks(world_size, opcheck_body)


def refused_body(ctx) -> None:
    A, B, bias, size = arguments(ctx, ALL_REDUCE)
    op = torch.ops.iris_ops.matmul_all_reduce
    with pytest.raises(ArgumentError, match="A requires grad, and this op has no backward"):
        op(A.clone().requires_grad_(), B, bias, size, ctx.group_name)
    # torch wraps what an operator raises while it is traced
    compiled = torch.compile(lambda a: op(a, B, bias, size, ctx.group_name), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="A requires grad, and this op has no backward"):
        compiled(A.clone().requires_grad_())
    with pytest.raises(ArgumentError, match="out is"):
        op(A, B, bias, (M + 1, N), ctx.group_name)
    with pytest.raises(ClosedError, match="group is 'nobody'; expected the group_name of an open context"):
        op(A, B, bias, size, "nobody")
    with torch.no_grad():
        assert op(A.requires_grad_(), B, bias, size, ctx.group_name).shape == size
    gated = torch.ops.iris_ops.matmul_gated
    for run in (gated, torch.compile(gated, fullgraph=True, backend="eager")):
        with pytest.raises(Exception, match="matmul_gated: A requires grad, and this op has no backward"):
            run(A, B, bias, ctx.group_name)


def test_gradients_wrong_sizes_and_unknown_groups_are_refused(world_size: int) -> None:
    run_ranks(world_size, refused_body)


def names_body(ctx) -> list[str]:
    A, B, bias, size = arguments(ctx, ALL_REDUCE)
    expected = torch.ops.iris_ops.matmul_all_reduce(A, B, bias, size, ctx.group_name)
    names = []
    for _ in range(2):
        with iris.iris(1 << 24) as other:
            names.append(other.group_name)
            for name in (other.group_name, ctx.group_name):
                assert torch.equal(torch.ops.iris_ops.matmul_all_reduce(A, B, bias, size, name), expected)
        with pytest.raises(ClosedError, match=f"group is '{other.group_name}'"):
            torch.ops.iris_ops.matmul_all_reduce(A, B, bias, size, other.group_name)
    return [ctx.group_name, *names]


def test_each_context_has_a_name_of_its_own_until_it_is_closed(world_size: int) -> None:
    results = run_ranks(world_size, names_body)
    assert len(set(results[0])) == 3
    assert all(names == results[0] for names in results), "ranks must agree on names"
