"""Weights in fp8 (e4m3, a scale for each column of B), and products with them by torch.

    B[:, n]  =  scale[n] * B8[:, n]        scale[n] a power of two: the column's largest entry is between 224 and 448

A power of two costs a floating-point format nothing in accuracy, and makes the way back exact. A weight is off by at
most 1/16 of itself or, if that is more, 2**-10 of its column's scale.

    rows of A         the product                                                      A is
    up to 16, Hopper  a stream of weights, widened in registers (`weight_stream.py`)        as it is
    more, Hopper      a stream of weights as they are (`tile_matmul.py`)                 rounded to e4m3, a scale a row
    else, bf16        `torch._scaled_mm` on GPUs with fp8 tensor cores                 rounded likewise
    else              by the weight that B8 and scale represent, made in each call     as it is

All-reduces and reduce-scatters of rounded rows have the kernels of 16 bits, in which scales end a tile
(`lamport_matmul.py`, `pipeline.py`). Gathered rows travel unrounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iris import platform
from iris.device import arch
from iris.launch import relaunch
import torch
from torch.nn import functional as F
import triton
import triton.language as tl

from ..kernels.descriptors import in_whole_vectors, of_whole_vectors
from ..planning.weights.fp8 import FP8, MULTIPLE
from . import packing, tile_matmul

# Elements of a row that a program of `round_rows` holds: of few rows all of them, of more as many as let several
# programs share a multiprocessor.
_FEW, _AT_ONCE = 128, (16384, 4096)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `weight` [rows, K] in fp8 and its scale [rows].

    A row with a NaN or an infinity becomes NaN everywhere.
    """
    return packing.FP8.quantise(weight)


def restored(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight that W8 and scale represent."""
    return packing.FP8.unpack(weight, scale, weight.shape[1], dtype)


def multiplies_in_fp8(shape: torch.Size, device: torch.device | str, dtype: torch.dtype) -> bool:
    """Return whether a weight of `shape` is multiplied in fp8: that takes fp8 tensor cores, bf16 rows and multiples of
    16."""
    aligned = shape.numel() > 0 and all(size % MULTIPLE == 0 for size in shape)
    served = dtype == torch.bfloat16 and aligned
    return served and platform.compute_capability(torch.device(device)) >= platform.HOPPER


@triton.jit
def round_rows_kernel(inp, out, scales, columns, stride_in, BLOCK: tl.constexpr):
    """Round one row: out = inp / scale in e4m3, with scale = its largest entry / 448.

    A row that does not fit in a block is read twice.
    """
    arch.follow()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    first = tl.load(inp + row * stride_in + at, mask=at < columns, other=0.0)
    largest = tl.abs(first.to(tl.float32))
    for start in range(BLOCK, columns, BLOCK):
        entries = tl.load(inp + row * stride_in + start + at, mask=start + at < columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(entries.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0), 2.0**-100) / 448.0
    arch.lead()
    tl.store(scales + row, scale)
    tl.store(out + row * columns + at, (first.to(tl.float32) / scale).to(tl.float8e4nv), mask=at < columns)
    for start in range(BLOCK, columns, BLOCK):
        entries = tl.load(inp + row * stride_in + start + at, mask=start + at < columns, other=0.0)
        rounded = (entries.to(tl.float32) / scale).to(tl.float8e4nv)
        tl.store(out + row * columns + start + at, rounded, mask=start + at < columns)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x [M, K] in e4m3 and the scale [M, 1] of each row."""
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    args, options = _rounding(out, scale, x)
    round_rows_kernel[(x.shape[0],)](**args, **options)
    return out, scale


def launch_rounding(
    kernels: dict, out: torch.Tensor, scales: torch.Tensor, x: torch.Tensor, moving: Sequence[int]
) -> relaunch.Launch | None:
    """Launch `round_rows` of x into `out` and `scales`; return what `relaunch` repeats, or None."""
    args, options = _rounding(out, scales, x)
    return relaunch.launch(kernels, x.device, round_rows_kernel, (x.shape[0], 1, 1), args, moving, **options)


def _rounding(out: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> tuple[dict, dict]:
    """Return the arguments and options of a launch."""
    block = min(_AT_ONCE[x.shape[0] > _FEW], triton.next_power_of_2(x.shape[1]))
    args = dict(inp=x, out=out, scales=scales, columns=x.shape[1], stride_in=x.stride(0), BLOCK=block)
    return args, dict(num_warps=max(4, block // 1024), **platform.launch_options(x.device))


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [M, K] times the transpose of the fp8 weight [N, K] with its scale, plus the bias, in x's dtype.

    The result is stored in `out`, if that is given.
    """
    if x.shape[0] == 0 or not multiplies_in_fp8(weight.shape, x.device, x.dtype):
        result = F.linear(x, restored(weight, scale, x.dtype), bias)
    else:
        direct = out if out is not None and of_whole_vectors(out) and out.is_contiguous() else None
        result = rounded_product(x, weight, scale, bias, direct)
        if direct is not None:
            return direct
    return result if out is None else out.copy_(result)


def fixed_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor | None:
    """Return the same to `out`, by our kernel: a row has the same bits at any number of rows.

    Where it cannot be multiplied in fp8, `out` is left alone, and the weight that W8 and scale represent returned.
    """
    if not multiplies_in_fp8(weight.shape, x.device, x.dtype):
        return restored(weight, scale, x.dtype)
    rounded_product(x, weight, scale, bias, out, by_tiles=True)
    return None


def rounded_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    by_tiles: bool = False,
) -> torch.Tensor:
    """Return the same of x rounded to fp8, too; to `out`, if there is one: contiguous, of whole vectors.

    `by_tiles`: not by torch's product, whatever is faster.
    """
    rounded, scale_x = round_rows(x if x.stride(1) == 1 else x.contiguous())
    weight = in_whole_vectors(weight)  # of another torch's product makes NaN
    if by_tiles or tile_matmul.is_faster(x.shape[0], weight.shape[0], x.device):
        out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
        tile_matmul.multiply(out, rounded, scale_x, weight, scale, bias if bias is None else bias.contiguous())
        return out
    factors: dict[str, Any] = dict(scale_a=scale_x, scale_b=scale[None, :], out_dtype=x.dtype)
    if out is None:
        result = torch._scaled_mm(rounded, weight.t(), **factors)
    else:
        result = torch._scaled_mm(rounded, weight.t(), **factors, out=out)
    return result if bias is None else result.add_(bias)
