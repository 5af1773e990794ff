"""The residual sum and the first half of an RMSNorm, in the kernel of the all-reduce before them.

An RMSNorm scales each row h by 1 / sqrt(mean(h^2) + eps). A program has summed some columns only, so it does not know
the mean. But a factor of a whole row may as well be applied to what the next product makes of the row. So here

    out     = h = residual + sum over ranks of A @ B (+ bias)
    scaled  = h * weight                                     rounded, as the norm's result would be
    squares = sums of h^2 over `SPAN` columns each           float32 [cdiv(N, SPAN), M]

and the product that follows multiplies `scaled` and scales the rows of its result
(`iris_ops/local/skinny_matmul.py`). Without this, the norm of a decode step is a kernel of 2 to 3 us that moves a few
KB, twice a layer. Where rows are many the all-reduce is a kernel without such an end, and `first_half_kernel` follows.
"""

from __future__ import annotations

from iris import platform
from iris.device import arch
from iris.device.function import device_function
from iris.errors import ArgumentError, DtypeError, ShapeError
import torch
from torch.nn import functional as F
import triton
import triton.language as tl

from ..checks import check_kind
from ..problem import NORM, NORM_SPAN

SPAN = tl.constexpr(NORM_SPAN)
OP = NORM

# Of a call, beside those of an all-reduce.
EPILOGUE_NAMES = ("residual", "weight", "scaled", "squares")
WRITTEN = "out", "scaled", "squares"
Epilogue = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
# Rows of a program after an all-reduce without this epilogue; the interpreter is quicker with large blocks.
_BLOCK_M = {"cuda": 16, "cpu": 256}


@device_function
def add_residual(residual, weight, r, c, M, N):
    """Load the tile of `residual` at rows r and columns c, and the weights of its columns."""
    place, inside = (r.to(tl.int64) * N)[:, None] + c[None, :], (r < M)[:, None] & (c < N)[None, :]
    return tl.load(residual + place, mask=inside, other=0.0), tl.load(weight + c, mask=c < N, other=0.0)


@device_function
def norm_first_half(total, epilogue, scaled, squares, r, c, col, M, N, BLOCK_N: tl.constexpr):
    """Return `residual + total`, rounded, in fp32, and store `scaled` and `squares` of it.

    `ahead` is the result of `add_residual`. `total` is a tile of rows r and of BLOCK_N columns c, from `col` on.
    """
    residual, weight = epilogue
    place, inside = (r.to(tl.int64) * N)[:, None] + c[None, :], (r < M)[:, None] & (c < N)[None, :]
    dtype: tl.constexpr = scaled.dtype.element_ty
    h = tl.where(inside, arch.round_to(total + residual.to(tl.float32), dtype).to(tl.float32), 0.0)
    tl.store(scaled + place, arch.round_to(h * weight.to(tl.float32)[None, :], dtype), mask=inside)
    sums = squares + (col // SPAN).to(tl.int64) * M + r
    tl.store(sums, tl.sum(h * h, 1), mask=r < M)
    for i in tl.static_range(1, BLOCK_N // SPAN):  # one sum for all of a wider tile
        tl.store(sums + i * M, tl.zeros(r.shape, tl.float32), mask=(r < M) & (col + i * SPAN < N))
    return h


def spans(columns: int) -> int:
    """Return how many sums of squares a row has."""
    return triton.cdiv(columns, SPAN.value)


def first_half(h: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scaled, squares) of rows h [..., N], by torch."""
    columns = h.shape[-1]
    padded = F.pad(h.float().square(), (0, spans(columns) * SPAN.value - columns))
    squares = _halved(padded.view(-1, spans(columns), SPAN.value))
    # with the strides of what a kernel makes, of one span too: compiled code checks them
    return h * weight, squares.t().clone(memory_format=torch.contiguous_format)


def _halved(x: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, a power of two, adding neighbours first.

    torch's own order depends on the number of rows.
    """
    while x.shape[-1] > 1:
        x = x[..., 0::2] + x[..., 1::2]
    return x[..., 0]


def second_half(scaled: torch.Tensor, squares: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the norm [..., N] of the rows of which these are the first half, by torch."""
    sums = _halved(F.pad(squares, (0, 0, 0, triton.next_power_of_2(squares.shape[0]) - squares.shape[0])).t())
    factors = torch.rsqrt(sums / scaled.shape[-1] + eps)
    return (scaled.float() * factors.view(*scaled.shape[:-1], 1)).to(scaled.dtype)


@triton.jit(do_not_specialize=["M"])  # a row's squares are added alike at every number of rows
def first_half_kernel(
    out, residual, weight, scaled, squares, M, N, stride_om, stride_on, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Add the residual to `out`, and store `scaled` and `squares` of the sum."""
    arch.follow()
    across = tl.cdiv(N, BLOCK_N)
    col = tl.program_id(0) % across * BLOCK_N
    r, c = tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
    place = out + (r.to(tl.int64) * stride_om)[:, None] + (c.to(tl.int64) * stride_on)[None, :]
    inside = (r < M)[:, None] & (c < N)[None, :]
    epilogue = add_residual(residual, weight, r, c, M, N)
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    h = norm_first_half(total, epilogue, scaled, squares, r, c, col, M, N, BLOCK_N)
    tl.store(place, h.to(out.dtype.element_ty), mask=inside)
    arch.lead()


def finish(
    out: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor
) -> None:
    """Compute what `norm_first_half` does, from `out` without the residual, after a kernel without this epilogue."""
    M, N = out.shape
    block_m = _BLOCK_M[out.device.type]
    first_half_kernel[triton.cdiv(M, block_m) * spans(N),](
        out, residual, weight, scaled, squares, M, N, *out.stride(), BLOCK_M=block_m, BLOCK_N=SPAN.value, num_warps=4,
        **platform.launch_options(out.device),
    )  # fmt: skip


def after_product(epilogue: object, out: torch.Tensor, product: torch.Tensor, *given: torch.Tensor) -> None:
    """Compute the same, of a product that was stored in `out`, as the separate kernel of an epilogue."""
    finish(out, *given)


def check(epilogue: Epilogue, out: torch.Tensor) -> None:
    """Raise a typed error for a tensor of the wrong kind. `out` [M, N] is checked."""
    M, N = out.shape
    for name, shape, t in zip(EPILOGUE_NAMES, ((M, N), (N,), (M, N), (spans(N), M)), epilogue, strict=True):
        check_kind(OP, name, t, out.device)
        if tuple(t.shape) != shape:
            raise ShapeError(f"{OP}: {name} is {tuple(t.shape)}; expected {shape}, for out {(M, N)}")
        dtype = torch.float32 if name == "squares" else out.dtype
        if t.dtype != dtype:
            raise DtypeError(f"{OP}: {name} has dtype {t.dtype}; expected {dtype}")
        if not t.is_contiguous():
            raise ArgumentError(f"{OP}: {name} has strides {t.stride()}; expected a contiguous tensor")
