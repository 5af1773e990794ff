"""On GPUs: collectives in CUDA graphs, replayed with changing inputs; calls that neither wait nor allocate."""

from __future__ import annotations

from dataclasses import replace

import iris
from iris.errors import CaptureError
import pytest
import torch

from tests.checks import assert_only_launches, poison
from tests.harness import WORLDS, run_ranks
from tests.iris.test_ccl import FLAGS, LAMPORT, ONE, OTHERS, TWO, Call, Case

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("world_size", WORLDS, scope="session")]

REPLAYS = 500
INPUTS = 4
DETERMINISTIC = [
    *(Case("all_reduce", (4, 5000), config) for config in (None, ONE, TWO, FLAGS, OTHERS[0])),
    *(Case(op, (16, 3000), config) for op in ("all_gather", "reduce_scatter") for config in (LAMPORT, FLAGS)),
    *(Case("all_to_all", (16, 3000), config) for config in (LAMPORT, FLAGS)),
    Case("all_reduce", (4, 1 << 20), None),
    Case("all_reduce", (300, 700), FLAGS, pad=8),
    *(Case("all_reduce", (5000,), config, torch.int32) for config in OTHERS[1:]),
]


class Pool:
    """A call's tensors, which a graph keeps, and several inputs with the results that they must give, bit for bit."""

    def __init__(self, ctx: iris.Iris, case: Case) -> None:
        self.call = Call(ctx, case)
        self.inputs, self.results = [], []
        for seed in range(INPUTS):
            other = Call(ctx, replace(case, seed=seed, on_heap=False))
            self.call.case, self.call.given = other.case, other.given
            self.call.run()
            self.inputs.append(other.given)
            self.results.append(self.call.check())
        self.wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)

    def launch(self) -> None:
        call = self.call
        getattr(call.ctx.ccl, call.case.op)(call.out, call.inp, config=call.case.config)

    def set(self, index: int) -> None:
        self.call.inp.copy_(self.inputs[index])
        poison(self.call.out)

    def compare(self, index: int) -> None:
        self.wrong += (self.call.out != self.results[index]).any()  # NaN differs from all


def capture(graph: torch.cuda.CUDAGraph):
    return torch.cuda.graph(graph, capture_error_mode="thread_local")


def replay(ctx: iris.Iris, case: Case) -> int:
    """In between, eager calls on the same workspace; now and then one rank comes late by up to 2 ms of device time."""
    pool = Pool(ctx, case)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        pool.launch()
    shared = torch.Generator().manual_seed(1)
    mine = torch.Generator().manual_seed(2 + ctx.cur_rank)
    for step in range(REPLAYS):
        index = int(torch.randint(INPUTS, (), generator=shared))
        pool.set(index)
        if step % 7 == 0 and step // 7 % ctx.num_ranks == ctx.cur_rank:
            torch.cuda._sleep(int(torch.randint(4_000_000, (), generator=mine)))
        graph.replay() if step % 3 else pool.launch()
        pool.compare(index)
    torch.cuda.synchronize()
    ctx.check()
    pool.call.guarded.check()
    return int(pool.wrong)


@pytest.mark.parametrize("case", DETERMINISTIC, ids=str)
def test_each_replay_is_right(world_size: int, case: Case) -> None:
    assert run_ranks(world_size, replay, case) == [0] * world_size


def first_call(ctx: iris.Iris) -> None:
    """The first call is refused in a capture; after a preamble it is not."""
    call = Call(ctx, Case("all_reduce", (1 << 16,), FLAGS))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="before capturing"), capture(graph):
        ctx.ccl.all_reduce(call.out, call.inp, config=FLAGS)
    torch.cuda.synchronize()
    workspace = ctx.ccl.all_reduce_preamble(call.out, call.inp, FLAGS)
    call.run(workspace=workspace)  # compiles, which may not be captured either
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        ctx.ccl.all_reduce(call.out, call.inp, config=FLAGS, workspace=workspace)
    poison(call.guarded.tensor)
    graph.replay()
    call.check()


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_first_call_is_not_captured(world_size: int) -> None:
    run_ranks(world_size, first_call)


def eager_cost(ctx: iris.Iris, case: Case) -> None:
    call = Call(ctx, case)
    call.run()
    pool = Pool(ctx, case)
    pool.launch()
    torch.cuda.synchronize()
    assert_only_launches(ctx, pool.launch)
    torch.cuda.synchronize()
    pool.call.check()


@pytest.mark.parametrize("on_heap", [True, False])
@pytest.mark.parametrize("case", DETERMINISTIC[1:9], ids=str)
def test_a_call_neither_waits_nor_allocates(world_size: int, case: Case, on_heap: bool) -> None:
    run_ranks(world_size, eager_cost, replace(case, on_heap=on_heap))


def overlap(ctx: iris.Iris, case: Case) -> bool:
    """Rank 0 comes late. Returns whether this rank's stream was free while its call still ran."""
    call = Call(ctx, case)
    call.run()
    own_work = torch.ones(256, 256, device=ctx.device)
    own_work @ own_work  # loading a kernel for the first time waits for those that run
    ctx.barrier()
    poison(call.guarded.tensor)
    if ctx.cur_rank == 0:
        torch.cuda._sleep(500_000_000)
    workspace = ctx.ccl.all_reduce(call.out, call.inp, async_op=True, config=case.config)
    own_work @ own_work
    torch.cuda.current_stream().synchronize()
    ran_on = not workspace._done.query()
    workspace.wait()
    torch.cuda.current_stream().synchronize()
    call.check()
    return ran_on


@pytest.mark.parametrize("config", [ONE, FLAGS])
def test_async_op_leaves_the_stream_free(world_size: int, config) -> None:
    if world_size == 1:
        pytest.skip("with nobody to wait for, the call may end first")
    assert all(run_ranks(world_size, overlap, Case("all_reduce", (5000,), config))[1:])
