"""Allocator "vmem": growing and shrinking, torch's pool on the heap, and everything else on top of it."""

import gc
import os
import sys
import time

import iris
from iris import errors
from iris.memory.base import ALIGNMENT
from iris.memory.vmem import CHUNK, pages_of
import pytest
import torch

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.iris import test_failures, test_rma
from tests.iris.heaps import MIB, exchange_through, mapped
from tests.iris_ops.calls import check_cases
from tests.processes import patient, run_fresh
from tests.reference import FORMS, Case

pytestmark = both

FEW = WORLDS if UNDER_TORCHRUN else [1, 3]
alone = pytest.mark.skipif(UNDER_TORCHRUN, reason="makes its own processes")


# --- what is below ---------------------------------------------------------------------------------------------------


def _pages_one_by_one(ctx):
    """Each call to the driver (on CPUs, the system) in turn, in one process: memory mapped at two addresses."""
    pages, size = pages_of(ctx.device), 4 * MIB
    base = pages.reserve(4 * size)
    assert base % ALIGNMENT == 0 and ALIGNMENT % pages.granule == 0
    memory = pages.create(size)
    fd = pages.export(memory)
    received = pages.receive(fd)
    os.close(fd)
    pages.map(base, size, memory)
    pages.map(base + 2 * size, size, received)
    pages.release(received)
    pages.clear(base, size)
    one, two = (pages.tensor(base + offset, size, None).view(torch.int32) for offset in (0, 2 * size))
    assert one.device == ctx.device and one.data_ptr() == base and (two == 0).all()
    one.copy_(torch.arange(size // 4))
    assert torch.equal(two, one)
    (extent,) = pages.extents(base + 100, base + size)
    assert extent.address <= base + 100 and extent.address + extent.size == base + size
    os.close(extent.fd)
    pages.release(extent.memory)
    pages.release(memory)
    with pytest.raises((OSError, errors.IrisError)):
        pages.extents(base, base + 2 * size)  # nothing is mapped behind the first
    del one, two
    pages.idle()
    pages.unmap(base, size)
    pages.unmap(base + 2 * size, size)
    pages.unreserve(base, 4 * size)


@pytest.mark.parametrize("world_size", WORLDS[-1:])
def test_memory_is_reserved_made_passed_on_mapped_and_found_again(world_size):
    run_ranks(world_size, _pages_one_by_one)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the bindings come with CUDA")
def test_missing_bindings_say_how_to_install_them(monkeypatch):
    from iris.memory.cuda_pages import CudaPages

    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # GPU builds of torch bring them along
    with pytest.raises(errors.PlatformError, match=r"pip install 'iris-tp\[vmem\]'"):
        CudaPages(torch.device("cuda", 0))


# --- growing and shrinking -------------------------------------------------------------------------------------------


def _grow_and_trim(ctx):
    free_before = torch.cuda.mem_get_info()[0] if ON_GPU else 0
    with iris.iris(1 << 38, "vmem") as heap:  # more than any GPU has
        assert all(int(base) % (2 << 20) == 0 for base in heap.get_heap_bases().cpu())
        assert mapped(heap) == 2 * CHUNK  # at the low end and at the high end
        small = heap.full((1000,), 1.0)
        assert mapped(heap) == 2 * CHUNK  # at the low end and at the high end
        large = heap.zeros(200 * MIB // 4, dtype=torch.int32)  # crosses from the first chunk into a new one
        assert mapped(heap) == 5 * CHUNK
        later = heap.zeros(CHUNK // 4, dtype=torch.int32)
        exchange_through(heap, large)
        exchange_through(heap, later)
        whole, place = mapped(heap), large.data_ptr()
        if ON_GPU:
            assert free_before - torch.cuda.mem_get_info()[0] >= whole
        heap.barrier()
        heap.free(large)
        with pytest.raises(errors.ArgumentError, match="is no allocation of this heap"):
            heap.free(large)
        with pytest.raises(errors.ArgumentError, match="is no allocation of this heap"):
            heap.free(small[1:])
        returned = heap.trim()
        assert returned == 2 * CHUNK and mapped(heap) == whole - returned  # those between `small` and `behind`
        assert heap.trim() == 0
        assert (small == 1).all()
        exchange_through(heap, later)  # the chunk behind the gap is still there
        again = heap.zeros(200 * MIB // 4, dtype=torch.int32)
        assert again.data_ptr() == place and mapped(heap) == whole
        exchange_through(heap, again)
        assert (heap.empty(3 * CHUNK, dtype=torch.uint8)[CHUNK:] == 0).all()  # memory is zeroed when it comes
        with pytest.raises(errors.HeapExhausted, match=r"bytes are free\). Make the heap larger"):
            heap.empty(1 << 40, dtype=torch.uint8)
        return [t.data_ptr() - heap.heap.base for t in (small, again, later)]


@pytest.mark.parametrize("world_size", FEW)
def test_a_heap_grows_by_chunks_and_gives_them_back(world_size):
    offsets = run_ranks(world_size, _grow_and_trim)
    assert all(actual == offsets[0] for actual in offsets)


def _freed_memory_is_reused(ctx):
    with iris.iris(64 * MIB) as heap:  # with any allocator
        first, second = heap.zeros(100), heap.zeros(100)
        heap.free(first)
        assert heap.empty(90).data_ptr() == first.data_ptr()
        used = heap.heap.used
        with pytest.raises(errors.IrisError):
            heap.rand(3, generator="none")
        assert heap.heap.used == used
        heap.free(second)
        with pytest.raises(errors.ArgumentError, match="expected a torch.Tensor"):
            heap.free(5)
        if not os.environ.get("IRIS_ALLOCATOR"):
            assert heap.trim() == 0


@pytest.mark.parametrize("world_size", FEW[-1:])
def test_freed_memory_serves_later_allocations(world_size):
    run_ranks(world_size, _freed_memory_is_reused)


def _too_much(rank, world_size):
    with iris.iris(1 << 40, "vmem") as heap:
        if rank == 1:
            limit = 1 << 20
            os.memfd_create, real = (lambda name: real_or_full(name)), os.memfd_create

            def real_or_full(name):
                raise OSError(28, f"no more than {limit} bytes")

        with pytest.raises(errors.HeapExhausted, match="could not grow: rank 1:.*no more than"):
            heap.empty(300 * MIB, dtype=torch.uint8)
        if rank == 1:
            os.memfd_create = real
        assert exchange_through(heap, heap.empty(300 * MIB // 4, dtype=torch.int32)) is None


@alone
def test_memory_that_one_rank_cannot_have_is_an_error_on_all_and_nothing_is_lost():
    for end in run_fresh(3, _too_much):
        assert end.exitcode == 0, end.traceback


def _different_calls(rank, world_size, what, done):
    ctx = iris.iris(1 << 32, "vmem")
    ctx.barrier()
    begin = time.monotonic()
    if what == "sizes":
        with pytest.raises(errors.HeapExhausted, match="the ranks want chunks.*expected the same allocations"):
            ctx.empty((200 + 100 * rank) * MIB, dtype=torch.uint8)
    elif what == "calls":
        with pytest.raises(errors.ArgumentError, match="ranks make different calls.*'grow'"):
            ctx.as_symmetric(torch.zeros(3)) if rank else ctx.empty(300 * MIB)
    elif rank == 0:
        with pytest.raises(errors.PeerLostError, match="rank 0 lost rank 1 before grow: it did not come within 2 s"):
            ctx.empty(300 * MIB)
        done.touch()
    else:
        while not done.exists() and time.monotonic() - begin < 60:  # on a busy machine rank 0's 2 s take longer
            time.sleep(0.05)
    return time.monotonic() - begin


@alone
@pytest.mark.parametrize("what", ["sizes", "calls", "nothing"])
def test_ranks_that_go_different_ways_learn_it_in_time(what, tmp_path):
    for end in run_fresh(2, _different_calls, what, tmp_path / "done", env={"IRIS_TIMEOUT": "2"}):
        assert end.exitcode == 0, end.traceback
        assert end.result < patient(5)


@alone
def test_a_lost_rank_is_named(monkeypatch):
    ended = run_fresh(3, test_failures._wait_for_the_dead, 1, "barrier", "SIGKILL", env={"IRIS_ALLOCATOR": "vmem"})
    assert [end.exitcode for end in ended] == [0, -9, 0], [end.traceback for end in ended]


# --- torch's allocations on the heap ---------------------------------------------------------------------------------


def _pool(ctx, allocator):
    with iris.iris(512 * MIB, allocator) as heap:
        with heap.memory_pool():
            assert not heap.is_symmetric(torch.zeros(3, device="meta"))
            layer = torch.nn.Linear(64, 32, device=ctx.device)
            x = torch.randn(16, 64, device=ctx.device)
            y = layer(x)
            y.sum().backward()
            large = torch.zeros(30 * MIB // 4, dtype=torch.int32, device=ctx.device)
            output = torch.tensor([1, 2, 3], device=ctx.device)
            view = large[5:100].view(5, 19)
        for tensor in (layer.weight, layer.bias, x, y, large, output, view):
            assert heap.is_symmetric(tensor), tensor.shape
        assert ON_GPU or heap.is_symmetric(layer.weight.grad)  # torch's backward has a thread for each GPU
        assert isinstance(layer.weight, torch.nn.Parameter) and output.tolist() == [1, 2, 3]
        expected = x.cpu().double() @ layer.weight.detach().cpu().double().t() + layer.bias.detach().cpu().double()
        torch.testing.assert_close(y.detach().cpu().double(), expected, rtol=1e-2, atol=1e-2)
        assert not heap.is_symmetric(torch.zeros(3, device=ctx.device))
        exchange_through(heap, large)
        taken = heap.zeros(100)  # the heap's own allocations go around the pool's
        assert not torch.equal(taken, large[:100])
        if ON_GPU:  # torch still cuts tensors from there
            with pytest.raises(errors.ArgumentError, match="are freed when Python drops them"):
                heap.free(large)
        with heap.memory_pool():
            assert heap.is_symmetric(torch.ones(4, device=ctx.device) + 1)
        offsets = [t.data_ptr() - heap.heap.base for t in (layer.weight, x, y, large, output)]
        with pytest.raises(errors.HeapExhausted, match="Make the heap larger"):
            with heap.memory_pool():
                torch.empty(1 << 30, dtype=torch.uint8, device=ctx.device)
        with pytest.raises(KeyError, match="inside"):
            with heap.memory_pool():
                raise KeyError("inside")
        if ctx.num_ranks > 1:
            with pytest.raises(errors.NotSymmetricError, match="heaps differ.*llocation number|at different offsets"):
                with heap.memory_pool():
                    kept = [torch.zeros(1000 * (1 + ctx.cur_rank), device=ctx.device)]
            del kept
    large.fill_(4)  # what lies in the pool outlives the heap
    assert (large == 4).all()
    return offsets


@pytest.mark.parametrize("allocator", ["vmem", "torch"])
@pytest.mark.parametrize("world_size", FEW)
def test_what_torch_allocates_in_the_pool_lies_on_the_heap(world_size, allocator):
    offsets = run_ranks(world_size, _pool, allocator)
    assert all(actual == offsets[0] for actual in offsets)


# --- everything else on such a heap ----------------------------------------------------------------------------------


def _rma_and_ops(ctx, cases):
    with iris.iris(1 << 30, "vmem") as heap:
        heap.free(heap.empty(100 * MIB, dtype=torch.uint8))
        heap.trim()
        test_rma._moves(heap, torch.bfloat16)
        actual = check_cases(heap, cases)
        with heap.memory_pool():
            out = torch.empty(64, 48, dtype=torch.float32, device=ctx.device)
        a = torch.full((64, 32), ctx.cur_rank + 1.0, device=ctx.device)
        b = torch.eye(32, 48, device=ctx.device)
        heap.ops.matmul_all_reduce(out, a, b)
        total = sum(range(1, ctx.num_ranks + 1))
        assert (out[:, :32] == total).all() and (out[:, 32:] == 0).all()
        return actual


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
def test_rma_and_fused_ops_on_a_heap_of_virtual_memory(world_size):
    cases = [Case(op, form, 35, 33, 40, on_heap=form != "rows") for op, form in FORMS]
    run_ranks(world_size, _rma_and_ops, cases)


def reserved(addresses: str, access: str) -> bool:
    """Whether it is a range of addresses without memory, as large as a heap's: threads have small ones."""
    begin, end = (int(each, 16) for each in addresses.split("-"))
    return access.startswith("---") and end - begin >= 1 << 29


def _many_contexts(ctx):
    def counts():
        gc.collect()  # the interpreter leaves cycles that hold the arguments of kernels
        with open("/proc/self/maps") as maps:
            mapped = sum("iris-heap" in line or reserved(*line.split()[:2]) for line in maps)
        return mapped, len(os.listdir("/proc/self/fd"))

    before = None
    for _ in range(4):
        with iris.iris(1 << 30, "vmem") as inner:
            inner.ones(200 * MIB // 4).sum()
        before = before or counts()
    after = counts()
    assert after == before, (before, after)


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.skipif(UNDER_TORCHRUN, reason="looks at the mappings of shared memory")
def test_closed_contexts_leave_nothing_behind(world_size):
    run_ranks(world_size, _many_contexts)


def _captured(ctx, allocator):
    with iris.iris(256 * MIB, allocator) as heap:
        before = heap.zeros(10)
        heap.barrier()
        calls = {
            "allocated on the heap": [lambda: heap.zeros(10), lambda: heap.empty(100 * MIB, dtype=torch.uint8)],
            "empty_ragged": [lambda: heap.empty_ragged(3)],
            "free": [lambda: heap.free(before)],
            "memory_pool": [lambda: heap.memory_pool().__enter__()],
        }
        graph, used = torch.cuda.CUDAGraph(), heap.heap.used
        with torch.cuda.graph(graph):
            for message, those in calls.items():
                for call in those:
                    with pytest.raises(errors.CaptureError, match=message):
                        call()
            before.add_(1)
        assert heap.heap.used == used
        graph.replay()
        assert (before == 1).all() and (heap.ones(10) == 1).all()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="captures CUDA graphs")
@pytest.mark.parametrize("allocator", ["vmem", "torch"])
@pytest.mark.parametrize("world_size", FEW)
def test_a_capture_allocates_and_frees_nothing(world_size, allocator):
    run_ranks(world_size, _captured, allocator)
