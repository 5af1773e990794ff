"""Calls of several launches become CUDA graphs: when they do, and that results stay the same.

The decision is tested with a fake capture on any machine; the rest needs GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import iris
from iris.launch import graphs as graphed
from iris.launch.graphs import Graphed, Graphs
from iris_ops import FusedConfig, calls, torch_ops
from iris_ops.config import WITH_TORCH
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, REDUCE_SCATTER
from iris_ops.with_torch import sequential
from iris_ops.workspace import Workspace
import pytest
import torch
import triton

from tests.checks import poison
from tests.harness import WORLDS, run_ranks
from tests.iris_ops.calls import Call
from tests.iris_ops.test_graph import INPUTS, VARIANTS, Pool, capture, delays, late
from tests.iris_ops.test_relaunch import served
from tests.reference import Case

# --- when a call becomes a graph -------------------------------------------------------------------------------------


class Machine:
    """Fake a context, a capturer and a clock. `answer`: what a capture does besides counting and taking time."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.now, self.takes = 0.0, 0.0  # s, now and that a capture takes
        self.graphs = Graphs(self, capturer=self, clock=lambda: self.now)
        self.captured, self.checks, self.reported, self.answer = 0, 0, [], None

    def check(self) -> None:
        self.checks += 1

    @property
    def log(self) -> Machine:
        return self

    def info(self, message: str) -> None:
        self.reported.append(message)

    def capture(self, again):
        self.captured += 1
        self.now += self.takes
        return self.answer() if self.answer else SimpleNamespace(replay=again.replayed)


class Work:
    """A call, and how often it was launched and replayed."""

    def __init__(self, machine: Machine) -> None:
        self.launches = self.replays = 0
        self.call = Graphed(machine.graphs, self)

    def __call__(self) -> bool:
        self.launches += 1
        return True

    def replayed(self) -> None:
        self.replays += 1

    def after(self, calls: int) -> tuple[int, int]:
        for _ in range(calls):
            assert self.call() is True
        return self.launches, self.replays


def test_what_is_repeated_for_the_second_time_is_a_graph() -> None:
    machine = Machine()
    work = Work(machine)
    assert work.after(2) == (2, 0) and not machine.captured
    assert work.after(3) == (2, 3) and machine.captured == 1
    assert machine.checks == 3, "what a replay finds is looked for as after a launch"


def test_calls_are_launched_where_launches_are_listened_to() -> None:
    machine = Machine()
    work = Work(machine)
    work.after(3)
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    try:
        assert work.after(4) == (6, 1)
    finally:
        hook.remove(print)
    assert work.after(1) == (6, 2)


def test_the_environment_switches_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(graphed.ENV_GRAPHS, "0")
    machine = Machine()
    assert Work(machine).after(200) == (200, 0) and not machine.captured and not machine.reported


def test_a_failure_is_told_once_and_ends_it() -> None:
    machine = Machine()
    before, work, other = (Work(machine) for _ in range(3))
    before.after(3)
    machine.answer = lambda: torch.empty(0)[1]
    assert work.after(200) == (200, 0) and other.after(200) == (200, 0)
    assert machine.captured == 2 and len(machine.reported) == 1 and "out of bounds" in machine.reported[0]
    assert before.after(1) == (2, 2), "what was captured before is right still"


def test_what_cannot_be_captured_now_is_tried_again() -> None:
    machine = Machine()
    work = Work(machine)
    machine.answer = lambda: None
    assert work.after(10) == (10, 0) and machine.captured == 1
    machine.answer = None
    assert work.after(graphed._RUNS_BETWEEN)[1] > 0 and machine.captured == 2 and not machine.reported


# --- that it changes nothing -----------------------------------------------------------------------------------------

TURNS = 200
WITH_TORCH_ALONE = [(op, form, config) for op, form, config in VARIANTS if config and config.algorithm in WITH_TORCH]
SHAPES = [(128, 512, 256), (37, 129, 50), (2048, 1024, 512)]
gpu = pytest.mark.gpu
ranks = pytest.mark.parametrize("world_size", WORLDS, scope="session")


@pytest.fixture(autouse=True)
def captures_come_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """However soon after others, where calls are captured in truth."""
    if "world_size" in request.fixturenames:
        monkeypatch.setattr(graphed, "_REST", 0)


def only_graphs(workspace: Workspace) -> int:
    """The number of graphs; their calls can no longer be launched in another way."""

    def again() -> bool:
        raise AssertionError("launched piece by piece")

    for call in workspace.graphs._graphed:
        call._again = again
    return len(workspace.graphs)


def alternate(ctx: iris.Iris, case: Case, turns: int) -> int:
    """Eager calls, as graphs or not, each rank for itself; asynchronous ones; replays of a graph of the user's."""
    pool = Pool(ctx, case)
    workspace = pool.workspace
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        pool.call.run(workspace)
    assert only_graphs(workspace) == 1
    together, mine = torch.Generator().manual_seed(7), delays(ctx, 8)
    graphs = 0
    for step in range(turns):
        kind, index = (int(torch.randint(n, (), generator=together)) for n in (6, INPUTS))
        ctx.ops.join()
        pool.set(index)
        poison(pool.call.out)
        late(ctx, step, mine)
        if kind == 0:
            graph.replay()
        elif kind == 1:
            pool.call.run(workspace, async_op=True)
            ctx.ops.join()
        else:
            pool.call.run(workspace)
        graphs += len(workspace.graphs)
        if int(torch.randint(10, (), generator=mine)) == 0:
            ctx.ops.forget_launches()  # here, not on peers; a graph dies while it runs
        pool.compare(index)
    torch.cuda.synchronize()
    ctx.check()
    pool.call.guarded.check()
    assert turns // 10 < graphs < turns, "graphs came and went"
    return int(pool.wrong)


@gpu
@ranks
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op, form, config", WITH_TORCH_ALONE)
@pytest.mark.some(on_gpus=8)
def test_calls_in_all_ways_in_turn(
    world_size: int, op: str, form: str, config: FusedConfig, shape: tuple[int, int, int]
) -> None:
    case = Case(op, form, *shape, config=config)
    if config.algorithm in WITH_TORCH and not served(case, world_size):
        pytest.skip("uneven rows are not gathered so")
    assert run_ranks(world_size, alternate, case, TURNS) == [0] * world_size


def beside_others(ctx: iris.Iris, cases: list[Case]) -> list[int]:
    """Graphs of several calls, which share memory, in any order, whatever becomes of what torch keeps for cuBLAS."""
    for case in cases:  # so that memory suffices for all
        Call(ctx, case).run()
    pools = [Pool(ctx, case) for case in cases]
    graphs = pools[0].workspace.graphs
    assert only_graphs(pools[0].workspace) == len(cases)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 24,), 7.0, device=ctx.device) for _ in range(16)]  # where such memory may have been
    random = torch.Generator().manual_seed(9)
    for step in range(TURNS):
        which, index = (int(torch.randint(n, (), generator=random)) for n in (len(pools), INPUTS))
        pools[which].set(index)
        poison(pools[which].call.out)
        pools[which].call.run()
        pools[which].compare(index)
        if step == TURNS // 2:  # what all of them work in moves to other memory
            Call(ctx, replace(cases[0], M=8 * cases[0].M)).run()
            assert len(graphs) == 0
    torch.cuda.synchronize()
    assert len(graphs) > len(cases) // 2, "they came again"
    assert all(bool((each == 7.0).all()) for each in others), "a graph writes what is not its own"
    return [int(pool.wrong) for pool in pools]


@gpu
@ranks
def test_graphs_keep_what_they_work_in(world_size: int) -> None:
    cases = [Case(op, form, 512, 1024, 768, config=config) for op, form, config in WITH_TORCH_ALONE]
    cases += [replace(case, bias=False, N=512) for case in cases]
    assert run_ranks(world_size, beside_others, cases) == [[0] * len(cases)] * world_size


def eager_ones(pool: Pool, calls: int) -> int:
    for index in range(calls):
        pool.set(index % INPUTS)
        poison(pool.call.out)
        pool.call.run(pool.workspace)
        pool.compare(index % INPUTS)
    torch.cuda.synchronize()
    return int(pool.wrong)


def refused(ctx: iris.Iris, case: Case) -> int:
    """The first capture fails: its calls go on as before, and other calls are still captured."""
    prepare, met = sequential.prepare, []

    def waiting(*args):
        again = prepare(*args)

        def waits_once() -> bool:
            again()
            if torch.cuda.is_current_stream_capturing() and not met:
                met.append(None)
                torch.cuda.current_stream().synchronize()
            return True

        return waits_once

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sequential, "prepare", waiting)
        pool = Pool(ctx, case)
    graphs = pool.workspace.graphs
    assert met and graphs.most == len(graphs) == 0
    wrong = eager_ones(pool, 20)
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        pool.call.run(pool.workspace)
    pool.set(3)
    poison(pool.call.out)
    graph.replay()
    pool.compare(3)
    pool.workspace = Workspace(ctx)  # whose captures have not failed
    wrong += eager_ones(pool, 20)
    assert only_graphs(pool.workspace) == 1
    return wrong + eager_ones(pool, 20)


@gpu
@ranks
def test_what_cannot_be_captured_stays_as_it_is(world_size: int) -> None:
    case = Case(ALL_REDUCE, "", 128, 512, 256, config=FusedConfig(algorithm="sequential"))
    assert run_ranks(world_size, refused, case) == [0] * world_size


def elsewhere(ctx: iris.Iris, case: Case) -> int:
    """No memory of a graph comes from a memory pool that the user has chosen."""
    pool = Pool(ctx, case)
    ctx.ops.forget_launches()
    memory = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(memory):
        wrong = eager_ones(pool, 10)
    assert all(block["state"] != "active_allocated" for each in memory.snapshot() for block in each["blocks"])
    wrong += eager_ones(pool, 70)
    assert only_graphs(pool.workspace) == 1
    return wrong + eager_ones(pool, 10)


@gpu
@ranks
def test_graphs_take_nothing_from_the_users_pool(world_size: int) -> None:
    case = Case(REDUCE_SCATTER, "rows", 256, 512, 256, config=FusedConfig(algorithm="sequential"))
    assert run_ranks(world_size, elsewhere, case) == [0] * world_size


@torch.no_grad()
def under_trees(ctx: iris.Iris, case: Case) -> None:
    """torch.compile's own graphs of a function in which the op is called, and eager calls of it in between."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(calls.Calls, "plan", lambda *_: case.config)
        call = Call(ctx, case)
        call.run()

        def product(A: torch.Tensor) -> torch.Tensor:
            result = torch_ops.product(case.op, ctx, A, call.B, call.bias, tuple(call.out.shape))
            return torch_ops.product(case.op, ctx, A, call.B, call.bias, tuple(call.out.shape)) + 0 * result

        torch.compiler.reset()
        compiled = torch.compile(product, mode="reduce-overhead", fullgraph=True)
        for step in range(12):
            A = call.A * (1 + step % 3)
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(A).clone()
            out = torch.full_like(call.out, torch.nan)
            getattr(ctx.ops, case.op)(out, A, call.B, call.bias)
            assert torch.equal(result, out), step


@gpu
@ranks
def test_torch_compiles_graphs_beside_them(world_size: int) -> None:
    for op, algorithm in ((GATHER_MATMUL, "copy_gather"), (ALL_REDUCE, "sequential")):
        form = "rows" if op == GATHER_MATMUL else ""
        case = Case(op, form, 256, 512, 256, config=FusedConfig(algorithm=algorithm))
        run_ranks(world_size, under_trees, case)
