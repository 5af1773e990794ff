"""Kernels as ROCm/iris's examples have them: tiles that peers sum, a grid with halos, tickets, cache modifiers."""

import iris
import torch
import triton
import triton.language as tl


@triton.jit
def _step(old, new, n, left, right, rank: tl.constexpr, BLOCK: tl.constexpr, heap_bases):
    """Cells 1 to n are this rank's; 0 and n + 1 are copies of its neighbours', to whom the edges go."""
    cells = tl.program_id(0) * BLOCK + 1 + tl.arange(0, BLOCK)
    mask = cells <= n
    value = (
        tl.load(old + cells - 1, mask=mask) + tl.load(old + cells, mask=mask) + tl.load(old + cells + 1, mask=mask)
    ) / 3
    tl.store(new + cells, value, mask=mask)
    iris.store(new + cells + n, value, rank, left, heap_bases, mask=mask & (cells == 1))
    iris.store(new + cells - n, value, rank, right, heap_bases, mask=mask & (cells == n))


def a_grid_with_halos():
    shmem = iris.iris(1 << 22)
    rank, n, cells = shmem.get_rank(), shmem.get_num_ranks(), 100
    whole = torch.linspace(0, 1, n * cells) ** 2
    old, new = shmem.zeros(cells + 2), shmem.zeros(cells + 2)
    at = torch.arange(rank * cells - 1, (rank + 1) * cells + 1) % (n * cells)
    old.copy_(whole[at])
    shmem.barrier()
    for _ in range(5):
        _step[(2,)](old, new, cells, (rank - 1) % n, (rank + 1) % n, rank, 64, shmem.get_heap_bases())
        shmem.barrier()
        old, new = new, old
        whole = (whole.roll(1) + whole + whole.roll(-1)) / 3
    torch.testing.assert_close(old.cpu(), whole[at])
    shmem.barrier()


@triton.jit
def _through_addresses(
    context_tensor, data, results, rank: tl.constexpr, world_size: tl.constexpr, BLOCK: tl.constexpr
):
    ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size)
    offsets = tl.arange(0, BLOCK)
    value = tl.load(ctx.as_remote(data + offsets, (rank + 1) % world_size))
    for peer in range(world_size):
        tl.store(ctx.as_remote(results + rank * BLOCK + offsets, peer), value)


def addresses_of_peers():
    shmem = iris.iris(1 << 20)
    rank, n = shmem.cur_rank, shmem.num_ranks
    data, results = shmem.full((32,), float(rank)), shmem.zeros(n, 32)
    shmem.barrier()
    _through_addresses[(1,)](shmem.get_device_context(), data, results, rank, n, 32)
    shmem.barrier()
    assert (results.cpu() == torch.tensor([(r + 1) % n for r in range(n)])[:, None]).all()
    shmem.barrier()


@triton.jit
def _puts(src, dst, rank: tl.constexpr, peer, heap_bases, context_tensor, copy_engine_ctx, world_size: tl.constexpr):
    offsets = tl.arange(0, 16)
    iris.put(
        src + offsets, dst + offsets, rank, peer, heap_bases, copy_engine_ctx=copy_engine_ctx, use_copy_engine=False
    )
    ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size)
    ctx.put(src + offsets, dst + 16 + offsets, peer, copy_engine_ctx=copy_engine_ctx, use_copy_engine=False)


def puts_without_a_copy_engine():
    shmem = iris.iris(1 << 20)
    rank, n = shmem.cur_rank, shmem.num_ranks
    src, dst = shmem.full((16,), float(rank)), shmem.zeros(32)
    shmem.barrier()
    _puts[(1,)](
        src, dst, rank, (rank + 1) % n, shmem.get_heap_bases(), shmem.get_device_context(),
        shmem.get_copy_engine_ctx(), n,
    )  # fmt: skip
    shmem.barrier()
    assert (dst == (rank - 1) % n).all()
    shmem.barrier()
