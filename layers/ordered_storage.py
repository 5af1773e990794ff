"""Store a weight whose groups do not follow each other along K, as GPTQ orders entries by activation.

Each rank sorts the columns that it holds by group. Kernels then find a group's entries side by side, as in any other
weight, and the layer takes the columns of its input in the same order: one gather a product. A rank that holds some of
the columns has a part of each group, so groups are padded to whole multiples of the form's: padding multiplies any
column of the input by 0.
"""

from __future__ import annotations

from typing import Any

from iris_ops import torch_ops
import torch
from torch import nn

from .formats.coded import rows_of
from .shard import Shard
from .weight_storage import Form, Layer, Quantised


class Ordered(Quantised):
    """Codes and scales with sorted columns. `weight_order` [entries of a stored row]: which input each multiplies."""

    tensors = (*Quantised.tensors, "weight_order")

    def __init__(self, layer: Layer, form: Form, rounds: bool = True) -> None:
        assert form.order is not None and form.group is not None
        ranges = ((0, layer.in_features),) if layer.dim == 0 else layer.parts[0].ranges
        self._ranges = [(start, stop) for start, stop in ranges if start < stop]
        device = form.order.groups.device
        columns = [torch.arange(start, stop, device=device) for start, stop in self._ranges]
        own = torch.cat(columns) if columns else torch.zeros(0, dtype=torch.int64, device=device)
        self._arrangement = form.order.arranged(own, form.group)
        if layer.dim == 1:
            layer.across_ranks = torch_ops.Parts(form.widest, layer.across_ranks.k_per_rank)
        layer.weight_order = self._indices(layer.weight.device)
        super().__init__(layer, form, rounds)

    def depth(self, layer: Layer) -> int:
        return len(self._arrangement.index)

    def inputs(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(-1, layer.weight_order)

    def fill(self, layer: Layer, before: int, shard: Shard, source: Any) -> None:
        if layer.weight_order.is_meta:
            layer.weight_order = self._indices(layer.ctx.device)
        super().fill(layer, before, shard, source)

    def numbers(self, layer: Layer, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        stored = super().numbers(layer, start, stop, dtype)
        index = self._arrangement.index.to(stored.device)
        exact = stored.new_zeros(stored.shape[0], layer.local_shape[1])
        exact[:, index[index >= 0]] = stored[:, index >= 0]
        return exact

    def _indices(self, device: torch.device) -> nn.Parameter:
        return nn.Parameter(self._arrangement.index.clamp(min=0).int().to(device), requires_grad=False)

    def _copy(self, layer: Layer, before: int, shard: Shard, source: Any) -> None:
        ranges, at = (shard.ranges, before) if layer.dim == 0 else (((0, layer.local_shape[0]),), 0)
        for first, last in ranges if self._ranges else ():
            for row, codes, scales in rows_of(source, (first, last), self._ranges, self.packing.zeros):
                self._store_sorted(layer, at + row, codes, scales)
            at += last - first

    def _store_sorted(self, layer: Layer, row: int, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """Write the codes of local columns and the scales of all groups, from a local row on."""
        index, groups = (each.to(codes.device) for each in (self._arrangement.index, self._arrangement.groups))
        scales, codes = scales.index_select(1, groups), codes.index_select(1, index.clamp(min=0))
        middle = self.packing.zero_code
        zeros = scales[..., 1] + middle if self.packing.zeros else torch.full_like(scales, middle)
        of_entries = zeros.to(codes.dtype).repeat_interleave(self.form.group, 1)
        self._store(layer, row, torch.where(index < 0, of_entries, codes), scales)

    def _round_rows(self, layer: Layer, row: int, exact: torch.Tensor) -> None:
        index = self._arrangement.index.to(exact.device)
        padded = nn.functional.pad(exact, (0, 1))  # its last column is that of padding
        super()._round_rows(layer, row, padded.index_select(1, index.masked_fill(index < 0, exact.shape[1])))
