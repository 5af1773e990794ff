"""Kernels of `benchmarks.rma`: one that moves n words in each of the ways, and one that plays ping-pong.

Every word has a value that follows from its place and its rank, so a receiver can check all of them. A program moves
blocks of 64 KiB, 16 bytes a thread at a time, and where it reads, two blocks are on their way while it works on a
third: a link's latency times its rate is some 700 KB, which few programs must have under way.
"""

from iris import platform  # before triton on a machine without a GPU
from iris.device import arch
from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.sync import signal, wait
import torch
import triton
import triton.language as tl

TRANSFERS = ("load", "store", "get", "put", "copy")
ATOMICS = tuple(f"atomic_{name}" for name in ("add", "xchg", "xor", "and", "or", "min", "max", "cas"))
WORD_BYTES = 4

STEP = tl.constexpr(0x1E3779B1)  # odd, so neighbours differ in all bytes
RANK_STEP = tl.constexpr(0x01234567)


def block_words(op: str) -> int:
    """Return words that a program moves at a time; sizes of `atomic_cas`, which knows no mask, are multiples of it."""
    return 1024 if op == "atomic_cas" else 4096 if op in ATOMICS else 16384


def options(op: str, device: torch.device) -> dict:
    """Return the constants of `op`: 1024 threads, and blocks ahead where hardware copies them and has enough memory."""
    threads = torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32
    stages = 3 if platform.name() == "cuda" and op in ("load", "get", "put", "copy") else 1
    return dict(OP=op, BLOCK=block_words(op), STAGES=stages, num_warps=1024 // threads)


@device_function
def word(offsets, rank):
    """Return the word of `rank` at each place; `benchmarks.rma.pattern` is the same in torch."""
    return offsets.to(tl.int32) * STEP + rank * RANK_STEP


@triton.jit(do_not_specialize=["peer"])
def move_kernel(
    ctx_ptr,
    src,
    dst,
    sums,
    n,
    peer,
    OP: tl.constexpr,
    STAGES: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Move words. src, dst: int32 [n or more] on the heap. sums: int64 [programs], what `load` has read."""
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    total = tl.zeros((BLOCK,), tl.int32)
    for block in tl.range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0), num_stages=STAGES):
        at = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        if OP == "load":
            total += ctx.load(src + at, peer, mask=inside, other=0)
        elif OP == "store":
            ctx.store(dst + at, word(at, ctx.rank), peer, mask=inside)
        elif OP == "get":
            ctx.get(src + at, dst + at, peer, mask=inside)
        elif OP == "put":
            ctx.put(src + at, dst + at, peer, mask=inside)
        elif OP == "copy":
            ctx.copy(src + at, dst + at, peer, peer, mask=inside)
        elif OP == "atomic_add":
            ctx.atomic_add(dst + at, word(at, ctx.rank), peer, mask=inside, sem="relaxed")
        elif OP == "atomic_xchg":
            ctx.atomic_xchg(dst + at, word(at, ctx.rank), peer, mask=inside, sem="relaxed")
        elif OP == "atomic_xor":
            ctx.atomic_xor(dst + at, word(at, ctx.rank), peer, mask=inside, sem="relaxed")
        elif OP == "atomic_and":
            ctx.atomic_and(dst + at, word(at, ctx.rank), peer, mask=inside, sem="relaxed")
        elif OP == "atomic_or":
            ctx.atomic_or(dst + at, word(at, ctx.rank), peer, mask=inside, sem="relaxed")
        elif OP == "atomic_min":
            ctx.atomic_min(dst + at, word(at, ctx.rank), peer, mask=inside, sem="relaxed")
        elif OP == "atomic_max":
            ctx.atomic_max(dst + at, word(at, ctx.rank), peer, mask=inside, sem="relaxed")
        else:  # atomic_cas has no mask: n is a multiple of the block
            ctx.atomic_cas(dst + at, word(at, WORLD_SIZE), word(at, ctx.rank), peer, sem="relaxed")
    if OP == "load":
        tl.store(sums + tl.program_id(0), tl.sum(total.to(tl.int64)))


@triton.jit(do_not_specialize=["first", "rounds", "peer", "begins"])
def round_trip_kernel(ctx_ptr, flag, ticks, first, rounds, peer, begins, WORLD_SIZE: tl.constexpr):
    """Signal `peer` and await its answer, `rounds` times. flag: int32 on the heap; ticks: int64, the time taken."""
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    begin = arch.clock()
    for i in range(rounds):
        if begins != 0:
            signal(ctx, flag, first + i, peer)
        wait(ctx, flag, first + i, peer)
        if begins == 0:
            signal(ctx, flag, first + i, peer)
    tl.store(ticks, arch.clock() - begin)
