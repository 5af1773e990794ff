"""Remote memory access inside `@triton.jit`: load, store, get, put and copy on a peer's heap; atomics in `atomics.py`.

Tensors on the symmetric heap have the same offset on every rank, so the caller's own address of a tensor plus the
difference of two heap bases is the peer's. `pointer` arguments are always the caller's own heap addresses, scalar or
block; `heap_bases` is `Iris.get_heap_bases()`. Accesses are unordered: `sync.signal` or an atomic's `sem` orders them.
"""

import triton
import triton.language as tl

from .arch import INTERPRET, is_cuda
from .bounds import CHECKED, METHOD_CALLED, check, is_pointer, within
from .function import device_function

# 2 MiB, the alignment of every heap base (iris/memory/base.py).
BASE_ALIGNMENT = tl.constexpr(2 << 20)
NO_COPY_ENGINE = tl.constexpr(
    "use_copy_engine is True; expected False: kernels here cannot drive copy engines, ctx.put on the host uses them "
    "(docs/guides/coming-from-iris.md)"
)
HINT_BY_KEYWORD = tl.constexpr(
    "iris.store: the seventh positional argument is cache_modifier, a string; pass hint= by keyword "
    "(docs/guides/coming-from-iris.md)"
)


@triton.constexpr_function
def is_modifier(value):
    """Return whether `value` may be a cache modifier."""
    return value is None or isinstance(value, str)


@device_function
def translate(pointer, from_rank, to_rank, heap_bases):
    """Return the address at `to_rank` of the bytes at `from_rank`'s address `pointer`, scalar or block."""
    tl.static_assert(is_pointer(heap_bases), METHOD_CALLED)
    target, base = tl.load(heap_bases + to_rank), tl.load(heap_bases + from_rank)
    return moved(pointer, base.to(tl.int64), target.to(tl.int64))


@device_function
def moved(pointer, base, target, ALIGNMENT: tl.constexpr = BASE_ALIGNMENT):
    """Return `pointer`, scalar or block, moved from the memory at `base` to that at `target`.

    `ALIGNMENT`: of the distance between the two, in bytes.
    """
    # One scalar, added once: casting a block of pointers through int64 would lose contiguity and alignment.
    nbytes: tl.constexpr = max(1, pointer.dtype.scalar.element_ty.primitive_bitwidth // 8)
    distance = target - base
    if nbytes > 1:  # a division by one would be dropped, and its result's hint with it
        distance = distance // nbytes
    return pointer + tl.multiple_of(distance, ALIGNMENT // nbytes)


@device_function
def across(pointer, one_rank, other_rank, heap_bases):
    """Return `pointer`, in the heap of either rank, as the address of the same bytes in the other one's heap.

    Heaps do not overlap. So addresses from the higher base on go down by the difference, and all others go up.
    """
    tl.static_assert(is_pointer(heap_bases), METHOD_CALLED)
    # Each element gets its own direction; a scalar would need a reduction over the block, whose masked elements may lie
    # outside any heap. A hint promises that all go the same way, so accesses stay wide.
    nbytes: tl.constexpr = max(1, pointer.dtype.scalar.element_ty.primitive_bitwidth // 8)
    one = tl.load(heap_bases + one_rank).to(tl.int64)
    other = tl.load(heap_bases + other_rank).to(tl.int64)
    higher = tl.maximum(one, other)
    distance = higher - tl.minimum(one, other)
    if nbytes > 1:
        distance = distance // nbytes
    way = tl.where(pointer.to(tl.int64) >= higher, -1, 1).to(tl.int64)
    if pointer.type.is_block() and not INTERPRET:  # the interpreter takes no shape in a hint, and needs none
        way = tl.max_constancy(way, pointer.shape)
    return pointer + way * tl.multiple_of(distance, BASE_ALIGNMENT // nbytes)


@device_function
def hinted(pointer, hint: tl.constexpr):
    """Return `pointer` with the hint that runs of `hint` elements are contiguous and begin at a multiple of `hint`."""
    if hint is None:
        return pointer
    else:
        return tl.max_contiguous(tl.multiple_of(pointer, hint), hint)


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
    hint: tl.constexpr = None,
):
    """Return the value at `pointer` on `from_rank`; the caller is `to_rank`.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        to_rank: the caller.
        from_rank: the rank whose memory is read.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        other: the value of elements that `mask` excludes.
        cache_modifier: as in `tl.load`.
        volatile: pass all caches. Then `cache_modifier` has no effect on NVIDIA GPUs, whose assembler refuses both. A
            block with fewer elements than the program has threads may be loaded twice, and give two values where a peer
            stores meanwhile: poll a flag with `wait`.
        hint: here and in every function below, how many elements of the block are contiguous, beginning at such a
            multiple: an integer, or a tuple for several dimensions. A hint that does not hold gives wrong data.
    """
    check("load", pointer, mask, to_rank, from_rank, heap_bases)
    mask = within("load", pointer, mask, to_rank, from_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(pointer, to_rank, from_rank, heap_bases), hint)
    if volatile and is_cuda():
        return tl.load(remote, mask=mask, other=other, volatile=True)
    else:
        return tl.load(remote, mask=mask, other=other, cache_modifier=cache_modifier, volatile=volatile)


@device_function
def store(
    pointer,
    value,
    from_rank,
    to_rank,
    heap_bases,
    mask=None,
    cache_modifier: tl.constexpr = None,
    hint: tl.constexpr = None,
):
    """Store `value` at `pointer` on `to_rank`; the caller is `from_rank`.

    Args:
        pointer: an address in the caller's own heap, scalar or block.
        value: the value, scalar or block.
        from_rank: the caller.
        to_rank: the rank whose memory is written.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        cache_modifier: as in `tl.store`.
        hint: as in `iris.load`.
    """
    check("store", pointer, mask, from_rank, to_rank, heap_bases)
    mask = within("store", pointer, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    tl.static_assert(is_modifier(cache_modifier), HINT_BY_KEYWORD)
    remote = hinted(translate(pointer, from_rank, to_rank, heap_bases), hint)
    tl.store(remote, value, mask=mask, cache_modifier=cache_modifier)


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
    hint: tl.constexpr = None,
):
    """Copy from `from_ptr` on `from_rank` to the caller's own `to_ptr`; the caller is `to_rank`.

    The two ranks may come in either order, as in code written for ROCm/iris: the caller is the one in whose heap
    `from_ptr` lies. `DeviceContext.get` skips that check.

    Args:
        from_ptr: an address in the caller's own heap, scalar or block; the bytes at that place on `from_rank` are read.
        to_ptr: where they are stored: any memory of the caller.
        from_rank: the rank whose memory is read.
        to_rank: the caller.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        other: as in `tl.load`.
        load_cache_modifier, store_cache_modifier: as in `tl.load` and `tl.store`.
        hint: as in `iris.load`.
    """
    check("get", from_ptr, mask, to_rank, from_rank, heap_bases, True)
    mask = within("get", from_ptr, mask, to_rank, from_rank, heap_bases, True) if CHECKED else mask
    remote = hinted(across(from_ptr, to_rank, from_rank, heap_bases), hint)
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
    hint: tl.constexpr = None,
    copy_engine_ctx=None,
    use_copy_engine: tl.constexpr = False,
):
    """Copy from the caller's own `from_ptr` to `to_ptr` on `to_rank`; the caller is `from_rank`.

    Args:
        from_ptr: what is read: any memory of the caller, scalar or block.
        to_ptr: an address in the caller's own heap; the bytes at that place on `to_rank` are written.
        from_rank: the caller.
        to_rank: the rank whose memory is written.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        other: as in `tl.load`.
        load_cache_modifier, store_cache_modifier: as in `tl.load` and `tl.store`.
        hint: as in `iris.load`.
        copy_engine_ctx: None, for code written for ROCm/iris.
        use_copy_engine: False: kernels here cannot drive a copy engine.
    """
    tl.static_assert(not use_copy_engine, NO_COPY_ENGINE)
    data = tl.load(from_ptr, mask=mask, other=other, cache_modifier=load_cache_modifier)
    check("put", to_ptr, mask, from_rank, to_rank, heap_bases)
    stored = within("put", to_ptr, mask, from_rank, to_rank, heap_bases) if CHECKED else mask
    remote = hinted(translate(to_ptr, from_rank, to_rank, heap_bases), hint)
    tl.store(remote, data, mask=stored, cache_modifier=store_cache_modifier)


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
    hint: tl.constexpr = None,
):
    """Copy from `src_ptr` on `from_rank` to `dst_ptr` on `to_rank`.

    Args:
        src_ptr: an address in the caller's own heap, scalar or block; the bytes at that place on `from_rank` are read.
        dst_ptr: an address in the caller's own heap; the bytes at that place on `to_rank` are written.
        from_rank: the rank whose memory is read.
        to_rank: the rank whose memory is written.
        cur_rank: the caller. It may be either of the two ranks, or a third one.
        heap_bases: `Iris.get_heap_bases()`, or a device context's `heap_bases()`.
        mask: which elements take part; None for all.
        other: as in `tl.load`.
        load_cache_modifier, store_cache_modifier: as in `tl.load` and `tl.store`.
        hint: as in `iris.load`.
    """
    check("copy", src_ptr, mask, cur_rank, from_rank, heap_bases)
    read = within("copy", src_ptr, mask, cur_rank, from_rank, heap_bases) if CHECKED else mask
    check("copy", dst_ptr, mask, cur_rank, to_rank, heap_bases)
    stored = within("copy", dst_ptr, mask, cur_rank, to_rank, heap_bases) if CHECKED else mask
    source = hinted(translate(src_ptr, cur_rank, from_rank, heap_bases), hint)
    data = tl.load(source, mask=read, other=other, cache_modifier=load_cache_modifier)
    remote = hinted(translate(dst_ptr, cur_rank, to_rank, heap_bases), hint)
    tl.store(remote, data, mask=stored, cache_modifier=store_cache_modifier)
