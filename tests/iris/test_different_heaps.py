"""Ranks whose heaps differ: found without debug mode, on every rank, before a peer's memory is written."""

from __future__ import annotations

import os
import threading

import iris
from iris.errors import ArgumentError, DtypeError, NotSymmetricError, ThreadError
from iris_ops import FusedConfig
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, run_ranks
from tests.processes import run_fresh

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")


def run(world: int, body, *args) -> None:
    ended = run_fresh(world, body, *args, env={"IRIS_TIMEOUT": "20"})
    assert [end.exitcode for end in ended] == [0] * world, [end.traceback for end in ended]


# --- allocations that differ -----------------------------------------------------------------------------------------


def multiply(ctx: iris.Iris, rows: int = 64) -> torch.Tensor:
    out = torch.empty(rows, 64, device=ctx.device)
    A, B = (torch.full(shape, 1.0, device=ctx.device) for shape in ((rows, 32), (32, 64)))
    ctx.ops.matmul_all_reduce(out, A, B)
    return out


def closing(ctx: iris.Iris) -> None:
    ctx.close()


FOUND_BY = {
    "barrier": lambda ctx: ctx.barrier(),
    "device_barrier": lambda ctx: (ctx.device_barrier(), ctx.barrier()),
    "broadcast": lambda ctx: ctx.broadcast(1),
    "close": closing,
    "an op's first call": multiply,
    "a collective's first call": lambda ctx: ctx.ccl.all_reduce(torch.empty(40), torch.ones(40)),
    "the end of memory_pool": lambda ctx: ctx.memory_pool().__enter__() or ctx.trim(),
}


def ragged(rank: int, world: int, where: str) -> None:
    ctx = iris.iris(1 << 24)
    same = ctx.ones(3)
    ctx.barrier()
    ctx.empty(19 if rank == 0 else 18, 1536)
    ctx.empty(5)  # which lies elsewhere, too
    message = "heaps differ.*llocation number 2 differs between ranks"
    if rank == 0 or world == 2:
        message += r".*a tensor \(19, 1536\) of torch.float32 \(116736 bytes at offset 256\) on rank 0.*empty_ragged"
    with pytest.raises(NotSymmetricError, match=message):
        FOUND_BY[where](ctx)
    if where != "close":
        with pytest.raises(NotSymmetricError, match="heaps differ"):  # from now on everything
            ctx.check()
    assert (same == 1).all()
    os._exit(0)


def caught(rank: int, world: int) -> None:
    ctx = iris.iris(1 << 24)
    if rank == 0:
        with pytest.raises(DtypeError, match="int64"):
            ctx.ops.matmul_all_reduce(torch.empty(4, 4), torch.ones(4, 4, dtype=torch.int64), torch.ones(4, 4))
    with pytest.raises(NotSymmetricError, match="rank 0 refused a call before: matmul_all_reduce: .*int64"):
        multiply(ctx) if rank else ctx.barrier()


def test_a_refused_call_that_others_made_is_named() -> None:
    run(2, caught)


@pytest.mark.parametrize("where", FOUND_BY)
def test_allocations_that_differ_are_found_wherever_ranks_meet(where: str) -> None:
    run(2, ragged, where)


GROWING = {
    "an op": multiply,
    "a collective": lambda ctx, rows=64: ctx.ccl.all_reduce(torch.empty(rows, 64), torch.ones(rows, 64)),
}


def growing(rank: int, world: int, what: str) -> None:
    ctx = iris.iris(1 << 24)
    GROWING[what](ctx)
    ctx.empty(100 * (1 + rank))
    GROWING[what](ctx)  # which needs no more, and compares nothing
    with pytest.raises(NotSymmetricError, match=r"heaps differ.*llocation number 1 differs between ranks"):
        GROWING[what](ctx, 512)
    os._exit(0)


@pytest.mark.parametrize("what", GROWING)
def test_growing_finds_allocations_that_differ(what: str) -> None:
    run(2, growing, what)


def two_slots(ctx: iris.Iris) -> None:
    barrier = ctx.new_barrier()
    ctx.barrier()
    first = 1 << 61
    for digest in (first + 1, first + 2):
        barrier(tuple(range(ctx.num_ranks)), digest)
    ctx.barrier()
    assert barrier._digests.tolist() == [[first + 2] * ctx.num_ranks, [first + 1] * ctx.num_ranks]


def test_a_barrier_leaves_what_the_one_before_compares() -> None:
    """A rank that is a barrier ahead sends its digest while a late one still looks at that of the barrier before."""
    run_ranks(2, two_slots)


def test_one_rank_of_three_that_differs_is_found_on_all() -> None:
    run(3, ragged, "barrier")


def freed(rank: int, world: int) -> None:
    """Frees that differ are found; another order of frees is not a difference."""
    ctx = iris.iris(1 << 24)
    first, second, third = (ctx.empty(100) for _ in range(3))
    ctx.free(*((first, second) if rank else (second, first)))
    ctx.barrier()
    if rank == 1:
        ctx.free(third)
    with pytest.raises(NotSymmetricError, match=r"llocation number 3 differs.*\(100,\).* on rank 0, none on rank 1"):
        ctx.barrier()
    os._exit(0)


def test_frees_that_differ_are_found() -> None:
    run(2, freed)


def unshifted(rank: int, world: int) -> None:
    """An allocation that differs between ranks moves no workspace: calls without a host barrier stay right.

    The second call reserves memory that peers write if `out` is not on the heap.
    """
    ctx = iris.iris(1 << 24)
    multiply(ctx)
    config, A, B = FusedConfig(32, 32, 32, num_warps=4), torch.ones(64, 32), torch.ones(32, 64)
    ctx.ops.matmul_all_reduce(ctx.empty(64, 64), A, B, config=config)
    ctx.empty(1000 * (1 + rank))
    assert (multiply(ctx) == 32 * world).all()
    out, (_, taken) = torch.empty(64, 64), ctx.heap.used
    ctx.ops.matmul_all_reduce(out, A, B, config=config)
    assert (out == 32 * world).all() and ctx.heap.used[1] > taken
    with pytest.raises(NotSymmetricError, match="heaps differ"):
        ctx.close()
    os._exit(0)


def test_workspaces_are_not_shifted() -> None:
    run(2, unshifted)


# --- parts whose sizes differ ----------------------------------------------------------------------------------------


def parts(ctx: iris.Iris) -> None:
    rank, world = ctx.cur_rank, ctx.num_ranks
    part = ctx.empty_ragged(19 - rank, 16, dtype=torch.int32)
    assert part.shape == (19 - rank, 16) and part.dtype == torch.int32 and ctx.is_symmetric(part)
    after = ctx.full((4,), rank)
    part.fill_(rank)
    ctx.barrier()
    theirs = ctx.peer_view(after, (rank + 1) % world)
    assert (theirs == (rank + 1) % world).all(), "what comes behind lies at the same place"
    ctx.barrier()
    ctx.free(part, after)
    assert ctx.empty_ragged((rank, 3)).shape == (rank, 3)
    with pytest.raises(ArgumentError, match=rf"rank {world - 1}: .*negative"):
        ctx.empty_ragged(-1 if rank == world - 1 else 4)
    if world > 1:
        with pytest.raises(DtypeError, match="dtype differs between ranks"):
            ctx.empty_ragged(4, dtype=torch.float32 if rank else torch.int8)
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS[:3])
def test_ragged_parts_take_the_same_place_on_all_ranks(world_size: int) -> None:
    run_ranks(world_size, parts)


# --- threads ---------------------------------------------------------------------------------------------------------

IN_A_THREAD = {
    "op": multiply,
    "collective": lambda ctx: ctx.ccl.all_reduce(torch.empty(40), torch.ones(40)),
    "barrier": lambda ctx: ctx.barrier(),
    "device_barrier": lambda ctx: ctx.device_barrier(),
    "allocation": lambda ctx: ctx.zeros(4),
    "broadcast": lambda ctx: ctx.broadcast(3),
    "close": lambda ctx: ctx.close(),
    "memory_pool": lambda ctx: ctx.memory_pool().__enter__(),
}


def in_thread(work) -> BaseException | None:
    raised = []

    def go() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=go, name="second")
    thread.start()
    thread.join()
    return raised[0] if raised else None


def threads(ctx: iris.Iris) -> None:
    multiply(ctx)
    for name, call in IN_A_THREAD.items():
        error = in_thread(lambda call=call: call(ctx))
        assert isinstance(error, ThreadError) and "take_over" in str(error) and "'second'" in str(error), name
    assert (multiply(ctx) == 32 * ctx.num_ranks).all(), "the context goes on"

    def taken_over() -> None:
        ctx.take_over()
        assert (multiply(ctx) == 32 * ctx.num_ranks).all()
        ctx.barrier()

    assert in_thread(taken_over) is None
    with pytest.raises(ThreadError):
        ctx.barrier()
    ctx.take_over()
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_a_context_belongs_to_one_thread(world_size: int) -> None:
    run_ranks(world_size, threads)
