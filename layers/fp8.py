"""Weights in eight bits (e4m3, one scale for each output channel): half the memory of the linears that take it.

    W[n, :]  =  scale[n] * W8[n, :]        scale[n] a power of two: the row's largest entry is between 224 and 448

A power of two costs a floating-point format nothing in accuracy, and makes the way back exact: a saved model holds what
the product used. A weight is off by at most 1/16 of itself.

On GPUs with fp8 tensor cores and for bf16 the input is rounded to e4m3 too, a scale for each row, by one kernel, and
`torch._scaled_mm` multiplies; elsewhere the weight is converted in each call, which saves memory and not time.

    linear                              what runs                                                 fused
    column-parallel, not gathered       rounding; product and scales                              nothing to exchange
    row-parallel, summed over ranks     rounding; product and scales; `ctx.ccl.all_reduce`; bias  nothing

Row-parallel weights have a scale for each output channel and rank, for each rank rounds the columns that it holds. Its
product is rounded to the input's dtype once, then summed in fp32. The fused ops take no fp8 operand, so the sum follows
the product: whether half the weight's bytes are worth that depends on the shape. Gathered products (the head) and
sequence-parallel ones keep their dtype. The report shows which are which.
"""

from __future__ import annotations

from iris import names
import torch
from torch.nn import functional as F
import triton
import triton.language as tl

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """W8 and scale [rows] of `weight` [rows, K]."""
    largest = weight.abs().amax(dim=1).float() if weight.numel() else weight.new_zeros(weight.shape[0]).float()
    mantissa, exponent = torch.frexp(largest / LARGEST)  # largest / 448 = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent).clamp(-100, 100)
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
    scale = ((exponent + 127) << 23).to(torch.int32).view(torch.float32)  # its bits: a power computed may be off
    return (weight.float() / scale[:, None]).to(FP8), scale


def restored(weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weight that W8 and scale stand for."""
    return (weight.float() * scale[:, None]).to(dtype)


def multiplies_in_fp8(shape: torch.Size, device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether a weight of `shape` is multiplied in fp8: that needs tensor cores for it, bf16, multiples of 16."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.hip or dtype != torch.bfloat16:
        return False
    aligned = shape.numel() > 0 and all(size % 16 == 0 for size in shape)
    return aligned and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def round_rows_kernel(inp, out, scales, columns, stride_in, BLOCK: tl.constexpr):
    """One row: out = inp / scale in e4m3, scale = its largest entry / 448. The second pass reads from the cache."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        entries = tl.load(inp + row * stride_in + start + at, mask=start + at < columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(entries.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    for start in range(0, columns, BLOCK):
        entries = tl.load(inp + row * stride_in + start + at, mask=start + at < columns, other=0.0)
        rounded = (entries.to(tl.float32) / scale).to(tl.float8e4nv)
        tl.store(out + row * columns + start + at, rounded, mask=start + at < columns)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] in e4m3 and the scale [M, 1] of each row."""
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty(x.shape[0], 1, dtype=torch.float32, device=x.device)
    block = min(4096, triton.next_power_of_2(x.shape[1]))
    round_rows_kernel[(x.shape[0],)](x, out, scale, x.shape[1], x.stride(0), BLOCK=block, num_warps=8)
    return out, scale


def product(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, in_fp8: bool):
    """x [M, K] times the weight's transpose, plus the bias: [M, rows], in x's dtype."""
    call = torch.ops.iris_layers.fp8_matmul if torch.compiler.is_compiling() else _product
    return call(x, weight, scale, bias, in_fp8)


def _product(x, weight, scale, bias, in_fp8):
    if not in_fp8 or x.shape[0] == 0:
        return F.linear(x, restored(weight, scale, x.dtype), bias)
    rounded, scale_x = round_rows(x)
    out = torch._scaled_mm(rounded, weight.t(), scale_a=scale_x, scale_b=scale[None, :], out_dtype=x.dtype)
    return out if bias is None else out + bias


def sum_over_ranks(partial: torch.Tensor, ctx) -> torch.Tensor:
    """The ranks' sum of `partial`, which is overwritten. The same bits on all of them."""
    if torch.compiler.is_compiling():
        return torch.ops.iris_layers.sum_over_ranks(partial, ctx.group_name)
    ctx.ccl.all_reduce(partial, partial)
    return partial


def _sum_over_ranks(partial: torch.Tensor, group: str) -> torch.Tensor:
    out = torch.empty_like(partial)
    names.find(group).ccl.all_reduce(out, partial)
    return out


# Opaque operators for compilers, as `iris_ops.library` has them.
_library = torch.library.Library("iris_layers", "FRAGMENT")
_exact = {"tags": (torch.Tag.needs_exact_strides,)}
_library.define("fp8_matmul(Tensor x, Tensor weight, Tensor scale, Tensor? bias, bool in_fp8) -> Tensor", **_exact)
_library.define("sum_over_ranks(Tensor partial, str group) -> Tensor", **_exact)
_library.impl("fp8_matmul", _product, "CompositeExplicitAutograd")
_library.impl("sum_over_ranks", _sum_over_ranks, "CompositeExplicitAutograd")
torch.library.register_fake(
    "iris_layers::fp8_matmul", lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]), lib=_library
)
torch.library.register_fake("iris_layers::sum_over_ranks", lambda partial, _: torch.empty_like(partial), lib=_library)
