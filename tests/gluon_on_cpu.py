"""Run Gluon over torch on the CPU: the kernels of touched experts and of widened codes, whose modules `streams()` and
`widened()` give, by `run`, and the products of warp-specialised programs, whose modules `products()` gives.

Triton's interpreter runs no Gluon. Here the source of the modules is executed with a language in which a value is a
tensor and layouts are dropped. It checks what the compiler cannot: which blocks are loaded when, that every wait ends,
all indices, all masks, and the numbers. `tests/iris_ops/test_widening.run` runs the assembly of widening, and
`gluon_values.py` has the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
import importlib
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

from iris import triton_private
import torch
import triton

from tests.gluon_values import (
    Barriers,
    Descriptor,
    Pointer,
    Shared,
    Value,
    async_load,
    atomic_add,
    copy_async,
    here,
    load,
    mma,
    partitions_of,
    store,
    turns,
    value,
)  # fmt: skip
from tests.iris_ops import test_widening

_LAYOUTS = (
    "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SliceLayout", "DistributedLinearLayout",
    "SwizzledSharedLayout", "NVMMASharedLayout",
)  # fmt: skip
_reported: list[bool] = []


def _language() -> ModuleType:
    gl = ModuleType("triton.experimental.gluon.language")
    for name in ("float32", "int16", "int32", "int64", "uint8", "bfloat16"):
        setattr(gl, name, getattr(torch, name))
    for name in _LAYOUTS:
        layout = lambda *given, **named: SimpleNamespace(**named) if named else None  # noqa: E731
        layout.get_default_for = layout
        setattr(gl, name, layout)
    gl.constexpr, gl.tensor, gl.static_range = (lambda x: x), Value, range
    gl.program_id, gl.num_programs = (lambda axis: value(here.program)), (lambda axis: value(here.programs))
    gl.num_warps, gl.load, gl.store, gl.atomic_add = (lambda: 4), load, store, atomic_add
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
    private = dict(aggregate=lambda cls: cls, mma_v2=mma, mbarrier=Barriers, async_load=async_load)
    private |= dict(program_barrier=lambda: None, warp_specialize=partitions_of, fence_async_shared=lambda: None)
    private |= dict(copy_async=copy_async, arrive_copied=Barriers.arrive_copied)
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
        factor = load(combine.weights + t * combine.stride_wt + j, mask=t < tokens)
        total = total + factor[:, None] * load(products + ((t * k + j) * ld)[:, None] + c[None, :], mask=inside)
    if combine.shared is not None:
        more = combine.shared + (t * combine.stride_st)[:, None] + (c * combine.stride_sn)[None, :]
        total = total + load(more, mask=inside)
    return value(total)


def _put(ctx: Any, place: Pointer, values: Value, mask: Value, bases: Any, to_rank: Any) -> None:
    store(place, values, mask)
    turns.change()


def _take(ctx: Any, place: Pointer, step: Any, mask: Value, *_: Any, **__: Any) -> tuple[Value, bool]:
    """Take a block of Lamport values of the only rank, once all of them are there."""
    turns.wait(lambda: bool((load(place, mask)[mask] != -1).all()))
    values = load(place, mask)
    store(place, torch.full_like(values, -1), mask)
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
    turns.begin()
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
