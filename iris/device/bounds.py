"""Check that accesses to peers stay in the heaps: always in the interpreter, with IRIS_DEBUG=1 on GPUs.

A pointer becomes a peer's by the difference of two heap bases. With the wrong rank for the caller's own, or with a
pointer outside the heap, the sum is the address of something else. On the host, a store there corrupts the memory of
the process, which ends later, elsewhere, by SIGSEGV. On a GPU it overwrites other tensors or faults.

On the host a table has the heaps of all open contexts. On a GPU `heap_bases` points into the context tensor, whose
header, before the bases, has the bytes of a heap. Elements outside are masked out there, and the first program that
finds one writes a failure record, from which the next call on the host raises. The switch is read when iris is
imported: it is part of what kernels are compiled from.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import triton
import triton.language as tl

from .. import agreement
from ..errors import ArgumentError
from . import waits
from .arch import INTERPRET
from .function import device_function

HEADER = tl.constexpr(10)  # words of a context tensor before its heap bases (`context.py`)
MARK = tl.constexpr(0x4952_4953_4845_4150)  # the last of them; other addresses that serve as bases have 0 there
CHECKED = tl.constexpr(not INTERPRET and agreement.enabled())

METHOD_CALLED = tl.constexpr(
    "heap_bases is the method of a device context, not its result; expected ctx.heap_bases(), with parentheses "
    "(docs/guides/coming-from-iris.md)"
)


@triton.constexpr_function
def is_pointer(value):
    """Return whether `value` is a pointer: code written for ROCm/iris may pass the method `heap_bases` itself."""
    return not callable(value) and not hasattr(value, "__func__")  # interpreted, and compiled


_heaps: dict[int, tuple[int, int]] = {}  # [base] = bytes, rank; of all open contexts, at this process's addresses


def add(bases: list[int], span: int) -> None:
    """Enter the heaps of a context, each of `span` bytes. Remove heaps at the same addresses: they were unmapped."""
    for old, (length, _) in list(_heaps.items()):
        if any(old < base + span and base < old + length for base in bases):
            del _heaps[old]
    _heaps.update({base: (span, rank) for rank, base in enumerate(bases)})


def remove(bases: list[int]) -> None:
    for base in bases:
        _heaps.pop(base, None)


def check_on_host(
    call: str, pointer: Any, mask: Any, own_rank: Any, peer_rank: Any, heap_bases: Any, either: bool
) -> None:
    """Raise `ArgumentError` if an element of `pointer` that `mask` lets through lies outside the heap of `own_rank`.

    The arguments are the interpreter's. `heap_bases`: of each rank, any address in its heap. `either`: the heap of
    `peer_rank` is allowed too. Pointers and bases that belong to no context are not checked.
    """
    addresses = pointer.handle.data
    if mask is not None:
        let_through = np.asarray(mask.handle.data if hasattr(mask, "handle") else mask, bool)
        addresses, let_through = np.broadcast_arrays(addresses, let_through)
        addresses = addresses[let_through]
    if not addresses.size:
        return
    nbytes = max(1, pointer.dtype.scalar.element_ty.primitive_bitwidth // 8)
    first, last = int(addresses.min()), int(addresses.max()) + nbytes
    heaps = [_heap_of(_base(_number(heap_bases), _number(rank))) for rank in (own_rank, peer_rank)]
    if None in heaps:
        if heaps != [None, None] or _heap_of(first) is not None:
            which = "the caller's own rank" if heaps[0] is None else "the peer's rank"
            raise ArgumentError(f"iris.{call}: {which} has no heap; expected ranks of the context that has heap_bases")
        return
    if not any(_within(heap, first, last) for heap in heaps[: 2 if either else 1]):
        begin, span, rank = heaps[0]  # type: ignore[misc]
        raise ArgumentError(
            f"iris.{call}: pointer {first:#x} to {last:#x} lies outside the heap of rank {rank}, {begin:#x} to "
            f"{begin + span:#x}, which the call names as the caller; expected addresses of the caller's own heap, and "
            f"its own rank"
        )


def _number(value: Any) -> int:
    value = getattr(value, "value", value)  # of a constexpr
    return int(value.handle.data.item()) if hasattr(value, "handle") else int(value)


def _base(heap_bases: int, rank: int) -> int:
    """Return the entry of `rank` at the address `heap_bases`; 0 for no rank of the context tensor that it is in."""
    header = (ctypes.c_int64 * HEADER.value).from_address(heap_bases - 8 * HEADER.value)
    if header[-1] == MARK.value and not 0 <= rank < header[1]:
        return 0
    return ctypes.c_int64.from_address(heap_bases + 8 * rank).value


def _heap_of(address: int) -> tuple[int, int, int] | None:
    """Return the base of the heap in which an address lies, its bytes and its rank; None outside all heaps."""
    for base, (span, rank) in _heaps.items():
        if base <= address < base + span:
            return base, span, rank
    return None


def _within(heap: tuple[int, int, int] | None, first: int, last: int) -> bool:
    return heap is not None and heap[0] <= first and last <= heap[0] + heap[1]


def _host_check(*args: Any) -> None:
    check_on_host(*args)


_host_check.__triton_builtin__ = True  # type: ignore[attr-defined]


_NUMBERS = {name.removeprefix("iris."): number for number, name in enumerate(waits.WAITERS)}


@triton.constexpr_function
def _waiter(call):
    return _NUMBERS[call]


@device_function
def check(call: tl.constexpr, pointer, mask, own_rank, other_rank, heap_bases, either: tl.constexpr = False):
    """Raise, in the interpreter, where an access of `call` leaves the heaps (`check_on_host`)."""
    tl.static_assert(is_pointer(heap_bases), METHOD_CALLED)
    if INTERPRET:
        _host_check(call, pointer, mask, own_rank, other_rank, heap_bases, either)


@device_function
def within(call: tl.constexpr, pointer, mask, own_rank, other_rank, heap_bases, either: tl.constexpr = False):
    """Return the elements of `pointer` that `mask` lets through and that lie in the heap of `own_rank`; report others.

    Call it where `CHECKED` holds only, as `mask = within(...) if CHECKED else mask`. `either`: the heap of `other_rank`
    is allowed too.
    """
    bases = heap_bases.to(tl.pointer_type(tl.int64))
    marked = tl.load(bases - 1) == MARK
    ctx_ptr = bases - HEADER
    ranks = tl.load(ctx_ptr + 1, mask=marked, other=0)
    known = (own_rank >= 0) & (own_rank < ranks) & (other_rank >= 0) & (other_rank < ranks)
    outside = _leaves(pointer, own_rank, bases, known)
    if either:
        outside = outside & _leaves(pointer, other_rank, bases, known)
    outside = outside & marked
    inside = outside == 0
    if mask is not None:
        outside, inside = outside & mask, inside & mask
    address = tl.where(outside, pointer.to(tl.int64), 0)
    if address.type.is_block():
        address = tl.max(address)
    if address != 0:
        named = tl.cast(own_rank, tl.int64) + (tl.cast(other_rank, tl.int64) << 32)
        waits.report_outside(ctx_ptr, _waiter(call), address, named)
    return inside


@device_function
def _leaves(pointer, rank, bases, known):
    """Return which elements of `pointer` lie outside the heap of `rank`; all if that rank is not `known`."""
    nbytes: tl.constexpr = max(1, pointer.dtype.scalar.element_ty.primitive_bitwidth // 8)
    span = tl.load(bases - 2, mask=known, other=-1)
    offset = pointer.to(tl.int64) - tl.load(bases + rank, mask=known, other=0)
    return (offset < 0) | (offset > span - nbytes)


@device_function
def own_base(heap_bases):
    """Return the heap base of the rank that runs the kernel, whichever ranks a call has named."""
    bases = heap_bases.to(tl.pointer_type(tl.int64))
    marked = tl.load(bases - 1) == MARK
    return tl.load(bases + tl.load(bases - HEADER, mask=marked, other=0))
