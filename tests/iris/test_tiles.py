"""Collectives on tiles inside a kernel: fresh inputs call after call, and the same bits on every rank."""

import random
import time

from iris.errors import ArgumentError
import pytest
import torch

from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.tile_kernels import (
    tile_exchange_kernel,
    tile_gather_kernel,
    tile_halves_kernel,
    tile_reduce_kernel,
    tile_rows_kernel,
    tile_scatter_kernel,
)

pytestmark = both
M, N = 16, 32
BF16 = torch.bfloat16


def _inputs(dtype, call, rank, *shape):
    tile = torch.randn(shape, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)
    tile.view(-1)[:2] = torch.tensor([float("inf"), float("nan")])
    return tile


def _of_all(ctx, dtype, call, *shape):
    """Every rank's input of a call, on this rank's device."""
    return torch.stack([_inputs(dtype, call, rank, *shape) for rank in range(ctx.num_ranks)]).to(ctx.device)


def _sums(ctx, dtype, count, flat, two_shot):
    space = ctx.ccl.tile_space(count, M * N, dtype)
    out = torch.full((count, M, N), 7.0, device=ctx.device)
    actual = []
    for call in range(5):
        inputs = _of_all(ctx, dtype, call, count, M, N)
        tile_reduce_kernel[(min(2, count),)](
            ctx.get_device_context(), space, inputs[ctx.cur_rank], out.fill_(7.0), ctx.cur_rank, count, M=M, N=N,
            FLAT=flat, TWO_SHOT=two_shot, WORLD_SIZE=ctx.num_ranks,
        )  # fmt: skip
        want = inputs.double().sum(0)
        if two_shot:  # a sum in fp32, rounded once more; one rank has nothing to sum
            torch.testing.assert_close(out.to(dtype).float(), out, rtol=0, atol=0, equal_nan=True)
            want = want.to(dtype).double() if dtype != torch.float32 else want
        rtol = torch.finfo(dtype).eps if two_shot else 1e-6
        torch.testing.assert_close(out.double(), want, rtol=rtol, atol=1e-6, equal_nan=True)
        actual.append(out.cpu().view(torch.int32).clone())
    ctx.barrier()
    assert (space[64:] == -1).all(), "a value was left behind"
    return torch.stack(actual)


@pytest.mark.some(4)
@pytest.mark.parametrize("two_shot", [False, True], ids=["one shot", "two shots"])
@pytest.mark.parametrize("dtype, flat", [(BF16, False), (torch.float16, True), (torch.float32, False)], ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_tiles_are_summed_on_all_ranks(world_size, dtype, flat, two_shot):
    bits = run_ranks(world_size, _sums, dtype, 3, flat, two_shot)
    if not ON_GPU:
        finite = [torch.where(each.view(torch.float32).isnan(), 0, each) for each in bits]
        assert all(torch.equal(finite[0], each) for each in finite)


def _scatters(ctx, dtype, count, first, owners):
    space = ctx.ccl.tile_space(count, M * N, dtype)
    out = torch.zeros(count, M, N, device=ctx.device)
    mine = torch.tensor([first + i % owners == ctx.cur_rank for i in range(count)], device=ctx.device)
    for call in range(5):
        inputs = _of_all(ctx, dtype, call, count, M, N)
        tile_scatter_kernel[(min(2, count),)](
            ctx.get_device_context(), space, inputs[ctx.cur_rank], out.fill_(7.0), ctx.cur_rank, count, first, owners,
            M=M, N=N, WORLD_SIZE=ctx.num_ranks,
        )  # fmt: skip
        want = torch.where(mine[:, None, None], inputs.double().sum(0), 7.0)
        torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    ctx.barrier()
    assert (space[64:] == -1).all(), "a value was left behind"


def _halves(ctx, dtype, count, scatter, parts, kept, look):
    space = ctx.ccl.tile_space(count, M * N, dtype)
    out = torch.zeros(count, M, N, device=ctx.device)
    mine = torch.tensor([not scatter or i % ctx.num_ranks == ctx.cur_rank for i in range(count)], device=ctx.device)
    for call in range(5):
        inputs = _of_all(ctx, dtype, call, count, M, N)
        tile_halves_kernel[(min(2, count),)](
            ctx.get_device_context(), space, inputs[ctx.cur_rank], out.fill_(7.0), ctx.cur_rank, count,
            M=M, N=N, SCATTER=scatter, PARTS=parts, KEPT=kept, LOOK=look, WORLD_SIZE=ctx.num_ranks,
        )  # fmt: skip
        want = torch.where(mine[:, None, None], inputs.double().sum(0), 7.0)
        torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    ctx.barrier()
    assert (space[64:] == -1).all(), "a value was left behind"


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "scatter, parts, kept, look",
    [
        (False, 1, False, False), (False, 4, False, False), (True, 1, False, False), (True, 2, False, False),
        (False, 2, True, False), (True, 4, True, False), (False, 1, False, True), (False, 2, True, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_sum_in_two_halves(world_size, dtype, scatter, parts, kept, look):
    run_ranks(world_size, _halves, dtype, 5, scatter, parts, kept, look)


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("owned", ["in turn", "by the last"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_tiles_sum_comes_to_its_owner_alone(world_size, owned, dtype):
    owners = (0, world_size) if owned == "in turn" else (world_size - 1, 1)
    run_ranks(world_size, _scatters, dtype, 5, *owners)


def _rows(ctx, rows, halves):
    """Send only some rows of a tile: the others do not travel, so no value of a peer remains in the space."""
    space = ctx.ccl.tile_space(1, M * N, BF16)
    for call in range(5):
        inputs = _of_all(ctx, BF16, call, rows, N)
        out = torch.full((rows + 1, N), 7.0, device=ctx.device)
        tile_rows_kernel[(1,)](
            ctx.get_device_context(), space, inputs[ctx.cur_rank], out, ctx.cur_rank, rows, M=M, N=N, HALVES=halves,
            WORLD_SIZE=ctx.num_ranks,
        )  # fmt: skip
        torch.testing.assert_close(out[:-1].double(), inputs.double().sum(0), rtol=1e-6, atol=1e-6, equal_nan=True)
        assert (out[-1] == 7).all()
    ctx.barrier()
    assert (space[64:] == -1).all(), "a value was left behind"


@pytest.mark.parametrize("halves", [False, True], ids=["at once", "in halves"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_rows_of_a_tile_are_summed(world_size, halves):
    run_ranks(world_size, _rows, 5, halves)


def _gathers(ctx, rows):
    space = ctx.ccl.tile_space(1, M * N, BF16)
    for call in range(3):
        inputs = _of_all(ctx, BF16, call, rows, N)
        out = torch.full((ctx.num_ranks * rows + 1, N), 7.0, dtype=BF16, device=ctx.device)
        tile_gather_kernel[(1,)](
            ctx.get_device_context(), space, inputs[ctx.cur_rank], out, ctx.cur_rank, rows, M=M, N=N,
            WORLD_SIZE=ctx.num_ranks,
        )  # fmt: skip
        torch.testing.assert_close(out[:-1], inputs.view(-1, N), rtol=0, atol=0, equal_nan=True)
        assert (out[-1] == 7).all()
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS)
def test_tiles_are_gathered(world_size):
    run_ranks(world_size, _gathers, 11)


def _exchanges(ctx, dtype, rows):
    w, rank = ctx.num_ranks, ctx.cur_rank
    space = ctx.ccl.tile_space(3, M * N, dtype)
    for call in range(5):
        inputs = _of_all(ctx, dtype, call, 3, rows, w, N)
        out = torch.full((3 * rows + 1, w, N), 7.0, dtype=dtype, device=ctx.device)
        tile_exchange_kernel[(2,)](
            ctx.get_device_context(), space, inputs[rank], out, rank, 3, rows, M=M, N=N, WORLD_SIZE=w
        )
        want = inputs[:, :, :, rank].movedim(0, 2)
        torch.testing.assert_close(out[:-1].view(3, rows, w, N), want, rtol=0, atol=0, equal_nan=True)
        assert (out[-1] == 7).all()
    ctx.barrier()
    assert (space[64:] == -1).all(), "a value was left behind"


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", WORLDS)
def test_each_rank_gets_its_tile_of_every_rank(world_size, dtype):
    run_ranks(world_size, _exchanges, dtype, 13)


def _mixed(ctx, calls):
    """Make all kinds of calls on one space without any host barrier, with ranks late in turn."""
    w, rank = ctx.num_ranks, ctx.cur_rank
    space, alike = ctx.ccl.tile_space(1, M * N, torch.float32), random.Random(5)
    own, out = random.Random(rank), torch.zeros(1, M, N, device=ctx.device)
    for call in range(calls):
        kind, owner, late = alike.randrange(6), alike.randrange(w), alike.randrange(w)
        inputs = _of_all(ctx, torch.float32, call, 1, M, N)
        mine, context = inputs[rank], ctx.get_device_context()
        if rank == late and own.random() < 0.5:
            torch.cuda._sleep(1_000_000) if ON_GPU else time.sleep(0.03)
        if kind < 2:
            tile_reduce_kernel[(1,)](
                context, space, mine, out.fill_(7.0), rank, 1, M=M, N=N, FLAT=False, TWO_SHOT=kind == 1, WORLD_SIZE=w
            )
        else:  # most of them, for here a rank might go ahead
            tile_scatter_kernel[(1,)](context, space, mine, out.fill_(7.0), rank, 1, owner, 1, M=M, N=N, WORLD_SIZE=w)
        if kind < 2 or owner == rank:
            torch.testing.assert_close(
                out.double(), inputs.double().sum(0), rtol=1e-6, atol=1e-6, equal_nan=True, msg=f"call {call}"
            )
        else:
            assert (out == 7).all()
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS)
def test_no_rank_sends_what_a_late_one_has_no_room_for(world_size):
    run_ranks(world_size, _mixed, 40)


def _replayed(ctx):
    w, rank, context = ctx.num_ranks, ctx.cur_rank, ctx.get_device_context()
    space = ctx.ccl.tile_space(3, M * N, BF16)
    inp = torch.zeros(3, M, N, dtype=BF16, device=ctx.device)
    one, two, own = (torch.zeros(3, M, N, device=ctx.device) for _ in range(3))

    def call():
        for out, two_shot in ((one, False), (two, True)):
            tile_reduce_kernel[(2,)](
                context, space, inp, out, rank, 3, M=M, N=N, FLAT=False, TWO_SHOT=two_shot, WORLD_SIZE=w
            )
        tile_scatter_kernel[(2,)](context, space, inp, own, rank, 3, 0, w, M=M, N=N, WORLD_SIZE=w)

    call()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    mine = torch.tensor([i % w == rank for i in range(3)], device=ctx.device)
    for turn in range(9):
        inputs = _of_all(ctx, BF16, turn, 3, M, N)
        inp.copy_(inputs[rank])
        for out in (one, two, own):
            out.fill_(7.0)
        graph.replay()
        want = inputs.double().sum(0)
        torch.testing.assert_close(one.double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(two.double(), want, rtol=0.01, atol=1e-6, equal_nan=True)
        want = torch.where(mine[:, None, None], want, 7.0)
        torch.testing.assert_close(own.double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    ctx.barrier()


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("world_size", WORLDS)
def test_captured_kernels_are_replayed(world_size):
    run_ranks(world_size, _replayed)


def _refused(ctx):
    for wrong in ((0, 4, BF16), (4, 2.0, BF16), (4, 4, torch.int32)):
        with pytest.raises(ArgumentError, match="tile_space"):
            ctx.ccl.tile_space(*wrong)


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_a_space_of_nothing_is_refused(world_size):
    run_ranks(world_size, _refused)
