"""RMSNorms whose rows have the same bits however many there are, with the residual's sum before them.

    rms_norm(x, weight, eps, offset)                  x / sqrt(mean(x^2) + eps) * (weight + offset) over the last
                                                      dimension
    add_rms_norm(x, residual, weight, eps, offset)    (total, rms_norm(total)) of total = x + residual, rounded
    layer_norm(x, weight, bias, eps)                  torch's kernel, which works row by row, in compiled code too; x is
                                                      copied where it begins between vectors, for which torch has
                                                      other code

Compilers split a row's sum by the number of rows. Here a program has whole rows, in tiles whose sides depend on the
width alone, and both functions add a row's squares in one order. Sums are in fp32, and a result is rounded once. On
CPUs torch's own norm works row by row, so the functions call it.
"""

from __future__ import annotations

from iris import platform
from iris.device import arch
import torch
from torch.nn import functional as F
import triton
import triton.language as tl

from ..operators import OPERATORS

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 1 << 15  # elements of a row that a program's registers hold
_AT_ONCE = 1024  # elements of a program, of rows that are shorter; of the interpreter's, which likes large blocks
_INTERPRETED = 1 << 16
_ALIGNMENT = 16  # bytes: code for other places in memory loads in another order


@triton.jit
def rms_norm_kernel(
    x, residual, weight, total, out, rows, eps, OFFSET: tl.constexpr, N: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalise x [rows, N] into `out` [rows, N].

    With `residual`, store x + residual in `total` and normalise that sum. `residual` and `total` are both None, or
    neither.
    """
    arch.follow()
    r = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    c = tl.arange(0, BLOCK_N)
    factors = tl.load(weight + c, mask=c < N, other=0.0).to(tl.float32) + OFFSET
    place, inside = r[:, None] * N + c[None, :], (r < rows)[:, None] & (c < N)[None, :]
    h = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        h += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        rounded = arch.round_to(h, total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        h = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(h * h, 1) / N + eps)
    tl.store(out + place, arch.round_to(h * scale[:, None] * factors[None, :], out.dtype.element_ty), mask=inside)
    arch.lead()


def normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None, offset: float = 0.0
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return (total, out) computed by the kernel; total is None without `residual`.

    x and residual [..., N] and weight [N] have one dtype.
    """
    N, cuda = weight.shape[0], x.device.type == "cuda"
    x, residual = _in_place(x), None if residual is None else _in_place(residual)
    out = torch.empty_like(x)
    total = None if residual is None else torch.empty_like(x)
    rows, block_n = x.numel() // max(1, N), triton.next_power_of_2(N)
    block_m = max(1, (_AT_ONCE if cuda else _INTERPRETED) // block_n)
    if x.numel():
        rms_norm_kernel[triton.cdiv(rows, block_m),](
            x, residual, _in_place(weight), total, out, rows, eps, OFFSET=float(offset), N=N, BLOCK_M=block_m,
            BLOCK_N=block_n, num_warps=min(16, max(4, block_n // 512)), **platform.launch_options(x.device),
        )  # fmt: skip
    return total, out


def _in_place(t: torch.Tensor) -> torch.Tensor:
    """Return `t`, or a copy that is contiguous and begins where all code for it expects."""
    t = t.contiguous()
    return t if t.data_ptr() % _ALIGNMENT == 0 else t.clone()


def _supported(x: torch.Tensor, weight: torch.Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in _DTYPES and weight.shape[0] <= _WIDEST


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    if _supported(x, weight):
        return normed(x, weight, eps, offset=offset)[1]
    if not offset:
        return F.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)  # in which a weight with its offset is not rounded
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide) + offset, eps).to(x.dtype)


def _layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return F.layer_norm(_in_place(x) if x.device.type == "cuda" else x, weight.shape, weight, bias, eps)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    if _supported(x, weight):
        total, out = normed(x, weight, eps, residual, offset)
        assert total is not None
        return total, out
    total = x + residual
    return total, _rms_norm(total, weight, eps, offset)


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


rms_norm = OPERATORS.add(
    "rms_norm(Tensor input, Tensor weight, float eps, float offset=0.0) -> Tensor",
    _rms_norm,
    lambda x, *_: _like(x),
    exact_strides=False,
)
add_rms_norm = OPERATORS.add(
    "add_rms_norm(Tensor input, Tensor residual, Tensor weight, float eps, float offset=0.0) -> (Tensor, Tensor)",
    _add_rms_norm,
    lambda x, *_: (_like(x), _like(x)),
    exact_strides=False,
)
layer_norm = OPERATORS.add(
    "layer_norm(Tensor input, Tensor weight, Tensor? bias, float eps) -> Tensor",
    _layer_norm,
    lambda x, *_: _like(x),
    exact_strides=False,
)
