"""Atomics on a peer's memory: all ranks share one histogram, one list of tasks and one maximum, which rank 0 holds.

python -m examples.atomics
"""

import iris
from iris_tp import launch
import torch
import triton
import triton.language as tl

BINS = tl.constexpr(16)


@triton.jit
def histogram_kernel(x, bins, largest, n, rank, heap_bases, BLOCK: tl.constexpr):
    """Count this rank's x [n], values below BINS, into rank 0's bins [BINS], and keep the largest value there."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    values = tl.load(x + offsets, mask=mask, other=0)
    iris.atomic_add(bins + values, 1, rank, 0, heap_bases, mask=mask)
    iris.atomic_max(largest, tl.max(values), rank, 0, heap_bases)


@triton.jit
def tasks_kernel(ticket, owner, tasks, rank, heap_bases):
    """Take tasks by ticket until none is left, and write this rank's number to owner [tasks] on rank 0."""
    task = iris.atomic_add(ticket, 1, rank, 0, heap_bases)
    while task < tasks:
        iris.atomic_cas(owner + task, -1, rank, rank, 0, heap_bases)  # nobody else had it
        task = iris.atomic_add(ticket, 1, rank, 0, heap_bases)


def rank_main(n: int = 1000, tasks: int = 24) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        rank, bases = ctx.cur_rank, ctx.get_heap_bases()
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(0, BINS.value, (n,), generator=generator, dtype=torch.int32).to(ctx.device)
        bins = ctx.zeros(BINS.value, dtype=torch.int32)
        largest, ticket = ctx.zeros(1, dtype=torch.int32), ctx.zeros(1, dtype=torch.int32)
        owner = ctx.full((tasks,), -1, dtype=torch.int32)
        ctx.barrier()
        histogram_kernel[(triton.cdiv(n, 256),)](x, bins, largest, n, rank, bases, BLOCK=256)
        tasks_kernel[(1,)](ticket, owner, tasks, rank, bases)
        ctx.barrier()
        if rank == 0:
            assert bins.sum() == n * ctx.num_ranks and largest.item() == BINS.value - 1
            assert ((owner >= 0) & (owner < ctx.num_ranks)).all()
            ctx.info(f"{bins.sum()} values in {BINS.value} bins: {bins.tolist()}, the largest is {largest.item()}")
            ctx.info(f"{tasks} tasks taken, by rank: {torch.bincount(owner.cpu(), minlength=ctx.num_ranks).tolist()}")


def main() -> None:
    launch.run(rank_main)


if __name__ == "__main__":
    main()
