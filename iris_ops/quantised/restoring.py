"""Products with a weight that is first made in the dtype of the rows: for any format, on any device.

On GPUs one kernel restores a weight at about the rate at which memory takes it. On CPUs torch does.
"""

from __future__ import annotations

from iris import platform
from iris.device import arch
from iris.machines import machine_of
import torch
from torch.nn import functional as F
import triton
import triton.language as tl

from ..kernels.arguments import TileEpilogue
from ..named import named
from ..planning.product_model import stream_launches
from ..planning.weights import format_of
from . import many_rows, skinny_stream, weight_stream
from .packing import PACKINGS

_BLOCK = 1024  # entries of a program


@triton.jit
def restore_kernel(
    weight, scale, out, K, stride_w, stride_s, ENTRY: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Restore out [rows, K] from a stored weight and its scales.

    `ENTRY` is the entry of a `Widening`. GROUP is 0 if each row has one scale. ZEROS: whether each has a zero point.
    """
    arch.follow()
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = ENTRY(weight + row * stride_w, k, k < K)
    if GROUP == 0:
        factor = tl.load(scale + row)
    else:
        place = scale + row * stride_s + k // GROUP * (1 + ZEROS)
        stored = tl.load(place, mask=k < K, other=0)
        if ZEROS:
            number -= tl.load(place + 1, mask=k < K, other=0).to(tl.float32)
        if stored.dtype == tl.uint8:  # an exponent; 2**-127 is subnormal
            bits = stored.to(tl.int32)
            factor = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
        else:
            factor = stored.to(tl.float32)
    arch.lead()
    tl.store(out + row * K + k, arch.round_to(number * factor, out.dtype.element_ty), mask=k < K)


def restored(weight: torch.Tensor, scale: torch.Tensor, K: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [N, K] that a stored weight and its scale represent."""
    if not (weight.numel() and K):
        return torch.zeros(weight.shape[0], K, dtype=dtype, device=weight.device)
    form = format_of(weight.t(), scale)
    if weight.device.type == "cpu" or not form.widening or weight.stride(1) != 1:
        return PACKINGS[form.packing].unpack(weight, scale, K, dtype)
    return restored_by_kernel(weight, scale, K, dtype)


def restored_by_kernel(weight: torch.Tensor, scale: torch.Tensor, K: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the same by `restore_kernel`."""
    form = format_of(weight.t(), scale)
    policy, out = named(form.widening), torch.empty(weight.shape[0], K, dtype=dtype, device=weight.device)
    words = weight if weight.dtype.is_floating_point else weight.view(torch.int32)
    if out.numel():
        restore_kernel[(weight.shape[0], triton.cdiv(K, _BLOCK))](
            words, scale, out, K, words.stride(0), scale.stride(0), ENTRY=policy.entry, GROUP=form.group,
            ZEROS=form.zeros, BLOCK=_BLOCK,
            num_warps=4, **platform.launch_options(weight.device),
        )  # fmt: skip
    return out


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [M, K] times the transpose of the weight, plus the bias, in x's dtype; to `out`, if there is one.

    Some hundred rows are multiplied by launches of the stream of weights, where these take less than a weight made
    in x's dtype.
    """
    if config := many_rows.tile_for(x, weight, scale):
        result = x.new_empty(x.shape[0], weight.shape[0]) if out is None or not out.is_contiguous() else out
        many_rows.multiply(result, x, weight, scale, bias, config)
        return result if out is None or result is out else out.copy_(result)
    if count := _stream_launches(x, weight, scale):
        result = x.new_empty(x.shape[0], weight.shape[0]) if out is None or not out.is_contiguous() else out
        epilogue = TileEpilogue(None if bias is None else bias.contiguous())
        for part, rows in zip(result.tensor_split(count), x.tensor_split(count), strict=True):
            skinny_stream.multiply(part, rows, weight, scale, epilogue)
        return result if out is None or result is out else out.copy_(result)
    result = F.linear(x, restored(weight, scale, x.shape[1], x.dtype), bias)
    return result if out is None else out.copy_(result)


def _stream_launches(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> int:
    """Return how many launches of the stream of weights serve a product; 0 where B is better made in x's dtype."""
    form = format_of(weight.t(), scale)
    if not x.is_cuda or x.requires_grad or weight_stream.supports(x[: form.local_rows], weight.t(), scale):
        return 0
    return stream_launches(form, *x.shape, weight.shape[0], machine_of(x.device))


def fixed_product(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Return the restored weight, which the caller multiplies in a fixed order; `out` is not written."""
    return restored(weight, scale, x.shape[1], x.dtype)
