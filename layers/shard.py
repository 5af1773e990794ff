"""Compute which part of which tensor belongs to which rank: pure arithmetic, the same on every rank.

A `Shard` is data: the ranges of one dimension that a rank holds, in local order. Everything else (linears, loading,
reports) reads it. Every shard comes from one of these ways to split:

- `chunk`     torch.chunk's: ceil(total / world) each, so the last ranks may be short or empty. The fused ops gather and
              scatter by it, so whatever an op gathers is split this way.
              A context's level of equal bits may give ranks other parts of what a row-parallel product sums
              (`Level.shares` of `iris_ops/planning/sums.py`).
- `in_units`  whole groups of quantised weights, for gates, ups and what multiplies them.
- `balanced`  sizes differ by one at most, so no rank is empty while there is enough. For heads, which no op gathers.
- `split_heads`  whole attention heads, in two cases. Either way a rank's query heads use its own kv heads in equal,
              contiguous groups, which is what `repeat_kv` in Hugging Face attention needs:

    kv heads >= ranks   kv heads are balanced over the ranks, and their query heads go with them. Groups stay as they
                        were.
    kv heads <  ranks   ranks are balanced over the kv heads; those of one kv head each hold a copy of it and share its
                        query heads. A rank then caches one kv head; its group is all its query heads.

With fewer query heads than ranks some ranks are idle. An idle rank still holds one query head, because attention cannot
reshape zero heads; its slice of the output projection is zero padding, so its result adds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from iris.errors import ArgumentError, ShapeError
from iris_ops.planning.sums import FREE, Level
import torch

Range = tuple[int, int]
_LEAST_UNIT = 8  # entries: 16 bytes of bf16


@dataclass(frozen=True)
class Shard:
    """One rank's part of a dimension of `total` entries: `ranges` one after the other, then `pad` zeros.

    `rank_sizes`: how many entries each rank has, in rank order, where ranks have one range each and follow each other;
    empty where that is not known.
    """

    total: int
    ranges: tuple[Range, ...]
    pad: int = 0
    rank_sizes: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.ranges) + self.pad

    @property
    def is_contiguous(self) -> bool:
        return len(self.ranges) <= 1 and not self.pad

    def fill(self, local: torch.Tensor, source: Any, dim: int) -> None:
        """Copy this part of `source`, a tensor or a safetensors slice, into `local`; read nothing else of it."""
        at = 0
        for start, stop in self.ranges:
            if start < stop:
                index = (slice(None),) * dim + (slice(start, stop),)
                fill(local.narrow(dim, at, stop - start), source, index)
                at += stop - start
        local.narrow(dim, at, self.pad).zero_()

    def view(self, full: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a view of this part of `full`. Only for a contiguous shard."""
        assert self.is_contiguous, self
        start, stop = self.ranges[0] if self.ranges else (0, 0)
        return full.narrow(dim, start, stop - start)


def fill(local: torch.Tensor, source: Any, index: tuple[slice, ...] = (slice(None),)) -> None:
    """Copy `source[index]` into `local`; a tensor in a checkpoint copies itself (see `checkpoint.files`)."""
    if hasattr(source, "copy_to"):
        source.copy_to(local, index)
    else:
        local.copy_(source[index])


class Transposed:
    """The transpose of a matrix `source`, a tensor or one in a checkpoint, which is read by parts."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def get_shape(self) -> list[int]:
        source = self._source
        return list(source.shape if isinstance(source, torch.Tensor) else source.get_shape())[::-1]

    def copy_to(self, local: torch.Tensor, index: tuple[slice, ...] = ()) -> None:
        read = torch.empty(local.shape[::-1], dtype=local.dtype, device=local.device)
        fill(read, self._source, (*index, *[slice(None)] * (2 - len(index)))[::-1])
        local.copy_(read.t())


def chunk(total: int, world: int, rank: int) -> Range:
    """Return `[start, stop)` of `rank` when `total` entries are split as torch.chunk and DTensor's Shard split them."""
    _check(world, rank)
    part = -(-total // world)
    return min(rank * part, total), min((rank + 1) * part, total)


def balanced(total: int, world: int, rank: int) -> Range:
    """Return `[start, stop)` of `rank` when `total` entries are split into parts whose sizes differ by at most one."""
    _check(world, rank)
    base, extra = divmod(total, world)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def plain(total: int, world: int, rank: int, level: Level = FREE) -> Shard:
    """Return rows of a column-parallel weight, or columns of a row-parallel one: the share by `level`, else a chunk."""
    _check(world, rank)
    sizes = level.shares(total, world)
    if sizes is None:
        return Shard(total, (chunk(total, world, rank),))
    start = sum(sizes[:rank])
    return Shard(total, ((start, start + sizes[rank]),), rank_sizes=sizes)


def in_units(total: int, world: int, rank: int, unit: int) -> Shard:
    """Return whole units of `unit` entries, as many on each rank or one more; the last unit may be short."""
    spans = [balanced(-(-total // unit), world, each) for each in range(world)]
    ends = [(min(start * unit, total), min(stop * unit, total)) for start, stop in spans]
    return Shard(total, (ends[rank],), rank_sizes=tuple(stop - start for start, stop in ends))


def even_unit(total: int, world: int, unit: int) -> int:
    """Return `unit`, halved until the largest part of `in_units` is at most 7 % above the mean, or 8 entries are left.

    A group of quantised weights that two ranks share is read by both, so cutting inside one is right, only less handy.
    """
    while unit > _LEAST_UNIT and unit % 2 == 0 and in_units(total, world, 0, unit).size * world > 1.07 * total:
        unit //= 2
    return unit


def merged(sizes: Sequence[int], world: int, rank: int, gathered: bool, level: Level = FREE) -> tuple[Shard, ...]:
    """Return one shard for each of several outputs that share one weight, as gate and up do.

    Each output is split by itself, so that the local result divides into the same outputs. If the result is gathered,
    the weight is split as one output instead: the gathered columns are then in the right order without a shuffle.
    """
    if not gathered:
        return tuple(plain(size, world, rank, level) for size in sizes)
    start, stop = chunk(sum(sizes), world, rank)
    shards, offset = [], 0
    for size in sizes:
        first, last = (min(max(edge - offset, 0), size) for edge in (start, stop))
        shards.append(Shard(size, ((first, last),)))
        offset += size
    return tuple(shards)


def concat(parts: Sequence[Shard]) -> Shard:
    """Return the shard of the concatenation of the tensors that `parts` split. At most the last may be padded."""
    assert not any(part.pad for part in parts[:-1]), parts
    ranges, offset = [], 0
    for part in parts:
        ranges += [(start + offset, stop + offset) for start, stop in part.ranges]
        offset += part.total
    return Shard(offset, tuple(ranges), parts[-1].pad)


@dataclass(frozen=True)
class HeadSplit:
    """The heads of one rank: query heads `q`, kv heads `kv`; `groups` query heads to each kv head."""

    num_heads: int
    num_kv_heads: int
    q: Range
    kv: Range
    idle: bool = False
    counts: tuple[int, ...] = ()
    """How many query heads each rank has; an idle one has none."""
    kv_counts: tuple[int, ...] = ()
    """How many kv heads each rank has."""

    @property
    def num_local_heads(self) -> int:
        return self.q[1] - self.q[0]

    @property
    def num_local_kv_heads(self) -> int:
        return self.kv[1] - self.kv[0]

    @property
    def groups(self) -> int:
        return self.num_local_heads // self.num_local_kv_heads

    def q_shard(self, width: int) -> Shard:
        """Return rows of the query projection, `width` to a head."""
        return Shard(self.num_heads * width, (_scaled(self.q, width),))

    def kv_shard(self, width: int) -> Shard:
        """Return rows of the key or the value projection, `width` to a head."""
        return Shard(self.num_kv_heads * width, (_scaled(self.kv, width),))

    def o_shard(self, width: int) -> Shard:
        """Return columns of the output projection, `width` to a query head: zeros where the rank is idle."""
        total, rank_sizes = self.num_heads * width, tuple(count * width for count in self.counts)
        if self.idle:
            return Shard(total, (), self.num_local_heads * width, rank_sizes)
        return Shard(total, (_scaled(self.q, width),), rank_sizes=rank_sizes)


def split_heads(num_heads: int, num_kv_heads: int, world: int, rank: int) -> HeadSplit:
    """Return the heads that `rank` holds. See the module's docstring for the rule."""
    _check(world, rank)
    splits = [_split_heads(num_heads, num_kv_heads, world, each) for each in range(world)]
    return replace(
        splits[rank],
        counts=tuple(0 if each.idle else each.num_local_heads for each in splits),
        kv_counts=tuple(each.num_local_kv_heads for each in splits),
    )


def _split_heads(num_heads: int, num_kv_heads: int, world: int, rank: int) -> HeadSplit:
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ShapeError(f"num_heads is {num_heads}: expected a multiple of num_kv_heads, which is {num_kv_heads}")
    group = num_heads // num_kv_heads
    if num_kv_heads >= world:
        kv = balanced(num_kv_heads, world, rank)
        return HeadSplit(num_heads, num_kv_heads, _scaled(kv, group), kv)
    for head in range(num_kv_heads):
        first, last = balanced(world, num_kv_heads, head)
        if first <= rank < last:
            break
    start, stop = balanced(group, last - first, rank - first)
    idle = start == stop
    q = (0, 1) if idle else (start, stop)
    return HeadSplit(num_heads, num_kv_heads, (head * group + q[0], head * group + q[1]), (head, head + 1), idle)


def _scaled(span: Range, width: int) -> Range:
    return span[0] * width, span[1] * width


def _check(world: int, rank: int) -> None:
    if world < 1 or not 0 <= rank < world:
        raise ArgumentError(f"rank {rank} of {world}: expected 0 <= rank < number of ranks")
