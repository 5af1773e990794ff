"""Check, in the interpreter, that accesses to peers stay in the heaps: others would corrupt this process.

A pointer becomes a peer's by the difference of two heap bases. With the wrong rank for the caller's own, or with a
pointer outside the heap, the sum is the address of something else. A GPU may fault there; a process of the host goes on
and ends later, elsewhere, by SIGSEGV. On GPUs nothing is checked, for kernels know no more of a heap than its base.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError

_heaps: dict[int, tuple[int, int]] = {}  # [base] = bytes, rank; of all open contexts, at this process's addresses


def add(bases: list[int], span: int) -> None:
    """Enter the heaps of a context, each of `span` bytes. A heap that they overlap is gone: its memory was unmapped."""
    for old, (length, _) in list(_heaps.items()):
        if any(old < base + span and base < old + length for base in bases):
            del _heaps[old]
    _heaps.update({base: (span, rank) for rank, base in enumerate(bases)})


def remove(bases: list[int]) -> None:
    for base in bases:
        _heaps.pop(base, None)


def check(call: str, pointer: Any, mask: Any, own: Any, peer: Any, either: bool = False) -> None:
    """Raise `ArgumentError` if an element of `pointer` that `mask` lets through lies outside the heap at `own`.

    `own`, `peer`: the entries of both ranks in the caller's `heap_bases`, any address in their heaps. `either`: the
    heap of `peer` is allowed too. Pointers and bases that belong to no context are not checked.
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
    bases = [int(base.handle.data.item()) for base in (own, peer)]
    heaps = [_heap_of(base) for base in bases]
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


def _heap_of(address: int) -> tuple[int, int, int] | None:
    """Return the base of the heap in which an address lies, its bytes and its rank; None outside all heaps."""
    for base, (span, rank) in _heaps.items():
        if base <= address < base + span:
            return base, span, rank
    return None


def _within(heap: tuple[int, int, int] | None, first: int, last: int) -> bool:
    return heap is not None and heap[0] <= first and last <= heap[0] + heap[1]
