"""A ring inside one kernel: a vector travels from rank to rank, each adds its own, and then the sum travels once more.

Every step has a row of memory and a flag of its own, so no rank overwrites what another one may still read. A flag
carries the number of the call, which the kernel itself counts: nothing is reset, and a captured call can be replayed.

    python -m examples.ring
"""

import iris
from iris.device import sync
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def ring_kernel(ctx_ptr, x, partial, flags, calls, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store the sum of all ranks' x [n] in row world + rank of `partial`.

    partial [2 * world, n] has a row for each step; flags are int32 [2 * world]; calls, int32, is the number of calls so
    far.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    call = tl.load(calls) + 1
    following = (ctx.rank + 1) % WORLD_SIZE
    previous = (ctx.rank + WORLD_SIZE - 1) % WORLD_SIZE
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    own = tl.load(x + offsets, mask=mask)
    # Rank 0 begins. Step s arrives at rank s; in the first round each rank adds its own, in the second it passes on.
    for round in tl.static_range(2):
        step = round * WORLD_SIZE + ctx.rank
        begins = step == 0
        ok = True
        total = own
        if not begins:
            ok = sync.wait(ctx, flags + step, call, previous)
            total = tl.load(partial + step * n + offsets, mask=mask)
            if round == 0:
                total += own
        if ok and step + 1 < 2 * WORLD_SIZE:
            ctx.store(partial + (step + 1) * n + offsets, total, following, mask=mask)
            sync.signal(ctx, flags + step + 1, call, following)
    tl.store(calls, call)


def rank_main(n: int = 1000, repeats: int = 3) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        world = ctx.num_ranks
        partial = ctx.zeros(2 * world, n)
        flags = ctx.zeros(2 * world, dtype=torch.int32)
        calls = torch.zeros(1, dtype=torch.int32, device=ctx.device)
        for call in range(1, repeats + 1):
            x = torch.full((n,), float(call * (ctx.cur_rank + 1)), device=ctx.device)
            ctx.barrier()  # nobody still reads the sum of the call before
            ring_kernel[(1,)](ctx.get_device_context(), x, partial, flags, calls, n, WORLD_SIZE=world, BLOCK=1024)
            ctx.barrier()
            total = partial[world + ctx.cur_rank]
            assert total.eq(call * world * (world + 1) / 2).all(), total
        ctx.info(f"after two rounds of {world} ranks every element is {total[0]:.0f}")


def main() -> None:
    launch.run(rank_main)


if __name__ == "__main__":
    main()
