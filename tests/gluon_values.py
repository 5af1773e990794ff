"""The values of Gluon over torch on the CPU (`gluon_on_cpu.py`): tensors, pointers, shared memory and its barriers.

Programs, and the partitions of one, are threads. One runs at a time, until it waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
import threading
from types import SimpleNamespace
from typing import Any

import torch

here = threading.local()  # of a thread: its program, and how many there are


class Turns:
    """Lets one thread run at a time; a thread that waits lets others run."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all threads."""
        self.changed, self.threads = threading.Condition(), list[threading.Thread]()
        self.alive, self.waiting, self.failed = 0, 0, None

    def wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.waiting += 1
            if self.waiting == self.alive and self.failed is None:
                self.failed = AssertionError("all programs wait: they would hang")
            if self.failed is not None:
                self.change()
                raise self.failed
            self.changed.wait()

    def change(self) -> None:
        """Let all that wait look again."""
        self.waiting = 0
        self.changed.notify_all()

    def start(self, function: Callable[[], object], program: int, programs: int) -> None:
        def body() -> None:
            with self.changed:
                here.program, here.programs = program, programs
                try:
                    with torch.no_grad():
                        function()
                except BaseException as error:
                    self.failed = self.failed or error
                self.alive -= 1
                self.change()

        self.alive += 1
        self.threads.append(threading.Thread(target=body))
        self.threads[-1].start()


turns = Turns()


def partitions_of(partitions: list[tuple], warps: Any, registers: Any) -> None:
    """Run partitions of a program beside each other."""
    (first, given), *others = partitions
    for function, arguments in others:
        turns.start(partial(function, *arguments), here.program, here.programs)
    first(*given)


class Value(torch.Tensor):
    """Wrap a tensor so that it has the methods of a value in a kernel."""

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Value:
        return self.view(dtype) if bitcast else torch.Tensor.to(self, dtype)

    @property
    def shape(self) -> list[int]:  # type: ignore[override]
        return list(torch.Tensor.size(self))

    @property
    def type(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(layout=None)


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Pointer:
    """Elements of a flat tensor."""

    def __init__(self, memory: torch.Tensor, at: Any) -> None:
        self.memory, self.at = memory, value(at)
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    @classmethod
    def of(cls, t: torch.Tensor) -> Pointer:
        size = t.untyped_storage().nbytes() // t.itemsize
        return cls(t.as_strided((size,), (1,), 0), t.storage_offset())

    def __add__(self, distance: Any) -> Pointer:
        return Pointer(self.memory, self.at + distance)

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.memory, self.at[index])


class Descriptor:
    """A tensor that is loaded by blocks; zeros beyond its ends."""

    def __init__(self, given: Any) -> None:
        base = given.base.as_strided(given.shape, given.strides)
        shape, itemsize = list(given.block_shape), base.itemsize
        self.base, self.dtype, self.layout, nbytes = base, base.dtype, None, itemsize
        for size in shape:
            nbytes *= size
        self.block_type = SimpleNamespace(shape=shape, nbytes=nbytes)


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < self.data.shape[0]
        return Shared(self.data[int(i)])

    def permute(self, by: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(by))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout: Any) -> Value:
        return value(self.data.clone())

    def store(self, x: torch.Tensor) -> None:
        assert list(x.shape) == self.shape
        self.data.copy_(x)


class Barriers:
    """Of each stage: bytes that are expected, bytes that came, completed phases, and whether threads copy and have."""

    @staticmethod
    def init(barrier: Shared, count: int) -> None:
        barrier.data.zero_()
        barrier.data[3] = count > 1

    @staticmethod
    def expect(barrier: Shared, nbytes: int, pred: Any = True) -> None:
        assert barrier.data[0] == barrier.data[1] == 0, "loads are requested while others are on their way"
        barrier.data[0] = nbytes

    @staticmethod
    def wait(barrier: Shared, phase: Any) -> None:
        turns.wait(lambda: (int(barrier.data[2]) & 1) == 1 - int(phase))

    @staticmethod
    def arrive(barrier: Shared, count: int, pred: Any = True) -> None:
        if pred:
            barrier.data[2] += 1
            turns.change()

    @staticmethod
    def end_loads(barrier: Shared) -> None:
        """Complete the phase if all bytes came, and all copies."""
        expected, came, _, copies, copied = barrier.data.tolist()
        if came == expected and copied == copies:
            barrier.data[:2], barrier.data[4] = 0, 0
            barrier.data[2] += 1
            turns.change()

    @staticmethod
    def arrive_copied(barrier: Shared, increment_count: bool) -> None:
        assert not increment_count
        barrier.data[4] += 1
        Barriers.end_loads(barrier)

    MBarrierLayout = staticmethod(lambda: None)


def copy_async(place: Shared, source: Pointer, mask: Any) -> None:
    place.store(load(source, mask))


def async_load(descriptor: Descriptor, at: list, barrier: Shared, place: Shared) -> None:
    block = torch.zeros_like(place.data)
    at = [int(each) for each in at]
    ends = [min(a + n, size) - a for a, n, size in zip(at, block.shape, descriptor.base.shape, strict=True)]
    if min(ends) > 0:
        source = descriptor.base
        for axis, (a, n) in enumerate(zip(at, ends, strict=True)):
            source = source.narrow(axis, a, n)
        block[tuple(slice(n) for n in ends)] = source
    place.data.copy_(block)
    barrier.data[1] += block.nbytes
    assert barrier.data[1] <= barrier.data[0]
    Barriers.end_loads(barrier)


def mma(y: torch.Tensor, x: torch.Tensor, acc: torch.Tensor) -> Value:
    assert y.dtype == x.dtype == torch.bfloat16
    return value(torch.Tensor.to(y, torch.float32) @ torch.Tensor.to(x, torch.float32) + acc)


def load(p: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
    at, mask = torch.broadcast_tensors(p.at, torch.as_tensor(True if mask is None else mask))
    assert bool(((at >= 0) & (at < len(p.memory)) | ~mask).all()), "loads beyond memory"
    found = p.memory[torch.where(mask, at, 0)]
    return value(torch.where(mask, found, torch.as_tensor(other or 0, dtype=found.dtype)))


def store(p: Pointer, x: torch.Tensor, mask: Any = None, **_: Any) -> None:
    mask, x = torch.as_tensor(True if mask is None else mask), torch.as_tensor(x, dtype=p.memory.dtype)
    at, mask, x = torch.broadcast_tensors(p.at, mask, x)
    at = at[mask]
    assert bool(((at >= 0) & (at < len(p.memory))).all()), "stores beyond memory"
    assert len(at.unique()) == len(at), "two threads store to one place"
    p.memory[at] = x[mask]


def atomic_add(p: Pointer, x: torch.Tensor, mask: Any, **_: Any) -> Value:
    before = torch.zeros_like(x)
    for i in torch.as_tensor(mask).nonzero()[:, 0].tolist():
        before[i] = p.memory[p.at[i]]
        p.memory[p.at[i]] += x[i]
    return value(before)
