"""Memory of tensors that every rank has dropped is reused; what one rank still holds is not."""

import gc

import iris
from iris.errors import HeapExhausted
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks

pytestmark = both
MIB = 1 << 20
HEAP = 4 * MIB
ALLOCATORS = ["torch", "vmem", "vmem_chunked"]


def _offsets_agree(ctx, *tensors):
    own = [ctx.heap.offset(tensor) for tensor in tensors]
    assert len(set(map(tuple, ctx.hosts.all_gather(own)))) == 1, own
    ctx.barrier()  # which compares the heaps


def check_many(_, allocator):
    with iris.iris(HEAP, allocator) as ctx:
        kept = ctx.full((1000,), 7.0)
        for number in range(50):
            tensor = ctx.empty(MIB, dtype=torch.uint8).fill_(number)
            _offsets_agree(ctx, tensor)
            assert int(tensor.min()) == int(tensor.max()) == number
        assert kept.eq(7.0).all()


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("world_size", [w for w in WORLDS if w != 3])
def test_dropped_tensors_make_room(world_size, allocator):
    run_ranks(world_size, check_many, allocator)


def check_one_holds(_):
    """A view on one rank alone keeps the memory of all; afterwards it is free on all."""
    with iris.iris(HEAP) as ctx:
        tensors = [ctx.full((MIB,), rank + 1, dtype=torch.uint8) for rank in range(3)]
        view = tensors[1][5:10].view(5, 1) if ctx.cur_rank == 0 else None
        tensors.clear()
        first, second = ctx.empty(MIB, dtype=torch.uint8), ctx.empty(MIB, dtype=torch.uint8)
        _offsets_agree(ctx, first, second)
        first.fill_(100), second.fill_(101)
        with pytest.raises(HeapExhausted, match="drop tensors on all ranks"):
            ctx.empty(3 * MIB // 2, dtype=torch.uint8)
        assert view is None or view.eq(2).all()
        del view, first
        _offsets_agree(ctx, ctx.empty(3 * MIB // 2, dtype=torch.uint8))
        assert second.eq(101).all()


def check_cycles(_):
    """The ranks' collectors run at other times, so a cycle dies at other times: it is collected when room is needed."""

    class Holder:
        def __init__(self, tensor):
            self.tensor, self.itself = tensor, self

    with iris.iris(HEAP) as ctx:
        gc.disable()
        try:
            for number in range(9):
                Holder(ctx.empty(MIB, dtype=torch.uint8))
                if number % 3 == ctx.cur_rank:
                    gc.collect()
                _offsets_agree(ctx, ctx.zeros(10))
        finally:
            gc.enable()


def check_peer_views(_):
    """What a rank sees of a peer through `as_remote` is not reused as long as it looks."""
    with iris.iris(HEAP) as ctx:
        peer = (ctx.cur_rank + 1) % ctx.num_ranks
        remote = ctx.as_remote(ctx.full((MIB,), ctx.cur_rank, dtype=torch.uint8), peer)[10:]
        ctx.barrier()
        for _ in range(6):
            ctx.full((MIB,), 99, dtype=torch.uint8)
        ctx.barrier()
        assert remote.eq(peer).all()
        ctx.barrier()
        del remote
        assert len(ctx.heap.dropped()) > 0
        ctx.empty(7 * MIB // 2, dtype=torch.uint8)


def check_too_large(_):
    """What never fits is refused at once, without an exchange: so by one rank alone, too."""
    with iris.iris(HEAP) as ctx:
        kept = ctx.zeros(100)
        if ctx.cur_rank == 0:
            with pytest.raises(HeapExhausted):
                ctx.empty(HEAP + 1, dtype=torch.uint8)
        ctx.barrier()
        assert not kept.any()


def check_outlives(_):
    """A tensor is valid after its context has been closed."""
    ctx = iris.iris(HEAP)
    tensor = ctx.full((1000,), 3.0)
    ctx.close()
    del ctx
    gc.collect()
    assert tensor.eq(3.0).all()


def check_ragged(_):
    with iris.iris(HEAP) as ctx:
        for _ in range(9):
            part = ctx.empty_ragged(MIB - ctx.cur_rank * 1000, dtype=torch.uint8)
            _offsets_agree(ctx, part)


@pytest.mark.parametrize(
    "check", [check_one_holds, check_cycles, check_peer_views, check_too_large, check_outlives, check_ragged]
)
@pytest.mark.parametrize("world_size", [w for w in WORLDS if w in (1, 2)])
def test_reuse(world_size, check):
    run_ranks(world_size, check)
