"""Compare a loaded model with its files: `from_pretrained(..., verify=True)`.

One weight of each kind (one name with any layer number, in one format) is read again and widened in float64. This
rank's shard may differ from that by one rounding to its dtype. Then the ranks compare digests: equal shards must have
equal digests, and the shards of all ranks must cover the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..digests import checksum
from ..expert_storage import CodedWeight, coded_weight, expert_entry
from ..formats.weight_format import quantised_weights
from ..shard import Shard, Transposed, concat, fill
from ..sharded import part_of
from ..together import one_line, raise_together
from ..weight_storage import ELEMENTS, Quantised
from .composed import Source

if TYPE_CHECKING:
    from iris.context import Iris

_PIECE = 1 << 21  # numbers that are compared at a time
_SLACK = 2.0**-22  # of the arithmetic in float32 before the rounding
# What rounding costs by element: of a number, and of its group's scale.
_ROUNDED = {"e4m3": (2.0**-4, 2.0**-10), "e2m1": (2.0**-2, 2.0**-2), "int4": (2.0**-20, 0.5 + 2.0**-20)}


@dataclass(frozen=True)
class _Allowed:
    """The largest allowed error of a number: `share` of its magnitude plus `least`."""

    share: float
    least: float = torch.finfo(torch.float32).tiny

    @classmethod
    def of(cls, dtype: torch.dtype) -> _Allowed:
        """Return the error of one rounding to `dtype`."""
        if not dtype.is_floating_point:
            return cls(0.0)
        return cls(torch.finfo(dtype).eps / 2 + _SLACK, torch.finfo(dtype).tiny)


@dataclass(frozen=True)
class Verified:
    """One weight: how many numbers of this shard were compared, and their largest error in roundings to `dtype`."""

    name: str
    stored: str  # its format, or dtype, in the files
    dtype: str
    numbers: int
    error: float
    digest: str
    ranges: tuple[tuple[int, int], ...]
    total: int


def compare_with_files(model: nn.Module, sources: Mapping[str, Source], folder: str, ctx: Iris) -> tuple[Verified, ...]:
    """Compare `model` on this rank with the `sources` that it was filled from, and return the results. Collective.

    Raises `CheckpointError` on every rank, with a line for each weight that differs from the files or other ranks.
    """
    own: list[Verified] = []
    try:
        own = [_verified(model, name, source) for name, source in _one_of_each(sources)]
        problems = [
            f"rank {ctx.cur_rank}: {each.name} differs from the files by {each.error:.3g} roundings: expected at most 1"
            for each in own
            if not each.error <= 1
        ]
    except Exception as error:  # a file, or memory of the device; the other ranks wait in `raise_together`
        problems = [f"rank {ctx.cur_rank}: {one_line(error)}"]
    what = f"{folder} differs from what was loaded"
    raise_together(problems, what, ctx)
    by_rank = ctx.hosts.all_gather(own)
    for number, each in enumerate(own):
        same_weight = [rows[number] for rows in by_rank]
        for other in same_weight:
            if other.ranges == each.ranges and other.digest != each.digest:
                problems.append(f"{each.name} differs between ranks that hold the same part of it")
                break
        if (missing := _missing(same_weight, each.total)) is not None:
            problems.append(f"entry {missing} of {each.total} of {each.name} is on no rank")
    raise_together(problems, what, ctx)
    return tuple(own)


def _one_of_each(sources: Mapping[str, Source]) -> Iterator[tuple[str, Source]]:
    kinds = set()
    for name, source in sources.items():
        kind = re.sub(r"\d+", "*", name), _stored(source)
        if kind not in kinds:
            kinds.add(kind)
            yield name, source


def _stored(source: Source) -> str:
    formats = sorted({each.format.label for each in quantised_weights(source)})
    return ", ".join(formats) or str(source.dtype).removeprefix("torch.")


def _verified(model: nn.Module, name: str, source: Any) -> Verified:
    parent, _, key = name.rpartition(".")
    module: Any = model.get_submodule(parent)
    local, shard, dim = _part(module, key)
    if (coded := coded_weight(module, key)) is not None and shard is not None:
        return _verified_experts(coded, name, source, shard, dim)
    storage = getattr(module, "storage", None) if key == "weight" else None
    local_dtype = str(local.dtype).removeprefix("torch.")
    allowed = _Allowed.of(local.dtype)
    if isinstance(storage, Quantised):
        local_dtype, allowed = storage.form.name, _Allowed(_SLACK)
        local = module.numbers(0, module.local_shape[0], torch.float32)
        if not storage.keeps(source):
            share, of_scale = _ROUNDED[ELEMENTS[storage.form.packing.name]]
            # numbers are rounded to the layer's dtype, and then to codes
            allowed = _Allowed(share + torch.finfo(module.dtype).eps, storage.largest_scale(module) * of_scale)
    stored = _stored(source)
    if getattr(module, "stored_transposed", False) and key == "weight":
        source = Transposed(source)
    error = max((_error(piece, source, index, allowed) for piece, index in _pieces(local, shard, dim)), default=0.0)
    ranges = shard.ranges if shard is not None else ((0, local.shape[0] if local.dim() else 1),)
    total = shard.total if shard is not None else ranges[0][1]
    return Verified(name, stored, local_dtype, local.numel(), error, f"{checksum(local):016x}", ranges, total)


def _verified_experts(coded: CodedWeight, name: str, source: Any, shard: Shard, dim: int) -> Verified:
    """Compare split experts that are held as codes, one expert at a time."""
    kept, error, numbers = coded.keeps(source), 0.0, 0
    for expert in range(coded.experts):
        share, of_scale = (_SLACK, 0.0) if kept else _ROUNDED[ELEMENTS[coded.form.packing.name]]
        allowed = _Allowed(share, max(_Allowed.least, coded.largest_scale(expert) * of_scale))
        local, entry = coded.numbers(expert, torch.float32), expert_entry(source, expert)
        for piece, index in _pieces(local, shard, dim - 1):
            error = max(error, _error(piece, entry, index, allowed))
        numbers += local.numel()
    digest = f"{checksum(coded.parameters[0].detach().view(torch.uint8)):016x}"
    return Verified(name, _stored(source), coded.form.name, numbers, error, digest, shard.ranges, shard.total)


def _part(module: Any, key: str) -> tuple[torch.Tensor, Shard | None, int]:
    """Return this rank's values of a parameter, its shard (None: all of it) and the dimension that is split."""
    local = getattr(module, key).detach()
    if hasattr(module, "load_shard"):
        split = key == "weight" or module.dim == 0
        return local, concat(module.parts) if split else None, module.dim if key == "weight" else 0
    part, dim = part_of(module, key) or (None, 0)
    return local, part, dim


def _pieces(local: torch.Tensor, shard: Shard | None, dim: int) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
    """Yield pieces of `local` of about 2 million numbers, and the index of each in the unsplit tensor."""
    if not local.dim():
        yield local, ()
        return
    ranges = shard.ranges if shard is not None else ((0, local.shape[0]),)
    at = 0
    for start, stop in ranges:
        block, at = local.narrow(dim, at, stop - start), at + stop - start
        if not block.numel():
            continue
        if dim > 1:  # a stored tensor is cut in one of its later dimensions only
            yield block, (slice(None),) * dim + (slice(start, stop),)
            continue
        rows = max(1, _PIECE * block.shape[0] // block.numel())
        for first in range(0, block.shape[0], rows):
            piece = block[first : first + rows]
            along = slice(first, first + piece.shape[0])
            yield piece, (slice(start + along.start, start + along.stop),) if dim == 0 else (along, slice(start, stop))


def _error(piece: torch.Tensor, source: Any, index: tuple[slice, ...], allowed: _Allowed) -> float:
    """Return the largest difference of `piece` from `source[index]`, in units of the allowed error."""
    exact = torch.empty(piece.shape, dtype=torch.float64, device=piece.device)
    fill(exact, source, index)
    difference = (piece.double() - exact).abs()
    ratio = difference / (exact.abs() * allowed.share + allowed.least)
    ratio.masked_fill_(piece.isnan() & exact.isnan() | (piece == exact), 0.0)
    return ratio.nan_to_num(float("inf")).max().item()


def _missing(parts: list[Verified], total: int) -> int | None:
    """Return the first of `total` entries that none of `parts` has, None if they cover all."""
    end = 0
    for start, stop in sorted(each for part in parts for each in part.ranges):
        if start > end:
            return end
        end = max(end, stop)
    return end if end < total else None
