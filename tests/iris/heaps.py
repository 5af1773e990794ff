"""What tests of a heap's memory ask of it: that ranks reach each other through it, and how much of it there is."""

from tests.iris import test_rma

MIB = 1 << 20


def mapped(ctx) -> int:
    """Bytes of this rank's heap that have memory."""
    return sum(ctx._segment._regions[ctx.cur_rank].mapped.values())


def exchange_through(ctx, tensor):
    """Every rank puts its number into the neighbour's `tensor` and reads the other neighbour's."""
    world, rank = ctx.num_ranks, ctx.cur_rank
    flat = tensor.view(-1)
    flat.fill_(-1)
    ctx.barrier()
    ends = ctx.full((test_rma.BLOCK,), rank, dtype=flat.dtype)
    offset = flat.numel() - test_rma.BLOCK
    for at in (0, offset):
        test_rma._far_kernel[(1,)](ends, flat, rank, (rank + 1) % world, ctx.get_heap_bases(), at, N=test_rma.BLOCK)
    ctx.barrier()
    before = (rank - 1) % world
    assert (flat[: test_rma.BLOCK] == before).all() and (flat[offset:] == before).all()
    assert (flat[test_rma.BLOCK : offset] == -1).all()
    ctx.barrier()
    ctx.free(ends)
