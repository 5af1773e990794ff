"""Store the weight of a split linear: in the dtype of its product, or as quantised codes with scales.

A layer calls its storage where storages differ, so each is an object here and not a condition in the layer. The
tensors are the layer's own: `weight`, and `weight_scale` where the storage has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
import math
from typing import Any

from iris import platform
from iris.errors import ArgumentError
from iris_ops.local import skinny_matmul
from iris_ops.planning.weights import format_of
from iris_ops.quantised import linear as quantised
from iris_ops.quantised.packing import (
    FP8,
    FP8_BLOCK,
    INT4,
    INT4_ZEROS,
    INT8,
    INT8_ZEROS,
    LINE,
    MXFP4,
    NVFP4,
    Packing,
)
from iris_ops.quantised.scaled_matmul import multiplies_in_fp8
import torch
from torch import nn
from torch.nn import functional as F

from .formats.coded import coded, coding_of
from .formats.order import Order
from .formats.weight_format import Coding
from .shard import Shard, fill

Layer = Any  # a `ShardedLinear`, whose module imports this one

LOCAL = "matmul (local)"
REDUCED, SCATTERED, GATHERED = "matmul_all_reduce", "matmul_reduce_scatter", "all_gather_matmul"
STORABLE = LOCAL, REDUCED, SCATTERED, GATHERED  # the ops that read a quantised weight
ELEMENTS = {
    FP8.name: "e4m3", FP8_BLOCK.name: "e4m3", INT4.name: "int4", INT8.name: "int8", MXFP4.name: "e2m1",
    NVFP4.name: "e2m1", INT4_ZEROS.name: "int4", INT8_ZEROS.name: "int8",
}  # fmt: skip
# What holds an element's codes that share a scale in a whole row, and in groups.
_BY_ROW = {"e4m3": FP8, "int4": INT4, "int8": INT8}
_IN_GROUPS = {"e4m3": FP8_BLOCK, "int4": INT4, "int8": INT8, "e2m1": MXFP4}
_WITH_ZEROS = {"int4": INT4_ZEROS, "int8": INT8_ZEROS}
_PIECE = 1 << 21  # numbers that are rounded at a time
_MOST_SORTED_BITS = 12  # of an entry, with padding: bfloat16 has 16


@dataclass(frozen=True)
class Form:
    """A packing, how many entries along K share a scale (None: a whole row), and the dtype of scales."""

    packing: Packing
    group: int | None = None
    scale_dtype: torch.dtype | None = None
    order: Order | None = None
    """The group of each entry of the unsplit weight, where those of a group do not follow each other."""
    widest: int = 0
    """With an order, the entries of the longest row on any rank, sorted by group and padded."""

    @property
    def name(self) -> str:
        """Return the packing and its group, for reports."""
        name = self.packing.name if self.group is None else f"{self.packing.name} by {self.group}"
        return f"{name}, ordered" if self.order else name

    def holds(self, coding: Coding, columns: int) -> bool:
        """Return whether codes of a weight with `columns` columns can be stored without another rounding."""
        if coding.element != ELEMENTS[self.packing.name] or coding.zeros > self.packing.zeros:
            return False
        if coding.order != self.order:
            return False
        if self.scale_dtype not in (None, torch.float32, coding.scales):
            return False
        if self.group is None or coding.group >= columns:
            return coding.group >= columns
        return self.order is not None or coding.group % self.group == 0


def form_of(coding: Coding, columns: int, starts: Iterable[int], by_row: bool = True) -> Form | str:
    """Return the form for codes of a weight with `columns` columns whose shards begin at `starts` along K, or why none
    can hold their groups.

    `by_row`: whether the form may have one scale for each row; else groups repeat it.
    """
    whole = coding.group >= columns
    if whole and by_row and coding.element in _BY_ROW and not coding.zeros:
        return Form(_BY_ROW[coding.element])
    nvfp4 = coding.element == "e2m1" and coding.scales == torch.float8_e4m3fn
    packing = NVFP4 if nvfp4 else (_WITH_ZEROS if coding.zeros else _IN_GROUPS)[coding.element]
    groups = [each for each in packing.groups if each is not None]
    if coding.order is not None:
        return _sorted_form(coding, coding.order, packing, groups, [*starts, columns] if starts else [0, columns])
    shared = math.gcd(0 if whole else coding.group, *starts)
    group = next((each for each in groups if shared % each == 0), None)
    if group is None:
        where = "" if coding.group % min(groups) else f", cut at multiples of {shared}"
        return f"groups of {coding.group}{where} are no multiples of {min(groups)}"
    as_stored = packing in (INT4, INT8) and group < LINE or coding.zeros
    return Form(packing, group, coding.scales if as_stored else None)


def _sorted_form(coding: Coding, order: Order, packing: Packing, groups: list[int], ends: list[int]) -> Form | str:
    """Return the form for codes that each rank sorts by group, with each group padded to a whole number of the form's.

    A rank that has a part of the columns has a part of each group, so its form has the smallest groups. `ends`: where
    the columns of the first rank begin, and where those of each rank end.
    """
    spans = [(start, stop) for start, stop in pairwise(ends) if start < stop]
    group = next((each for each in groups if len(spans) == 1 and coding.group % each == 0), min(groups))
    padded, columns = max((order.padded(span, group), span[1] - span[0]) for span in spans)
    bits = 8 * packing.dtype.itemsize // packing.per_element
    if padded * bits > _MOST_SORTED_BITS * columns:
        return f"{columns} entries on a rank, ordered by activation, would be padded to {padded}"
    return Form(packing, group, coding.scales if group < LINE or coding.zeros else None, order, padded)


FORMS = {
    "fp8": Form(FP8),
    "fp8_all": Form(FP8),
    "fp8_block": Form(FP8_BLOCK, 128),
    "int4": Form(INT4, 128),
    "mxfp4": Form(MXFP4, 32),
}
"""What `weights=` rounds to, by its name there."""
COLUMNS_ONLY = frozenset(("fp8",))
"""The names of those that round no weight whose products are summed over ranks."""


class InDtype:
    """The weight in the dtype of inputs and outputs. `reason`: why quantised numbers of the files were widened."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def dtype(self, weight: torch.Tensor) -> torch.dtype:
        """Return the dtype of inputs and outputs."""
        return weight.dtype

    def op(self, layer: Layer) -> str:
        """Return the op of forward."""
        return layer.op

    def serve_by(self, layer: Layer, op: str) -> None:
        """Let `op` compute forward."""
        layer.op = op

    def named(self, op: str) -> str:
        """Return an op and how it reads the weight, for reports."""
        return op

    def few_rows(self, layer: Layer, gated: bool) -> int:
        """Return up to how many rows `skinny_matmul` computes a product without an exchange in compiled code."""
        return skinny_matmul.most_rows(layer.local_shape[0] // (1 + gated), 1 + gated, True, layer.weight.device)

    def inputs(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        """Return `x` [..., K] with its columns in the order of the stored weight's."""
        return x

    def operand(self, layer: Layer, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the weight [N, K] for a product in `dtype`, another one under torch.autocast, and its scales."""
        weight = layer.local_weight
        return weight if weight.dtype == dtype else weight.to(dtype), None

    def linear(self, layer: Layer, x: torch.Tensor, weight: torch.Tensor, scale: Any, bias: Any) -> torch.Tensor:
        """Return `x` times an operand by torch, plus `bias`."""
        return F.linear(x, weight, bias)

    def fill(self, layer: Layer, before: int, shard: Shard, source: Any) -> None:
        """Fill the part of the layer's weight from entry `before` on with `shard` of `source`."""
        shard.fill(layer.allocated("weight").narrow(layer.dim, before, shard.size), source, layer.dim)

    def keeps(self, source: Any) -> bool:
        """Return whether `fill` copies the codes of `source` and rounds nothing."""
        return False

    def numbers(self, layer: Layer, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the numbers of local rows from `start` to `stop`, in `dtype`."""
        return layer.local_weight.detach()[start:stop].to(dtype)

    def apply(self, layer: Layer, fn: Callable, apply: Callable[[Callable], Any]) -> Any:
        """Run `apply(fn)`, by which torch moves and converts the layer's tensors."""
        return apply(fn)


def unstorable(layer: Layer, rounds: bool = True) -> str:
    """Return why no form serves a layer; "" if one may. `rounds`: whether ranks round their parts of the weight."""
    if rounds and (reason := layer.ctx.level.unrounded_parts):  # scales go by the rank
        return reason
    if hasattr(layer, "tied_to"):
        return f"it is tied to {layer.tied_to}"
    if layer.op not in STORABLE:
        return f"{layer.op} takes no scales"
    return "its inputs are in several parts" if layer.dim == 1 and len(layer.parts) > 1 else ""


class Quantised(InDtype):
    """The weight in codes and scales of a `form`; `exact_dtype` is the dtype of inputs and outputs.

    Ops are given codes and scales. One that has no kernel for them restores the weight in each call.
    """

    tensors: tuple[str, ...] = ("weight", "weight_scale")  # parameters whose dtypes stay

    def __init__(self, layer: Layer, form: Form, rounds: bool = True) -> None:
        super().__init__()
        if reason := unstorable(layer, rounds):
            raise ArgumentError(
                f"weights of the layer are to be stored in {form.name}, but {reason}: expected a layer that supports it"
                f" by {' or '.join(STORABLE)}, whose inputs are in one part, and sums that may differ by the ranks"
            )
        self.form, self.packing = form, form.packing
        self.exact_dtype, self._op = layer.weight.dtype, layer.op
        exact = layer.weight.detach()
        stored = form.packing.stored(layer.local_shape[0], self.depth(layer), form.group, form.scale_dtype)
        layer.weight, layer.weight_scale = (
            nn.Parameter(torch.zeros(shape, dtype=dtype, device=exact.device), requires_grad=False)
            for shape, dtype in stored
        )
        if not exact.is_meta:
            for start, stop in _pieces(*exact.shape):
                self._round_rows(layer, start, exact[start:stop])
        self._choose(layer)

    def depth(self, layer: Layer) -> int:
        """Return how many entries a stored row has, without padding at its end."""
        return layer.local_shape[1]

    def _choose(self, layer: Layer) -> None:
        shape, device = (layer.local_shape[0], self.depth(layer)), layer.ctx.device
        has_kernels = self.exact_dtype == torch.bfloat16 and platform.has_warp_specialisation(device) and shape[0] > 0
        streamed = has_kernels and format_of(layer.weight.t(), layer.weight_scale).streamable(1, shape[1])
        in_fp8 = self.packing == FP8 and multiplies_in_fp8(torch.Size(shape), device, self.exact_dtype)
        self._converts = not (streamed or in_fp8)
        layer.op = self.named(self._op)
        # what is summed over ranks has no steps of its own, and its depth may differ between them
        alone = streamed or self._op == REDUCED
        layer.own_steps = layer.may_step and alone

    def dtype(self, weight: torch.Tensor) -> torch.dtype:
        return self.exact_dtype

    def op(self, layer: Layer) -> str:
        return self._op

    def serve_by(self, layer: Layer, op: str) -> None:
        self._op = op
        self._choose(layer)

    def named(self, op: str) -> str:
        name = self.form.name
        if not self._converts:
            return f"{name} {op}"
        return f"{op[:-1]}, weight converted from {name})" if op == LOCAL else f"{op} (weight converted from {name})"

    def few_rows(self, layer: Layer, gated: bool) -> int:
        return format_of(layer.weight.t(), layer.weight_scale).joined_rows

    def operand(self, layer: Layer, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        return layer.weight, layer.weight_scale

    def linear(self, layer: Layer, x: torch.Tensor, weight: torch.Tensor, scale: Any, bias: Any) -> torch.Tensor:
        return F.linear(x, weight, bias) if scale is None else quantised.linear(x, weight, scale, bias)

    def keeps(self, source: Any) -> bool:
        coding = coding_of(source)
        return not isinstance(coding, str) and self.form.holds(coding, source.shape[1])

    def fill(self, layer: Layer, before: int, shard: Shard, source: Any) -> None:
        """Copy codes and scales of a file that has such codes; round the numbers of another source."""
        for key in ("weight", "weight_scale"):
            if getattr(layer, key).is_meta:
                layer.allocated(key).view(torch.uint8).zero_()  # kernels read scales of padding
        (self._copy if self.keeps(source) else self._round)(layer, before, shard, source)

    def _copy(self, layer: Layer, before: int, shard: Shard, source: Any) -> None:
        group, at = self.form.group, before
        for start, stop in shard.ranges:
            index = (slice(start, stop),) if layer.dim == 0 else (slice(None), slice(start, stop))
            row, column = (at, 0) if layer.dim == 0 else (0, at)
            for rows, columns, codes, scales in coded(source, index, group or source.shape[1], self.packing.zeros):
                scales = scales.flatten() if group is None else scales
                self._store(layer, row + rows[0], codes, scales, column + columns[0])
            at += stop - start

    def _round(self, layer: Layer, before: int, shard: Shard, source: Any) -> None:
        rows, columns = layer.local_shape
        at = before if layer.dim == 0 else 0
        for first, last in shard.ranges if layer.dim == 0 else ((0, rows),):
            for start, stop in _pieces(last - first, columns):
                exact = torch.zeros(stop - start, columns, dtype=self.exact_dtype, device=layer.weight.device)
                some, column = slice(first + start, first + stop), 0
                if layer.dim == 0:
                    fill(exact, source, (some,))
                for begin, end in shard.ranges if layer.dim == 1 else ():
                    fill(exact.narrow(1, column, end - begin), source, (some, slice(begin, end)))
                    column += end - begin
                self._round_rows(layer, at + start, exact)
            at += last - first

    def _round_rows(self, layer: Layer, row: int, exact: torch.Tensor) -> None:
        codes, scales = self.packing.quantise(exact, self.form.group, self.form.scale_dtype)
        self._store(layer, row, codes, scales)

    def _store(self, layer: Layer, row: int, codes: torch.Tensor, scales: torch.Tensor, column: int = 0) -> None:
        """Write codes and scales of a piece that begins at a local row and column, the latter a multiple of 128."""
        packed, stored = self.packing.pack(codes, scales, self.form.group, self.form.scale_dtype)
        rows, first = slice(row, row + len(packed)), column // self.packing.per_element
        layer.weight[rows, first : first + packed.shape[1]] = packed
        if self.form.group is None:
            layer.weight_scale[rows] = stored
        else:  # a packed piece has room for scales of four lines
            count, first = scales.shape[1], column // self.form.group
            layer.weight_scale[rows, first : first + count] = stored[:, :count]

    def numbers(self, layer: Layer, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        weight, scale = (each.detach()[start:stop] for each in (layer.weight, layer.weight_scale))
        return self.packing.unpack(weight, scale, self.depth(layer), dtype)

    def largest_scale(self, layer: Layer) -> float:
        """Return the largest of the weight's scales."""
        scale = layer.weight_scale
        if scale.dtype == torch.uint8:  # exponents
            return 2.0 ** (int(scale.max()) - 127)
        return float(scale.max())

    def apply(self, layer: Layer, fn: Callable, apply: Callable[[Callable], Any]) -> Any:
        """Apply `fn`; a change of dtype changes `exact_dtype` only, not codes and scales."""
        self.exact_dtype = fn(torch.empty(0, dtype=self.exact_dtype, device=layer.weight.device)).dtype
        kept = [getattr(layer, key) for key in self.tensors]
        result = apply(lambda t: fn(t.view(torch.uint8)).view(t.dtype) if any(t is each for each in kept) else fn(t))
        self._choose(layer)
        return result


def _pieces(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return spans of rows of about 2 million numbers each."""
    step = max(1, _PIECE // max(1, columns))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


IN_DTYPE = InDtype()
