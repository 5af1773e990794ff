"""Run Gluon over torch on the CPU: the kernels of touched experts and of widened codes, whose modules `streams()` and
`widened()` give, by `run`, and the products of warp-specialised programs, whose modules `products()` gives.

Triton's interpreter runs no Gluon. Here the source of the modules is executed with a language in which a value is a
tensor and layouts are dropped. It checks what the compiler cannot: which blocks are loaded when, that every wait ends,
all indices, all masks, and the numbers. `tests/iris_ops/test_widening.run` runs the assembly of widening.

Programs, and the partitions of one, are threads. One runs at a time, until it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import importlib
import re
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from iris import triton_private
import torch
import triton

from tests.iris_ops import test_widening

_LAYOUTS = (
    "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout", "DistributedLinearLayout",
    "SwizzledSharedLayout", "NVMMASharedLayout",
)  # fmt: skip
_here = threading.local()  # of a thread: its program, and how many there are
_reported: list[bool] = []


class _Turns:
    """Lets one thread run at a time; a thread that waits lets others run."""

    def __init__(self) -> None:
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
                _here.program, _here.programs = program, programs
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


_turns = _Turns()


def _partitions(partitions: list[tuple], warps: Any, registers: Any) -> None:
    """Run partitions of a program beside each other."""
    (first, given), *others = partitions
    for function, arguments in others:
        _turns.start(partial(function, *arguments), _here.program, _here.programs)
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
        _turns.wait(lambda: (int(barrier.data[2]) & 1) == 1 - int(phase))

    @staticmethod
    def arrive(barrier: Shared, count: int, pred: Any = True) -> None:
        if pred:
            barrier.data[2] += 1
            _turns.change()

    @staticmethod
    def end_loads(barrier: Shared) -> None:
        """Complete the phase if all bytes came, and all copies."""
        expected, came, _, copies, copied = barrier.data.tolist()
        if came == expected and copied == copies:
            barrier.data[:2], barrier.data[4] = 0, 0
            barrier.data[2] += 1
            _turns.change()

    @staticmethod
    def arrive_copied(barrier: Shared, increment_count: bool) -> None:
        assert not increment_count
        barrier.data[4] += 1
        Barriers.end_loads(barrier)

    MBarrierLayout = staticmethod(lambda: None)


def _copy_async(place: Shared, source: Pointer, mask: Any) -> None:
    place.store(_load(source, mask))


def _async_load(descriptor: Descriptor, at: list, barrier: Shared, place: Shared) -> None:
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


def _mma(y: torch.Tensor, x: torch.Tensor, acc: torch.Tensor) -> Value:
    assert y.dtype == x.dtype == torch.bfloat16
    return value(torch.Tensor.to(y, torch.float32) @ torch.Tensor.to(x, torch.float32) + acc)


def _load(p: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
    at, mask = torch.broadcast_tensors(p.at, torch.as_tensor(True if mask is None else mask))
    assert bool(((at >= 0) & (at < len(p.memory)) | ~mask).all()), "loads beyond memory"
    found = p.memory[torch.where(mask, at, 0)]
    return value(torch.where(mask, found, torch.as_tensor(other or 0, dtype=found.dtype)))


def _store(p: Pointer, x: torch.Tensor, mask: Any = None, **_: Any) -> None:
    mask, x = torch.as_tensor(True if mask is None else mask), torch.as_tensor(x, dtype=p.memory.dtype)
    at, mask, x = torch.broadcast_tensors(p.at, mask, x)
    at = at[mask]
    assert bool(((at >= 0) & (at < len(p.memory))).all()), "stores beyond memory"
    assert len(at.unique()) == len(at), "two threads store to one place"
    p.memory[at] = x[mask]


def _atomic_add(p: Pointer, x: torch.Tensor, mask: Any, **_: Any) -> Value:
    before = torch.zeros_like(x)
    for i in torch.as_tensor(mask).nonzero()[:, 0].tolist():
        before[i] = p.memory[p.at[i]]
        p.memory[p.at[i]] += x[i]
    return value(before)


def _split(x: torch.Tensor) -> tuple[Value, Value]:
    return value(x[..., 0]), value(x[..., 1])


def _language() -> ModuleType:
    gl = ModuleType("triton.experimental.gluon.language")
    for name in ("float32", "int16", "int32", "int64", "uint8", "bfloat16"):
        setattr(gl, name, getattr(torch, name))
    for name in _LAYOUTS:
        layout = lambda *given, **named: SimpleNamespace(**named) if named else None  # noqa: E731
        layout.get_default_for = layout
        setattr(gl, name, layout)
    gl.constexpr, gl.tensor, gl.static_range = (lambda x: x), Value, range
    gl.program_id, gl.num_programs = (lambda axis: value(_here.program)), (lambda axis: value(_here.programs))
    gl.num_warps, gl.load, gl.store, gl.split, gl.atomic_add = (lambda: 4), _load, _store, _split, _atomic_add
    gl.arange = lambda first, end, layout=None: value(torch.arange(first, end))
    gl.zeros = lambda shape, dtype, layout=None: value(torch.zeros([int(n) for n in shape], dtype=dtype))
    gl.full = lambda shape, x, dtype, layout=None: value(torch.full([int(n) for n in shape], x, dtype=dtype))
    gl.where = lambda mask, x, y: value(torch.where(torch.as_tensor(mask), torch.as_tensor(x), torch.as_tensor(y)))
    gl.sum = lambda x, axis: value(torch.sum(x, axis))
    gl.associative_scan = lambda x, axis, combine: value(torch.cumsum(x, axis, dtype=x.dtype))  # all are sums
    gl.max = lambda x, axis: value(torch.amax(x, axis))
    gl.maximum = lambda x, y, propagate_nan=None: value(torch.maximum(torch.as_tensor(x), torch.as_tensor(y)))
    gl.minimum = lambda x, y: value(torch.minimum(torch.as_tensor(x), torch.as_tensor(y)))
    gl.cdiv = lambda x, y: value(-(-torch.as_tensor(x) // y))
    gl.convert_layout, gl.expand_dims = (lambda x, layout, **_: x), (lambda x, axis: value(x.unsqueeze(axis)))
    gl.split, gl.multiple_of = (lambda x: (value(x[..., 0]), value(x[..., 1]))), (lambda x, n: x)
    gl.reshape, gl.permute = (lambda x, shape: value(x.reshape(tuple(shape)))), (lambda x, by: value(x.permute(by)))
    gl.join = lambda x, y: value(torch.stack((x, y), -1))
    gl.broadcast = lambda x, y: tuple(map(value, torch.broadcast_tensors(x, y)))
    gl.allocate_shared_memory, gl.inline_asm_elementwise = _allocate, _assembly
    return gl


def _assembly(source: str, constraints: str, operands: list[Value], dtype: Any, is_pure: bool, pack: int) -> Value:
    """Run instructions on pairs of bf16 numbers."""
    assert pack == 2 and dtype == torch.bfloat16 and constraints.split(",") == ["=r"] + ["r"] * len(operands)
    held = {f"${i}": torch.Tensor.to(x, torch.float64) for i, x in enumerate(operands, 1)}
    for instruction in re.findall(r"(?:mov|add|mul|fma)\.[^;]*", source):
        name, target, *rest = instruction.replace(",", "").split()
        read = [held[each] if each in held else _constant(each) for each in rest]
        result = _INSTRUCTIONS[name.split(".")[0]](*read)
        held[target] = torch.Tensor.to(torch.Tensor.to(result, torch.bfloat16), torch.float64)
    return value(torch.Tensor.to(held["$0"], torch.bfloat16))


_INSTRUCTIONS: dict[str, Callable] = {
    "mov": lambda x: x, "add": torch.add, "mul": torch.mul, "fma": lambda x, y, z: x * y + z,
}  # fmt: skip


def _constant(text: str) -> torch.Tensor:
    low, high = int(text, 0) & 0xFFFF, int(text, 0) >> 16
    assert low == high
    return torch.tensor([low - (low >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16).double()


def _allocate(dtype: torch.dtype, shape: list, layout: Any) -> Shared:
    if dtype == torch.int64 and shape[-1] == 1:  # barriers
        shape = [*shape[:-1], 5]
    data = torch.full([int(n) for n in shape], 0, dtype=dtype)
    return Shared(data.view(torch.uint8).fill_(0xFF).view(dtype))


def _words(policy: Any) -> Callable[[Value], tuple[Value, ...]]:
    def widened(words: Value) -> tuple[Value, ...]:
        pairs = torch.Tensor.numpy(words.as_subclass(torch.Tensor).contiguous()).view("uint32").reshape(-1, 2)
        products = test_widening.run(policy, pairs[:, 0].copy(), pairs[:, 1].copy())
        return tuple(value(each.reshape(words.shape).to(torch.bfloat16)) for each in products)

    return widened


class Policy:
    """A `Widening` whose words are widened here."""

    def __init__(self, policy: Any) -> None:
        self._policy, self.words = policy, _words(policy)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def _apart(x: Value) -> tuple[Value, ...]:
    numbers = x.as_subclass(torch.Tensor).contiguous().view(torch.bfloat16).view(*x.shape, 4)
    return tuple(value(numbers[..., i] * 2.0**64) for i in range(4))


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Any) -> torch.Tensor:
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return ungated(gate, activation) * (up + activation.shift)


def ungated(x: torch.Tensor, activation: Any) -> torch.Tensor:
    kinds = {"silu": lambda x: x * torch.sigmoid(activation.alpha * x), "relu2": lambda x: x.clamp(min=0).square()}
    return kinds[activation.kind](x)


@contextmanager
def _swapped(*modules: str) -> Iterator[None]:
    """While `modules` of `iris_ops` are imported: this language in place of Gluon."""
    gluon, parent = ModuleType("triton.experimental.gluon"), ModuleType("triton.experimental")
    gluon.jit = lambda fn=None, **options: fn if fn is not None else lambda fn: fn
    gluon.language, parent.gluon = _language(), gluon
    names = {"triton.experimental": parent, gluon.__name__: gluon, gluon.language.__name__: gluon.language}
    private = dict(aggregate=lambda cls: cls, mma_v2=_mma, mbarrier=Barriers, async_load=_async_load)
    private |= dict(program_barrier=lambda: None, warp_specialize=_partitions, fence_async_shared=lambda: None)
    private |= dict(copy_async=_copy_async, arrive_copied=Barriers.arrive_copied)
    with (
        mock.patch.dict(sys.modules, names),
        mock.patch.multiple(triton_private, **private),
        mock.patch.object(triton, "constexpr_function", lambda fn: fn),
    ):
        for name in modules:
            sys.modules.pop(f"iris_ops.{name}", None)
        yield


def _multiplied(y: Any, x: Shared, acc: torch.Tensor, use_acc: bool = True, is_async: bool = False) -> Value:
    left = y.data if isinstance(y, Shared) else y
    product = torch.Tensor.to(left, torch.float32) @ torch.Tensor.to(x.data, torch.float32)
    return value(product + acc if use_acc else product)


def _reinterpreted(memory: Shared, dtype: Any, shape: list[int], layout: Any) -> Shared:
    """Return blocks of a block: rows after rows, or, of half as many columns, columns after columns, as TMA does."""
    if shape[-1] == memory.shape[-1]:
        return Shared(memory.data.reshape(shape))
    rows, columns = memory.shape
    return Shared(memory.data.reshape(rows, columns // shape[-1], shape[-1]).transpose(0, 1))


def products() -> tuple[ModuleType, ModuleType]:
    """Return `scaled_mma` and `widened_mma` of `iris_ops.kernels.hopper`."""
    scaled_mma, widened_mma = _of_warp_groups("kernels.hopper.scaled_mma", "kernels.hopper.widened_mma")
    scaled_mma._times = lambda sums, factors: value(sums * factors[:, None])
    return scaled_mma, widened_mma


def widened() -> ModuleType:
    """Return `widened_matmul` of `iris_ops.moe`, whose kernel is a function for `run`."""
    names = "kernels.hopper.loading", "kernels.hopper.widened_mma", "moe.widened_matmul"
    module = _of_warp_groups(*names)[-1]
    module.arch = SimpleNamespace(follow=lambda: None, lead=lambda: None)
    module.joined, module.activated = gated, ungated
    return module


def _of_warp_groups(*names: str) -> list[ModuleType]:
    """Return modules of `iris_ops` with products of warp groups."""
    waiting = dict(warpgroup_mma_init=lambda x: x, warpgroup_mma_wait=lambda left, deps: deps[0])
    private = mock.patch.multiple(
        triton_private, warpgroup_mma=_multiplied, reinterpret=_reinterpreted, **waiting
    )  # fmt: skip
    importlib.import_module("iris_ops.layouts")  # whose modules are not swapped
    with mock.patch.dict(sys.modules), _swapped(*names), private:
        modules = [importlib.import_module(f"iris_ops.{name}") for name in names]
    for module in modules:
        module.known = lambda x: x
    return modules


def streams() -> tuple[ModuleType, ModuleType]:
    """Return `touched_stream` and `touched_down` of `iris_ops.moe`, whose kernels are functions for `run`."""
    names = "quantised.line_products", "moe.touched", "moe.touched_stream", "moe.touched_down"
    with mock.patch.dict(sys.modules), _swapped(*names):
        lines, touched, stream, down = (importlib.import_module(f"iris_ops.{name}") for name in names)
    lines._apart, lines._scaled = _apart, lambda x: value(x * 2.0**64)
    touched.known = lambda x: x
    stream.joined, stream.activated = gated, ungated
    stream.report_experts = lambda ctx, given, wrong, experts, waiter: _reported.append(bool(wrong.any()))
    for module in (stream, down):
        module.DeviceContext = SimpleNamespace(initialize=lambda *given: None)
        module.arch = SimpleNamespace(follow=lambda: None, lead=lambda: None, drain_stores=lambda: None)
    down.load_bases, down.settled, down.advance = (lambda *_: ()), (lambda x: x), (lambda *_: None)
    down.without_sentinel = lambda x, dtype: value(torch.Tensor.to(x, dtype).view(torch.int16))
    down.combined, down.put, down.take = _combined, _put, _take
    return stream, down


def _combined(
    total: Value, products: Pointer, combine: Any, t: Any, c: Any, tokens: Any, N: Any, ld: Any, k: int
) -> Any:
    inside = (t < tokens)[:, None] & (c < N)[None, :]
    for j in range(k):
        factor = _load(combine.weights + t * combine.stride_wt + j, mask=t < tokens)
        total = total + factor[:, None] * _load(products + ((t * k + j) * ld)[:, None] + c[None, :], mask=inside)
    if combine.shared is not None:
        more = combine.shared + (t * combine.stride_st)[:, None] + (c * combine.stride_sn)[None, :]
        total = total + _load(more, mask=inside)
    return value(total)


def _put(ctx: Any, place: Pointer, values: Value, mask: Value, bases: Any, to_rank: Any) -> None:
    _store(place, values, mask)
    _turns.change()


def _take(ctx: Any, place: Pointer, step: Any, mask: Value, *_: Any, **__: Any) -> tuple[Value, bool]:
    """Take a block of Lamport values of the only rank, once all of them are there."""
    _turns.wait(lambda: bool((_load(place, mask)[mask] != -1).all()))
    values = _load(place, mask)
    _store(place, torch.full_like(values, -1), mask)
    return value(values.as_subclass(torch.Tensor).view(torch.bfloat16).float()), True


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "uint8": torch.uint8}


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer.of(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*map(_argument, x))
    if type(x) is int:
        return value(x)
    if getattr(x, "WIDENING", None) is not None:
        return replace(x, WIDENING=Policy(x.WIDENING), SCALES=_DTYPES[x.SCALES.name])
    return Policy(x) if hasattr(x, "PRODUCTS") else x


def run(kernel: Callable, grid: int, args: dict) -> bool:
    """Run all programs of a launch; return whether the first one reported experts that are out of range."""
    global _turns
    _turns = turns = _Turns()
    _reported.clear()
    with turns.changed:
        for number in range(grid):
            given = {name: _argument(each) for name, each in args.items()}
            turns.start(partial(kernel, **given), number, grid)
    for thread in turns.threads:  # partitions are added meanwhile
        thread.join()
    if turns.failed is not None:
        raise turns.failed
    return any(_reported[:1])
