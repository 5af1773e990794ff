"""The Gluon device context on GPUs: every call compared with torch; test_codegen*.py checks the compiled code."""

import iris
from iris import platform
from iris.errors import PlatformError
import iris.experimental.iris_gluon as iris_gl
import pytest
import torch
from triton.experimental.gluon import language as gl

from examples import tile_all_reduce_hopper
from tests import gluon_kernels
from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both
on_gpus = pytest.mark.skipif(not ON_GPU, reason="Gluon has no interpreter: needs GPUs, under torchrun")

WARPS = 4


def layout(ctx, per_thread):
    threads = torch.cuda.get_device_properties(ctx.device).warp_size
    return gl.BlockedLayout([per_thread], [threads], [WARPS], [0])


def check_copies(ctx, dtype, n):
    """Each of load and store, get, put and copy moves what the next rank has, or into the next rank."""
    rank, world = ctx.cur_rank, ctx.num_ranks
    peer, before = (rank + 1) % world, (rank - 1) % world

    def of(owner):
        return torch.arange(n, device=ctx.device).remainder(97).add(owner).to(dtype)

    src, dst = ctx.empty(n, dtype=dtype).copy_(of(rank)), ctx.empty(4 * n, dtype=dtype).fill_(-1)
    ctx.barrier()
    grid = (-(-n // 1024),)
    gluon_kernels.gluon_copies_kernel[grid](
        src, dst, ctx.get_device_context(), peer, n, BLOCK=1024, LAYOUT=layout(ctx, 8), num_warps=WARPS
    )
    ctx.barrier()
    stored, got, put, copied = dst.view(4, n)
    assert torch.equal(stored, of(rank))  # the rank before stored here what it had loaded here
    assert torch.equal(got, of(peer))
    assert torch.equal(put, of(before))
    assert torch.equal(copied, of(rank))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_gpus
@pytest.mark.parametrize("world_size", WORLDS)
def test_copies(world_size, dtype):
    for n in (1000, 4096):
        run_ranks(world_size, check_copies, dtype, n)


def check_atomics(ctx):
    block = 256
    flags = ctx.zeros(9 * block, dtype=torch.int32)
    start = torch.arange(9 * block, dtype=torch.int32, device=ctx.device).remainder(13).view(9, block)
    start[7] = torch.arange(block, device=ctx.device)
    start[7, ::2] -= 1
    flags.copy_(start.view(-1))
    ctx.barrier()
    before = (ctx.cur_rank - 1) % ctx.num_ranks
    gluon_kernels.gluon_atomics_kernel[(1,)](
        flags, ctx.get_device_context(), (ctx.cur_rank + 1) % ctx.num_ranks, block, layout(ctx, 1), num_warps=WARPS
    )
    ctx.barrier()
    i = torch.arange(block, dtype=torch.int32, device=ctx.device)
    expected = start.clone()
    ops = [
        lambda x: x + i,
        lambda x: i,
        lambda x: x ^ i,
        lambda x: x & i,
        lambda x: x | i,
        lambda x: torch.minimum(x, i),
        lambda x: torch.maximum(x, i),
    ]
    for row, op in enumerate(ops):
        expected[row, :-1] = op(start[row])[:-1]  # the last element is masked out
    expected[7] = torch.where(start[7] == i, i + 1, start[7])
    expected[8, 0] += before + 10 * ctx.num_ranks
    assert torch.equal(flags.view(9, block), expected)


@on_gpus
@pytest.mark.parametrize("world_size", WORLDS)
def test_atomics(world_size):
    run_ranks(world_size, check_atomics)


def check_signal(ctx, n):
    """What was put before the signal is there after the wait, in a kernel of several programs, again and again."""
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    programs = -(-n // 1024)
    src, dst = ctx.empty(n, dtype=torch.bfloat16), ctx.zeros(n, dtype=torch.bfloat16)
    src.fill_(ctx.cur_rank + 1)
    for _ in range(20):
        flags = ctx.zeros(programs, dtype=torch.int32)
        ctx.barrier()
        gluon_kernels.gluon_put_and_signal_kernel[(programs,)](
            src, dst, ctx.get_device_context(), flags, peer, n, 1024, layout(ctx, 8), num_warps=WARPS
        )
        arrived = dst.clone()  # in stream order: nobody but the kernel has waited
        assert (arrived == (ctx.cur_rank - 1) % ctx.num_ranks + 1).all() and (flags == 1).all()
        ctx.barrier()
        dst.zero_()


@on_gpus
@pytest.mark.parametrize("world_size", WORLDS)
def test_signal_and_wait(world_size):
    """The wait names the wrong peer, whom it only reports; the flag is set by the rank before."""
    run_ranks(world_size, check_signal, 20_000)


def test_the_host_side_is_the_same():
    assert iris_gl.iris is iris.iris


def check_tiles(ctx, two_shot):
    rank, w, count, shape = ctx.cur_rank, ctx.num_ranks, 3, (64, 128)
    threads = torch.cuda.get_device_properties(ctx.device).warp_size
    held = gl.BlockedLayout([1, 8], [threads // 16, 16], [WARPS, 1], [1, 0])
    space = ctx.ccl.tile_space(4 * count, 64 * 128, torch.bfloat16)
    for call in range(5):
        generator = torch.Generator().manual_seed(call)
        inputs = torch.randn(w, count, *shape, generator=generator).to(ctx.device, torch.bfloat16)
        out = torch.full((count, 2 + 2 * w, *shape), 7.0, dtype=torch.bfloat16, device=ctx.device)
        gluon_kernels.gluon_tiles_kernel[(2,)](
            ctx.get_device_context(), space, inputs[rank], out, count, w, *shape, two_shot, held, num_warps=WARPS
        )
        sums = inputs.double().sum(0)
        for i in range(count):
            torch.testing.assert_close(out[i, 0].double(), sums[i], rtol=0.01, atol=0.01)
            own = sums[i] if rank == i % w else torch.full_like(sums[i], 7.0)
            torch.testing.assert_close(out[i, 1].double(), own, rtol=0.01, atol=0.01)
            assert torch.equal(out[i, 2 : 2 + w], inputs[:, i])
            assert torch.equal(out[i, 2 + w :], inputs[rank : rank + 1, i].expand(w, *shape))
    ctx.barrier()


@pytest.mark.parametrize("two_shot", [False, True], ids=["one shot", "two shots"])
@on_gpus
@pytest.mark.parametrize("world_size", WORLDS)
def test_collectives_on_tiles(world_size, two_shot):
    run_ranks(world_size, check_tiles, two_shot)


def check_specialised_tiles(ctx):
    if not platform.has_warp_specialisation(ctx.device):
        pytest.skip("needs a Hopper GPU")
    M, N, K = 400, 1032, 520
    space = tile_all_reduce_hopper.space_for(ctx, M, N, torch.bfloat16)
    out = torch.empty(M, N, dtype=torch.bfloat16, device=ctx.device)
    for call in range(4):
        generator = torch.Generator().manual_seed(call)
        A = torch.randn(ctx.num_ranks, M, K, generator=generator).to(ctx.device, torch.bfloat16)
        B = torch.randn(ctx.num_ranks, K, N, generator=generator).to(ctx.device, torch.bfloat16)
        tile_all_reduce_hopper.tile_matmul_hopper(ctx, space, A[ctx.cur_rank], B[ctx.cur_rank], out.fill_(7.0))
        exact = torch.bmm(A.double(), B.double()).sum(0)
        assert (out - exact).abs().max() < 1e-2 * exact.abs().max()
    ctx.barrier()
    assert (space[64:] == -1).all(), "a value was left behind"


@on_gpus
@pytest.mark.parametrize("world_size", WORLDS)
def test_tiles_in_specialised_warps(world_size):
    run_ranks(world_size, check_specialised_tiles)


def check_without_a_gpu(ctx):
    x = ctx.zeros(1024)
    for grid in ((1,), lambda meta: (1,)):
        with pytest.raises(PlatformError, match="cannot run Gluon; expected a GPU"):
            gluon_kernels.gluon_copies_kernel[grid](
                x, x, ctx.get_device_context(), 0, 4, BLOCK=128, LAYOUT=gl.BlockedLayout([1], [32], [4], [0])
            )


@pytest.mark.skipif(ON_GPU, reason="for machines without GPUs")
def test_without_a_gpu():
    run_ranks(1, check_without_a_gpu)
