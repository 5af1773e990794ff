"""`linear` with a quantised weight: less memory, and less to stream in a decode step.

Which kernel a split layer runs depends on the rows of its input:

    linear                              what runs
    column-parallel, not gathered       few rows: `skinny_stream`; more: the input is rounded, too
    row-parallel, summed over ranks     `matmul_all_reduce` with scales
    either, sequence parallel           `all_gather_matmul`, `matmul_reduce_scatter` with scales

A row-parallel weight has a scale for each output channel and rank, because each rank rounds the columns that it holds.
Gathered products (the head) keep their dtype. The report shows which are which. A saved model holds the weights that
the product used.
"""

from __future__ import annotations

import torch

from ..named import named
from ..operators import OPERATORS
from ..planning.weights import format_of
from ..recording import is_recording, row_count


def linear(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x [..., K] times the transpose of the weight, plus the bias: [..., rows], in x's dtype."""
    call = torch.ops.iris_ops.quantised_matmul if is_recording() else _product
    out = call(x.reshape(row_count(x), x.shape[-1]), weight, scale, bias)
    return out.view(*x.shape[:-1], weight.shape[0])


def _product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return named(format_of(weight.t(), scale).product)(x, weight, scale, bias, None)


OPERATORS.add(
    "quantised_matmul(Tensor x, Tensor weight, Tensor scale, Tensor? bias) -> Tensor",
    _product,
    lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]),
)
