"""On GPUs: ops in CUDA graphs, replayed with changing inputs; calls that neither wait for the device nor allocate."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
import time

import iris
from iris.errors import CaptureError
from iris_ops import FusedConfig
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, REDUCE_SCATTER
import pytest
import torch

from tests.checks import assert_only_launches, poison
from tests.harness import WORLDS, run_ranks
from tests.iris_ops.calls import Call
from tests.reference import FORMS, Case

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("world_size", WORLDS, scope="session")]

REPLAYS = 1000
INPUTS = 8  # different inputs that replays take in random order
ONE_SHOT = FusedConfig(16, 64, 64, num_warps=4, algorithm="one_shot")
TWO_SHOT = FusedConfig(64, 64, 32, num_warps=8, algorithm="two_shot")
SPECIALISED = FusedConfig(128, 128, 64, num_stages=5, num_programs=7, splits=4, stagger_us=5, warp_specialised=True)
LAMPORT = FusedConfig(64, 128, 64, num_stages=3, num_programs=7, warp_specialised=True, algorithm="two_shot")
VARIANTS = [
    (ALL_REDUCE, "", TWO_SHOT),
    (ALL_REDUCE, "", LAMPORT),
    *((op, form, replace(LAMPORT, algorithm="one_shot")) for op, form in ((ALL_REDUCE, ""), (REDUCE_SCATTER, "rows"))),
    *((op, form, ONE_SHOT) for op, form in FORMS),
    *((op, form, None) for op, form in FORMS),
    *((op, form, SPECIALISED) for op, form in FORMS if op != GATHER_MATMUL),
    *((op, form, FusedConfig(algorithm="sequential")) for op, form in FORMS if form in ("", "rows")),
    (GATHER_MATMUL, "rows", FusedConfig(algorithm="copy_gather")),
]


class Pool:
    """A call's tensors, which a graph keeps, and several inputs with the results that they must give, bit for bit."""

    def __init__(self, ctx: iris.Iris, case: Case) -> None:
        self.call = Call(ctx, case)
        self.workspace = None
        self.inputs, self.results = [], []
        for seed in range(INPUTS):
            other = Call(ctx, replace(case, seed=seed, on_heap=False))
            self.inputs.append((other.A, other.B, other.bias))
            self.set(seed)
            self.call.inputs = other.inputs
            poison(self.call.guarded.tensor)
            self.workspace = self.call.run()
            ctx.barrier()
            self.results.append(self.call.check())
        self.wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)

    def set(self, index: int) -> None:
        """Puts input number `index` in place, on the stream."""
        for place, value in zip((self.call.A, self.call.B, self.call.bias), self.inputs[index], strict=True):
            if place is not None:
                place.copy_(value)

    def compare(self, index: int) -> None:
        """Counts, on the stream, a result that is not the one of input number `index`."""
        self.wrong += (self.call.out != self.results[index]).any()  # NaN differs from all


@contextmanager
def capture(graph: torch.cuda.CUDAGraph):
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        yield


def delays(ctx: iris.Iris, seed: int) -> torch.Generator:
    """Random numbers that the ranks do not share."""
    return torch.Generator().manual_seed(seed * ctx.num_ranks + ctx.cur_rank)


def late(ctx: iris.Iris, step: int, random: torch.Generator) -> None:
    """Now and then one rank comes late to the call, by up to 2 ms of device time."""
    if step % 7 == 0 and step // 7 % ctx.num_ranks == ctx.cur_rank:
        torch.cuda._sleep(int(torch.randint(4_000_000, (), generator=random)))


def replay(ctx: iris.Iris, case: Case, replays: int) -> int:
    pool = Pool(ctx, case)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        pool.call.run(pool.workspace)
    order = torch.randint(INPUTS, (replays,), generator=torch.Generator().manual_seed(1)).tolist()
    random = delays(ctx, 2)
    for step, index in enumerate(order):
        pool.set(index)
        poison(pool.call.out)
        late(ctx, step, random)
        graph.replay()
        pool.compare(index)
    torch.cuda.synchronize()
    ctx.check()
    pool.call.guarded.check()
    return int(pool.wrong)


@pytest.mark.parametrize("shape", [(128, 512, 256), (37, 129, 50), (1, 1024, 512)], ids=str)
@pytest.mark.parametrize("op, form, config", VARIANTS)
@pytest.mark.some(on_gpus=29)  # each variant, each shape with a third of them
def test_each_replay_is_right(
    world_size: int, op: str, form: str, config: FusedConfig | None, shape: tuple[int, int, int]
) -> None:
    case = Case(op, form, *shape, config=config)
    if config and config.algorithm == "sequential" and op != ALL_REDUCE and shape[0] % world_size:
        pytest.skip("uneven rows are not gathered so")
    assert run_ranks(world_size, replay, case, REPLAYS) == [0] * world_size


def replay_chain(ctx: iris.Iris, cases: list[Case], replays: int) -> list[int]:
    """All calls in one graph, with eager calls between its replays, on one workspace."""
    pools = [Pool(ctx, case) for case in cases]
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        for pool in pools:
            pool.call.run()
    random = torch.Generator().manual_seed(3)
    mine = delays(ctx, 4)
    for step in range(replays):
        chosen = torch.randint(INPUTS, (len(pools),), generator=random).tolist()
        for pool, index in zip(pools, chosen, strict=True):
            pool.set(index)
            poison(pool.call.out)
        late(ctx, step, mine)
        if step % 3:
            graph.replay()
        else:
            for pool in pools:
                pool.call.run()
        for pool, index in zip(pools, chosen, strict=True):
            pool.compare(index)
    torch.cuda.synchronize()
    ctx.check()
    return [int(pool.wrong) for pool in pools]


def test_ops_share_a_graph_and_a_workspace(world_size: int) -> None:
    cases = [Case(op, form, 96, 256, 192, config=config) for op, form, config in VARIANTS]
    assert run_ranks(world_size, replay_chain, cases, 200) == [[0] * len(cases)] * world_size


def replay_stale(ctx: iris.Iris) -> int:
    """A graph whose op was left out: what the test above would count."""
    pool = Pool(ctx, Case(ALL_REDUCE, "", 64, 64, 64))
    for index in (0, 1):
        pool.set(index)
        poison(pool.call.out)
        pool.compare(index)
    pool.call.out.copy_(pool.results[0])
    pool.compare(1)
    pool.compare(0)
    return int(pool.wrong)


def test_a_stale_result_is_counted(world_size: int) -> None:
    assert run_ranks(world_size, replay_stale) == [3] * world_size


# --- what cannot be captured -----------------------------------------------------------------------------------------


def capture_first_call(ctx: iris.Iris, warm: bool) -> None:
    """The first call at all, or the first that needs more workspace than any before, is refused; the next one is right.

    `warm`: whether a smaller problem was called before.
    """
    small, large = (Call(ctx, Case(REDUCE_SCATTER, "rows", m, 256, 64)) for m in (64, 2048))
    if warm:
        small.run()
    used = ctx.heap.used
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CaptureError, match="before capturing"), capture(graph):
        large.run()
    torch.cuda.synchronize()
    assert ctx.heap.used == used
    large.run()
    large.check()
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        large.run()
    poison(large.guarded.tensor)
    graph.replay()
    large.check()


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_first_call_is_not_captured(world_size: int, warm: bool) -> None:
    run_ranks(world_size, capture_first_call, warm)


# --- host cost -------------------------------------------------------------------------------------------------------


def eager_cost(ctx: iris.Iris, case: Case) -> None:
    call = Call(ctx, case)
    workspace = call.run()
    for _ in range(4):  # the last of them as those that follow
        call.run(workspace)
    torch.cuda.synchronize()
    poison(call.guarded.tensor)
    assert_only_launches(ctx, lambda: call.run(workspace))
    call.check()
    most, workspace.graphs.most = workspace.graphs.most, 0  # as where there are no graphs
    try:
        ctx.ops.forget_launches()
        for _ in range(3):
            call.run(workspace)
        torch.cuda.synchronize()
        poison(call.guarded.tensor)
        assert_only_launches(ctx, lambda: call.run(workspace))
        call.check()
    finally:
        workspace.graphs.most = most


@pytest.mark.parametrize("on_heap", [True, False])
@pytest.mark.parametrize("op, form, config", VARIANTS)
@pytest.mark.some(on_gpus=29)  # each variant
def test_a_call_neither_waits_nor_allocates(
    world_size: int, op: str, form: str, config: FusedConfig | None, on_heap: bool
) -> None:
    run_ranks(world_size, eager_cost, Case(op, form, 132, 264, 72, config=config, on_heap=on_heap))


def overlap(ctx: iris.Iris, case: Case) -> bool:
    """Rank 0 comes half a second late. Returns whether this rank's stream was free while its call still ran."""
    call = Call(ctx, case)
    call.run()
    call.check()
    poison(call.guarded.tensor)
    own_work = torch.ones(256, 256, device=ctx.device)
    own_work @ own_work  # loading a kernel for the first time waits for those that run
    ctx.barrier()
    if ctx.cur_rank == 0:
        time.sleep(0.5)
    workspace = call.run(async_op=True)
    own_work @ own_work
    torch.cuda.current_stream().synchronize()
    ran_on = not workspace._done.query()
    workspace.wait()
    result = call.out.clone()
    torch.cuda.current_stream().synchronize()
    assert workspace._done.query()
    assert torch.equal(result, call.check())
    return ran_on


@pytest.mark.parametrize("op, form, config", VARIANTS)
@pytest.mark.some(on_gpus=10)
def test_async_op_leaves_the_stream_free(world_size: int, op: str, form: str, config: FusedConfig | None) -> None:
    if world_size == 1:
        pytest.skip("with nobody to wait for, the call may end first")
    ran_on = run_ranks(world_size, overlap, Case(op, form, 64, 128, 64, config=config))
    assert all(ran_on[1:])


def captured_and_eager(ctx: iris.Iris, case: Case) -> None:
    """A captured call on the side stream leaves nothing for eager calls to wait for, nor they for a capture."""
    call = Call(ctx, case)
    call.run()
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        call.run(async_op=True)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call.run(async_op=True)
            ctx.ops.join()
        call.run()
        call.check()
        poison(call.guarded.tensor)
        graph.replay()
        call.check()


@pytest.mark.parametrize("op, form, config", VARIANTS)
@pytest.mark.some(on_gpus=10)
def test_captured_and_eager_calls_in_turn(world_size: int, op: str, form: str, config: FusedConfig | None) -> None:
    run_ranks(world_size, captured_and_eager, Case(op, form, 64, 128, 64, config=config))


def mixed(ctx: iris.Iris, calls: int) -> int:
    """Asynchronous and other calls after each other on one workspace, some joined through it and some by the next."""
    pools = [Pool(ctx, Case(op, form, 72, 136, 80)) for op, form in FORMS]
    random = torch.Generator().manual_seed(5)
    mine = delays(ctx, 6)
    for step in range(calls):
        which, index, kind = (int(torch.randint(n, (), generator=random)) for n in (len(pools), INPUTS, 3))
        pool = pools[which]
        ctx.ops.join()  # the inputs may be in use
        pool.set(index)
        poison(pool.call.out)
        late(ctx, step, mine)
        workspace = pool.call.run(async_op=kind > 0)
        if kind == 1:
            workspace.wait()
        elif kind == 2:
            ctx.ops.join()
        pool.compare(index)
    torch.cuda.synchronize()
    return sum(int(pool.wrong) for pool in pools)


def test_async_and_other_calls_in_turn(world_size: int) -> None:
    assert run_ranks(world_size, mixed, 300) == [0] * world_size
