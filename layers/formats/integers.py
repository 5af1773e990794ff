"""Code that formats of integers share: a weight is (code - zero) * scale, with a zero and a scale for each group along
K."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from iris.errors import CheckpointError
import torch

from ..checkpoint.files import StoredTensor
from .bits import Span, block_of, blocks
from .order import Order
from .weight_format import Coding, WeightFormat

_SCALES = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class GroupedIntegers(WeightFormat):
    """Integers of `bits`, `group` of them along K to a scale. `order`: which ones, where they do not follow each
    other."""

    bits: int
    group: int
    order: Order | None = None

    @property
    def label(self) -> str:
        shared = "channel" if self.group >= self.shape[1] else f"groups of {self.group}"
        return f"{self.name} int{self.bits} by {shared}{', ordered' if self.order else ''}"

    @property
    def unit(self) -> int:
        apart = self.order or self.group >= self.shape[1]
        return 32 // self.bits if apart else self.group

    @property
    def per_scale(self) -> int:
        return self.group

    def coding(self, tensors: Mapping[str, StoredTensor]) -> Coding | str:
        zeros = "zero" in tensors and not self._is_symmetric(tensors["zero"])
        group = self.order.shared if self.order else self.group
        return Coding(f"int{self.bits}", group, tensors["scale"].dtype, zeros, self.order)

    def pairs(self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span) -> torch.Tensor:
        scale, zero = self.scales(held, rows, columns), self.zeros(held, rows)
        zero = zero if isinstance(zero, torch.Tensor) else torch.full_like(scale, zero)
        return torch.stack((scale, zero.float() - (1 << (self.bits - 1))), 2)

    def _is_symmetric(self, stored: StoredTensor) -> bool:
        """Return whether all zero points in `stored` are the middle one. Reads them, of all ranks."""
        rows, columns = (0, self.shape[0]), (0, self.shape[1])
        for some in ((0, self.group), columns):  # most weights that are not have others in the first group
            zeros = self.zeros({"zero": stored[self.reads(rows, some)["zero"]]}, rows)
            if not isinstance(zeros, torch.Tensor) or not (zeros == 1 << (self.bits - 1)).all():
                return False
        return True

    def groups(self, columns: Span) -> Span:
        """Return the groups whose scales `columns` need: all of them where entries are ordered by activation."""
        return (0, -(-self.shape[1] // self.group)) if self.order else blocks(columns, self.group)

    def packed_span(self, span: Span) -> Span:
        """Return the int32 elements that hold `span`, where codes are packed along it."""
        return blocks(span, 32 // self.bits)

    def within(self, codes: torch.Tensor, span: Span, dim: int) -> torch.Tensor:
        """Return `span` of `codes`, which are unpacked from `packed_span(span)` along `dim`."""
        return codes.narrow(dim, span[0] % (32 // self.bits), span[1] - span[0])

    def widen(
        self, held: Mapping[str, torch.Tensor], rows: Span, columns: Span, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        scale = self.scales(held, rows, columns, dtype)
        of = self.order.groups[slice(*columns)] if self.order else block_of(columns, self.group, scale.device)
        zero = self.zeros(held, rows)
        codes = self.codes(held, rows, columns).to(dtype)
        codes = codes - (zero.to(dtype).index_select(1, of) if isinstance(zero, torch.Tensor) else zero)
        return codes * scale.index_select(1, of)

    @abstractmethod
    def zeros(self, held: Mapping[str, torch.Tensor], rows: Span) -> torch.Tensor | int:
        """Return the integers that represent 0: [rows, groups read], or one for all."""


def check_scales(scale: StoredTensor) -> None:
    """Raise `CheckpointError` unless stored scales are of a dtype that libraries write."""
    if scale.dtype not in _SCALES:
        raise CheckpointError(f"has scales in {scale.dtype}: expected one of {', '.join(map(str, _SCALES))}")


def stored_order(stored: StoredTensor | None, columns: int, group: int) -> Order | None:
    """Return the order that a stored index of each entry's group gives; None where groups follow each other.

    compressed-tensors fills an index that it does not use with -1. Raises `CheckpointError` for one that is wrong.
    """
    if stored is None:
        return None
    if stored.shape != (columns,) or stored.dtype not in (torch.int32, torch.int64):
        raise CheckpointError(f"has g_idx {stored.dtype} {list(stored.shape)}: expected int32 [{columns}]")
    groups = stored[(slice(None),)].long()
    if (groups == -1).all() or torch.equal(groups, torch.arange(columns, device=groups.device) // group):
        return None
    least, most, count = int(groups.min()), int(groups.max()), -(-columns // group)
    if least < 0 or most >= count:
        raise CheckpointError(f"has g_idx from {least} to {most}: expected groups from 0 to {count - 1}")
    return Order.of(groups)
