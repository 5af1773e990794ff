"""Collectives on tiles inside a kernel: fresh inputs call after call, and the same bits on every rank."""

import iris
from iris.errors import ArgumentError
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both
M, N = 16, 32


@triton.jit
def _sums_kernel(
    ctx_ptr, space, inp, out, rank, num_tiles, M: tl.constexpr, N: tl.constexpr, FLAT: tl.constexpr,
    WORLD: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD)
    tiles = iris.tiles.open_tiles(ctx, space)
    if FLAT:
        at = tl.arange(0, M * N)
    else:
        at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    for number in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile = tl.load(inp + number * M * N + at)
        tl.store(out + number * M * N + at, tiles.all_reduce(tile, number))
    tiles.close()


def _inputs(dtype, call, rank, count):
    made = torch.randn(count, M, N, generator=torch.Generator().manual_seed(100 * call + rank)).to(dtype)
    made[0, 0, 0], made[0, 0, 1] = float("inf"), float("nan")
    return made


def _sums(ctx, dtype, count, flat):
    space = ctx.ccl.tile_space(count, M * N, dtype)
    out = torch.full((count, M, N), 7.0, device=ctx.device)
    found = []
    for call in range(5):
        inp = _inputs(dtype, call, ctx.cur_rank, count).to(ctx.device)
        _sums_kernel[(min(2, count),)](
            ctx.get_device_context(), space, inp, out.fill_(7.0), ctx.cur_rank, count, M=M, N=N, FLAT=flat,
            WORLD=ctx.num_ranks,
        )  # fmt: skip
        want = sum(_inputs(dtype, call, rank, count).double() for rank in range(ctx.num_ranks))
        assert torch.equal(out.isnan().cpu(), want.isnan())
        torch.testing.assert_close(out.cpu().double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
        found.append(out.cpu().view(torch.int32).clone())
    ctx.barrier()
    values = space[64:]
    assert (values == -1).all(), "a value was left behind"
    return torch.stack(found)


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "dtype, flat", [(torch.bfloat16, False), (torch.float16, True), (torch.float32, False)], ids=str
)
@pytest.mark.parametrize("world_size", WORLDS)
def test_tiles_are_summed_on_all_ranks(world_size, dtype, flat):
    bits = run_ranks(world_size, _sums, dtype, 3, flat)
    if not ON_GPU:
        finite = [torch.where(each.view(torch.float32).isnan(), 0, each) for each in bits]
        assert all(torch.equal(finite[0], each) for each in finite)


@triton.jit
def _gather_kernel(ctx_ptr, space, inp, out, rank, rows, M: tl.constexpr, N: tl.constexpr, WORLD: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD)
    tiles = iris.tiles.open_tiles(ctx, space)
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(inp + m * N + n, mask=m < rows, other=0.0)
    tiles.all_gather(tile, 0, out + m * N + n, rows * N, mask=m < rows)
    tiles.close()


def _gathers(ctx, rows):
    space = ctx.ccl.tile_space(1, M * N, torch.bfloat16)
    for call in range(3):
        inp = _inputs(torch.bfloat16, call, ctx.cur_rank, 1)[0, :rows].contiguous().to(ctx.device)
        out = torch.full((ctx.num_ranks * rows + 1, N), 7.0, dtype=torch.bfloat16, device=ctx.device)
        _gather_kernel[(1,)](
            ctx.get_device_context(), space, inp, out, ctx.cur_rank, rows, M=M, N=N, WORLD=ctx.num_ranks
        )
        want = torch.cat([_inputs(torch.bfloat16, call, rank, 1)[0, :rows] for rank in range(ctx.num_ranks)])
        torch.testing.assert_close(out[:-1].cpu(), want, rtol=0, atol=0, equal_nan=True)
        assert (out[-1] == 7).all()
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS)
def test_tiles_are_gathered(world_size):
    run_ranks(world_size, _gathers, 11)


def _replayed(ctx):
    space = ctx.ccl.tile_space(3, M * N, torch.bfloat16)
    inp, out = torch.zeros(3, M, N, dtype=torch.bfloat16, device=ctx.device), torch.zeros(3, M, N, device=ctx.device)

    def call():
        _sums_kernel[(2,)](
            ctx.get_device_context(), space, inp, out, ctx.cur_rank, 3, M=M, N=N, FLAT=False, WORLD=ctx.num_ranks
        )

    call()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for turn in range(9):
        inp.copy_(_inputs(torch.bfloat16, turn, ctx.cur_rank, 3))
        out.fill_(7.0)
        graph.replay()
        want = sum(_inputs(torch.bfloat16, turn, rank, 3).double() for rank in range(ctx.num_ranks))
        torch.testing.assert_close(out.cpu().double(), want, rtol=1e-6, atol=1e-6, equal_nan=True)
    ctx.barrier()


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_captured_kernel_is_replayed(world_size):
    run_ranks(world_size, _replayed)


def _refused(ctx):
    for wrong in ((0, 4, torch.bfloat16), (4, 2.0, torch.bfloat16), (4, 4, torch.int32)):
        with pytest.raises(ArgumentError, match="tile_space"):
            ctx.ccl.tile_space(*wrong)


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_a_space_of_nothing_is_refused(world_size):
    run_ranks(world_size, _refused)
