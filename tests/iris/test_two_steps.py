"""Broadcasts and reductions of large tensors in two steps: the same bits as in one, in any number of pieces."""

from __future__ import annotations

import contextlib

from iris.ccl import rings, two_steps
import pytest
import torch

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both
SEVERAL = [w for w in WORLDS if w > 2]
# Elements: one, fewer than owners, a share's edge, shares of which the last are empty, some that are short.
COUNTS = [1, 3, 2048, 2049, 5 * 2048 + 7, 50_001]


@contextlib.contextmanager
def _in(pieces: int, most: int = rings.MOST_SLOTS):
    """Force this number of pieces, in message buffers of at most this number of slots in all."""
    before = two_steps.pieces, rings.MOST_SLOTS
    two_steps.pieces, rings.MOST_SLOTS = lambda op, nbytes, world: pieces if world > 2 and nbytes else 0, most
    try:
        yield
    finally:
        two_steps.pieces, rings.MOST_SLOTS = before


def _drawn(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


def _broadcasts(ctx, pieces):
    rank, n = ctx.cur_rank, ctx.num_ranks
    for turn, count in enumerate(COUNTS):
        for dtype in (torch.float32, torch.uint8):
            src = turn % n
            x = _drawn(count, dtype, 10 * turn + rank).to(ctx.device)
            with _in(pieces):
                ctx.ccl.broadcast(x, src)
            assert torch.equal(x.cpu(), _drawn(count, dtype, 10 * turn + src)), (count, dtype)
    ctx.barrier()


@pytest.mark.some(1)
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("world_size", SEVERAL)
def test_everyone_gets_what_the_root_has(world_size, pieces):
    run_ranks(world_size, _broadcasts, pieces)


def _reductions(ctx, pieces):
    rank, n = ctx.cur_rank, ctx.num_ranks
    for turn, count in enumerate(COUNTS):
        dtypes = torch.bfloat16, torch.int8, torch.float32, torch.int64
        for dtype in dtypes if ON_GPU else dtypes[turn % 2 :: 2]:
            dst, inp = turn % n, _drawn(count, dtype, 10 * turn + rank).to(ctx.device)
            out, other = (torch.full((count,), 7, dtype=dtype, device=ctx.device) for _ in range(2))
            with _in(pieces):
                ctx.ccl.reduce(out, inp, dst)
            with _in(0):
                ctx.ccl.reduce(other, inp, dst)
            all_of = torch.stack([_drawn(count, dtype, 10 * turn + r) for r in range(n)])
            want = (all_of.double().sum(0) if dtype.is_floating_point else all_of.sum(0, dtype=dtype)).double()
            if rank == dst:
                assert torch.equal(out, other), (count, dtype)
                off = (out.cpu().double() - want).abs().max()
                assert off <= (want.abs().max() * torch.finfo(dtype).eps if dtype.is_floating_point else 0)
            else:
                assert (out == 7).all()
            with _in(pieces):
                ctx.ccl.reduce(inp, inp, dst)  # in place
            assert (
                torch.equal(inp, other)
                if rank == dst
                else torch.equal(inp.cpu(), _drawn(count, dtype, 10 * turn + rank))
            )
    ctx.barrier()


@pytest.mark.some(1)
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("world_size", SEVERAL)
def test_sums_have_the_bits_of_one_step(world_size, pieces):
    run_ranks(world_size, _reductions, pieces)


def _in_rounds(ctx):
    """Through rings that hold a part of the tensor, again and again, so that senders wait for room."""
    rank, n = ctx.cur_rank, ctx.num_ranks
    turns, count, slots = (3, 300_000, 64) if ON_GPU else (2, 100_000, 24)  # slots of 8 KiB each, of a rank
    for turn in range(turns):
        of = [_drawn(count, torch.float32, 10 * turn + r) for r in range(n)]
        x, out = of[rank].to(ctx.device, copy=True), torch.zeros(count, device=ctx.device)
        with _in(2, most=slots * n):
            ctx.ccl.broadcast(x, turn % n)
            ctx.ccl.reduce(out, of[rank].to(ctx.device), (turn + 1) % n)
        assert torch.equal(x.cpu(), of[turn % n])
        if rank == (turn + 1) % n:
            want = torch.stack(of).double().sum(0)
            assert (out.cpu().double() - want).abs().max() < 1e-5
    ctx.barrier()


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", SEVERAL)
def test_tensors_larger_than_the_rings(world_size):
    run_ranks(world_size, _in_rounds)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("world_size", SEVERAL)
def test_they_are_captured(world_size):
    run_ranks(world_size, _captured)


def _captured(ctx):
    rank, n, count = ctx.cur_rank, ctx.num_ranks, 1 << 20
    x, out = torch.zeros(count, device=ctx.device), torch.zeros(count, device=ctx.device)
    with _in(2):
        for _ in range(2):  # the first makes room
            ctx.ccl.broadcast(x, 0)
            ctx.ccl.reduce(out, x, n - 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ctx.ccl.broadcast(x, 0)
            ctx.ccl.reduce(out, x, n - 1)
    for turn in range(5):
        x.fill_(turn + rank)
        graph.replay()
        torch.cuda.synchronize()
        assert (x == turn).all() and (rank != n - 1 or (out == n * turn).all())
    ctx.barrier()
