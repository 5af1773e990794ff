"""Whether a loaded model holds what its files say: `from_pretrained(..., verify=True)`.

Of each kind of weight (one name with any layer number, in one format) one is read again and widened in float64. This
rank's part may differ from that by one rounding to its dtype. Then the ranks compare: where two hold the same part,
their digests are the same, and the parts of all together are the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
import re
from typing import TYPE_CHECKING, Any

from iris_ops.fp8.scaled_matmul import restored
import torch
from torch import nn

from ..digests import checksum
from ..formats.fp8 import by_rows
from ..formats.weight_format import quantised_weights
from ..shard import Shard, Transposed, concat, fill
from ..sharded import part_of
from ..together import raise_together, words
from .composed import Source

if TYPE_CHECKING:
    from iris.context import Iris

_PIECE = 1 << 21  # numbers that are compared at a time
_SLACK = 2.0**-22  # of the arithmetic in float32 before the rounding
_OF_FP8, _SMALLEST_FP8 = 2.0**-4, 2.0**-10  # what rounding to e4m3 costs: of a number, and of its channel's scale


@dataclass(frozen=True)
class _Allowed:
    """How far a number may be from the files': a share of itself, and so much at least."""

    share: float
    least: float = torch.finfo(torch.float32).tiny

    @classmethod
    def of(cls, dtype: torch.dtype) -> _Allowed:
        """One rounding to `dtype`."""
        if not dtype.is_floating_point:
            return cls(0.0)
        return cls(torch.finfo(dtype).eps / 2 + _SLACK, torch.finfo(dtype).tiny)


@dataclass(frozen=True)
class Verified:
    """One weight: how many numbers of this rank's part were compared, and the largest error in roundings to `dtype`."""

    name: str
    stored: str  # its format, or dtype, in the files
    dtype: str
    numbers: int
    error: float
    digest: str
    ranges: tuple[tuple[int, int], ...]
    total: int


def compare_with_files(model: nn.Module, sources: Mapping[str, Source], folder: str, ctx: Iris) -> tuple[Verified, ...]:
    """Return what was compared of `model` on this rank with the `sources` that it was filled from. Collective.

    Raises `CheckpointError` on every rank, with a line for each weight that is not what the files or other ranks have.
    """
    own: list[Verified] = []
    try:
        own = [_verified(model, name, source) for name, source in _one_of_each(sources)]
        problems = [
            f"rank {ctx.cur_rank}: {each.name} differs from the files by {each.error:.3g} roundings: expected at most 1"
            for each in own
            if not each.error <= 1
        ]
    except Exception as error:  # a file, or memory of the device; the other ranks are waiting for a word
        problems = [f"rank {ctx.cur_rank}: {words(error)}"]
    what = f"{folder} was not loaded as it is stored"
    raise_together(problems, what, ctx)
    told = ctx.hosts.all_gather(own)
    for number, each in enumerate(own):
        alike = [rows[number] for rows in told]
        for other in alike:
            if other.ranges == each.ranges and other.digest != each.digest:
                problems.append(f"{each.name} differs between ranks that hold the same part of it")
                break
        if (missing := _missing(alike, each.total)) is not None:
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
    module = model.get_submodule(parent)
    local, shard, dim = _part(module, key)
    scale = getattr(module, "weight_scale", None) if key == "weight" else None
    kept = str(local.dtype).removeprefix("torch.")
    if scale is None:
        allowed = _Allowed.of(local.dtype)
    else:
        local = restored(local, scale, torch.float32)
        again = by_rows(source) is None
        allowed = _Allowed(_OF_FP8, float(scale.max()) * _SMALLEST_FP8) if again else _Allowed(_SLACK)
    stored = _stored(source)
    if getattr(module, "stored_transposed", False) and key == "weight":
        source = Transposed(source)
    error = max((_error(piece, source, index, allowed) for piece, index in _pieces(local, shard, dim)), default=0.0)
    ranges = shard.ranges if shard is not None else ((0, local.shape[0] if local.dim() else 1),)
    total = shard.total if shard is not None else ranges[0][1]
    return Verified(name, stored, kept, local.numel(), error, f"{checksum(local):016x}", ranges, total)


def _part(module: Any, key: str) -> tuple[torch.Tensor, Shard | None, int]:
    """What this rank holds of a parameter, which part of the whole that is, and along which dimension."""
    local = getattr(module, key).detach()
    if hasattr(module, "load_shard"):
        split = key == "weight" or module.dim == 0
        return local, concat(module.parts) if split else None, module.dim if key == "weight" else 0
    part, dim = part_of(module, key) or (None, 0)
    return local, part, dim


def _pieces(local: torch.Tensor, shard: Shard | None, dim: int) -> Iterator[tuple[torch.Tensor, tuple[slice, ...]]]:
    """Parts of `local` of about 2 million numbers, and where each stands in the whole."""
    if not local.dim():
        yield local, ()
        return
    whole = shard or Shard(local.shape[0], ((0, local.shape[0]),))
    at = 0
    for start, stop in whole.ranges:
        held, at = local.narrow(dim, at, stop - start), at + stop - start
        if not held.numel():
            continue
        if dim > 1:  # a stored tensor is cut in one of its later dimensions only
            yield held, (slice(None),) * dim + (slice(start, stop),)
            continue
        rows = max(1, _PIECE * held.shape[0] // held.numel())
        for first in range(0, held.shape[0], rows):
            piece = held[first : first + rows]
            along = slice(first, first + piece.shape[0])
            yield piece, (slice(start + along.start, start + along.stop),) if dim == 0 else (along, slice(start, stop))


def _error(piece: torch.Tensor, source: Any, index: tuple[slice, ...], allowed: _Allowed) -> float:
    """The largest difference of `piece` from `source[index]`, in allowed ones."""
    exact = torch.empty(piece.shape, dtype=torch.float64, device=piece.device)
    fill(exact, source, index)
    difference = (piece.double() - exact).abs()
    difference.masked_fill_(piece.isnan() & exact.isnan() | (piece == exact), 0.0)
    return (difference / (exact.abs() * allowed.share + allowed.least)).nan_to_num(float("inf")).max().item()


def _missing(parts: list[Verified], total: int) -> int | None:
    """The first entry that none of `parts` has."""
    end = 0
    for start, stop in sorted(each for part in parts for each in part.ranges):
        if start > end:
            return end
        end = max(end, stop)
    return end if end < total else None
