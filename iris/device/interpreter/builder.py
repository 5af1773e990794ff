"""Correct the operations that Triton's `InterpreterBuilder` does wrong.

Triton keeps a bfloat16 as an integer of 16 bits and an fp8 number as one of 8, and computes on those integers.
`Builder` keeps bfloat16 as float32 numbers (`floats.py`); its loads, stores, casts to bits and atomics convert them. An
fp8 number stays a byte: a kernel can move it, cast it and multiply it by `tl.dot`. All else raises, for no GPU computes
in fp8.
"""

from functools import partialmethod

import numpy as np

from ... import fixed_order
from ...errors import DtypeError
from ...triton_private import (
    EXCHANGE,
    FLOAT_ADD,
    PADDED_WITH_NAN,
    TO_NEAREST,
    InterpreterBuilder,
    TensorHandle,
    core,
    memory,
    numpy_type,
)
from . import floats

_SMALL = 1024  # elements of a block that is loaded and stored in one piece
_ALL = np.ones(1, bool)


class Builder(InterpreterBuilder):
    """Triton's builder, with the types that numpy lacks."""

    # --- constants ----------------------------------------------------------------------------------------------------

    def get_bf16(self, value):
        return TensorHandle(floats.rounded(np.array([value], np.float32)), core.bfloat16)

    def _get_fp8(self, value, dtype):
        return TensorHandle(floats.to_fp8(np.array([value], np.float32), dtype.name), dtype)

    get_fp8e4nv = partialmethod(_get_fp8, dtype=core.float8e4nv)
    get_fp8e5 = partialmethod(_get_fp8, dtype=core.float8e5)
    get_fp8e4b8 = partialmethod(_get_fp8, dtype=core.float8e4b8)
    get_fp8e5b16 = partialmethod(_get_fp8, dtype=core.float8e5b16)

    # --- casts --------------------------------------------------------------------------------------------------------

    def cast_impl(self, src, dst_type):
        to = dst_type.scalar
        if to.name == "bf16":
            return TensorHandle(floats.rounded(src.data.astype(np.float32)), to)
        return TensorHandle(src.data.astype(numpy_type(to)), to)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        """Cast between floating-point types, also from and to fp8, and with a given rounding."""
        of, to = src.dtype.scalar, dst_type.scalar
        nearest = rounding_mode is None or rounding_mode == TO_NEAREST
        for each in (of, to):
            if each.is_fp8() and not (floats.converts(each.name) and nearest):
                raise DtypeError(_refusal(f"a cast from {of} to {to}, rounded by {rounding_mode}"))
        if not (of.is_fp8() or to.is_fp8()) and to.name != "bf16":
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        x = floats.from_fp8(src.data, of.name) if of.is_fp8() else src.data.astype(np.float32)
        if to.is_fp8():
            return TensorHandle(floats.to_fp8(x, to.name), to)
        if to.name == "bf16":
            return TensorHandle(floats.rounded(x) if nearest else floats.truncated(x), to)
        return TensorHandle(x.astype(numpy_type(to)), to)

    def create_bitcast(self, src, dst_type):
        data, to = _bits(src), dst_type.scalar
        if to.name == "bf16":
            return TensorHandle(floats.from_bits(data), to)
        return TensorHandle(data.view(numpy_type(to)), to)

    create_int_to_ptr = create_ptr_to_int = create_bitcast

    # --- arithmetic ---------------------------------------------------------------------------------------------------

    def binary_op(self, lhs, rhs, op):
        return _result(op(_numbers(lhs, op), rhs.data), lhs.dtype.scalar)

    def unary_op(self, arg, op):
        return _result(op(_numbers(arg, op)), arg.dtype.scalar)

    def ternary_op(self, lhs, rhs, other, op):
        last = other.data if op is np.where else _numbers(other, op)  # bits can be chosen from
        return _result(op(lhs.data, rhs.data, last), other.dtype.scalar)

    def create_fma(self, x, y, z):
        dtype = z.dtype.scalar
        if dtype.name != "bf16":
            return TensorHandle(_numbers(x, "fma") * y.data + z.data, dtype)
        exact = x.data.astype(np.float64) * y.data  # the product of two bfloat16, without error
        return TensorHandle(floats.rounded(floats.to_odd(exact + z.data)), dtype)

    def create_fabs(self, arg):
        return self.unary_op(arg, np.abs)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        x, y = (floats.from_fp8(_convertible(each), each.dtype.scalar.name) if each.dtype.scalar.is_fp8() else each.data
                for each in (a, b))  # fmt: skip
        if d.data.dtype == np.float32 and x.ndim == 2:  # a row's bits must not depend on the tile's height
            return TensorHandle(fixed_order.product(x, y) + d.data, d.dtype.scalar)
        product = np.matmul(x, y, dtype=d.data.dtype)
        product += d.data
        return TensorHandle(product, d.dtype.scalar)

    def create_dot_scaled(self, *operands):
        raise DtypeError(_refusal("tl.dot_scaled"))

    # --- memory -------------------------------------------------------------------------------------------------------

    def create_masked_load(self, ptrs, mask, other, *hints, **named_hints):
        element = ptrs.get_element_ty()
        if element.name == "int16":
            return TensorHandle(_load_int16(ptrs, mask, other), element)
        data = _loaded(ptrs.data, _bool_mask(mask), None if other is None else _bits(other), _memory_type(element))
        return TensorHandle(floats.from_bits(data) if element.name == "bf16" else data, element)

    def create_masked_store(self, ptrs, value, mask, *hints):
        addresses, values, touched = ptrs.data, _bits(value), _bool_mask(mask)
        if _are_few(touched):
            addresses, values, touched = addresses[touched], np.broadcast_to(values, touched.shape)[touched], _ALL
        if touched.shape != addresses.shape:
            touched = np.broadcast_to(touched, addresses.shape)
        memory.store(addresses, values, touched)

    def create_descriptor_load(self, desc, indices, *hints):
        element = desc.base.dtype.element_ty
        inside, where = _window(desc, indices, _memory_type(element))
        if element.name == "bf16":
            inside = floats.from_bits(np.array(inside))
        if inside.shape == tuple(desc.block_shape):
            return TensorHandle(np.array(inside), element)
        block = np.zeros(desc.block_shape, inside.dtype)
        if desc.padding == PADDED_WITH_NAN:
            block.fill(np.nan)
        block[where] = inside
        return TensorHandle(block, element)

    def create_descriptor_store(self, desc, value, indices):
        inside, where = _window(desc, indices, _memory_type(desc.base.dtype.element_ty))
        inside[...] = _bits(value)[where]

    # --- atomics ------------------------------------------------------------------------------------------------------

    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        if cmp.dtype.scalar.name != "bf16":
            return super().create_atomic_cas(ptr, cmp, val, sem, scope)
        as_bits = [TensorHandle(_bits(each), core.uint16) for each in (cmp, val)]
        was = super().create_atomic_cas(ptr, *as_bits, sem, scope)
        return TensorHandle(floats.from_bits(was.data), cmp.dtype.scalar)

    def create_atomic_rmw(self, rmwOp, ptr, val, mask, sem, scope):
        dtype = val.dtype.scalar
        if rmwOp == FLOAT_ADD and dtype.primitive_bitwidth == 16:
            return self._add_narrow(ptr, val, mask, sem)
        if rmwOp == EXCHANGE and dtype.is_floating():  # as integers
            word = core.get_int_dtype(dtype.primitive_bitwidth, False)
            bits = TensorHandle(val.data.view(numpy_type(word)), word)
            was = super().create_atomic_rmw(rmwOp, ptr, bits, mask, sem, scope)
            return TensorHandle(was.data.view(numpy_type(dtype)), dtype)
        return super().create_atomic_rmw(rmwOp, ptr, val, mask, sem, scope)

    def _add_narrow(self, ptr, val, mask, sem):
        """Add numbers of 16 bits by compare and swap, and repeat where another rank or element came between."""
        dtype, shape = val.dtype.scalar, ptr.data.shape
        bfloat = dtype.name == "bf16"
        values = np.broadcast_to(val.data, shape).ravel()
        addresses, before = ptr.data.ravel(), np.zeros(ptr.data.size, np.uint16)
        order = self.ir_sem_to_interpreter_sem[sem]
        pending = np.flatnonzero(np.broadcast_to(mask.data, shape))
        while pending.size:
            at, every = addresses[pending], np.ones(pending.size, bool)
            seen = memory.load(at, every, np.zeros(pending.size, np.uint16), np.dtype(np.uint16))
            if bfloat:
                new = floats.to_bits(floats.rounded(floats.from_bits(seen) + values[pending]))
            else:
                new = (seen.view(np.float16) + values[pending]).view(np.uint16)
            was = memory.atomic_cas(at, seen, new, order)
            before[pending] = was
            pending = pending[was != seen]
        before = before.reshape(shape)
        return TensorHandle(floats.from_bits(before) if bfloat else before.view(np.float16), dtype)


def _refusal(what: str) -> str:
    return f"{what}: Triton's interpreter cannot compute this; cast to tl.float32 first"


def _numbers(arg, op):
    """Return an operand's data if they are numbers, and raise if they are the bits of fp8."""
    dtype = arg.dtype.scalar
    if dtype.name.startswith("fp8"):
        raise DtypeError(_refusal(f"{getattr(op, '__name__', op)} of {dtype}"))
    return arg.data


def _convertible(arg):
    name = arg.dtype.scalar.name
    if not floats.converts(name):
        raise DtypeError(_refusal(f"tl.dot of {name}"))
    return arg.data


def _result(data, dtype):
    """Convert an operation's result to the width and precision of `dtype`; comparisons give truth values."""
    if data.dtype == np.bool_:
        return TensorHandle(data, core.int1)
    if dtype.name == "bf16":
        return TensorHandle(floats.rounded(data), dtype)
    target = numpy_type(dtype)
    return TensorHandle(data.astype(target) if data.dtype.itemsize > target.itemsize else data, dtype)


def _bits(value):
    """Return a value's data with the bits that they have in memory."""
    return floats.to_bits(value.data) if value.dtype.scalar.name == "bf16" else value.data


def _memory_type(element):
    return np.dtype(np.uint16) if element.name == "bf16" else numpy_type(element)


def _window(desc, indices, dtype):
    """Return a view of the memory that a descriptor's block at `indices` covers, and which part of the block it is."""
    starts = [int(index.data.item()) for index in indices]
    assert starts[-1] * dtype.itemsize % 16 == 0, "block offset start must be 16-byte aligned"
    address, sizes, strides, where = int(desc.base.data.item()), [], [], []
    for start, size, stride, block in zip(starts, desc.shape, desc.strides, desc.block_shape, strict=True):
        first, end = max(start, 0), min(start + block, int(size.data.item()))
        step = int(stride.data.item()) * dtype.itemsize
        address += first * step
        sizes.append(max(0, end - first))
        strides.append(step)
        where.append(slice(first - start, max(first, end) - start))
    return np.asarray(_Memory(address, sizes, strides, dtype)), tuple(where)


def _bool_mask(mask):
    """Return a bool mask of the elements that a load or a store touches."""
    touched = mask.data if isinstance(mask, TensorHandle) else mask
    return touched if touched.dtype == np.bool_ else touched.astype(bool)


def _are_few(touched) -> bool:
    """Return whether it is faster to select the elements first: Triton's C code handles one after the other."""
    return touched.size > _SMALL and 4 * np.count_nonzero(touched) < touched.size


def _loaded(addresses, touched, other, kind):
    if other is None:
        result = np.zeros(addresses.shape, kind)
    elif other.shape == addresses.shape and other.dtype == kind:
        result = other
    else:
        result = np.broadcast_to(other, addresses.shape).astype(kind)
    if not _are_few(touched):
        return memory.load(addresses, touched, result, kind)
    result = result.copy() if result is other else result
    at = addresses[touched]
    result[touched] = memory.load(at, np.ones(at.shape, bool), np.zeros(at.shape, kind), kind)
    return result


def _load_int16(ptrs, mask, other):
    """Load integers of 16 bits with one load each: Lamport kernels need it, as a sentinel marks what has not arrived.

    Triton's interpreter copies each element by memcpy. A C library may load two bytes, and then the last of them again:
    of a value that a peer stores in between, half is new and half is old.
    """
    touched = np.broadcast_to(_bool_mask(mask), ptrs.data.shape)
    result = np.zeros(ptrs.data.shape, np.int16)
    if other is not None:
        result[...] = other.data
    at = ptrs.data[touched]
    if at.size:
        first, last = int(at.min()), int(at.max())
        view = np.asarray(_Memory(first, [(last - first) // 2 + 1], [2], result.dtype))
        result[touched] = view[(at.astype(np.int64) - first) // 2]
    return result


class _Memory:
    """The memory at an address, as numpy reads it."""

    def __init__(self, address, shape, strides, dtype) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": dtype.str,
            "version": 3,
        }
