"""Warp-specialised programs, against float64. Elsewhere than on Hopper the portable kernels serve these calls."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import iris
from iris import platform
from iris_ops import FusedConfig
from iris_ops.kernels.hopper import operands
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, REDUCE_SCATTER
import pytest
import torch

from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.iris_ops.calls import Call, assert_same_bits, bits, check_cases, strided
from tests.reference import FORMS, Case

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2, 3], scope="session")]

PUSHED = [(op, form) for op, form in FORMS if op != GATHER_MATMUL]
# Sizes that no block divides, with rows and, among 2, 4 or 8 ranks, parts of columns that begin at whole vectors.
M, N, COLS, K = (300, 520, 576, 200) if ON_GPU else (70, 72, 144, 40)
SMALLEST = FusedConfig(64, 64, 32, num_stages=2, group_m=2, num_programs=3, warp_specialised=True)
# Several tiles a program; tiles whole, or, where they fill no round, shared along K, by programs that end in turn too.
CONFIGS = [
    replace(SMALLEST, block_m=128, block_n=128, block_k=64, num_stages=5),
    replace(SMALLEST, block_m=128, block_n=256, block_k=64, num_stages=3, num_programs=5, splits=4, stagger_us=30),
    replace(SMALLEST, block_m=128, block_n=128, block_k=64, num_stages=3, num_programs=7, splits=4),
    replace(SMALLEST, num_programs=0, splits=2, stagger_us=5),
] if ON_GPU else [SMALLEST, replace(SMALLEST, splits=4, stagger_us=3)]  # fmt: skip
# All-reduce by Lamport values: tiles lower and higher than an owner's rows, one and many a program.
LAMPORT = [
    replace(SMALLEST, algorithm="two_shot"),
    replace(SMALLEST, block_m=128, num_programs=0, algorithm="two_shot"),
]
LAMPORT += [
    replace(LAMPORT[1], block_n=128, block_k=64, num_stages=5),
    replace(LAMPORT[0], block_n=256, block_k=64, num_programs=7),
] if ON_GPU else []  # fmt: skip
# The same in one shot, which warp-specialised programs serve between two ranks.
PAIRS = [replace(SMALLEST, algorithm="one_shot"), replace(SMALLEST, block_m=128, num_programs=0, algorithm="one_shot")]
PAIRS += [
    replace(PAIRS[1], block_n=128, block_k=64, num_stages=5),
    replace(PAIRS[0], block_n=256, block_k=64, num_programs=7),
] if ON_GPU else []  # fmt: skip
DTYPES = [torch.bfloat16, torch.float16]


def case_of(op: str, form: str, turn: int = 0, **changes) -> Case:
    case = Case(op, form, M, COLS if form == "cols" else N, K, dtype=DTYPES[turn % 2], seed=turn)
    return replace(case, config=CONFIGS[turn % len(CONFIGS)], **changes)


def in_lamport(cases: list[Case], world_size: int) -> list[Case]:
    """The all-reduces among them and, between two ranks, the scattered rows, by Lamport values."""
    lamport_cases = [case for case in cases if case.op == ALL_REDUCE]
    swapped = lamport_cases + [case for case in cases if (case.op, case.form) == (REDUCE_SCATTER, "rows")]
    ways = [(LAMPORT, lamport_cases), (PAIRS, swapped)] if world_size == 2 else [(LAMPORT, lamport_cases)]
    return [replace(case, config=way[turn % len(way)]) for way, some in ways for turn, case in enumerate(some)]


@contextmanager
def looked_at(served: list[bool]):
    """Puts into `served` of each launch whether warp-specialised programs serve it."""
    supports = operands.supports

    def looking(*args) -> str | None:
        reason = supports(*args)
        served.append(reason is None)
        return reason

    operands.supports = looking
    try:
        yield
    finally:
        operands.supports = supports


def check_served(ctx: iris.Iris, cases: list[Case]) -> list[str]:
    """`check_cases`, and warp-specialised programs serve all of them where there can be any."""
    served: list[bool] = []
    with looked_at(served):
        digests = check_cases(ctx, cases)
    assert set(served) == {platform.has_warp_specialisation(ctx.device)}, served
    return digests


@pytest.mark.parametrize("op, form", PUSHED)
@pytest.mark.some(4, on_gpus=3)
def test_op_is_right(world_size: int, op: str, form: str) -> None:
    """Both dtypes and layouts of B, with and without bias, `out` on the heap or not, rows that stand apart."""
    called = [
        case_of(op, form, turn, bias=bias, transposed=transposed, on_heap=turn % 3 > 0, pad=8 * (turn % 2))
        for turn, (bias, transposed) in enumerate(product([True, False], [True, False]))
    ]
    if ON_GPU:
        called += [replace(case, config=CONFIGS[turn - 1]) for turn, case in enumerate(called)]
    # one step along K, a part of one, and many; a single block of rows
    called += [case_of(op, form, turn, K=depth) for turn, depth in enumerate((CONFIGS[0].block_k, 8, 5 * K))]
    called.append(case_of(op, form, 1, M=16, K=8, pad=8))
    for cases in filter(None, (called, in_lamport(called, world_size))):
        assert_same_bits(cases, run_ranks(world_size, check_served, cases))


@pytest.mark.parametrize("op, form", [(op, form) for op, form in PUSHED if form != "cols"])
@pytest.mark.some(4, on_gpus=1)
def test_parts_may_be_empty(world_size: int, op: str, form: str) -> None:
    """A rank that has none itself is served by portable kernels: nothing can be loaded or stored by TMA."""
    called = [case_of(op, form, turn, M=world_size + 1) for turn in range(len(CONFIGS))]
    called += in_lamport(called, world_size) + in_lamport([case_of(op, form, M=1)], world_size)
    assert_same_bits(called, run_ranks(world_size, check_cases, called))


def check_uneven(ctx: iris.Iris, cases: list[Case]) -> list[str]:
    """Each rank's rows begin at whole vectors, however many elements they have."""
    digests = []
    for case in cases:
        call, served = Call(ctx, case), []
        depth = call.A.shape[1]
        call.A = strided(call.A, -depth % 8)
        call.B = strided(call.B.t(), -depth % 8).t()
        with looked_at(served):
            call.run()
        assert served == [platform.has_warp_specialisation(ctx.device) and depth > 0], served
        digests.append(bits(call.check()))
    return digests


@pytest.mark.parametrize("op, form", [(op, form) for op, form in PUSHED if op in (ALL_REDUCE, REDUCE_SCATTER)])
@pytest.mark.some(4, on_gpus=1)
def test_ranks_may_differ_in_depth(world_size: int, op: str, form: str) -> None:
    """By a step along K, and so that one has nothing to multiply, for which a portable kernel serves."""
    sizes = [64 * world_size + 1, max(1, world_size - 1)]
    called = [case_of(op, form, turn, K=depth, uneven=True) for depth in sizes for turn in range(len(CONFIGS))]
    called += in_lamport(called, world_size)
    assert_same_bits(called, run_ranks(world_size, check_uneven, called))


def shifted(B: torch.Tensor) -> torch.Tensor:
    """Copy `B` with the same strides to an address that is not aligned to a vector."""
    stored = B.t() if B.stride(0) == 1 else B
    copy = stored.new_empty(stored.numel() + 1)[1:].view(stored.shape).copy_(stored)
    return copy.t() if stored is not B else copy


def check_mixed(ctx: iris.Iris, cases: list[Case]) -> list[str]:
    """Give one rank a B that TMA cannot load; its portable kernel and the others' kernels use the same signals."""
    digests, portable = [], 1 % ctx.num_ranks
    for case in cases:
        call, served = Call(ctx, case), []
        if ctx.cur_rank == portable:
            call.B = shifted(call.B)
        with looked_at(served):
            for _ in range(2):
                call.out.fill_(float("nan"))
                call.run()
                digests.append(bits(call.check()))
        assert set(served) == {platform.has_warp_specialisation(ctx.device) and ctx.cur_rank != portable}, served
        assert digests[-1] == digests[-2]
    return digests[::2]


@pytest.mark.parametrize("op, form", PUSHED)
@pytest.mark.some(4, on_gpus=2)
def test_ranks_with_and_without_specialised_warps_work_together(world_size: int, op: str, form: str) -> None:
    """Short and empty parts, too, of which each kind of kernel computes other tiles."""
    called = [case_of(op, form, turn, transposed=turn % 2 == 0) for turn in range(len(CONFIGS))]
    called += [case_of(op, form, turn, M=M // 2 + 1) for turn in (0, 1)]
    called += in_lamport(called, world_size)
    assert_same_bits(called, run_ranks(world_size, check_mixed, called))
