"""Arguments of collectives' kernels, in groups: values of a call as named tuples, constants as frozen dataclasses.

A kernel assigns a field of a constant to a name (`BLOCK: tl.constexpr = unit_form.BLOCK`) where an expression needs a
`constexpr`: the field alone is a plain number there. Triton specialises integers in a named tuple on 1 and on multiples
of 16, so an integer that must not be specialised stays an argument of its own (`do_not_specialize`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class TensorParts(NamedTuple):
    """A tensor, and how it is divided into parts: the first fields of its `View`, in the same order."""

    data: Any
    n: Any
    cols: Any
    stride_row: Any
    stride_col: Any
    share: Any
    limit: Any
    part_step: Any


@dataclass(frozen=True)
class UnitForm:
    """How `inp` and `out` are divided into units of BLOCK elements: the constants of their `View`s.

    INTERLEAVED: of all tensors but an `out` that is one rank's part (ONE_OUT).
    """

    BLOCK: int
    IN_LAYOUT: int
    OUT_LAYOUT: int
    INTERLEAVED: bool
    ONE_OUT: bool
    TILE_N: int
    GROUP_M: int


@dataclass(frozen=True)
class CollectiveForm:
    """Which collective a kernel carries out.

    SCATTER: every rank receives another part of `inp`. REDUCE: parts are summed. GATHER: sums are sent to all ranks.
    """

    SCATTER: bool
    REDUCE: bool
    GATHER: bool


@dataclass(frozen=True)
class NormForm:
    """The form of `all_reduce_norm_kernel`: BLOCK, a power of two of at least N columns; whether sums take a second hop
    (TWO_SHOT), and whether results are divided by a scale."""

    BLOCK: int
    TWO_SHOT: bool
    HAS_SCALE: bool
