"""Remote access beyond 4 GiB, for which the heap of a GPU must be that large."""

import pytest
import torch

from tests.harness import WORLDS, both, run_ranks
from tests.iris import test_rma

pytestmark = both


def _beyond_4_gib(ctx):
    """Offsets of more than 2^32 bytes reach the right place at the peer."""
    src = ctx.full((test_rma.BLOCK,), ctx.cur_rank + 1, dtype=torch.int32)
    far = ctx.empty((9 << 29) // 4, dtype=torch.int32)
    to = (ctx.cur_rank + 1) % ctx.num_ranks
    ctx.barrier()
    offset = far.numel() - test_rma.BLOCK
    test_rma._far_kernel[(1,)](src, far, ctx.cur_rank, to, ctx.get_heap_bases(), offset, N=test_rma.BLOCK)
    ctx.barrier()
    assert (far[-test_rma.BLOCK :] == (ctx.cur_rank - 1) % ctx.num_ranks + 1).all()
    assert (far[: test_rma.BLOCK] == 0).all() and (far[-2 * test_rma.BLOCK : -test_rma.BLOCK] == 0).all()


@pytest.mark.parametrize("world_size", WORLDS[-1:])
def test_a_put_beyond_4_gib(world_size):
    run_ranks(world_size, _beyond_4_gib)
