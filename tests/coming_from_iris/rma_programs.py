"""Kernels with the functions of `iris`: ranks as constants, and `heap_bases` as the last argument."""

import iris
import torch
import triton
import triton.language as tl

from .device import DEVICE


@triton.jit
def _store_ones(buffer, buffer_size: tl.constexpr, block_size: tl.constexpr, target: tl.constexpr, heap_bases_ptr):
    pid = tl.program_id(0)
    offsets = pid * block_size + tl.arange(0, block_size)
    mask = offsets < buffer_size
    iris.store(buffer + offsets, 1, 0, target, heap_bases_ptr, mask=mask)


def store_to_the_last_rank():
    ctx = iris.iris(1 << 20)
    cur_rank, target = ctx.get_rank(), ctx.get_num_ranks() - 1
    buffer = ctx.zeros(300, device=DEVICE, dtype=torch.float32)
    grid = lambda meta: (triton.cdiv(300, meta["block_size"]),)  # noqa: E731
    ctx.barrier()
    if cur_rank == 0:
        _store_ones[grid](buffer, 300, 128, target, ctx.get_heap_bases())
    ctx.barrier()
    assert buffer.sum().item() == (300 if cur_rank == target else 0)
    ctx.barrier()


@triton.jit
def _get(data, results, cur_rank: tl.constexpr, num_ranks: tl.constexpr, BLOCK: tl.constexpr, heap_bases: tl.tensor):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < BLOCK
    acc = tl.zeros([BLOCK], dtype=data.type.element_ty)
    for target_rank in range(num_ranks):
        iris.get(data + offsets, results + offsets, cur_rank, target_rank, heap_bases, mask=mask)
        acc += tl.load(results + offsets, mask=mask)
    tl.store(results + offsets, acc, mask=mask)


def get_with_the_caller_first():
    shmem = iris.iris(1 << 20)
    num_ranks, cur_rank = shmem.get_num_ranks(), shmem.get_rank()
    data = shmem.full((16,), cur_rank + 1, dtype=torch.float32)
    results = shmem.zeros_like(data)
    shmem.barrier()
    _get[(1,)](data, results, cur_rank, num_ranks, 16, shmem.get_heap_bases())
    shmem.barrier()
    assert torch.equal(results.cpu(), torch.full((16,), num_ranks * (num_ranks + 1) / 2))
    shmem.barrier()


@triton.jit
def _get_remote_first(data, results, cur_rank: tl.constexpr, remote: tl.constexpr, BLOCK: tl.constexpr, heap_bases):
    offsets = tl.arange(0, BLOCK)
    iris.get(data + offsets, results + offsets, remote, cur_rank, heap_bases, hint=BLOCK)


def get_with_the_remote_rank_first():
    shmem = iris.iris(1 << 20)
    remote = (shmem.cur_rank + 1) % shmem.num_ranks
    data, results = shmem.arange(32) + 100 * shmem.cur_rank, shmem.zeros(32, dtype=torch.int64)
    symmetric = shmem.empty(32, dtype=torch.int64)
    symmetric.copy_(data)
    shmem.barrier()
    _get_remote_first[(1,)](symmetric, results, shmem.cur_rank, remote, 32, shmem.get_heap_bases())
    shmem.barrier()
    assert torch.equal(results.cpu(), torch.arange(32) + 100 * remote)
    shmem.barrier()


@triton.jit
def _put(data, results, cur_rank: tl.constexpr, num_ranks: tl.constexpr, BLOCK: tl.constexpr, heap_bases: tl.tensor):
    offsets = tl.arange(0, BLOCK)
    for target in range(num_ranks):
        iris.put(data + offsets, results + cur_rank * BLOCK + offsets, cur_rank, target, heap_bases, hint=16)


def put_to_everyone():
    shmem = iris.iris(1 << 20)
    data = shmem.full((16,), shmem.cur_rank, dtype=torch.int32)
    results = shmem.full((shmem.num_ranks, 16), -1, dtype=torch.int32)
    shmem.barrier()
    _put[(1,)](data, results, shmem.cur_rank, shmem.num_ranks, 16, shmem.get_heap_bases())
    shmem.barrier()
    assert results[:, 0].tolist() == list(range(shmem.num_ranks))
    shmem.barrier()


@triton.jit
def _load(data, results, source: tl.constexpr, partner: tl.constexpr, BLOCK: tl.constexpr, heap_bases: tl.tensor):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < BLOCK - 1
    value = iris.load(data + offsets, source, partner, heap_bases, mask=mask, other=9.0, hint=(16,))
    tl.store(results + offsets, value)


def load_from_a_partner():
    shmem = iris.iris(1 << 20)
    partner = (shmem.cur_rank + shmem.num_ranks // 2) % shmem.num_ranks
    data, results = shmem.full((16,), float(shmem.cur_rank)), shmem.zeros(16)
    shmem.barrier()
    _load[(1,)](data, results, shmem.cur_rank, partner, 16, shmem.get_heap_bases())
    shmem.barrier()
    assert results.tolist() == [float(partner)] * 15 + [9.0]
    shmem.barrier()


@triton.jit
def _copy(data, results, cur_rank: tl.constexpr, num_ranks: tl.constexpr, BLOCK: tl.constexpr, heap_bases: tl.tensor):
    offsets = tl.arange(0, BLOCK)
    for source in range(num_ranks):
        dest = results + source * BLOCK + offsets
        iris.copy(data + source * BLOCK + offsets, dest, source, cur_rank, cur_rank, heap_bases)


def copy_a_row_from_each_rank():
    shmem = iris.iris(1 << 20)
    n = shmem.num_ranks
    data, results = shmem.zeros((n, 8)), shmem.zeros((n, 8))
    data += shmem.cur_rank + 10 * torch.arange(n, device=data.device)[:, None]
    shmem.barrier()
    _copy[(1,)](data, results, shmem.cur_rank, n, 8, shmem.get_heap_bases())
    shmem.barrier()
    assert results[:, 3].tolist() == [11.0 * i for i in range(n)]
    shmem.barrier()


@triton.jit
def _atomics(counter, maximum, bits, cur_rank: tl.constexpr, num_ranks: tl.constexpr, heap_bases: tl.tensor):
    for target in range(num_ranks):
        iris.atomic_add(counter, 1, cur_rank, target, heap_bases, sem="relaxed", scope="sys")
        iris.atomic_max(maximum, cur_rank, cur_rank, target, heap_bases, mask=None, sem="acq_rel", scope="sys")
        iris.atomic_or(bits, 1 << cur_rank, cur_rank, target, heap_bases)


def atomics_on_every_rank():
    shmem = iris.iris(1 << 20)
    n = shmem.num_ranks
    counter, maximum, bits = (shmem.zeros(1, dtype=torch.int32) for _ in range(3))
    shmem.barrier()
    _atomics[(1,)](counter, maximum, bits, shmem.cur_rank, n, shmem.get_heap_bases())
    shmem.barrier()
    assert (counter.item(), maximum.item(), bits.item()) == (n, n - 1, 2**n - 1)
    shmem.barrier()


@triton.jit
def _claim(word, won, cur_rank: tl.constexpr, heap_bases: tl.tensor):
    before = iris.atomic_cas(word, 0, cur_rank + 1, cur_rank, 0, heap_bases, sem="acq_rel", scope="sys")
    tl.store(won, before)


def compare_and_swap_lets_one_rank_win():
    shmem = iris.iris(1 << 20)
    word, won = shmem.zeros(1, dtype=torch.int32), shmem.zeros(1, dtype=torch.int32)
    shmem.barrier()
    _claim[(1,)](word, won, shmem.cur_rank, shmem.get_heap_bases())
    shmem.barrier()
    winner = shmem.broadcast(word.item(), source_rank=0)
    assert (won.item() == 0) == (winner == shmem.cur_rank + 1)
    shmem.barrier()


@triton.jit
def _produce(src, dst, flag, n, producer: tl.constexpr, consumer: tl.constexpr, BLOCK: tl.constexpr, bases):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    iris.put(src + offsets, dst + offsets, producer, consumer, bases, mask=mask)
    tl.debug_barrier()
    iris.atomic_cas(flag + tl.program_id(0), 0, 1, producer, consumer, bases, sem="release", scope="sys")


@triton.jit
def _consume(dst, out, flag, n, consumer: tl.constexpr, BLOCK: tl.constexpr, bases):
    pid = tl.program_id(0)
    done = 0
    while done == 0:
        done = iris.atomic_cas(flag + pid, 1, 0, consumer, consumer, bases, sem="acquire", scope="sys")
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(dst + offsets, mask=mask) * 2, mask=mask)


def messages_from_a_producer_to_a_consumer():
    shmem = iris.iris(1 << 20)
    consumer = shmem.num_ranks - 1
    src = shmem.arange(0, 200, dtype=torch.float32)
    dst, out = shmem.zeros_like(src), shmem.zeros_like(src)
    flag = shmem.zeros((4,), dtype=torch.int32)
    shmem.barrier()
    if shmem.cur_rank == 0:
        _produce[(4,)](src, dst, flag, 200, 0, consumer, 64, shmem.get_heap_bases())
    if shmem.cur_rank == consumer:
        _consume[(4,)](dst, out, flag, 200, consumer, 64, shmem.get_heap_bases())
    shmem.barrier()
    assert torch.equal(out, 2 * src if shmem.cur_rank == consumer else torch.zeros_like(src))
    shmem.barrier()
