"""Shorten operators, on which Triton's interpreter spends some tens of microseconds of checks and conversions each.

The operands' types alone decide which type a result has. So `quick` calls Triton's operator for the first operands of
given types, and keeps the result's type; later it only calls numpy on the arrays. It does so for integers of 32 and 64
bits, float32, truth values, and addresses plus integers. Triton's own operators handle everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import getitem
from typing import Any

import numpy as np

from ....triton_private import Semantic, TensorHandle, core, numpy_type
from .scope import Scope

_INTEGERS = {"int32": np.int32, "int64": np.int64}
_NUMBERS = _INTEGERS | {"fp32": np.float32}
_TRUTH = {"int1": np.bool_}


def _quotient(a, b):
    """Divide integers and round towards zero; numpy rounds down."""
    return (a - np.fmod(a, b)) // b


def _swapped(ufunc):
    return lambda a, b: ufunc(b, a)


# By operator: numpy's function, and the types that it handles.
_OPERATORS: dict[str, tuple[Callable, Any]] = {
    "add": (np.add, _NUMBERS),
    "sub": (np.subtract, _NUMBERS),
    "mul": (np.multiply, _NUMBERS),
    "floordiv": (_quotient, _INTEGERS),
    "mod": (np.fmod, _INTEGERS),
    "lt": (np.less, _NUMBERS),
    "le": (np.less_equal, _NUMBERS),
    "gt": (np.greater, _NUMBERS),
    "ge": (np.greater_equal, _NUMBERS),
    "eq": (np.equal, _NUMBERS),
    "ne": (np.not_equal, _NUMBERS),
    "and": (np.bitwise_and, _INTEGERS | _TRUTH),
    "or": (np.bitwise_or, _INTEGERS | _TRUTH),
    "xor": (np.bitwise_xor, _INTEGERS | _TRUTH),
}
_REVERSED = ("add", "sub", "mul", "and", "or", "xor")
_WIDER = {("int32", "int64"), ("int32", "fp32"), ("int1", "int32"), ("int1", "int64"), ("bf16", "fp32")}


def prepare(scope: Scope) -> None:
    """Replace operators, once `interpreter._patch_lang` has put Triton's own in place."""
    tensor = core.tensor

    def replace(owner: Any, name: str, wrap: Callable) -> None:
        scope.set(owner, name, wrap(getattr(owner, name)))

    for name, (ufunc, kinds) in _OPERATORS.items():
        replace(tensor, f"__{name}__", partial(_operator, ufunc=ufunc, kinds=kinds, of_addresses=name == "add"))
    for name in _REVERSED:
        ufunc, kinds = _OPERATORS[name]
        replace(tensor, f"__r{name}__", partial(_operator, ufunc=_swapped(ufunc), kinds=kinds))
    replace(tensor, "__getitem__", _with_axes)
    replace(tensor, "to", _cast)
    replace(Semantic, "broadcast_impl_value", _of_one_shape)
    replace(Semantic, "binary_op_type_checking_impl", _of_one_type)
    replace(Semantic, "to_tensor", _a_tensor)
    replace(core, "_unwrap_if_constexpr", _plain)


def _operator(whole: Callable, ufunc: Callable, kinds: dict, of_addresses: bool = False) -> Callable:
    known: dict = {}  # by the operands' types, what `_remembered` returned

    def quick(self, other):
        kind = type(other)
        if kind is core.constexpr:
            other = other.value
            kind = type(other)
        if kind is core.tensor:
            key, data = (self.type.name, other.type.name), other.handle.data
        elif kind is int or kind is float:
            key, data = (self.type.name, kind), other
        else:
            return whole(self, other)
        if key not in known:
            known[key] = _remembered(self, other, kind, whole(self, other))
        rule = known[key]
        if rule is None or kind is int and not -(2**31) <= other < 2**31:
            return whole(self, other)
        type_, scalar, width = rule
        if width:
            moved = _moved(self.handle.data, data, width)
            return core.tensor(TensorHandle(moved, self.handle.dtype), type_)
        return core.tensor(TensorHandle(ufunc(self.handle.data, data), scalar), type_)

    def _remembered(self, other, kind, result):
        """Return (type, scalar type, bytes of an element if it is an address); None for Triton's operator."""
        mine = self.type.scalar
        theirs = other.type.scalar.name if kind is core.tensor else None
        if mine.is_ptr():
            whole_number = theirs in _INTEGERS or kind is int
            if not (of_addresses and whole_number):
                return None
            return result.type, None, max(1, mine.element_ty.primitive_bitwidth // 8)
        if mine.name not in kinds or kind is float and mine.name != "fp32":
            return None
        if theirs is not None and theirs != mine.name and not (mine.name in _INTEGERS and theirs in _INTEGERS):
            return None
        if kind is int and mine.name == "int1":
            return None
        return result.type, result.type.scalar, 0

    return quick


def _moved(addresses, steps, width):
    if type(steps) is int:
        return addresses + np.uint64(steps * width % 2**64)
    steps = steps.astype(np.uint64)
    steps *= np.uint64(width)
    return addresses + steps


def _of_one_shape(whole: Callable) -> Callable:
    """Broadcast two values to the one shape that has room for both."""
    known: dict = {}  # by both types, the results' types and shape

    def seen(value, type_, shape):
        if value.type.name == type_.name:
            return value
        return core.tensor(TensorHandle(_spread(value.handle.data, shape), value.handle.dtype), type_)

    def quick(self, lhs, rhs):
        key = lhs.type.name, rhs.type.name
        if key not in known:
            wide_lhs, wide_rhs = whole(self, lhs, rhs)
            known[key] = wide_lhs.type, wide_rhs.type, tuple(size.value for size in wide_lhs.shape)
        lhs_type, rhs_type, shape = known[key]
        return seen(lhs, lhs_type, shape), seen(rhs, rhs_type, shape)

    return quick


def _spread(data, shape):
    """Return a view of that shape. For a single element numpy's own function takes six times as long."""
    if data.size != 1:
        return np.broadcast_to(data, shape)
    view = np.ndarray(shape, data.dtype, data, 0, (0,) * len(shape))
    view.flags.writeable = False
    return view


def _of_one_type(whole: Callable) -> Callable:
    """Prepare two values for an operation: if `_OPERATORS` covers their one type, only shapes can differ."""

    def quick(self, lhs, rhs, *options, **named):
        if type(lhs) is core.tensor and type(rhs) is core.tensor:
            kind = lhs.dtype.name
            if kind == rhs.dtype.name and (kind in _NUMBERS or kind in _TRUTH):
                return self.broadcast_impl_value(lhs, rhs)
        return whole(self, lhs, rhs, *options, **named)

    return quick


def _a_tensor(whole: Callable) -> Callable:
    def quick(self, x, check_type=True):
        return x if type(x) is core.tensor else whole(self, x, check_type)

    return quick


def _plain(whole: Callable) -> Callable:
    plain = {core.tensor, core.dtype, core.block_type, core.pointer_type, int, float, str, bool, type(None)}

    def quick(x):
        return x if type(x) in plain else whole(x)

    return quick


def _with_axes(whole: Callable) -> Callable:
    """Handle indices such as `x[:, None]`, of whole axes and new ones."""
    known: dict = {}

    def quick(self, slices):
        if type(slices) is not tuple or not all(each is None or each == slice(None) for each in slices):
            return whole(self, slices)
        key = self.type.name, tuple(each is None for each in slices)
        if key not in known:
            known[key] = whole(self, slices).type
        data = getitem(self.handle.data, slices)
        return core.tensor(TensorHandle(data, self.handle.dtype), known[key])

    return quick


def _as_kind(data, kind):
    return data.astype(kind, copy=False)


def _cast(whole: Callable) -> Callable:
    known: dict = {}

    def quick(self, dtype, *options, **named):
        if type(dtype) is core.constexpr:
            dtype = dtype.value
        if options or named or type(dtype) is not core.dtype:
            return whole(self, dtype, *options, **named)
        if dtype.name == self.dtype.name:
            return self
        key = self.type.name, dtype.name
        if (self.dtype.name, dtype.name) not in _WIDER:
            return whole(self, dtype)
        if key not in known:
            known[key] = whole(self, dtype).type, numpy_type(dtype)
        type_, kind = known[key]
        return core.tensor(TensorHandle(_as_kind(self.handle.data, kind), dtype), type_)

    return quick
