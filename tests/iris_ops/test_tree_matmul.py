"""`tree_matmul`: what any number of ranks sum is what one rank sums, and what torch adds up in the tree's order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
import random

import iris
from iris_ops import FusedConfig, sum_tree
from iris_ops.problem import ALL_REDUCE, REDUCE_SCATTER, part_of, part_size
import pytest
import torch
from torch import distributed

from tests.checks import poison
from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.reference import Case

pytestmark = both

SUMS = [(ALL_REDUCE, ""), (REDUCE_SCATTER, "rows"), (REDUCE_SCATTER, "cols")]


def halved(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Two halves are added in float32, and each sum is rounded."""
    if len(leaves) == 1:
        return leaves[0]
    middle = (len(leaves) + 1) // 2
    return (halved(leaves[:middle]).float() + halved(leaves[middle:]).float()).to(leaves[0].dtype)


def tree_body(ctx: iris.Iris, case: Case, k_per_rank: tuple[int, ...]) -> list[str]:
    """Return a description of each difference between three equal calls and this rank's own sum over all of K."""
    ctx.invariant = "ranks"
    w, rank = ctx.num_ranks, ctx.cur_rank
    draw = torch.Generator().manual_seed(case.seed)
    sizes = (case.M, case.K), (case.N, case.K), (case.N,)
    A, W, bias = (torch.randn(*size, generator=draw).to(ctx.device, case.dtype) for size in sizes)
    B = W.t() if case.transposed else W.t().contiguous()
    groups = [distributed.new_group([each]) for each in range(w)] if w > 1 else [None]
    with iris.iris(32 << 20, group=groups[rank], invariant="ranks") as alone:
        whole, one_by_one = torch.empty(2, case.M, case.N, dtype=case.dtype, device=ctx.device)
        alone.ops.matmul_all_reduce(poison(whole), A, B, bias)
        borders = [sum_tree.border(case.K, leaf) for leaf in range(sum_tree.leaves_of(case.K) + 1)]
        if borders[1] <= sum_tree.BLOCK:  # else a leaf alone is a tree of its own
            leaves = []
            for first, last in pairwise(borders):
                leaves.append(poison(torch.empty_like(whole)))
                alone.ops.matmul_all_reduce(leaves[-1], A[:, first:last].contiguous(), B[first:last])
            one_by_one.copy_((halved(leaves).float() + bias.float()).to(case.dtype))
        else:
            one_by_one.copy_(whole)
    exact = A.double() @ B.double() + bias.double()
    assert (whole - exact).abs().max() <= exact.abs().max() * (1e-5 if case.dtype == torch.float32 else 2e-2)
    begin = sum(k_per_rank[:rank])
    own = slice(begin, begin + k_per_rank[rank])
    size = case.M if case.form == "rows" else case.N
    part = slice(rank * part_size(size, w), rank * part_size(size, w) + part_of(size, w, rank))
    place = (slice(None), slice(None))
    if case.op == REDUCE_SCATTER:
        place = (part, slice(None)) if case.form == "rows" else (slice(None), part)
    expected, differences = one_by_one[place], []
    out = (ctx if case.on_heap else torch).empty(case.M, case.N, dtype=case.dtype, device=ctx.device)[place]
    out = out if case.on_heap else out.contiguous()
    a, b = A[:, own].contiguous(), B[own]
    for number in range(3):
        getattr(ctx.ops, case.op)(poison(out), a, b, bias, config=case.config, k_per_rank=k_per_rank)
        unlike = int((out != expected).sum())
        if unlike or not torch.equal(whole[place], expected):
            differences.append(f"{unlike} of {out.numel()} numbers of call {number} on rank {rank}")
    return differences


def check(world_size: int, case: Case, k_per_rank: tuple[int, ...]) -> None:
    differences = [each for of_rank in run_ranks(world_size, tree_body, case, k_per_rank) for each in of_rank]
    assert not differences, f"{case}, {k_per_rank}: {differences[:4]}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("op", "form"), SUMS)
@pytest.mark.some(4, on_gpus=8)
def test_any_ranks_sum_as_one_does(world_size, op, form, dtype):
    rng = random.Random()
    for M in (1, 20, 70):
        K = rng.choice([64, 200, 520, 1100, 2112])
        cuts = sorted(rng.randint(0, sum_tree.leaves_of(K)) for _ in range(world_size - 1))
        ends = [0, *(sum_tree.border(K, cut) for cut in cuts), K]
        uneven = tuple(after - before for before, after in zip(ends[:-1], ends[1:], strict=True))
        k_per_rank = rng.choice([sum_tree.shares(K, world_size), uneven])
        kinds = dict(transposed=rng.random() < 0.7, on_heap=rng.random() < 0.5, seed=rng.randrange(1 << 20))
        check(world_size, Case(op, form, M, rng.choice([40, 136]), K, dtype, **kinds), k_per_rank)


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_both_shots_sum_as_one_rank_does(world_size, algorithm):
    config = FusedConfig(16, 64, 64, num_warps=4, num_stages=2, algorithm=algorithm)
    case = Case(ALL_REDUCE, "", 50, 150, 64 * 9, torch.float32, config=config, seed=random.randrange(1 << 20))
    check(world_size, case, sum_tree.shares(case.K, world_size))


SPECIALISED = FusedConfig(128, 128, 64, num_warps=8, num_stages=5, warp_specialised=True, algorithm="one_shot")


@pytest.mark.skipif(2 not in WORLDS, reason="between two ranks")
@pytest.mark.some(3, on_gpus=16)  # each value of each parameter
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("op", "form"), SUMS[:2])
@pytest.mark.parametrize("few_programs", [False, True])
@pytest.mark.parametrize("high", [False, True])
def test_specialised_warps_sum_as_one_rank_does(high, few_programs, op, form, dtype):
    """On Hopper; elsewhere the portable fallback runs. Leaves have one width, two widths, or a shorter last one."""
    config = SPECIALISED if high else replace(SPECIALISED, block_m=64, num_warps=4, num_stages=8)
    config = replace(config, num_programs=3) if few_programs else config
    for M, K in ((70, 512), (300, 4096 if ON_GPU else 512), (200, 11000 if ON_GPU else 2232)):
        kinds = dict(transposed=M != 200, on_heap=M == 70, seed=random.randrange(1 << 20))
        case = Case(op, form, M, 520 if ON_GPU else 72, K, dtype, config=config, **kinds)
        check(2, case, sum_tree.shares(K, 2))
