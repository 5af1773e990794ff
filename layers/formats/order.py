"""The order of entries that a format of groups stores by itself, as GPTQ does where it quantised by activations."""

from __future__ import annotations

from dataclasses import dataclass, field
import hashlib
import math

import torch

from .bits import Span


@dataclass(frozen=True)
class Order:
    """The group of each entry of a row, `groups` int64 [K], where entries of a group do not follow each other.

    GPTQ stores such an index where it quantised entries by their activations. Two are equal if their digests are.
    """

    groups: torch.Tensor = field(compare=False, repr=False)
    digest: str

    @classmethod
    def of(cls, groups: torch.Tensor) -> Order:
        """Return the order of stored integers [K]."""
        return cls(groups.long(), hashlib.sha256(groups.long().cpu().numpy().tobytes()).hexdigest()[:16])

    @property
    def shared(self) -> int:
        """Return the largest number of entries that divides the sizes of all groups, but for one that is smaller."""
        sizes = sorted(torch.bincount(self.groups).tolist())
        return math.gcd(*[each for each in sizes if each][1:] or sizes)

    def padded(self, columns: Span, size: int) -> int:
        """Return how many entries `columns` take, sorted by group, if each group is padded to multiples of `size`."""
        return int((-(-torch.bincount(self.groups[slice(*columns)]) // size) * size).sum())

    def arranged(self, columns: torch.Tensor, size: int) -> Arrangement:
        """Return how `columns` are sorted by group, if each group is padded to multiples of `size`."""
        groups, sorted_ = self.groups.to(columns.device)[columns].sort(stable=True)
        present, counts = groups.unique_consecutive(return_counts=True)
        padded = -(-counts // size) * size
        places = torch.arange(len(groups), device=groups.device)
        places += (padded.cumsum(0) - padded - counts.cumsum(0) + counts).repeat_interleave(counts)
        index = torch.full((max(size, int(padded.sum())),), -1, device=groups.device)
        index[places] = sorted_
        of_slots = present.repeat_interleave(padded // size)
        return Arrangement(index, of_slots if len(of_slots) else of_slots.new_zeros(1))


@dataclass(frozen=True)
class Arrangement:
    """A rank's entries of a row, sorted by group: `index` [n], the local column of each, or -1 of padding.

    `groups` [n / size]: the group of each `size` of them.
    """

    index: torch.Tensor
    groups: torch.Tensor
