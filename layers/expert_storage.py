"""Store the weights of split experts as quantised codes with scales, as the kernels of a mixture read them.

A weight is [E, N, K] here, N its outputs, whichever way the model's module stores it. The module holds two parameters,
the codes under the weight's name and the scales under that name with `_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .checkpoint.composed import Concatenation, Stack
from .formats.coded import coded, coding_of
from .formats.weight_format import Coding, Turned, joint_coding
from .shard import Shard, Transposed, fill
from .weight_storage import ELEMENTS, FORMS, Form, form_of

WIDENED = "widened"
_PIECE = 1 << 21  # numbers that are rounded at a time


def scale_name(key: str) -> str:
    """Return the name of the scales of weight `key`."""
    return f"{key}_scale"


def scale_names(module: Any) -> set[str]:
    """Return the names of the scales of a module's weights in codes."""
    return {scale_name(key) for key in getattr(module, "coded", {})}


def coded_weight(module: Any, key: str) -> CodedWeight | None:
    """Return the storage of weight `key` of `module` if that is split experts' and in codes, else None."""
    return getattr(module, "coded", {}).get(key)


def coding_of_experts(source: Any) -> Coding | str:
    """Return what the codes of all experts in `source` [E, ...] mean, or why they cannot be kept."""
    kinds = {coding_of(_by_outputs(entry, False)) for entry in _entries(source)}
    if reasons := sorted(each for each in kinds if isinstance(each, str)):
        return reasons[0]
    codings = [each for each in kinds if isinstance(each, Coding)]
    if any(each.order for each in codings):
        return "its entries are ordered by activation, those of each expert in another order"
    return joint_coding(codings) or "its experts are in several formats"


def expert_entry(source: Any, expert: int) -> Any:
    """Return the matrix of one expert in `source` [E, ...]."""
    if isinstance(source, Stack):
        return source.inside[expert]
    if isinstance(source, Concatenation) and source.dim:
        return Concatenation([expert_entry(each, expert) for each in source.inside], source.dim - 1)
    return source.entry(expert) if hasattr(source, "entry") else source[expert]


def _entries(source: Any) -> Iterator[Any]:
    return (expert_entry(source, expert) for expert in range(source.shape[0]))


def _by_outputs(entry: Any, transposed: bool) -> Any:
    """Return a matrix of the files as [N, K]. `transposed`: they have it as [K, N]."""
    if isinstance(entry, Turned):
        return entry.inside
    return Transposed(entry) if transposed else entry


@dataclass(frozen=True)
class Cut:
    """The division of a weight [E, N, K] among ranks: this rank's rows and columns, and where every rank's columns
    begin."""

    rows: Shard
    columns: Shard
    starts: tuple[int, ...]


def form_for(coding: Coding | str, cut: Cut, weights: str | None) -> Form | str:
    """Return how a weight is stored, or why it is in the model's dtype. `coding`: that of the files, "" for none.

    All ranks choose alike: `weights=` and the files' codes decide as for linears (`hf/stored.py`).
    """
    if weights == WIDENED:
        return "weights='widened'"
    own = coding if isinstance(coding, str) else form_of(coding, cut.columns.total, cut.starts)
    if weights is None:
        return own
    kind = ELEMENTS[FORMS[weights].packing.name]
    return own if isinstance(own, Form) and ELEMENTS[own.packing.name] == kind else FORMS[weights]


class CodedWeight:
    """Weight `key` of a module of split experts, in codes and scales of `form`, of which each rank holds its `cut`.

    `transposed`: whether the model and its files have it as [E, K, N].
    """

    def __init__(self, module: Any, key: str, form: Form, cut: Cut, transposed: bool) -> None:
        self.module, self.key, self.form, self.cut, self.transposed = module, key, form, cut, transposed
        exact = getattr(module, key).detach()
        self.exact_dtype, self.experts = exact.dtype, exact.shape[0]
        self.shape = (self.experts, cut.rows.size, cut.columns.size)
        self._allocate(exact.device)
        module._parts = {**module._parts, scale_name(key): module._parts[key]}
        if not exact.is_meta:
            for expert in range(self.experts):
                local = exact[expert].t() if transposed else exact[expert]
                for start, stop in _pieces(*local.shape):
                    self._round(expert, start, local[start:stop])

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the numbers that codes and scales represent."""
        return self.exact_dtype

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes as an op takes them, [E, K, N] with K packed, and scales."""
        return getattr(self.module, self.key).transpose(1, 2), getattr(self.module, scale_name(self.key))

    @property
    def parameters(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Return codes [E, N, K / packed] and scales [E, N] or [E, N, slots]."""
        return getattr(self.module, self.key), getattr(self.module, scale_name(self.key))

    def keeps(self, source: Any) -> bool:
        """Return whether `fill` copies the codes of `source` and rounds nothing."""
        coding = coding_of_experts(source)
        return not isinstance(coding, str) and self.form.holds(coding, self.cut.columns.total)

    def fill(self, source: Any) -> None:
        """Fill codes and scales from the unsplit weight: copy codes that the form holds, else round the numbers."""
        if self.parameters[0].is_meta:
            self._allocate(self.module.ctx.device)
        store = self._copy if self.keeps(source) else self._fill_rounded
        for expert, entry in enumerate(_entries(source)):
            store(expert, _by_outputs(entry, self.transposed))

    def numbers(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's numbers of one expert, [N, K] or as the model has them."""
        weight, scale = (each.detach()[expert] for each in self.parameters)
        exact = self.form.packing.unpack(weight, scale, self.shape[2], dtype)
        return exact.t() if self.transposed else exact

    def largest_scale(self, expert: int) -> float:
        """Return the largest scale of one expert."""
        scale = self.parameters[1][expert]
        largest = scale.max() if scale.numel() else scale.new_zeros(())
        return 2.0 ** (int(largest) - 127) if scale.dtype == torch.uint8 else float(largest)

    def _allocate(self, device: torch.device) -> None:
        """Make both parameters, zero: kernels read the scales of padding."""
        experts, rows, columns = self.shape
        stored = self.form.packing.stored(experts * rows, columns, self.form.group, self.form.scale_dtype)
        for name, (shape, dtype) in zip((self.key, scale_name(self.key)), stored, strict=True):
            zeros = torch.zeros(experts, rows, *shape[1:], dtype=dtype, device=device)
            setattr(self.module, name, nn.Parameter(zeros, requires_grad=False))

    def _copy(self, expert: int, entry: Any) -> None:
        row = 0
        for index, size in self._ranges():
            group, zeros = self.form.group or entry.shape[1], self.form.packing.zeros
            for rows, columns, codes, scales in coded(entry, index, group, zeros):
                self._store(expert, row + rows[0], codes, scales, columns[0])
            row += size

    def _fill_rounded(self, expert: int, entry: Any) -> None:
        row, device = 0, self.parameters[0].device
        for (rows, columns), size in self._ranges():
            for start, stop in _pieces(size, self.shape[2]):
                exact = torch.empty(stop - start, self.shape[2], dtype=self.exact_dtype, device=device)
                fill(exact, entry, (slice(rows.start + start, rows.start + stop), columns))
                self._round(expert, row + start, exact)
            row += size

    def _ranges(self) -> Iterator[tuple[tuple[slice, slice], int]]:
        """Yield rows and columns of the unsplit matrix that this rank holds, in local order, and how many rows."""
        if not self.shape[2]:
            return
        ((first, last),) = self.cut.columns.ranges
        for start, stop in self.cut.rows.ranges:
            if start < stop:
                yield (slice(start, stop), slice(first, last)), stop - start

    def _round(self, expert: int, row: int, exact: torch.Tensor) -> None:
        if exact.shape[1]:
            self._store(expert, row, *self.form.packing.quantise(exact, self.form.group, self.form.scale_dtype))

    def _store(self, expert: int, row: int, codes: torch.Tensor, scales: torch.Tensor, column: int = 0) -> None:
        """Write codes and scales of a piece that begins at a local row and column, the latter a multiple of 128."""
        packing, group = self.form.packing, self.form.group
        scales = scales.flatten() if group is None else scales
        packed, stored = packing.pack(codes, scales, group, self.form.scale_dtype)
        weight, scale = self.parameters
        rows, first = slice(row, row + len(packed)), column // packing.per_element
        weight[expert, rows, first : first + packed.shape[1]] = packed
        if group is None:
            scale[expert, rows] = stored
        else:  # a packed piece has room for scales of four lines
            count, first = scales.shape[1], column // group
            scale[expert, rows, first : first + count] = stored[:, :count]


def _pieces(rows: int, columns: int) -> list[tuple[int, int]]:
    """Return spans of rows of about 2 million numbers each."""
    step = max(1, _PIECE // max(1, columns))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
