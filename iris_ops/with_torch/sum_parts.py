"""A rank's own part of a sum and what its peers sent for it, added up."""

from __future__ import annotations

from iris.device import arch
import triton
import triton.language as tl

from ..kernels.tiles import Matrix, add_bias


@triton.jit
def sum_parts_kernel(
    out,
    staging,
    bias,
    rows,
    N,
    stride_om,
    stride_on,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """`out [rows, N] += sum of the peers' parts (+ bias)`, in fp32, in rank order from the rank's own on.

    `staging`: [WORLD_SIZE - 1, rows, N], the next rank's part first. One program a tile.
    """
    num_n = tl.cdiv(N, BLOCK_N)
    row, col = tl.program_id(0) // num_n * BLOCK_M, tl.program_id(0) % num_n * BLOCK_N
    target, mask = Matrix(out, rows, N, stride_om, stride_on, False).pointers(row, col, BLOCK_M, BLOCK_N)
    acc = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    size = tl.cast(rows, tl.int64) * N  # a single row is a number that the compiler knows
    for i in tl.static_range(WORLD_SIZE - 1):
        place, _ = Matrix(staging + i * size, rows, N, N, 1, False).pointers(row, col, BLOCK_M, BLOCK_N)
        acc += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    if HAS_BIAS:
        acc = add_bias(acc, bias, col, N, BLOCK_N)
    tl.store(target, arch.round_to(acc, out.dtype.element_ty), mask=mask)
