"""The host's side: constructors, barriers, broadcast, logging, timing, memory of peers."""

import iris
import numpy as np
import pytest
import torch

from .device import DEVICE


def sizes_of_every_kind():
    ctx = iris.iris(1 << 20)
    size = (2, 3)
    for result in (
        ctx.zeros(2, 3),
        ctx.zeros(size),
        ctx.zeros([2, 3]),
        ctx.zeros((size,)),
        ctx.zeros(torch.Size(size)),
    ):
        assert result.shape == size and not result.any()
    assert ctx.ones(np.int64(4), np.int64(2)).shape == (4, 2)
    for nested in ((size,), [size], (np.int64(2), np.int32(3))):
        assert ctx.full(nested, 4).shape == ctx.randint(0, 9, nested).shape == ctx.rand(nested).shape == size
    assert ctx.zeros(*()).shape == ctx.randn(()).shape == ()
    assert ctx.empty(0).numel() == 0
    ctx.barrier()


def out_of_another_shape():
    ctx = iris.iris(1 << 20)
    out = ctx.empty(12, dtype=torch.float32)
    ones = ctx.ones(3, 4, out=out)
    assert ones.shape == (3, 4) and ones.data_ptr() == out.data_ptr() and out.sum().item() == 12
    with pytest.raises(RuntimeError):
        ctx.zeros(5, out=out)
    with pytest.raises(RuntimeError):
        ctx.zeros(12, out=out, dtype=torch.int32)
    with pytest.raises(RuntimeError):
        ctx.zeros(12, out=torch.zeros(12, device=ctx.device))
    with pytest.raises(RuntimeError):
        ctx.zeros(3, device="meta")
    with pytest.raises(RuntimeError):
        ctx.randint(10, 5, (2, 3))
    with pytest.raises(ValueError):
        ctx.zeros(3, layout=torch.sparse_coo)
    ctx.barrier()


def evenly_spaced_numbers():
    ctx = iris.iris(1 << 20)
    assert ctx.linspace(0, 10, 5, device=DEVICE).tolist() == [0, 2.5, 5, 7.5, 10]
    assert ctx.linspace(0, 1, (3,)).tolist() == ctx.linspace(0, 1, [(3,)]).tolist() == [0, 0.5, 1]
    start, end = torch.tensor(0 + 0j), torch.tensor(2 + 4j)
    assert ctx.linspace(start, end, 3).tolist() == [0, 1 + 2j, 2 + 4j]
    assert ctx.linspace(0, 6, np.int64(4), dtype=torch.int32).tolist() == [0, 2, 4, 6]
    assert ctx.arange(4).tolist() == [0, 1, 2, 3]
    ctx.barrier()


def random_numbers():
    ctx = iris.iris(1 << 20)
    uniform = ctx.uniform((100, 10), low=-2.0, high=-1.0, dtype=torch.float16)
    assert uniform.dtype == torch.float16 and uniform.min() >= -2 and uniform.max() <= -1
    drawn = ctx.randint(3, 7, (1000,))
    assert sorted(set(drawn.tolist())) == [3, 4, 5, 6]
    assert ctx.rand(5, requires_grad=True).requires_grad and ctx.full((2, 2), 3.5).mean().item() == 3.5
    ctx.barrier()


def a_peers_tensor():
    ctx = iris.iris(1 << 20)
    buf = ctx.full((8, 4), ctx.cur_rank, dtype=torch.int32)
    target = (ctx.cur_rank + 1) % ctx.num_ranks
    ctx.barrier()
    remote = ctx.as_remote(buf, target)
    assert remote.shape == buf.shape and remote.dtype == buf.dtype and (remote == target).all()
    bases = ctx.get_heap_bases().tolist()
    assert remote.data_ptr() - bases[target] == buf.data_ptr() - bases[ctx.cur_rank]
    tensor, table = ctx.allocate_symmetric(16, dtype=torch.float32)
    assert tensor.shape == (16,) and ctx.is_symmetric(tensor) and table.dtype == torch.uint64
    assert table.tolist() == [base + tensor.data_ptr() - bases[ctx.cur_rank] for base in bases]
    ctx.barrier()


def the_time_of_a_call():
    ctx = iris.iris(1 << 20)
    ms = iris.do_bench(lambda: ctx.zeros(10, 10), barrier_fn=ctx.barrier, n_warmup=1, n_repeat=3)
    assert ms > 0
    times = iris.do_bench(lambda: None, ctx.barrier, lambda: None, 0, 3, return_mode="all")
    assert len(times) == 3
    assert len(iris.do_bench(lambda: None, n_warmup=0, n_repeat=3, quantiles=[0.5, 0.2, 0.8])) == 3


def what_the_heap_knows():
    ctx = iris.iris(1 << 20, copy_engine=None)
    assert ctx.comm is not None and ctx.get_copy_engine_ctx() is None
    bases = [int(ctx.heap.heap_bases[rank].item()) for rank in range(ctx.num_ranks)]
    assert bases == ctx.get_heap_bases().tolist()
    buf = ctx.zeros(64)
    for rank in range(ctx.num_ranks):
        remote = ctx.as_remote(buf, rank)
        assert remote.data_ptr() - bases[rank] == buf.data_ptr() - bases[ctx.cur_rank]
        assert ctx.translate(buf.data_ptr(), ctx.cur_rank, rank) == remote.data_ptr()
    with pytest.raises(ValueError, match="out of range"):
        ctx.as_remote(buf, ctx.num_ranks)
    with pytest.raises(ValueError, match="symmetric heap"):
        ctx.as_remote(torch.zeros(64, device=ctx.device), 0)
    with pytest.raises(ValueError, match="copy_engine is 'sdma'; expected None"):
        iris.iris(1 << 20, copy_engine="sdma")
    ctx.barrier()


def copies_from_the_host():
    ctx = iris.iris(1 << 20)
    rank, n = ctx.get_rank(), ctx.get_num_ranks()
    to, before = (rank + 1) % n, (rank - 1) % n
    data, dst = ctx.full((6, 4), float(rank)), ctx.full((24,), -1.0)
    ctx.barrier()
    ctx.put(data, dst_rank=to, dst_tensor=dst)
    ctx.barrier()
    assert (dst == before).all() and (data == rank).all()
    ctx.barrier()
    mine = torch.full((6, 4), rank + 100.0, device=ctx.device)
    ctx.put(mine, to_rank=to, dst_tensor=data, async_op=True)
    ctx.quiet(dst_rank=to)
    ctx.barrier()
    assert (data == before + 100).all()
    ctx.put(dst, to_rank=rank, use_copy_engine=False)
    ctx.barrier()


def copies_that_wait_and_signal():
    """Rank 0 sends; each rank passes on what has arrived, and says so."""
    ctx = iris.iris(1 << 20)
    rank, n = ctx.get_rank(), ctx.get_num_ranks()
    data, flag = ctx.full((1000,), 42.0 if rank == 0 else 0.0), ctx.zeros(1, dtype=torch.int32)
    if rank == 0:
        flag.fill_(3)
    ctx.barrier()
    if rank + 1 < n:
        ctx.put(data, rank + 1, wait_flag=flag, wait_value=3, signal_flag=flag, signal_value=3)
    ctx.barrier()
    assert (data == 42).all() and flag.item() == 3
    ctx.barrier()


def wrong_copies_from_the_host():
    ctx = iris.iris(1 << 20)
    data, flag = ctx.zeros(4), ctx.zeros(1, dtype=torch.int64)
    outside = torch.zeros(4, device=ctx.device)
    for message, call in (
        ("dst_rank is 99, out of range", lambda: ctx.put(data, 99)),
        ("src_tensor, a tensor .* lies outside the symmetric heap", lambda: ctx.put(outside, 0)),
        ("dst_tensor, a tensor .* lies outside the symmetric heap", lambda: ctx.put(data, 0, outside)),
        (
            "dst_tensor is torch.int64; expected torch.float32",
            lambda: ctx.put(data, 0, ctx.zeros(4, dtype=torch.int64)),
        ),
        ("expected as many elements", lambda: ctx.put(data, 0, ctx.zeros(5))),
        ("signal_flag is .* expected one int32", lambda: ctx.put(data, 0, signal_flag=flag)),
        ("wait_value is 1.5", lambda: ctx.put(data, 0, wait_value=1.5)),
        ("src_tensor is int; expected a torch.Tensor", lambda: ctx.put(3, 0, data)),
        ("src_tensor is torch.sparse_coo; expected a strided", lambda: ctx.put(data.to_sparse(), 0, data)),
        ("ptr is 0x10; expected an address in the heap of rank 0", lambda: ctx.translate(16, 0, 0)),
        ("ptr is .*; expected an address", lambda: ctx.translate(data, 0, 0)),
        ("dst_rank is -1", lambda: ctx.quiet(-1)),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()
    ctx.barrier()


def dropped_tensors_of_the_chunked_allocator():
    """Without `free`, as its memory comes back when tensors die."""
    for allocator in ("torch", "vmem_chunked"):
        ctx = iris.iris(4 << 20, allocator_type=allocator)
        for number in range(50):
            assert ctx.full((1 << 18,), float(number)).eq(number).all()
        ctx.barrier()
