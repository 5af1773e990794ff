"""Arguments of a mixture's kernels, in groups; see `iris_ops/kernels/arguments.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from .routing import Routing


class Choice(NamedTuple):
    """`chosen` [pairs]: each pair's expert. `order`, `offsets`: pairs by expert, where they are sorted."""

    chosen: Any
    order: Any
    offsets: Any


class ExpertStrides(NamedTuple):
    """Elements from row to row, and from column to column, of A and of the result; and B's [experts, K, N]."""

    am: Any
    ak: Any
    be: Any
    bk: Any
    bn: Any
    om: Any
    on: Any


class ExpertScales(NamedTuple):
    """The scales of experts' weights, `e` elements from expert to expert and `n` from column to column."""

    data: Any
    e: Any
    n: Any


@dataclass(frozen=True)
class Codes:
    """The layout of a weight's codes (`coded.py`): PACKED in an element, GROUP along K for each scale (0: one for a
    column).

    LINES: elements hold entries of whole lines, else those that lie there in K's order. ZEROS: whether each scale is
    followed by its zero point.
    """

    PACKED: int
    LINES: bool
    GROUP: int
    ZEROS: bool


class ExpertBias(NamedTuple):
    """The experts' biases, `stride` elements apart; `data` is None where there are none."""

    data: Any
    stride: Any


class Combine(NamedTuple):
    """Terms of a token's sum over its pairs: `weights` [tokens, TOP_K], and `shared` [tokens, N] or None."""

    weights: Any
    stride_wt: Any
    shared: Any
    stride_st: Any
    stride_sn: Any


class DownMemory(NamedTuple):
    """Memory that `moe_lamport_down_kernel` uses apart from its operands and its result.

    Programs of a rank share `products` [pairs, ld], and `counts`, initially zero, one a block of columns. lamport: two
    buffers (`LamportMemory`) for what ranks exchange; sync: [epoch, finished].
    """

    products: Any
    counts: Any
    lamport: Any
    sync: Any


class Sizes(NamedTuple):
    """The columns N and the depth K of an expert's weight."""

    N: Any
    K: Any


@dataclass(frozen=True)
class ScoringForm:
    """The constants of a `Scoring`. KIND: index in `KINDS`; KEPT of GROUPS, each scored by its BEST highest scores."""

    KIND: int
    NORMALISED: bool
    GROUPS: int
    KEPT: int
    BEST: int


@dataclass(frozen=True)
class GroupedForm:
    """The rows that a program multiplies, and the epilogue of its product.

    SORTED: by order and offsets; else by chosen. SEARCHED: experts or pairs, as a power of two. MATRICES: of an expert,
    whose columns are joined. INTERLEAVED: these columns alternate; else the matrices lie side by side, and TOGETHER: a
    tile of both is loaded as one.
    """

    SORTED: bool
    SEARCHED: int
    MATRICES: int = 1
    INTERLEAVED: bool = False
    TOGETHER: bool = False


@dataclass(frozen=True)
class DownForm:
    """`GroupedForm` of `moe_lamport_down_kernel`, which adds up BLOCK_T tokens of TOP_K pairs at once.

    ONE_TILE: those are all; this rank's sums then stay in registers.
    """

    SORTED: bool
    SEARCHED: int
    TOP_K: int
    ONE_TILE: bool
    BLOCK_T: int


@dataclass(frozen=True)
class TokenForm:
    """How a program sums a token's TOP_K experts: CHOICES, a power of two, for BLOCK_N columns, BLOCK_K at a time."""

    TOP_K: int
    CHOICES: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int


@dataclass(frozen=True)
class StreamedForm:
    """How a program streams touched experts (`touched.py`) of tokens that have TOP_K experts each.

    PAIRS: a power of two, at least as many as there are. STAGES: of the ring of weights. MATRICES, INTERLEAVED: as in
    `GroupedForm`. ZEROS: as in `Codes`. LATER: the factor of sums that a `Widening` names.
    """

    TOP_K: int
    PAIRS: int
    STAGES: int
    MATRICES: int
    INTERLEAVED: bool
    ZEROS: bool
    LATER: float


def choice_of(where: torch.Tensor | Routing) -> Choice:
    """Return the `Choice` of `where`: experts as they were chosen, or sorted."""
    if isinstance(where, torch.Tensor):
        return Choice(where, where, where)
    return Choice(where.chosen, where.rows, where.offsets)


def strides_of(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor) -> ExpertStrides:
    return ExpertStrides(*A.stride(), *B.stride(), *out.stride())


def bias_of(bias: torch.Tensor | None) -> ExpertBias:
    return ExpertBias(bias, 0 if bias is None else bias.stride(0))


def combine_of(weights: torch.Tensor, shared: torch.Tensor | None) -> Combine:
    return Combine(weights, weights.stride(0), shared, *((0, 0) if shared is None else shared.stride()))
