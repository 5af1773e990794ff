"""Atomics on a peer's heap, inside `@triton.jit`: ranks count, swap and signal without a separate copy.

Arguments are as in `rma.py`, which turns the caller's address into the peer's. Only an atomic orders other accesses:
`sem="release"` puts this thread's earlier stores before it, `sem="acquire"` its later loads after it. A program has
many threads, so `sync.signal` puts a barrier of the program before its release.
"""

import triton
import triton.language as tl

from .bounds import CHECKED, check, own_base, within
from .function import device_function
from .rma import hinted, translate


@triton.constexpr_function
def _reach(scope):
    return "sys" if scope is None else scope


@device_function
def atomic_cas(
    pointer,
    cmp,
    val,
    from_rank,
    to_rank,
    heap_bases,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Store `val` at `pointer` on `to_rank` if its value is `cmp`; return the old value.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        cmp: the value to compare with.
        val: the value to store.
        from_rank: the caller.
        to_rank: the rank whose memory changes.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        sem: "acquire", "release", "acq_rel" (default) or "relaxed". This and `scope` are those of every atomic here.
        scope: "sys" (default), "gpu" or "cta"; only "sys" is right between ranks.
        hint: as in `iris.load`.
    """
    check("atomic_cas", pointer, None, from_rank, to_rank, heap_bases)
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    if CHECKED:  # a swap takes no mask: outside the heap it writes `cmp` over `cmp`, where this rank's heap begins
        inside = within("atomic_cas", pointer, None, from_rank, to_rank, heap_bases)
        remote = tl.where(inside, remote, own_base(heap_bases).to(remote.dtype.scalar))
        val = tl.where(inside, val, cmp)
    return tl.atomic_cas(remote, cmp, val, sem=sem, scope=_reach(scope))


@device_function
def atomic_add(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Add `val` at `pointer` on `to_rank`; return the old value. fp16 and bf16 round at each addition.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        val: the operand, scalar or block.
        from_rank: the caller.
        to_rank: the rank whose memory changes.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        sem, scope: as in `iris.atomic_cas`.
        hint: as in `iris.load`.
    """
    check("atomic_add", pointer, mask, from_rank, to_rank, heap_bases)
    mask = within("atomic_add", pointer, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    return tl.atomic_add(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_xchg(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Store `val` at `pointer` on `to_rank`; return the old value.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        val: the operand, scalar or block.
        from_rank: the caller.
        to_rank: the rank whose memory changes.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        sem, scope: as in `iris.atomic_cas`.
        hint: as in `iris.load`.
    """
    check("atomic_xchg", pointer, mask, from_rank, to_rank, heap_bases)
    mask = within("atomic_xchg", pointer, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    return tl.atomic_xchg(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_xor(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Apply exclusive-or with `val` to `pointer` on `to_rank`; return the old value. Integers only.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        val: the operand, scalar or block.
        from_rank: the caller.
        to_rank: the rank whose memory changes.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        sem, scope: as in `iris.atomic_cas`.
        hint: as in `iris.load`.
    """
    check("atomic_xor", pointer, mask, from_rank, to_rank, heap_bases)
    mask = within("atomic_xor", pointer, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    return tl.atomic_xor(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_and(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Apply and with `val` to `pointer` on `to_rank`; return the old value. Integers only.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        val: the operand, scalar or block.
        from_rank: the caller.
        to_rank: the rank whose memory changes.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        sem, scope: as in `iris.atomic_cas`.
        hint: as in `iris.load`.
    """
    check("atomic_and", pointer, mask, from_rank, to_rank, heap_bases)
    mask = within("atomic_and", pointer, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    return tl.atomic_and(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_or(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Apply or with `val` to `pointer` on `to_rank`; return the old value. Integers only.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        val: the operand, scalar or block.
        from_rank: the caller.
        to_rank: the rank whose memory changes.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        sem, scope: as in `iris.atomic_cas`.
        hint: as in `iris.load`.
    """
    check("atomic_or", pointer, mask, from_rank, to_rank, heap_bases)
    mask = within("atomic_or", pointer, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    return tl.atomic_or(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_min(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Store the minimum of `val` and the value at `pointer` on `to_rank` there; return the old value.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        val: the operand, scalar or block.
        from_rank: the caller.
        to_rank: the rank whose memory changes.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        sem, scope: as in `iris.atomic_cas`.
        hint: as in `iris.load`.
    """
    check("atomic_min", pointer, mask, from_rank, to_rank, heap_bases)
    mask = within("atomic_min", pointer, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    return tl.atomic_min(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_max(
    pointer,
    val,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    sem: tl.constexpr = None,
    scope: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Store the maximum of `val` and the value at `pointer` on `to_rank` there; return the old value.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        val: the operand, scalar or block.
        from_rank: the caller.
        to_rank: the rank whose memory changes.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        sem, scope: as in `iris.atomic_cas`.
        hint: as in `iris.load`.
    """
    check("atomic_max", pointer, mask, from_rank, to_rank, heap_bases)
    mask = within("atomic_max", pointer, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    return tl.atomic_max(remote, val, mask=mask, sem=sem, scope=_reach(scope))
