"""Products of many rows without ranks by weights with scales of groups, on NVIDIA Hopper.

It is the warp-specialised kernel of `kernels/hopper/gather_matmul.py` with one rank. Rows are rounded to fp8 for
weights in fp8 blocks, whose scales multiply sums block by block (`scaled_mma.py`). Other codes are widened in registers
(`widened_mma.py`), and rows stay as they are.
"""

from __future__ import annotations

from dataclasses import replace

from iris.machines import machine_of
import torch

from ..config import FusedConfig
from ..kernels.descriptors import of_whole_vectors
from ..kernels.hopper.gather_matmul import multiply_without_rank
from ..operands import Operands
from ..planning.product_model import local_problem, quantised_tile
from ..planning.weights import format_of
from . import scaled_matmul


def tile_for(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> FusedConfig | None:
    """Return the tile that multiplies x [M, K] by a stored weight, or None where the weight is converted instead."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or x.requires_grad or x.numel() == 0:
        return None
    if not (of_whole_vectors(x) and of_whole_vectors(weight)):
        return None
    return quantised_tile(format_of(weight.t(), scale), *x.shape, weight.shape[0], machine_of(x.device))


def multiply(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
    config: FusedConfig,
) -> None:  # fmt: skip
    """Compute out [M, N], contiguous, as x [M, K] times the transpose of the weight [N, ...], plus the bias."""
    form = format_of(weight.t(), scale)
    problem = replace(local_problem(x.shape[0], weight.shape[0], x.shape[1], x.dtype), weights=form)
    scales: dict[str, torch.Tensor | int] = {}
    if form.rounds_rows:
        x, factors = scaled_matmul.round_rows(x)
        scales = dict(a_scales=factors, block_scales=scale, block_stride=scale.stride(0))
    bias = None if bias is None else bias.contiguous()
    multiply_without_rank(problem, config, Operands(out, x, weight.t(), bias, scale), scales)
