"""Every op in every form, dtype and layout against float64, on every number of ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import iris
from iris.ccl import problem as ccl_problem
from iris_ops import FusedConfig
from iris_ops.config import ALGORITHMS
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER
import pytest
import torch

from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.iris_ops.calls import Call, assert_same_bits, check_cases
from tests.reference import FORMS, Case

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS, scope="session")]

# What is gathered or scattered, by which algorithm.
VARIANTS = [
    (ALL_REDUCE, "", "two_shot"),
    *((op, form, algorithm) for algorithm in ("one_shot", "overlapped") for op, form in FORMS),
    *((op, form, "sequential") for op, form in FORMS if form in ("", "rows")),
    (GATHER_MATMUL, "rows", "copy_gather"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
RUNS = 2 if ON_GPU else 1  # where the other tests have looked at a second run of the same kernels
# Sizes that nothing divides, that blocks and ranks divide, a long and a wide one.
SHAPES = [(19, 29, 19), (32, 32, 32), (35, 17, 24), (5, 33, 38)]
# Several tiles and rounds in small matrices; on GPUs a few programs, so that each has several tiles.
SMALL = [
    FusedConfig(16, 16, 16, group_m=2, num_warps=4, num_stages=2, num_programs=3, comm_programs=2),
    FusedConfig(
        16, 32, 16, group_m=3, num_warps=4, num_stages=3, num_programs=5, comm_programs=1, stagger_us=3, splits=2
    ),
]


def cases(op: str, form: str, algorithm: str, dtype: torch.dtype) -> list[Case]:
    """Both layouts of B with and without bias; shape, place of out, row strides and blocks in rotation."""
    shift = VARIANTS.index((op, form, algorithm)) + DTYPES.index(dtype)
    result = []
    for index, (transposed, bias) in enumerate(product([True, False], [True, False])):
        turn = index + shift
        m, n, k = SHAPES[turn % len(SHAPES)]
        if algorithm == "sequential":
            m = -(-m // 12) * 12  # equal parts to gather
        result.append(
            Case(
                op,
                form,
                m,
                n,
                k,
                dtype=dtype,
                bias=bias,
                transposed=transposed,
                on_heap=turn % 3 != 0,
                pad=(0, 3, 8)[turn % 3],
                config=replace(SMALL[index % 2], algorithm=algorithm),
                seed=turn,
            )
        )
    return result


def dtypes(world_size: int, turn: int) -> list[torch.dtype]:
    """On CPUs fp16, which differs from bf16 in how a sum is rounded, in turn with it on two ranks; on more, one."""
    if ON_GPU:
        return DTYPES
    return [DTYPES[turn % 2], torch.float32] if world_size <= 2 else [(torch.bfloat16, torch.float32)[turn % 2]]


@pytest.mark.parametrize("op, form, algorithm", VARIANTS)
@pytest.mark.some(20, on_gpus=10)
def test_op_is_right_with_given_blocks(world_size: int, op: str, form: str, algorithm: str) -> None:
    turn = VARIANTS.index((op, form, algorithm))
    called = [case for dtype in dtypes(world_size, turn) for case in cases(op, form, algorithm, dtype)]
    assert_same_bits(called, run_ranks(world_size, check_cases, called))


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="the test above has them")
@pytest.mark.parametrize("op, form, algorithm", VARIANTS)
def test_op_is_right_in_every_dtype(world_size: int, op: str, form: str, algorithm: str) -> None:
    called = [case for dtype in DTYPES for case in cases(op, form, algorithm, dtype)]
    assert_same_bits(called, run_ranks(world_size, check_cases, called))


@pytest.mark.parametrize("op, form", FORMS)
def test_op_is_right_as_planned(world_size: int, op: str, form: str) -> None:
    turn = FORMS.index((op, form))
    given = [case for dtype in dtypes(world_size, turn) for case in cases(op, form, "overlapped", dtype)[::3]]
    called = [replace(case, config=None) for case in given]
    assert_same_bits(called, run_ranks(world_size, check_cases, called))


@pytest.mark.parametrize("op, form", FORMS)
def test_out_may_lie_anywhere(world_size: int, op: str, form: str) -> None:
    called = [
        Case(op, form, 20, 56, 24, on_heap=on_heap, pad=pad, seed=pad) for on_heap in (True, False) for pad in (0, 5)
    ]
    assert_same_bits(called, run_ranks(world_size, check_cases, called, RUNS))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ranks_may_differ_in_depth_or_columns(world_size: int, algorithm: str) -> None:
    """K split unevenly over the ranks, down to a rank with nothing to multiply; of a gather, columns of B."""
    config = replace(SMALL[0], algorithm=algorithm)
    called = [Case(ALL_REDUCE, "", 24, 16, k, uneven=True, config=config, seed=k) for k in (67, 5, 2, 1)]
    called += [Case(REDUCE_SCATTER, form, 24, 36, 33, uneven=True, config=config) for form in ("rows", "cols")]
    called += [
        Case(GATHER_MATMUL, form, 24, n, 33, uneven=True, config=config) for form in ("rows", "k") for n in (50, 5)
    ]
    called = [case for case in called if (case.op, case.form, algorithm) in VARIANTS]
    assert called
    assert_same_bits(called, run_ranks(world_size, check_cases, called, RUNS))


@pytest.mark.parametrize("op, form", FORMS)
@pytest.mark.some(on_gpus=4)
def test_a_product_of_depth_zero_is_the_bias(world_size: int, op: str, form: str) -> None:
    called = [Case(op, form, m, 20, 0, bias=bias) for m in (1, 19) for bias in (True, False)]
    assert_same_bits(called, run_ranks(world_size, check_cases, called, RUNS))


@pytest.mark.parametrize("op, form", FORMS)
@pytest.mark.some(on_gpus=4)
def test_one_element_in_all(world_size: int, op: str, form: str) -> None:
    """Rank 0 cannot distinguish the forms, and the other ranks' parts of B and of the bias are empty."""
    ours = ("one_shot", "two_shot", "overlapped")
    algorithms = [None, *(algorithm for *known, algorithm in VARIANTS if known == [op, form] and algorithm in ours)]
    called = [
        Case(
            op,
            form,
            1,
            1,
            k,
            dtype=torch.float32,
            bias=bias,
            config=algorithm and replace(SMALL[0], algorithm=algorithm),
            seed=turn,
        )
        for turn, (algorithm, k, bias) in enumerate(product(algorithms, (0, 1, 5), (True, False)))
    ]
    assert_same_bits(called, run_ranks(world_size, check_cases, called, RUNS))


def test_what_nobody_multiplies_does_not_come_late(world_size: int) -> None:
    """Gathers of which no rank, or of short last parts no block, is multiplied; the next call uses the same memory."""
    config = replace(SMALL[0], block_m=128, block_n=128, num_programs=2, splits=2)
    sizes = (5, 0), (2, 0), (32 * world_size, 0), (5, 7)
    gathers = [Case(GATHER_MATMUL, "rows", m, n, 17, config=SMALL[0]) for m, n in sizes]
    then = Case(MATMUL_GATHER, "rows", 129, 129, 13, dtype=torch.float32, transposed=False, pad=8, config=config)
    called = [case for gather in gathers for case in (gather, then)] * 5
    assert_same_bits(called, run_ranks(world_size, check_cases, called, 1))


def unusual_strides(ctx) -> None:
    """Operands that are views: A transposed, expanded; bias every second element or one for all columns; B sliced."""
    generator = torch.Generator().manual_seed(3)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(ctx.device)

    w, config = ctx.num_ranks, replace(SMALL[0], block_n=64)
    A, B, bias = draw(24, 20).t(), draw(48, 70)[::2, 1::2], draw(70)[::2]
    for a, c in ((A, bias), (A[:1].expand(20, 24), bias[:1].expand(35))):
        wide = torch.full((20, 40), float("nan"), device=ctx.device)
        for out in (wide[:, 1:36], torch.full((35, 20), float("nan"), device=ctx.device).t()):
            ctx.ops.matmul_all_reduce(out, a, B, c, config=config)
            torch.testing.assert_close(out, w * (a @ B) + c, rtol=1e-5, atol=1e-4)
        assert wide[:, :1].isnan().all() and wide[:, 36:].isnan().all()


def test_operands_may_be_any_views(world_size: int) -> None:
    run_ranks(world_size, unusual_strides)


def in_turn(ctx, called: list[Case]) -> None:
    """Asynchronous calls, each awaited through its workspace, and a call that follows without a wait."""
    for case in called:
        call = Call(ctx, case)
        workspace = call.run(async_op=True)
        workspace.wait()
        call.check()
    first, second = (Call(ctx, case) for case in called[:2])
    workspace = first.run(async_op=True)
    second.run()
    workspace.wait()
    first.check()
    second.check()


def test_async_op_is_right_after_wait(world_size: int) -> None:
    run_ranks(world_size, in_turn, [Case(op, form, 33, 40, 24, seed=i) for i, (op, form) in enumerate(FORMS)])


def two_workspaces(ctx) -> None:
    """A workspace of another ops object of this context serves too; both keep their own epochs."""
    case = Case(ALL_REDUCE, "", 20, 24, 16, config=SMALL[0])
    first = Call(ctx, case)
    workspace = first.run()
    ctx._components.clear()
    second = Call(ctx, replace(case, seed=1))
    other = second.run()
    assert other is not workspace
    for call, used in ((first, workspace), (second, other), (first, other), (second, workspace)):
        call.out.fill_(float("nan"))
        assert call.run(used) is used
        call.check()


def test_workspace_can_be_passed_back(world_size: int) -> None:
    run_ranks(world_size, two_workspaces)


def in_pieces(ctx: iris.Iris, called: list[Case]) -> list[str]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(ccl_problem, "MAX_ELEMENTS", 7 * 40 + 1)
        return check_cases(ctx, called)


def test_large_sums_are_all_reduced_in_pieces(world_size: int) -> None:
    """More elements than a collective takes: as many rows together as it does."""
    case = Case(ALL_REDUCE, "", 17, 40, 24, config=FusedConfig(algorithm="sequential"))
    called = [case, replace(case, pad=8, bias=False, on_heap=False), replace(case, M=7)]
    assert_same_bits(called, run_ranks(world_size, in_pieces, called))
