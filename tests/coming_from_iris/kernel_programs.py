"""Kernels as ROCm/iris's examples have them: tiles that peers sum, a grid with halos, tickets, cache modifiers."""

import iris
import torch
import triton
import triton.language as tl

from .device import DEVICE


@triton.jit
def _partial(A, B, partial, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    pid = tl.program_id(0)
    rm = pid // tl.cdiv(N, BN) * BM + tl.arange(0, BM)
    rn = pid % tl.cdiv(N, BN) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, K, BK):
        rk = k + tl.arange(0, BK)
        a = tl.load(A + rm[:, None] * K + rk[None, :], mask=(rm < M)[:, None] & (rk < K)[None, :], other=0.0)
        b = tl.load(B + rk[:, None] * N + rn[None, :], mask=(rk < K)[:, None] & (rn < N)[None, :], other=0.0)
        acc += tl.dot(a, b)
    tl.store(partial + rm[:, None] * N + rn[None, :], acc, mask=(rm < M)[:, None] & (rn < N)[None, :])


@triton.jit
def _sum_of_all(partial, out, count, rank: tl.constexpr, world_size: tl.constexpr, BLOCK: tl.constexpr, heap_bases):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < count
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for remote in range(world_size):
        acc += iris.load(partial + offsets, rank, remote, heap_bases, mask=mask)
    tl.store(out + offsets, acc, mask=mask)


def a_product_that_peers_sum():
    shmem = iris.iris(1 << 22)
    rank, n = shmem.get_rank(), shmem.get_num_ranks()
    M, N, K = 40, 48, 32 * n
    torch.manual_seed(0)
    A, B = torch.randn(M, K), torch.randn(K, N)
    local_A, local_B = (x.contiguous().to(DEVICE) for x in (A.chunk(n, 1)[rank], B.chunk(n, 0)[rank]))
    partial, out = shmem.zeros((M, N), dtype=torch.float32), shmem.zeros((M, N), dtype=torch.float32)
    tiles = triton.cdiv(M, 16) * triton.cdiv(N, 16)
    _partial[(tiles,)](local_A, local_B, partial, M, N, K // n, BM=16, BN=16, BK=16)
    shmem.barrier()
    grid = lambda meta: (triton.cdiv(M * N, meta["BLOCK"]),)  # noqa: E731
    _sum_of_all[grid](partial, out, M * N, rank, n, BLOCK=256, heap_bases=shmem.get_heap_bases())
    shmem.barrier()
    torch.testing.assert_close(out.cpu(), A @ B, rtol=1e-2, atol=1e-2)


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
def _draw(counter, drawn, rank: tl.constexpr, world_size: tl.constexpr, COUNT: tl.constexpr, context_tensor):
    ctx = iris.DeviceContext.initialize(context_tensor, rank, world_size)
    for i in range(COUNT):
        tl.store(drawn + i, ctx.atomic_add(counter, 1, 0, sem="acq_rel", scope="sys"))


def tickets_of_one_counter():
    shmem = iris.iris(1 << 22)
    rank, n, count = shmem.get_rank(), shmem.get_num_ranks(), 8
    counter, drawn = shmem.zeros(1, dtype=torch.int32), shmem.zeros(count, dtype=torch.int32)
    everyone = shmem.zeros(n * count, 1, dtype=torch.int32)
    shmem.barrier()
    _draw[(1,)](counter, drawn, rank, n, count, shmem.get_device_context())
    shmem.barrier()
    shmem.ccl.all_gather(everyone, drawn.view(count, 1))
    shmem.barrier()
    assert sorted(everyone.flatten().tolist()) == list(range(n * count)), "no ticket twice"
    assert (drawn.diff() > 0).all(), "a rank's are in order"


@triton.jit
def _modified(
    data, got, given, rank: tl.constexpr, peer: tl.constexpr, BLOCK: tl.constexpr, heap_bases, LOAD: tl.constexpr,
    STORE: tl.constexpr, VOLATILE: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    value = iris.load(data + i, rank, peer, heap_bases, cache_modifier=LOAD, volatile=VOLATILE)
    iris.store(given + i, value, rank, peer, heap_bases, cache_modifier=STORE)
    iris.get(
        data + i, got + i, rank, peer, heap_bases, mask=i < BLOCK, load_cache_modifier=LOAD, store_cache_modifier=STORE
    )


def loads_and_stores_with_cache_modifiers():
    shmem = iris.iris(1 << 22)
    rank, n = shmem.get_rank(), shmem.get_num_ranks()
    peer = (rank + 1) % n
    for load, store, volatile in ((None, None, False), ("", "", False), (".ca", ".wb", False), (".cg", ".wt", True)):
        data, got, given = shmem.full((64,), rank + 0.5), shmem.zeros(64), shmem.zeros(64)
        shmem.barrier()
        _modified[(1,)](data, got, given, rank, peer, 64, shmem.get_heap_bases(), load, store, volatile)
        shmem.barrier()
        assert (got == peer + 0.5).all(), "from the peer"
        assert (given == rank + 0.5).all(), "the rank before stored back what it had loaded here"
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
