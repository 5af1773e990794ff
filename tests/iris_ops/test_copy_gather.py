"""Copy engines: every row is sent once and multiplied once, step after step, whatever a step takes together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
import time

import iris
from iris import platform
from iris.errors import PeerLostError
from iris_ops import FusedConfig
from iris_ops.kernels.hopper import gather_matmul
from iris_ops.planning.ways import copy_engines
from iris_ops.problem import GATHER_MATMUL, Problem, part_of
import pytest
import torch

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.iris_ops.calls import check_cases
from tests.iris_ops.test_graph import captured_and_eager, replay
from tests.processes import patient, run_fresh
from tests.reference import Case

pytestmark = both

SPECIALISED = FusedConfig(128, 128, 64, num_stages=5, warp_specialised=True, algorithm="copy_gather")


def problem(M: int, world_size: int, N: int = 2560, K: int = 8192) -> Problem:
    return Problem(GATHER_MATMUL, "rows", M, N, K, world_size, torch.bfloat16)


def config(together: int = 1) -> FusedConfig:
    return FusedConfig(algorithm="copy_gather", ranks_together=together)


@pytest.mark.parametrize("together", [1, 2, 3, 9])
@pytest.mark.parametrize("rows", [1, 2, 200, 400, 2048])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_every_rank_multiplies_what_it_is_sent(world_size: int, rows: int, together: int) -> None:
    for M in {rows * world_size, rows * world_size - 1, max(1, rows * (world_size - 1) - 1)}:
        case = problem(M, world_size)
        steps, part = copy_engines.steps_of(case, config(together)), case.part_rows
        assert [i for step in steps for i in step] == list(range(1, world_size))
        least = min(world_size - 1, together)
        assert all(len(step) * part >= copy_engines._LEAST_ROWS for step in steps[1:]) or len(steps) <= 1
        assert all(len(step) >= least for step in steps[1:]) and len(steps) <= -(-(world_size - 1) // max(1, least))
        for rank in range(world_size):
            for step in steps:
                spans = copy_engines.rows_of(case, rank, step)
                sent = [(rank + i) % world_size for i in step]  # by those who have `rank` so many ranks before them
                expected = [row for r in sent for row in range(r * part, r * part + part_of(M, world_size, r))]
                assert sorted(row for begin, end in spans for row in range(begin, end)) == sorted(expected)
                assert len(spans) <= 2


# --- on ranks --------------------------------------------------------------------------------------------------------


def in_steps_of(least_rows: int, body, *args):
    """Run `body` with this limit of rows that one product takes from several ranks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(copy_engines, "_LEAST_ROWS", least_rows)
        return body(*args)


def check_in_steps(ctx: iris.Iris, cases: list[Case]) -> None:
    for least_rows in (1, 2 * -(-cases[0].M // ctx.num_ranks)):
        ctx.ops.forget_launches()  # which have the other steps
        in_steps_of(least_rows, check_cases, ctx, cases)
    together = [replace(case, config=replace(case.config, ranks_together=ctx.num_ranks)) for case in cases]
    in_steps_of(1, check_cases, ctx, together)


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.some(2)
def test_results_are_right_in_steps(world_size: int) -> None:
    """Even and uneven rows, ranks without rows, different columns on a rank, and rows that are not contiguous."""
    config = FusedConfig(algorithm="copy_gather")
    for M in (2000, 1999, 5, 3) if ON_GPU else (24, 23, 5, 3):
        case = Case(GATHER_MATMUL, "rows", M, 40, 24, config=config, seed=M)
        cases = [case, replace(case, uneven=True, bias=False, pad=8), replace(case, dtype=torch.float32, on_heap=False)]
        cases += [replace(each, config=SPECIALISED, transposed=not each.transposed) for each in cases]
        run_ranks(world_size, check_in_steps, cases)


def without_depth(ctx: iris.Iris) -> None:
    """The sum of no products is the bias, in a workspace without staging and in one with some."""
    rows, like = part_of(5, ctx.num_ranks, ctx.cur_rank), dict(dtype=torch.bfloat16, device=ctx.device)
    bias = torch.arange(16, **like)
    for K in (0, 8, 0):
        out = torch.full((5, 16), torch.nan, **like)
        ctx.ops.all_gather_matmul(out, torch.ones(rows, K, **like), torch.ones(K, 16, **like), bias, config=config())
        assert torch.equal(out, (bias + K).expand(5, 16)), K


@pytest.mark.parametrize("world_size", WORLDS)
def test_rows_without_columns_arrive_too(world_size: int) -> None:
    run_ranks(world_size, without_depth)


def one_row_along_k(ctx: iris.Iris) -> None:
    """Parts of a single row that is at most one wide: those along K are taken as rows, of which one rank has one."""
    like = dict(dtype=torch.bfloat16, device=ctx.device)
    bias = torch.arange(16, **like)
    for K, chosen in ((1, config()), (0, config()), (1, SPECIALISED), (1, None), (0, None)):
        wide = torch.full((3, 16), torch.nan, **like)
        A = torch.full((1, part_of(K, ctx.num_ranks, ctx.cur_rank)), 2.0, **like)
        ctx.ops.all_gather_matmul(wide[1:2], A, torch.ones(K, 16, **like), bias, config=chosen)
        assert torch.equal(wide[1], bias + 2 * K), K
        assert wide[::2].isnan().all(), "written beyond out"


@pytest.mark.parametrize("world_size", WORLDS)
def test_one_row_that_is_split_along_k(world_size: int) -> None:
    run_ranks(world_size, one_row_along_k)


def counts_wrap(ctx: iris.Iris, config: FusedConfig) -> None:
    """Flags are awaited as their count goes from the largest number to the smallest."""
    rows, like = part_of(300, ctx.num_ranks, ctx.cur_rank), dict(dtype=torch.bfloat16, device=ctx.device)
    A, B, out = torch.empty(rows, 64, **like), torch.ones(64, 32, **like), torch.empty(300, 32, **like)
    workspace = ctx.ops.all_gather_matmul(out, A.fill_(0), B, config=config)
    ctx.barrier()
    workspace.barrier.counts.fill_(2**31 - 4)
    ctx.barrier()
    for call in range(1, 8):
        ctx.ops.all_gather_matmul(out, A.fill_(call), B, config=config)
        assert (out == 64 * call).all(), call
    assert int(workspace.barrier.passed) == 3 - 2**31


@pytest.mark.parametrize("config", [config(), SPECIALISED], ids=["steps", "specialised"])
def test_flags_are_told_apart_where_counts_wrap(config: FusedConfig) -> None:
    run_ranks(2, counts_wrap, config)


def at_once(ctx: iris.Iris, M: int, K: int, between: int) -> list[bool]:
    """Return whether one kernel multiplies rows at this distance; the result is right either way."""
    served, like = [], dict(dtype=torch.bfloat16, device=ctx.device)
    kernel = gather_matmul.product
    rows = part_of(M, ctx.num_ranks, ctx.cur_rank)
    wide, weight = torch.ones(rows, K + between, **like), torch.ones(32, -(-K // 8) * 8, **like)
    out = torch.full((M, 32), torch.nan, **like)

    def reported(*args):
        served.append(True)
        return kernel(*args) if ON_GPU else lambda: None

    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setattr(platform, "has_warp_specialisation", lambda device: True)
        patch.setattr(gather_matmul, "product", reported)
        ctx.ops.all_gather_matmul(out, wide[:, :K], weight[:, :K].t(), config=SPECIALISED)
    assert (out == K).all() or (served and not ON_GPU)
    return served


@pytest.mark.parametrize(
    "M, K, between, expected",
    [(6, 24, 0, True), (6, 24, 8, False), (2, 20, 4, False)],
    ids=["side by side", "apart", "gathered between vectors"],
)
def test_one_kernel_multiplies_rows_that_copy_engines_carry(M: int, K: int, between: int, expected: bool) -> None:
    """Such as stand apart are copied by a kernel, which could wait for room until the product ends."""
    if ON_GPU and not platform.has_warp_specialisation(torch.device("cuda", 0)):
        pytest.skip("warps are specialised on Hopper only")
    assert run_ranks(2, at_once, M, K, between) == [[True] * expected] * 2


def come_late(rank: int, world_size: int, limit: float) -> None:
    """Rank 0 gives up waiting for rank 1, which comes to a call that rank 0 has vouched for nothing in."""
    with iris.iris(1 << 22) as ctx, pytest.raises(PeerLostError, match=f"rank {rank} lost rank {1 - rank}"):
        whole, part, B = torch.ones(8, 8), torch.ones(4, 8), torch.ones(8, 8)
        call = partial(ctx.ops.all_gather_matmul, whole, part, B, config=FusedConfig(algorithm="copy_gather"))
        call()
        ctx.barrier()
        time.sleep(3 * limit * rank)
        call()


@pytest.mark.slow
@pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")
def test_who_gave_up_at_the_entry_lets_nobody_use_its_rows() -> None:
    limit = patient(1)  # making the context must not take longer
    ended = run_fresh(2, come_late, limit, env={"IRIS_TIMEOUT": str(limit)})
    assert [end.exitcode for end in ended] == [0, 0], [end.traceback for end in ended]


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", WORLDS)
def test_steps_are_captured(world_size: int) -> None:
    """Replays with late ranks, and captured and eager calls in turn, which set the same marks."""
    for M, config in product((512, 37), (FusedConfig(algorithm="copy_gather"), SPECIALISED)):
        case = Case(GATHER_MATMUL, "rows", M, 512, 1024, config=config)
        assert run_ranks(world_size, in_steps_on, 1, replay, case, 1000) == [0] * world_size
        run_ranks(world_size, in_steps_on, 1, captured_and_eager, case)


def in_steps_on(ctx: iris.Iris, least_rows: int, body, *args):
    return in_steps_of(least_rows, body, ctx, *args)
