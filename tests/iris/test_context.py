"""The context: what it has, barriers, log lines, bad arguments, the end."""

import contextlib
import gc
import io
import logging
import math
import os
import time

import iris
from iris import errors
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both


def _attributes(ctx):
    assert ctx.get_rank() == ctx.cur_rank and ctx.get_num_ranks() == ctx.num_ranks
    assert ctx.get_device() == ctx.device and ctx.get_device_id() == ctx.gpu_id and ctx.get_cu_count() >= 1
    bases = ctx.get_heap_bases()
    assert bases.dtype == torch.uint64 and bases.shape == (ctx.num_ranks,) and bases.device == ctx.device
    assert torch.equal(bases, ctx.heap_bases)
    assert all(int(base) % (2 << 20) == 0 for base in bases.cpu())
    context = ctx.get_device_context()
    assert context.dtype == torch.int64 and context.device == ctx.device
    first = ctx.empty(1)
    assert int(bases[ctx.cur_rank]) <= first.data_ptr() < int(bases[ctx.cur_rank]) + ctx.heap_size
    return ctx.cur_rank, ctx.num_ranks, ctx.heap_size


def _peer_views(ctx):
    """Fill this rank's strided rows in the table of every rank by copies of torch, without a kernel."""
    table = ctx.zeros(ctx.num_ranks, 5)
    ctx.device_barrier()
    for peer in range(ctx.num_ranks):
        theirs = ctx.peer_view(table[:, ::2], peer)
        assert theirs.shape == (ctx.num_ranks, 3) and theirs.device == ctx.device
        theirs[ctx.cur_rank].copy_(torch.arange(3, device=ctx.device) + 10 * ctx.cur_rank)
    ctx.device_barrier()
    with pytest.raises(errors.NotSymmetricError, match=r"outside the symmetric heap; make it with ctx.empty"):
        ctx.peer_view(torch.zeros(3, device=ctx.device), 0)
    with pytest.raises(errors.ArgumentError, match=f"rank is {ctx.num_ranks}"):
        ctx.peer_view(table, ctx.num_ranks)
    return table.tolist()


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_tensor_can_be_had_as_a_peer_has_it(world_size):
    rows = [[10.0 * rank, 0, 10 * rank + 1, 0, 10 * rank + 2] for rank in range(world_size)]
    assert run_ranks(world_size, _peer_views) == [rows] * world_size


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_a_context_tells(world_size):
    reported = run_ranks(world_size, _attributes)
    assert [rank for rank, _, _ in reported] == list(range(world_size))
    assert {size for _, size, _ in reported} == {world_size} and len({size for _, _, size in reported}) == 1


# --- barriers --------------------------------------------------------------------------------------------------------


@triton.jit
def _mark_kernel(board, rank, value, bases, WORLD: tl.constexpr):
    for to in range(WORLD):
        iris.store(board + rank, value, rank, to, bases)


def _nobody_passes_early(ctx, on_device):
    """In each round one rank is late; a rank that has passed the barrier sees what the late one wrote before."""
    board = ctx.zeros(ctx.num_ranks, dtype=torch.int32)
    ctx.barrier()
    for turn in range(1, 2 * ctx.num_ranks + 1):
        if turn % ctx.num_ranks == ctx.cur_rank:
            time.sleep(0.05)
        _mark_kernel[(1,)](board, ctx.cur_rank, turn, ctx.get_heap_bases(), WORLD=ctx.num_ranks)
        ctx.device_barrier() if on_device else ctx.barrier()
        seen = board.tolist()
        assert seen == [turn] * ctx.num_ranks, (turn, seen)
        ctx.device_barrier() if on_device else ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("on_device", [False, True], ids=["barrier", "device_barrier"])
def test_a_barrier_holds_everyone_until_the_last(world_size, on_device):
    run_ranks(world_size, _nobody_passes_early, on_device)


def _barrier_in_pairs(ctx):
    """Barriers of overlapping groups, a rank taking part in some of them, mixed with barriers of all."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    for _ in range(3):
        for low in range(world - 1):
            if rank in (low, low + 1):
                ctx.barrier(group=[low, low + 1])
                ctx.device_barrier(group=(low, low + 1))
        ctx.barrier()
        ctx.barrier(group=[rank])
        ctx.barrier(group=list(reversed(range(world))))
    for bad, text in (
        ([world], "distinct ranks"),
        ([rank, rank], "distinct ranks"),
        ([], "this rank"),
        (["0"], "distinct"),
        ([bool(rank)], "distinct"),
        ("tp", "str"),
    ):
        with pytest.raises(errors.ArgumentError, match=text):
            ctx.barrier(group=bad)
    if world > 1:
        with pytest.raises(errors.ArgumentError, match="with this rank"):
            ctx.device_barrier(group=[(rank + 1) % world])
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS)
def test_barriers_of_subgroups_do_not_mix(world_size):
    run_ranks(world_size, _barrier_in_pairs)


def _subgroup_runs_ahead(ctx):
    """A subgroup's barriers do not wait for ranks outside, and do not count as barriers with them."""
    if ctx.cur_rank < 2:
        for _ in range(5):
            ctx.barrier(group=[0, 1])
        ahead = time.monotonic()
    else:
        time.sleep(0.5)
        ahead = None
    late = time.monotonic()
    ctx.barrier()
    return ahead, late, time.monotonic()


@pytest.mark.parametrize("world_size", [w for w in WORLDS if w > 2])
def test_a_subgroup_barrier_leaves_the_others_out(world_size):
    reported = run_ranks(world_size, _subgroup_runs_ahead)
    slowest = max(late for ahead, late, _ in reported if ahead is None)
    assert all(ahead < slowest for ahead, _, _ in reported if ahead is not None)
    assert all(passed >= slowest for _, _, passed in reported)


def _barriers_that_wrap(ctx):
    """Counts that stand just below 2^31 pass through it, and through 2^32, without a stuck or an early rank."""
    for start in (2**31 - 3, -3):
        ctx.barrier()
        ctx._barrier.counts.fill_(start)
        iris.platform.synchronize(ctx.device)
        ctx.hosts.all_gather(None)
        _nobody_passes_early(ctx, True)
        if ctx.cur_rank == 0:
            time.sleep(0.1)
        ctx.barrier()
        assert torch.equal(ctx._barrier.counts[0], ctx._barrier.counts[1])
        count = int(ctx._barrier.counts[0][ctx.cur_rank])
        assert count < 0 if start > 0 else count > 0
        ctx.hosts.all_gather(None)  # nobody is in the next barrier before all have looked


@pytest.mark.parametrize("world_size", WORLDS)
def test_barrier_counts_may_wrap(world_size):
    run_ranks(world_size, _barriers_that_wrap)


# --- logging ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_handlers_of_the_application():
    """pytest, where it runs in the ranks, has handlers on the root logger."""
    root = logging.getLogger()
    kept, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = kept


def _lines_by_the_application(ctx):
    """A handler that the application adds after the context was made takes the lines, and stderr has none."""
    printed, taken = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(taken)
    for logger in (logging.getLogger(), logging.getLogger("iris")):
        with contextlib.redirect_stderr(printed), _no_handlers_of_the_application():
            logger.addHandler(handler)
            ctx.warning("once")
            logger.removeHandler(handler)
    assert printed.getvalue() == "" and taken.getvalue() == f"[{ctx.cur_rank}/{ctx.num_ranks}] once\n" * 2


def test_an_application_s_handlers_take_the_log_lines():
    run_ranks(2, _lines_by_the_application)


def _log_lines(ctx):
    printed = io.StringIO()
    levels = {"debug": iris.DEBUG, "info": iris.INFO, "warning": iris.WARNING, "error": iris.ERROR}
    with contextlib.redirect_stderr(printed), _no_handlers_of_the_application():
        for level in levels.values():
            iris.set_logger_level(level)
            for name in levels:
                getattr(ctx, name)(f"{name} at {level} 100%")
    for bad in ("LOUD", None, 1.5):
        with pytest.raises(errors.ArgumentError, match=f"level is {bad!r}; expected iris.DEBUG"):
            iris.set_logger_level(bad)
    iris.set_logger_level(iris.INFO)
    here = f"[Iris] [{ctx.cur_rank}/{ctx.num_ranks}]"
    expected = [
        f"{here} {name} at {level} 100%" for level in levels.values() for name, own in levels.items() if own >= level
    ]
    assert printed.getvalue().splitlines() == expected


@pytest.mark.parametrize("world_size", WORLDS)
def test_log_lines_carry_rank_and_world(world_size):
    run_ranks(world_size, _log_lines)


# --- making and closing ----------------------------------------------------------------------------------------------


def _end(ctx):
    with iris.iris(heap_size=1 << 20) as inner:
        kept = inner.full((4,), 3.0)
        ops, ccl = inner.ops, inner.ccl
        inner.barrier()
    assert kept.sum().item() == 12
    for use in (
        lambda: inner.zeros(1),
        lambda: inner.barrier(),
        lambda: inner.device_barrier(),
        lambda: inner.broadcast(1),
        lambda: inner.get_heap_bases(),
        lambda: inner.get_device_context(),
        lambda: inner.is_symmetric(kept),
        lambda: inner.ops,
        lambda: ops.plan("matmul_all_reduce", 8, 16, 16, torch.float16),
        lambda: ccl.plan("all_reduce", kept, kept),
        lambda: ccl.new_workspace(),
        lambda: inner.__enter__(),
    ):
        with pytest.raises(errors.ClosedError, match="closed"):
            use()
    inner.close()  # twice is harmless
    assert inner.get_rank() == ctx.cur_rank and inner.get_num_ranks() == ctx.num_ranks
    with pytest.raises(KeyError):
        with iris.iris(1 << 20) as failing:
            raise KeyError("inside")
    with pytest.raises(errors.ClosedError):
        failing.check()
    ctx.barrier()  # the other context lives on


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_closed_context_refuses_and_others_live_on(world_size):
    run_ranks(world_size, _end)


def _many_contexts(ctx):
    """Contexts made and closed again and again leave no memory mapped and no descriptor open."""

    def counts():
        gc.collect()  # the interpreter leaves cycles that hold the arguments of kernels
        with open("/proc/self/maps") as maps:
            mapped = sum("iris-heap" in line for line in maps)
        return mapped, len(os.listdir("/proc/self/fd"))

    before = None
    for _ in range(5):
        with iris.iris(1 << 22) as inner:
            inner.ones(3)
            inner.barrier()
        before = before or counts()
        ctx.barrier()
    assert counts() == before


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.skipif(ON_GPU, reason="looks at the mappings of shared memory")
def test_closed_contexts_leave_nothing_behind(world_size):
    run_ranks(world_size, _many_contexts)


def _bad_arguments(ctx):
    for size in (0, -1, 1.5, "1G", None, True, 1 << 60, math.inf):
        with pytest.raises(errors.ArgumentError, match="heap_size is"):
            iris.iris(size)
    for group in ("tp", 3, [0]):
        with pytest.raises(errors.ArgumentError, match="group is"):
            iris.iris(1 << 20, group=group)
    if "IRIS_ALLOCATOR" not in os.environ:  # which would override it
        with pytest.raises(errors.ArgumentError, match="allocator_type is 'paper'"):
            iris.iris(1 << 20, "paper")
    for level in ("rows", True, ["batch"]):
        with pytest.raises(errors.ArgumentError, match="invariant is"):
            iris.iris(1 << 20, invariant=level)
    if ctx.num_ranks > 1:
        with pytest.raises(errors.ArgumentError, match="invariant differs between ranks: 'batch', None"):
            iris.iris(1 << 20, invariant=None if ctx.cur_rank else "batch")
    mine = (1 << 20) * (1 + (ctx.cur_rank == 0))
    if ctx.num_ranks > 1:
        with pytest.raises(errors.ArgumentError, match=r"heap_size differs between ranks: 2097152, 1048576"):
            iris.iris(mine)
    with iris.iris(1) as least:  # rounded up, to what the barrier's counts need
        least.barrier()
        with pytest.raises(errors.HeapExhausted):
            least.empty(least.heap_size)
    with iris.iris(heap_size=1 << 20, allocator_type="torch") as inner:
        assert inner.broadcast(ctx.cur_rank, ctx.num_ranks - 1) == ctx.num_ranks - 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_bad_arguments_raise_on_every_rank_and_the_next_context_works(world_size):
    run_ranks(world_size, _bad_arguments)
