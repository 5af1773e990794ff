"""Simulate a GPU for torch and triton: launchers run on tensors without memory, and every launch is recorded.

For processes that compile kernels ahead of time. `torch.cuda` describes the GPU, `FakeTensor` gives tensors on it, and
triton's driver names the target. A launch compiles nothing: it is kept with the arguments that triton would specialise
the kernel on, so signatures are those of real calls.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32), "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64), "gfx950": GPUTarget("hip", "gfx950", 64),
}  # fmt: skip
# Name, multiprocessors, shared memory of a program.
GPUS = {
    "sm_90": ("NVIDIA H200", 132, 227 << 10), "sm_100": ("NVIDIA B200", 148, 227 << 10),
    "gfx942": ("AMD Instinct MI300X", 304, 64 << 10), "gfx950": ("AMD Instinct MI350X", 256, 160 << 10),
}  # fmt: skip
_addresses: dict[int, tuple[int, Any]] = {}  # of storages, which stay


def _address(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    known, _ = _addresses.setdefault(storage._cdata, ((len(_addresses) + 1) << 34, storage))
    return known + tensor.storage_offset() * tensor.element_size()


class _Nothing:
    """A stream or an event of torch's, of which any method may be called."""

    def __init__(self, *args: Any, **named: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: None


def pretend(name: str) -> FakeTensorMode:
    """Has this process see one GPU of that target, on which tensors made in the returned mode lie. Before iris."""
    target, (gpu, programs, shared) = TARGETS[name], GPUS[name]
    cuda, stream = target.backend == "cuda", _Nothing()
    torch.version.hip = None if cuda else "6.4"
    properties = SimpleNamespace(name=gpu, multi_processor_count=programs, warp_size=target.warp_size)
    torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: divmod(target.arch, 10) if cuda else (9, 4)
    torch.cuda.is_current_stream_capturing, torch.cuda.synchronize = lambda: False, lambda *device: None
    torch.cuda.Stream = torch.cuda.Event = _Nothing
    torch.cuda.current_stream, torch.cuda.set_stream = lambda device=None: stream, lambda stream: None
    torch.cuda.stream = nullcontext
    FakeTensor.data_ptr = _address
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": shared})
    driver = SimpleNamespace(utils=utils, get_current_target=lambda: target, get_current_device=lambda: 0)
    driver.get_current_stream = lambda device: 0
    triton.runtime.driver.set_active(driver)
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_rank(world_size: int = 4, number: int = 1, invariant: str | None = None, recording: bool = False) -> Any:
    """A context of rank `number` whose peers never come; its `ops`, `ccl` and heap are the library's own."""
    from iris.barrier import DeviceBarrier
    from iris.context import Iris
    from iris.device.context import HEADER, pack
    from iris.heap import Heap
    from iris.launch import relaunch
    from iris.launch.streams import SideStream
    from iris.rank import Rank

    class Fake(Iris):
        __init__ = Rank.__init__

        def check(self) -> None: ...

        def barrier(self, stream: Any = None, group: Any = None) -> None: ...

    relaunch.alias = lambda t, distance=0: t  # there is no memory to keep alive
    rank, size, ranks = Fake(), 1 << 36, tuple(range(world_size))
    memory = torch.empty(size, dtype=torch.uint8, device="cuda:0")
    bases = [memory.data_ptr()] * world_size
    segment = SimpleNamespace(local=memory, span=size, bases=bases, back=lambda *_: None)
    rank.cur_rank, rank.num_ranks, rank.group_name, rank.heap_size = number, world_size, "fake", size
    rank.device, rank.gpu_id, rank.heap, rank._segment = memory.device, 0, Heap(segment), segment
    rank.hosts = SimpleNamespace(members=lambda group: ranks, rank=number, size=world_size)
    rank.agreement, rank.invariant, rank.recording = None, invariant, recording
    rank._handed_out, rank._pool = 1 << 60, None
    fields = pack(number, bases, size, bases, 0, 0, 1)
    rank._context_tensor = torch.tensor(fields, dtype=torch.int64, device=rank.device)
    rank.heap_bases = rank._context_tensor[HEADER.value : HEADER.value + world_size].view(torch.uint64)
    counts = rank.heap.reserve((DeviceBarrier.WORDS * world_size,), torch.int32)
    rank._barrier = DeviceBarrier(rank.device, rank._context_tensor, world_size, counts)
    rank.side = SideStream(rank.device)
    return rank
