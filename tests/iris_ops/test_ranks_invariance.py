"""With `invariant="ranks"` a row has the same bits on any number of ranks, of even shares or not."""

from __future__ import annotations

from itertools import pairwise
import random

import iris
from iris.errors import IrisError
from iris_ops import FusedConfig, sum_tree
from iris_ops.planning.ways import tree
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, part_of, part_size
import pytest
import torch

from tests.checks import poison
from tests.harness import UNDER_TORCHRUN, run_ranks
from tests.iris_ops.invariance import Place, Probe, different_rows
from tests.reference import Case

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="compares numbers of ranks")


def whole(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(case.seed)
    sizes = (case.M, case.K), (case.N, case.K), (case.N,)
    A, W, bias = (torch.randn(*size, generator=draw).to(case.dtype) for size in sizes)
    return A, W.t(), bias


def body(ctx: iris.Iris, case: Case, k_per_rank: tuple[int, ...] | None) -> torch.Tensor:
    """All of the result that this rank has, at its place in a matrix of NaN."""
    ctx.invariant = "ranks"
    w, rank = ctx.num_ranks, ctx.cur_rank
    A, B, bias = whole(case)
    rows = slice(rank * part_size(case.M, w), rank * part_size(case.M, w) + part_of(case.M, w, rank))
    cols = slice(rank * part_size(case.N, w), rank * part_size(case.N, w) + part_of(case.N, w, rank))
    given = {}
    if case.reduces:
        k_per_rank = k_per_rank or sum_tree.shares(case.K, w)
        begin = sum(k_per_rank[:rank])
        A, B = A[:, begin : begin + k_per_rank[rank]], B[begin : begin + k_per_rank[rank]]
        given["k_per_rank"] = k_per_rank
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
    result = results[0].clone()
    for other in results[1:]:
        both = ~result.isnan() & ~other.isnan()
        assert torch.equal(result[both], other[both])
        result = torch.where(result.isnan(), other, result)
    assert not result.isnan().any()
    return result


def draw_k_per_rank(K: int, world_size: int, rng: random.Random) -> tuple[int, ...]:
    """Any whole leaves, none for some ranks."""
    cuts = sorted(rng.randint(0, sum_tree.leaves_of(K)) for _ in range(world_size - 1))
    ends = [0, *(sum_tree.border(K, cut) for cut in cuts), K]
    return tuple(b - a for a, b in pairwise(ends))


SUMS = [(ALL_REDUCE, ""), (REDUCE_SCATTER, "rows"), (REDUCE_SCATTER, "cols")]
GATHERS = [(GATHER_MATMUL, "rows"), (GATHER_MATMUL, "k"), (MATMUL_GATHER, "rows"), (MATMUL_GATHER, "cols")]


# the sum in one shot, whose ranks all join all roots, and in two, whose ranks join those of their rows
ROWS = {ALL_REDUCE: (5, 20), REDUCE_SCATTER: (7,)}


# the first of both in all three, for in bfloat16 each sum is rounded
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("op", "form"), SUMS)
@pytest.mark.some(3)
def test_a_sum_has_the_same_bits_on_any_number_of_ranks(op, form, dtype):
    rng = random.Random()
    for M in ROWS[op]:
        case = Case(op, form, M, 40, rng.choice([200, 320, 449]), dtype, rng.random() < 0.7, seed=rng.randrange(99))
        (alone,) = run_ranks(1, body, case, None)
        A, B, bias = (each.double() for each in whole(case))
        exact = A @ B + (bias if case.bias else 0)
        assert (alone - exact).abs().max() <= exact.abs().max() * (1e-5 if dtype == torch.float32 else 2e-2)
        for world_size in (2, 3, 4):
            for k_per_rank in (None, draw_k_per_rank(case.K, world_size, rng)):
                result = joined(run_ranks(world_size, body, case, k_per_rank))
                assert torch.equal(result, alone), f"{case} on {world_size} ranks of {k_per_rank}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("op", "form"), GATHERS)
def test_a_gather_has_the_same_bits_on_any_number_of_ranks(op, form, dtype):
    case = Case(op, form, 9, 40, 512, dtype, seed=random.randrange(99))
    (alone,) = run_ranks(1, body, case, None)
    for world_size in (2, 4) if form == "k" else (2, 3, 4):  # whole blocks of K on each rank
        assert torch.equal(joined(run_ranks(world_size, body, case, None)), alone), f"{case} on {world_size} ranks"


def rows_body(ctx: iris.Iris, case: Case, places: list[Place]) -> list[str]:
    ctx.invariant, most = "ranks", tree._MOST_ELEMENTS
    tree._MOST_ELEMENTS = 4000  # so that 130 rows are several launches
    try:
        assert max(place.M for place in places) > 4000 // case.N
        return different_rows(Probe(ctx, case), places)
    finally:
        tree._MOST_ELEMENTS = most


@pytest.mark.parametrize(("op", "form"), SUMS)
def test_a_row_of_such_a_sum_has_the_same_bits_among_any_others(op, form):
    """Also where more rows are multiplied than one launch takes."""
    case = Case(op, form, 0, 80, 192, torch.float32, seed=random.randrange(99))
    places = [Place(M, M // 2, others) for M, others in ((1, "nan"), (2, "nan"), (33, "random"), (130, "nan"))]
    assert not any(run_ranks(3, rows_body, case, places))


def norm_body(ctx: iris.Iris, case: Case) -> list[torch.Tensor]:
    ctx.invariant = "ranks"
    (A, B, bias), k_per_rank = whole(case), sum_tree.shares(case.K, ctx.num_ranks)
    own = slice(sum(k_per_rank[: ctx.cur_rank]), sum(k_per_rank[: ctx.cur_rank + 1]))
    draw = torch.Generator().manual_seed(case.seed + 1)
    residual, weight = torch.randn(case.M, case.N, generator=draw), torch.randn(case.N, generator=draw)
    out, scaled, squares = torch.empty(case.M, case.N), torch.empty(case.M, case.N), torch.empty(2, case.M)
    ctx.ops.matmul_all_reduce_norm(
        *map(poison, (out, scaled, squares)), A[:, own].contiguous(), B[own], residual, weight, bias,
        k_per_rank=list(k_per_rank),  # any sequence will do
    )  # fmt: skip
    assert torch.allclose(out, A @ B + bias + residual, atol=1e-3)
    return [out, scaled, squares]


def test_a_norm_behind_such_a_sum_has_the_same_bits():
    case = Case(ALL_REDUCE, "", 6, 96, 450, torch.float32, seed=random.randrange(99))
    (alone,) = run_ranks(1, norm_body, case)
    for world_size in (2, 3):
        for result in run_ranks(world_size, norm_body, case):
            assert all(map(torch.equal, result, alone))


def refusals_body(ctx: iris.Iris) -> list[str]:
    ctx.invariant = "ranks"
    out, A, B = torch.empty(4, 16), torch.randn(4, 128), torch.randn(128, 16)
    eight = B.t().contiguous().to(torch.float8_e4m3fn).t()
    small = FusedConfig(64, 64, 16, algorithm="one_shot")
    tries = {
        "a leaf cut": lambda: ctx.ops.matmul_all_reduce(out, A[:, :100], B[:100]),
        "k_per_rank cut": lambda: ctx.ops.matmul_all_reduce(out, A, B, k_per_rank=(128, 100, 28)),
        "another K": lambda: ctx.ops.matmul_all_reduce(out, A, B, k_per_rank=(64, 64, 192)),
        "too few": lambda: ctx.ops.matmul_all_reduce(out, A, B, depths=(256, 128)),
        "no numbers": lambda: ctx.ops.matmul_all_reduce(out, A, B, k_per_rank="all"),
        "fp8": lambda: ctx.ops.matmul_all_reduce(out, A, eight, scale=torch.ones(16)),
        "another order": lambda: ctx.ops.matmul_all_reduce(out, A, B, config=FusedConfig(64, 64, 64)),
        "other blocks": lambda: ctx.ops.matmul_all_reduce(out, A, B, config=small),
        "gathered parts": lambda: ctx.ops.all_gather_matmul(out, torch.randn(4, 50), torch.randn(150, 16)),
        "experts": lambda: ctx.ops.plan("moe_gate_up", 4, 16, 64, torch.float32, experts=2),
    }
    messages = []
    for name, attempt in tries.items():
        with pytest.raises(IrisError) as caught:
            attempt()
        messages.append(f"{name}: {type(caught.value).__name__}: {caught.value}")
    ctx.ops.matmul_all_reduce(out, A, B)  # the ranks still agree
    return messages


def test_what_cannot_be_kept_is_refused_on_every_rank():
    for messages in run_ranks(3, refusals_body):
        kinds = [each.split(": ")[1] for each in messages]
        assert kinds == ["ShapeError"] * 3 + ["ArgumentError"] * 7, messages
        assert "such as 128, 64, 108" in messages[0], messages[0]
