"""Calls that repeat an earlier one: recognised by all that matters, and by nothing less."""

from __future__ import annotations

from dataclasses import replace
import gc
from typing import NamedTuple

import iris
from iris.errors import ArgumentError, HeapExhausted
from iris.launch import relaunch
from iris.triton_private import DirectLaunch
from iris_ops import FusedConfig, steps
from iris_ops.config import WITH_TORCH
from iris_ops.planning.plan import way_for
from iris_ops.planning.ways.lamport import LAMPORT
from iris_ops.planning.ways.weight_stream import LAMPORT_STREAM, STREAM_CONFIG
from iris_ops.planning.weights.fp8 import FP8_FORMAT
from iris_ops.problem import ALL_REDUCE, MATMUL_GATHER, REDUCE_SCATTER, Problem
from iris_ops.workspace import Workspace
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.checks import poison
from tests.harness import WORLDS, both, run_ranks
from tests.iris_ops.calls import Call
from tests.reference import FORMS, Case

pytestmark = both

BLOCKS = FusedConfig(16, 16, 16, num_warps=4, num_stages=2, comm_programs=1)


class Repeats:
    """Count calls whose key matches an earlier call; each still runs in full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        run_all = steps.run_all

        def run_and_keep(*args):
            run_all(*args)
            return relaunch.Launch(self.actual)

        monkeypatch.setattr(steps, "run_all", run_and_keep)

    def actual(self, *_) -> bool:
        self.count += 1
        return False

    def of(self, call) -> int:
        before = self.count
        call()
        return self.count - before


def vary(ctx: iris.Iris, case: Case) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        repeats = Repeats(monkeypatch)
        call, other = Call(ctx, case), Call(ctx, replace(case, seed=1))
        op = getattr(ctx.ops, case.op)
        out, A, B, bias = call.out, call.A, call.B, call.bias
        workspace = call.run()
        call.run()  # the key of the first call was made before there was a workspace
        for given in (None, workspace):
            assert repeats.of(lambda given=given: call.run(given)) == 1
        # the same memory under other Python objects
        assert repeats.of(lambda: op(out[:], A[:], B[:], bias[:], config=case.config)) == 1
        different = [
            lambda: op(other.out, A, B, bias, config=case.config),
            lambda: op(out, other.A, B, bias, config=case.config),
            lambda: op(out, A, other.B, bias, config=case.config),
            lambda: op(out, A, B, other.bias, config=case.config),
            lambda: op(out, A, B, None, config=case.config),
            lambda: op(out, A, B.contiguous() if case.transposed else B.t().contiguous().t(), bias, config=case.config),
            lambda: op(out, A, B, bias, config=replace(case.config, group_m=1)),
            lambda: op(out, A, B, bias, config=replace(case.config, kernel="another")),
            lambda: op(out, A, B, bias, config=case.config, workspace=Workspace(ctx)),
        ]
        for index, changed in enumerate(different):
            assert repeats.of(changed) == 0, index
        with torch.enable_grad(), pytest.raises(ArgumentError, match="requires grad"):
            op(out, A.detach().requires_grad_(), B, bias, config=case.config)
        # larger than all before: the workspace grows, and what was kept belongs to the old one
        ctx.barrier()
        large = Call(ctx, Case(case.op, case.form, 96, 128, 64, config=replace(BLOCKS, block_m=32, block_n=32)))
        call.run()
        large.run()
        large.check()
        assert repeats.of(call.run) == (case.op == MATMUL_GATHER)  # which needs no workspace
        ctx.barrier()


def test_configurations_that_select_other_kernels_differ() -> None:
    """Of one algorithm a quantised weight has two kernels, so calls that differ in `kernel` alone are two."""
    problem = Problem(ALL_REDUCE, "", 1, 4096, 1024, 2, torch.bfloat16, FP8_FORMAT)
    stream, rounded = STREAM_CONFIG, replace(STREAM_CONFIG, kernel=LAMPORT)
    assert [way_for(problem, each).kernel for each in (stream, rounded)] == [LAMPORT_STREAM, LAMPORT]
    out = torch.empty(4)
    first, second = (relaunch.key_of((out,), (ALL_REDUCE, each)) for each in (stream, rounded))
    assert first != second and stream != rounded
    with pytest.raises(ArgumentError, match="FusedConfig.kernel is None"):
        replace(stream, kernel=None)


@pytest.mark.parametrize("op, form", FORMS)
@pytest.mark.parametrize("world_size", [WORLDS[-1]])
@pytest.mark.some(2)
def test_only_the_same_call_is_repeated(world_size: int, op: str, form: str) -> None:
    run_ranks(world_size, vary, Case(op, form, 24, 40, 32, bias=True, transposed=True, config=BLOCKS))


def elsewhere(ctx: iris.Iris, cases: list[Case]) -> None:
    """Calls that differ in their addresses only, and then those again."""
    for case in cases:
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = [Call(ctx, replace(case, seed=seed)) for seed in range(3)]
            for _ in range(2):  # before the first of all calls there is no workspace
                calls[0].run()
            run_all, whole = steps.run_all, []

            def run_and_count(*args, run_all=run_all, whole=whole):
                whole.append(args)
                return run_all(*args)

            monkeypatch.setattr(steps, "run_all", run_and_count)
            for call in calls[1:] + calls:
                ctx.barrier()
                poison(call.guarded.tensor)
                ctx.barrier()
                call.run()
                call.check()
            if case.config.algorithm not in WITH_TORCH:
                assert not whole, "a call was made the long way that differs in its addresses only"


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [WORLDS[-1]])
def test_calls_at_other_addresses_are_right(world_size: int) -> None:
    configs = [BLOCKS, replace(BLOCKS, algorithm="one_shot"), *(FusedConfig(algorithm=kind) for kind in WITH_TORCH)]
    cases = [Case(op, form, 32, 48, 32, config=config) for op, form in FORMS for config in configs]
    cases += [replace(case, bias=False, transposed=False, on_heap=False) for case in cases if case.config is BLOCKS]
    run_ranks(world_size, elsewhere, [case for case in cases if served(case, world_size)])


def outgrow(ctx: iris.Iris) -> None:
    """What a call's collective works in moves to other memory."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        repeats = Repeats(monkeypatch)
        config = FusedConfig(algorithm="sequential")
        call, large = (Call(ctx, Case(ALL_REDUCE, "", 16, n, 8, config=config)) for n in (40, 4000))
        call.run()
        call.run()
        assert repeats.of(call.run) == 1
        large.run()
        assert repeats.of(call.run) == 0, "it goes to where its peers no longer look"
        assert repeats.of(call.run) == 1
        call.check()


@pytest.mark.parametrize("world_size", [WORLDS[-1]])
def test_calls_are_forgotten_when_their_collective_moves(world_size: int) -> None:
    run_ranks(world_size, outgrow)


def outgrow_results(ctx: iris.Iris) -> list[int]:
    """A launch moved to another `out` outside the heap would leave the result where nothing copies it from."""
    moved: list[int] = []
    run_all = steps.run_all

    def run_and_keep(*args):
        run_all(*args)
        return relaunch.Launch(lambda: False, lambda addresses: lambda: bool(moved.append(addresses[0])))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(steps, "run_all", run_and_keep)
        case = Case(MATMUL_GATHER, "rows", 16, 40, 8, config=BLOCKS, on_heap=False)
        first, second, third = (Call(ctx, replace(case, seed=seed)) for seed in range(3))
        for call in (first, first, second):  # the first call's key was made before there was a workspace
            call.run()
        before = len(moved)
        Call(ctx, replace(case, M=512, N=512)).run()  # whose results need more memory
        third.run()
        third.check()
    return [before, len(moved) - before]


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_launches_to_results_that_moved_are_forgotten(world_size: int) -> None:
    before, after = run_ranks(world_size, outgrow_results)[0]
    assert before > 0 and after == 0


def outgrow_the_heap(ctx: iris.Iris) -> None:
    """There is room for the flags of a call, which move, but not for what it stages."""
    with iris.iris(2 << 20) as small, pytest.MonkeyPatch.context() as monkeypatch:
        repeats = Repeats(monkeypatch)
        call = Call(small, Case(REDUCE_SCATTER, "rows", 16, 32, 16, config=BLOCKS))
        call.run()
        call.run()
        assert repeats.of(call.run) == 1
        flags = small.ops._calls.workspace.flags
        with pytest.raises(HeapExhausted):
            Call(small, Case(REDUCE_SCATTER, "rows", 2048, 2048, 16, config=BLOCKS, on_heap=False)).run()
        assert small.ops._calls.workspace.flags is not flags
        assert repeats.of(call.run) == 0, "it goes to where a peer may no longer look"
        call.check()
        ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_calls_are_forgotten_when_the_heap_is_too_small(world_size: int) -> None:
    run_ranks(world_size, outgrow_the_heap)


def give_back(ctx: iris.Iris, cases: list[Case]) -> list[Case]:
    """The cases of which a kept call holds memory that its caller has let go."""
    held = []
    for case in cases:
        call = Call(ctx, replace(case, on_heap=False))
        for _ in range(3):  # the last of them is among those that came before
            call.run()
        call.check()
        tensors = call.A, call.B, call.bias, call.guarded.buffer
        memory = [StorageWeakRef(t.untyped_storage()) for t in tensors]
        del call, tensors
        gc.collect()
        if not all(each.expired() for each in memory):
            held.append(case)
    return held


@pytest.mark.parametrize("world_size", [WORLDS[-1]])
@pytest.mark.slow
def test_what_is_kept_of_a_call_keeps_no_memory(world_size: int) -> None:
    cases = [Case(op, form, 24, 40, 32) for op, form in FORMS]
    cases += [replace(case, config=FusedConfig(algorithm=kind)) for case in cases for kind in WITH_TORCH]
    for held in run_ranks(world_size, give_back, [case for case in cases if served(case, world_size)]):
        assert not held


def served(case: Case, world_size: int) -> bool:
    problem = Problem(case.op, case.form, case.M, case.N, case.K, world_size, case.dtype)
    if case.config and case.config.algorithm == "copy_gather" and case.op != "all_gather_matmul":
        return False
    return not (case.config and way_for(problem, case.config).refuses(problem))


class Several(NamedTuple):
    first: torch.Tensor | None
    second: torch.Tensor | int


def test_addresses_in_named_tuples_move() -> None:
    """A group of arguments goes to the launcher as a tuple, in which another call's addresses stand."""
    given: list[tuple] = []
    how = DirectLaunch(lambda *call: given.append(call), lambda: 7, (), lambda values: (tuple(values),), None, None)
    a, b, c, d = (torch.empty(64) for _ in range(4))
    values = [Several(a, 3), b, 5, Several(None, c), Several(b, a)]
    launch = relaunch._Native(how).prepare((2, 1, 1), values, (a.data_ptr(), b.data_ptr()))

    def expected(x: torch.Tensor, y: torch.Tensor) -> tuple:
        x, y = x.data_ptr(), y.data_ptr()
        return 2, 1, 1, 7, ((x, 3), y, 5, (None, c.data_ptr()), (y, x))

    assert launch.again() and given == [expected(a, b)]
    moved = launch.moved((c.data_ptr(), d.data_ptr()))
    assert moved() and given[1:] == [expected(c, d)]
    assert launch.again() and given[2:] == [expected(a, b)], "the first call's list is its own"
