"""`as_symmetric` on allocator "vmem": outside memory on the heap without a copy, or what to do where that cannot be."""

import contextlib
import math
import os

import iris
from iris import errors
import pytest
import torch

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.iris import test_rma
from tests.iris.heaps import MIB, exchange_through, mapped

pytestmark = both

FEW = WORLDS if UNDER_TORCHRUN else [1, 3]


@contextlib.contextmanager
def _shareable():
    """torch takes memory in the block from where it can be shared; on CPUs `_outside` does that itself."""
    if ON_GPU:
        torch.cuda.empty_cache()
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def _outside(ctx, *sizes, dtype=torch.int32):
    if not ON_GPU:
        return torch.zeros(*sizes, dtype=dtype).share_memory_()
    # so large that no gap between tensors that are not shareable can hold it
    room = torch.zeros(max(64 * MIB, math.prod(sizes) * dtype.itemsize), dtype=torch.uint8, device=ctx.device)
    return room.view(dtype)[: math.prod(sizes)].view(sizes)


def _imports(ctx):
    with iris.iris(256 * MIB, "vmem") as heap, _shareable():
        assert heap.as_symmetric(inside := heap.zeros(5)) is inside
        for mib in (1, 3, 70):  # on GPUs: a small segment, one handle, several handles
            theirs = _outside(ctx, mib * MIB // 4)
            ours = heap.as_symmetric(theirs)
            assert heap.is_symmetric(ours) and not heap.is_symmetric(theirs)
            assert ours.data_ptr() != theirs.data_ptr() and ours.shape == theirs.shape
            exchange_through(heap, ours)
            assert torch.equal(ours, theirs)  # the same memory, not a copy
            theirs[1234] = 99
            assert ours[1234] == 99
        part = _outside(ctx, 64, 64, dtype=torch.float32)[3:60, 1:40:2]
        imported = heap.as_symmetric(part)
        assert imported.stride() == part.stride() and imported.shape == part.shape
        part.fill_(3.0)
        assert (imported == 3).all()
        before = mapped(heap)
        heap.free(ours, imported)
        del ours, imported
        heap.trim()
        assert mapped(heap) <= before - 70 * MIB
        with pytest.raises(errors.ArgumentError, match="is no allocation of this heap"):
            heap.free(theirs)
        assert (theirs[test_rma.BLOCK + 2000 : 5000] == -1).all()  # the memory itself stays
        last = heap.as_symmetric(theirs)
    assert torch.equal(last, theirs)  # and lives on after the heap


@pytest.mark.parametrize("world_size", FEW)
def test_outside_memory_is_imported_without_a_copy(world_size):
    run_ranks(world_size, _imports)


def _refused_imports(ctx):
    remedy = "expandable_segments:True" if ON_GPU else "share_memory_"
    with iris.iris(64 * MIB, "vmem") as heap:
        ordinary = torch.zeros(3 * MIB, device=ctx.device)
        with pytest.raises(errors.NotSymmetricError, match=f"cannot import the tensor of ranks.*{remedy}"):
            heap.as_symmetric(ordinary)
        with pytest.raises(errors.NotSymmetricError, match="has no elements"):
            heap.as_symmetric(torch.zeros(0, device=ctx.device))
        with pytest.raises(errors.NotSymmetricError, match="on meta; expected"):
            heap.as_symmetric(torch.zeros(3, device="meta"))
        with pytest.raises(errors.ArgumentError, match="tensor is 5"):
            heap.as_symmetric(5)
        with _shareable():
            if ctx.num_ranks > 1:
                theirs = _outside(ctx, 100)
                with pytest.raises(errors.NotSymmetricError, match="another form on other ranks"):
                    heap.as_symmetric(theirs[: 50 + ctx.cur_rank])
                with pytest.raises(errors.NotSymmetricError, match="lie at different distances from a page"):
                    heap.as_symmetric(theirs[ctx.cur_rank :][:50])
                with pytest.raises(errors.NotSymmetricError, match="on the heap on some ranks and outside on others"):
                    inside = heap.zeros(100, dtype=torch.int32)
                    heap.as_symmetric(inside if ctx.cur_rank else theirs)
                with pytest.raises(errors.NotSymmetricError, match="different offsets on the heap"):
                    heap.as_symmetric(heap.zeros(100, dtype=torch.int32)[ctx.cur_rank :][:50])
            if not ON_GPU:
                with pytest.raises(errors.HeapExhausted, match="bytes for the tensor; expected at most"):
                    heap.as_symmetric(_outside(ctx, 200 * MIB, dtype=torch.uint8))
            exchange_through(heap, heap.as_symmetric(_outside(ctx, 5000)))  # nothing is out of step after all that
    with iris.iris(64 * MIB, "torch") as heap:
        if not os.environ.get("IRIS_ALLOCATOR"):
            with pytest.raises(errors.NotSymmetricError, match="allocator_type='vmem'"):
                heap.as_symmetric(ordinary)


@pytest.mark.parametrize("world_size", FEW)
def test_what_cannot_be_imported_says_what_to_do_on_every_rank(world_size):
    run_ranks(world_size, _refused_imports)
