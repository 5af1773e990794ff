"""Remote memory access inside `@triton.jit`: load, store, get, put, copy and atomics on a peer's heap.

Tensors on the symmetric heap have the same offset on every rank, so the caller's own address of a tensor plus the
difference of two heap bases is the peer's. `pointer` arguments are always the caller's own heap addresses, scalar or
block; `heap_bases` is `Iris.get_heap_bases()`. Accesses are unordered unless an atomic's `sem` orders them.
"""

import triton
import triton.language as tl

from .function import device_function

# 2 MiB, the alignment of every heap base (iris/memory/base.py).
BASE_ALIGNMENT = tl.constexpr(2 << 20)


@device_function
def translate(pointer, from_rank, to_rank, heap_bases):
    """`from_rank`'s address `pointer`, scalar or block, as the address of the same bytes at `to_rank`."""
    target, base = tl.load(heap_bases + to_rank), tl.load(heap_bases + from_rank)
    return moved(pointer, base.to(tl.int64), target.to(tl.int64))


@device_function
def moved(pointer, base, target, ALIGNMENT: tl.constexpr = BASE_ALIGNMENT):
    """`pointer`, scalar or block, in the memory that begins at `base`, as an address of that which begins at `target`.

    `ALIGNMENT`: of the distance between the two, in bytes.
    """
    # One scalar, added once: casting a block of pointers through int64 would lose contiguity and alignment.
    nbytes: tl.constexpr = max(1, pointer.dtype.scalar.element_ty.primitive_bitwidth // 8)
    distance = target - base
    if nbytes > 1:  # a division by one would be dropped, and with it what is said of its result
        distance = distance // nbytes
    return pointer + tl.multiple_of(distance, ALIGNMENT // nbytes)


@device_function
def load(
    pointer,
    to_rank,
    from_rank,
    heap_bases,
    mask=None,
    other=None,
    cache_modifier: tl.constexpr = None,
    volatile: tl.constexpr = False,
):
    """Returns what stands at `pointer` on `from_rank`; the caller is `to_rank`."""
    remote = translate(pointer, to_rank, from_rank, heap_bases)
    return tl.load(remote, mask=mask, other=other, cache_modifier=cache_modifier, volatile=volatile)


@device_function
def store(pointer, value, from_rank, to_rank, heap_bases, mask=None, cache_modifier: tl.constexpr = None):
    """Stores `value` at `pointer` on `to_rank`; the caller is `from_rank`."""
    tl.store(translate(pointer, from_rank, to_rank, heap_bases), value, mask=mask, cache_modifier=cache_modifier)


@device_function
def get(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
):
    """Copies from `from_ptr` on `from_rank` to the caller's own `to_ptr`; the caller is `to_rank`."""
    remote = translate(from_ptr, to_rank, from_rank, heap_bases)
    data = tl.load(remote, mask=mask, other=other, cache_modifier=load_cache_modifier)
    tl.store(to_ptr, data, mask=mask, cache_modifier=store_cache_modifier)


@device_function
def put(
    from_ptr,
    to_ptr,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
):
    """Copies from the caller's own `from_ptr` to `to_ptr` on `to_rank`; the caller is `from_rank`."""
    data = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
    remote = translate(to_ptr, from_rank, to_rank, heap_bases)
    tl.store(remote, data, mask=mask, cache_modifier=store_cache_modifier)


@device_function
def copy(
    src_ptr,
    dst_ptr,
    from_rank,
    to_rank,
    cur_rank,
    heap_bases,
    mask=None,
    other=None,
    load_cache_modifier: tl.constexpr = None,
    store_cache_modifier: tl.constexpr = None,
):
    """Copies from `src_ptr` on `from_rank` to `dst_ptr` on `to_rank`; the caller is `cur_rank`, any of them or none."""
    source = translate(src_ptr, cur_rank, from_rank, heap_bases)
    data = tl.load(source, mask=mask, other=other, cache_modifier=load_cache_modifier)
    remote = translate(dst_ptr, cur_rank, to_rank, heap_bases)
    tl.store(remote, data, mask=mask, cache_modifier=store_cache_modifier)


@triton.constexpr_function
def _reach(scope):
    return "sys" if scope is None else scope


@device_function
def atomic_cas(pointer, cmp, val, from_rank, to_rank, heap_bases, sem: tl.constexpr = None, scope: tl.constexpr = None):
    """Stores `val` at `pointer` on `to_rank` if `cmp` stands there; returns what stood there.

    `sem`: "acquire", "release", "acq_rel" (default) or "relaxed". `scope`: "sys" (default), "gpu" or "cta"; only "sys"
    is right between ranks. The same holds for every atomic here.
    """
    remote = translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_cas(remote, cmp, val, sem=sem, scope=_reach(scope))


@device_function
def atomic_add(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
):
    """Adds `val` at `pointer` on `to_rank`; returns what stood there. fp16 and bf16 round at each addition."""
    remote = translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_add(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_xchg(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
):
    """Stores `val` at `pointer` on `to_rank`; returns what stood there."""
    remote = translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_xchg(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_xor(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
):
    """Exclusive-ors `val` into `pointer` on `to_rank`; returns what stood there. Integers only."""
    remote = translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_xor(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_and(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
):
    """Ands `val` into `pointer` on `to_rank`; returns what stood there. Integers only."""
    remote = translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_and(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_or(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
):
    """Ors `val` into `pointer` on `to_rank`; returns what stood there. Integers only."""
    remote = translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_or(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_min(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
):
    """Leaves the smaller of `val` and what stands at `pointer` on `to_rank`; returns what stood there."""
    remote = translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_min(remote, val, mask=mask, sem=sem, scope=_reach(scope))


@device_function
def atomic_max(
    pointer, val, from_rank, to_rank, heap_bases, mask=None, sem: tl.constexpr = None, scope: tl.constexpr = None
):
    """Leaves the larger of `val` and what stands at `pointer` on `to_rank`; returns what stood there."""
    remote = translate(pointer, from_rank, to_rank, heap_bases)
    return tl.atomic_max(remote, val, mask=mask, sem=sem, scope=_reach(scope))
