"""Attention of one new token a row over a static cache: programs read the cache once, and only where the mask shows it.

torch's attention with a mask copies the cache for grouped heads, walks it with one program a head, and reads all of it,
however little is filled. Here each program takes a split of the cache for one kv head and all query heads that use it.
It reads from the first place that the mask shows to the last. A second kernel combines the splits. Sums are kept in
fp32. Where there are enough short caches, a split is a whole one, and there is no second kernel.

With `equal_splits` splits have one length, whatever the batch and the cache, and count from a row's first token, after
its padding: so a row attends in one order among any others (`docs/concepts/determinism.md`).

`layers/serving/attention.py` has the models of transformers attend by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from iris import platform
from iris.device import arch
from iris.device.function import device_function
import torch
import triton
import triton.language as tl

from ..operators import OPERATORS

_BLOCK, _WARPS, _STAGES = 32, 4, 3
_MOST_SCANNED, _REDUCTION_BYTES = 4096, 4096
_MOST_PARTS, _COLUMNS = 256, 32  # of a program that combines
_HELD, _OF_A_WARP = 4096, 1024  # numbers that a program holds with `equal_splits`, at most, and with one warp
_SPLIT = 128  # of a cache, where it must not depend on the batch
# One H200, 128 columns: programs that a multiprocessor holds, how many of them keep the memory busy, and how many
# blocks a program could read before its first one and after its last one, or while a second kernel combines.
_RESIDENT, _SATURATING, _BESIDES = 5, 1.6, 3


@device_function
def _load(base, rows, there, stride_row, columns, COLUMNS: tl.constexpr):
    """Load elements [rows, COLUMNS]: zero in rows where `there` is false and in columns from `columns` on."""
    c = tl.arange(0, COLUMNS)
    at = base + rows.to(tl.int64)[:, None] * stride_row + c[None, :]
    return tl.load(at, mask=there[:, None] & (c < columns)[None, :], other=0.0)


@device_function
def _first_seen(mask, length, SCAN: tl.constexpr):
    """Return the first column that a row's mask shows."""
    n = 0
    first = length
    while (n < length) & (first == length):
        columns = n + tl.arange(0, SCAN)
        seen = tl.load(mask + columns, mask=columns < length, other=0) != 0
        first = tl.min(tl.where(seen, columns, length), 0)
        n += SCAN
    return first


class CacheStrides(NamedTuple):
    """Elements from batch to batch, head to head and row to row, of q, k, v and the mask."""

    qb: Any
    qh: Any
    kb: Any
    kh: Any
    kn: Any
    vb: Any
    vh: Any
    vn: Any
    mb: Any


@dataclass(frozen=True)
class SplitForm:
    """The form of `split_kernel`: whether one split is all (`WHOLE`), and its query heads and columns, as powers of
    two.

    BLOCK rows of keys are multiplied together, SCAN of the mask are looked at. `FROM_FIRST`: splits begin with the
    first column that the mask shows, not with the cache.
    """

    WHOLE: bool
    GROUPS: int
    DIM: int
    BLOCK: int
    SCAN: int
    FROM_FIRST: bool = False


@triton.jit
def split_kernel(
    q, k, v, mask, out, weights, scale, length, groups, dim, kv_heads, split, strides, form: tl.constexpr
):  # fmt: skip
    """Attend over one split of the keys.

    Store `out` [B*H, parts, D] fp32, not yet divided, and `weights` [B*H, parts, 2]: the maximum and the sum. With a
    single split, store the attention itself as `out` [B*H, D] and leave `weights` alone.
    """
    arch.follow()
    GROUPS: tl.constexpr = form.GROUPS
    DIM: tl.constexpr = form.DIM
    BLOCK: tl.constexpr = form.BLOCK
    SCAN: tl.constexpr = form.SCAN
    pair, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    batch, head = (pair // kv_heads).to(tl.int64), (pair % kv_heads).to(tl.int64)
    mask += batch * strides.mb
    begin = part * split
    if form.FROM_FIRST:
        begin = min(begin + _first_seen(mask, length, SCAN), length)
    end = min(begin + split, length)
    # From the first column seen to the last, so that the loop over keys has no branch, and loads run ahead of it.
    first, beyond = end, begin
    for n in range(begin, end, SCAN):
        columns = n + tl.arange(0, SCAN)
        seen = tl.load(mask + columns, mask=columns < end, other=0) != 0
        first = min(first, tl.min(tl.where(seen, columns, end), 0))
        beyond = max(beyond, tl.max(tl.where(seen, columns + 1, begin), 0))
    g = tl.arange(0, GROUPS)
    q += batch * strides.qb + head * groups * strides.qh
    query = _load(q, g, g < groups, strides.qh, dim, DIM)
    top = tl.full((GROUPS,), float("-inf"), tl.float32)
    total = tl.zeros((GROUPS,), tl.float32)
    acc = tl.zeros((GROUPS, DIM), tl.float32)
    k += batch * strides.kb + head * strides.kh
    v += batch * strides.vb + head * strides.vh
    for n in range(first, beyond, BLOCK):
        columns = n + tl.arange(0, BLOCK)
        seen = tl.load(mask + columns, mask=columns < beyond, other=0) != 0
        keys = _load(k, columns, columns < beyond, strides.kn, dim, DIM)
        values = _load(v, columns, columns < beyond, strides.vn, dim, DIM)
        scores = arch.dot(query, keys.T, tl.zeros((GROUPS, BLOCK), tl.float32)) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))  # a number from the first block on: it begins with one that is seen
        chances = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        total = total * fade + tl.sum(chances, 1)
        acc = arch.dot(chances.to(values.dtype), values, acc * fade[:, None])
        top = higher
    arch.lead()
    place = ((batch * kv_heads + head) * groups + g) * parts + part
    there = g < groups
    d = tl.arange(0, DIM)
    if form.WHOLE:
        acc = acc / total[:, None]
    else:
        tl.store(weights + place * 2, top, mask=there)
        tl.store(weights + place * 2 + 1, total, mask=there)
    where = out + place[:, None] * dim + d[None, :]
    tl.store(where, acc.to(out.dtype.element_ty), mask=there[:, None] & (d < dim)[None, :])


@device_function
def _in_pairs(x, COUNT: tl.constexpr):
    """Return the sums of the rows of x [rows, COUNT], adding neighbours first."""
    for _i in tl.static_range(COUNT.bit_length() - 1):
        first, second = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        x = first + second
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def combine_kernel(
    splits, weights, out, num_parts, dim, PARTS: tl.constexpr, COLUMNS: tl.constexpr, IN_PAIRS: tl.constexpr = False
):
    """Combine all splits of a head into `out` [B*H, D]; a program computes `COLUMNS` of its columns.

    `IN_PAIRS` adds neighbours first, so that empty splits after the last full one do not change the order of the sum.
    """
    arch.follow()
    head, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS
    p, c = tl.arange(0, PARTS), tl.arange(0, COLUMNS)
    there = p < num_parts
    top = tl.load(weights + (head * num_parts + p) * 2, mask=there, other=float("-inf"))
    total = tl.load(weights + (head * num_parts + p) * 2 + 1, mask=there, other=0.0)
    share = tl.exp(top - tl.max(top, 0))
    sums = _load(splits + head * num_parts * dim + d, p, there, dim, dim - d, COLUMNS)
    arch.lead()
    if IN_PAIRS:
        lower = tl.zeros((COLUMNS, PARTS), tl.float32) + (total * share)[None, :]
        result = _in_pairs((sums * share[:, None]).T, PARTS) / _in_pairs(lower, PARTS)
    else:
        result = tl.sum(sums * share[:, None], 0) / tl.sum(total * share, 0)
    tl.store(out + head * dim + d + c, result.to(out.dtype.element_ty), mask=c < dim - d)


@cache
def pipeline_of(groups: int, row_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """Return the rows of keys to multiply together, and the stages of their loads, that fit in shared memory.

    Each stage but one holds a block of keys and one of values. Queries and the warps' partial reductions take space,
    too.
    """
    for rows, stages in ((_BLOCK, _STAGES), (_BLOCK // 2, _STAGES), (_BLOCK // 2, 2)):
        if (2 * (stages - 1) * rows + 2 * groups) * row_bytes + _REDUCTION_BYTES <= shared_bytes:
            return rows, stages
    return _BLOCK // 2, 1


def splits_of(pairs: int, length: int, block: int, multiprocessors: int) -> tuple[int, int]:
    """Return into how many splits each of `pairs` caches of `length` rows is cut, and of how many rows: to end soonest.

    Of cuts that end together the finest, since a cache may be almost empty.
    """
    blocks = triton.cdiv(length, block)
    split = triton.cdiv(blocks, _fastest_cut(pairs, blocks, multiprocessors)) * block
    return triton.cdiv(length, split), split


@lru_cache(1024)
def _fastest_cut(pairs: int, blocks: int, multiprocessors: int) -> int:
    """Return the number of splits that takes the least time, counted in blocks that a program reads.

    As many programs as fit run at once, then the next ones. A few of them saturate the memory.
    """
    at_once = _RESIDENT * multiprocessors

    def blocks_until_the_end(parts: int) -> float:
        of_each = triton.cdiv(blocks, parts)
        waves, rest = divmod(pairs * parts, at_once)
        last = of_each * max(1, triton.cdiv(rest, multiprocessors) / _SATURATING) + _BESIDES if rest else 0
        return waves * (of_each * _RESIDENT / _SATURATING + _BESIDES) + last + (_BESIDES if parts > 1 else 0)

    return min(range(min(_MOST_PARTS, blocks), 0, -1), key=blocks_until_the_end)


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float, equal_splits: bool = False
) -> torch.Tensor:
    """Return the attention [B, H, D] of queries q [B, H, D] over k, v [B, KV, L, D] where mask [B, L] is true.

    Every row of the mask must show at least one column. With `equal_splits`, a row has the same bits whatever the
    batch, its padding and the length of the cache.
    """
    batch, heads, dim = q.shape
    kv_heads, length = k.shape[1:3]
    groups = heads // kv_heads
    padded, rows = (max(16, triton.next_power_of_2(size)) for size in (dim, groups))  # what a product of tiles takes
    block, stages = pipeline_of(rows, padded * q.element_size(), platform.shared_bytes(q.device))
    if equal_splits:
        parts, split = triton.cdiv(length, _SPLIT), _SPLIT
    else:
        parts, split = splits_of(batch * kv_heads, length, block, platform.num_programs(q.device))
    whole = parts == 1 and not equal_splits
    out = torch.empty(batch, heads, dim, dtype=q.dtype, device=q.device)
    weights = q.new_empty(batch * heads, parts, 2, dtype=torch.float32)
    splits = out if whole else q.new_empty(batch * heads, parts, dim, dtype=torch.float32)
    split_kernel[(batch * kv_heads, parts)](
        q, k, v, mask, splits, weights, scale, length, groups, dim, kv_heads, split,
        CacheStrides._make((*q.stride()[:2], *k.stride()[:3], *v.stride()[:3], mask.stride(0))),
        SplitForm(whole, rows, padded, block, min(_MOST_SCANNED, triton.next_power_of_2(split)), equal_splits),
        num_warps=_WARPS, num_stages=stages, **platform.launch_options(q.device),
    )  # fmt: skip
    if not whole:
        held, columns = triton.next_power_of_2(parts), min(padded, _COLUMNS)
        if equal_splits:  # splits are many, and short: fewer programs, with more columns each
            columns = max(columns, min(padded, _HELD // held))
        combine_kernel[(batch * heads, triton.cdiv(dim, columns))](
            splits, weights, out, parts, dim, PARTS=held, COLUMNS=columns, IN_PAIRS=equal_splits,
            num_warps=1 if equal_splits and held * columns <= _OF_A_WARP else 4,
            **platform.launch_options(q.device, fused=not equal_splits),
        )  # fmt: skip
    return out


OPERATORS.add(
    "decode_attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale, bool equal_splits=False) -> Tensor",
    decode_attention,
    lambda q, *_: q.new_empty(q.shape),
)
