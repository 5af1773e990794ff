"""With `invariant="ranks"` a row has the same bits on any number of ranks, of even shares or not."""

from __future__ import annotations

from itertools import pairwise
import random

import iris
from iris_ops import sum_tree
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, part_of, part_size
import pytest
import torch

from tests.checks import poison
from tests.harness import UNDER_TORCHRUN, run_ranks
from tests.reference import Case

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="compares numbers of ranks")


def whole(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(case.seed)
    sizes = (case.M, case.K), (case.N, case.K), (case.N,)
    A, W, bias = (torch.randn(*size, generator=draw).to(case.dtype) for size in sizes)
    return A, W.t(), bias


def body(ctx: iris.Iris, case: Case, depths: tuple[int, ...] | None) -> torch.Tensor:
    """All of the result that this rank has, at its place in a matrix of NaN."""
    ctx.invariant = "ranks"
    w, rank = ctx.num_ranks, ctx.cur_rank
    A, B, bias = whole(case)
    rows = slice(rank * part_size(case.M, w), rank * part_size(case.M, w) + part_of(case.M, w, rank))
    cols = slice(rank * part_size(case.N, w), rank * part_size(case.N, w) + part_of(case.N, w, rank))
    given = {}
    if case.reduces:
        depths = depths or sum_tree.shares(case.K, w)
        begin = sum(depths[:rank])
        A, B = A[:, begin : begin + depths[rank]], B[begin : begin + depths[rank]]
        given["depths"] = depths
    elif case.op == GATHER_MATMUL:
        k = slice(rank * part_size(case.K, w), rank * part_size(case.K, w) + part_of(case.K, w, rank))
        A = A[rows] if case.form == "rows" else A[:, k]
    elif case.form == "rows":
        A = A[rows]
    else:
        B, bias = B[:, cols], bias[cols]
    place = slice(None), slice(None)
    if case.op == REDUCE_SCATTER:
        place = (rows, slice(None)) if case.form == "rows" else (slice(None), cols)
    result = torch.full((case.M, case.N), float("nan"), dtype=case.dtype)
    out = poison(torch.empty_like(result[place]).contiguous())
    getattr(ctx.ops, case.op)(out, A.contiguous(), B, bias if case.bias else None, **given)
    result[place] = out
    return result


def joined(results: list[torch.Tensor]) -> torch.Tensor:
    """What all ranks have, which must be the same where several have it."""
    found = results[0].clone()
    for other in results[1:]:
        both = ~found.isnan() & ~other.isnan()
        assert torch.equal(found[both], other[both])
        found = torch.where(found.isnan(), other, found)
    assert not found.isnan().any()
    return found


def draw_depths(K: int, world_size: int, rng: random.Random) -> tuple[int, ...]:
    """Any whole leaves, none for some ranks."""
    width, leaves = sum_tree.leaf_width(K), sum_tree.leaves_of(K)
    cuts = sorted(rng.randint(0, leaves) for _ in range(world_size - 1))
    ends = [0, *(min(K, cut * width) for cut in cuts), K]
    return tuple(b - a for a, b in pairwise(ends))


SUMS = [(ALL_REDUCE, ""), (REDUCE_SCATTER, "rows"), (REDUCE_SCATTER, "cols")]
GATHERS = [(GATHER_MATMUL, "rows"), (GATHER_MATMUL, "k"), (MATMUL_GATHER, "rows"), (MATMUL_GATHER, "cols")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "form"), SUMS)
def test_a_sum_has_the_same_bits_on_any_number_of_ranks(op, form, dtype):
    rng = random.Random()
    case = Case(op, form, rng.choice([1, 5, 17]), 40, rng.choice([200, 320, 449]), dtype, True, seed=rng.randrange(99))
    (alone,) = run_ranks(1, body, case, None)
    A, B, bias = (each.double() for each in whole(case))
    exact = A @ B + bias
    assert (alone - exact).abs().max() <= (1e-4 if dtype == torch.float32 else 1e-1)
    for world_size in (2, 3, 4):
        for depths in (None, draw_depths(case.K, world_size, rng)):
            found = joined(run_ranks(world_size, body, case, depths))
            assert torch.equal(found, alone), f"{case} on {world_size} ranks of {depths}"
