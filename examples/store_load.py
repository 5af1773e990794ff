"""Remote store and load: each rank writes into the next rank's memory, then reads the previous rank's.

python -m examples.store_load
"""

import iris
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def store_kernel(x, inbox, n, rank, world_size, heap_bases, BLOCK: tl.constexpr):
    """Store this rank's x [n] in the next rank's inbox [n]."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    values = tl.load(x + offsets, mask=mask)
    iris.store(inbox + offsets, values, rank, (rank + 1) % world_size, heap_bases, mask=mask)


@triton.jit
def load_kernel(x, out, n, rank, world_size, heap_bases, BLOCK: tl.constexpr):
    """Load the previous rank's x [n] into this rank's out [n]."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    previous = (rank + world_size - 1) % world_size
    tl.store(out + offsets, iris.load(x + offsets, rank, previous, heap_bases, mask=mask), mask=mask)


def rank_main(n: int = 1000) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        rank, world_size = ctx.cur_rank, ctx.num_ranks
        x = ctx.full((n,), float(rank))  # on the heap, at the same offset on every rank
        inbox = ctx.zeros(n)
        out = torch.empty(n, device=ctx.device)  # only this rank touches it: any memory will do
        ctx.barrier()
        grid = (triton.cdiv(n, 256),)
        store_kernel[grid](x, inbox, n, rank, world_size, ctx.get_heap_bases(), BLOCK=256)
        load_kernel[grid](x, out, n, rank, world_size, ctx.get_heap_bases(), BLOCK=256)
        ctx.barrier()  # every rank's store has arrived
        previous = (rank - 1) % world_size
        assert inbox.eq(previous).all() and out.eq(previous).all()
        ctx.info(f"inbox holds {inbox[0]:.0f}, written by rank {previous}; loaded {out[0]:.0f} from it")


def main() -> None:
    launch.run(rank_main)


if __name__ == "__main__":
    main()
