"""The product of some tens of rows in fp8 with a weight in fp8.

`weight_stream.py` serves fewer rows, torch's own product more. Each program streams the weights of some outputs once
and multiplies them as outputs x rows, as in `lamport_matmul.py`.

The tensor cores keep the sums, and cut what does not fit into 13 bits after the point. For numbers around zero that is
an error of some 2**-8, beside the 2**-5 of rounding. Where both operands have a mean of a third of their deviation, it
is 1 to 2 %.
"""

from iris import platform
from iris.device import arch
import torch
import triton
import triton.language as tl

from ..kernels.arguments import Tile, TileEpilogue
from ..kernels.descriptors import operand, rows_operand
from ..kernels.tiles import Matrix, add_bias, first_row, multiply_transposed, rows_from, scale_transposed

# By the most rows, and whether there are more tiles of 64 columns than programs: (rows, columns, depth of a
# block, warps), stages.
TILES = {
    (32, False): ((32, 64, 256, 4), 8),
    (32, True): ((32, 128, 256, 4), 5),
    (64, False): ((64, 64, 256, 4), 6),
    (64, True): ((64, 128, 256, 8), 4),
    (128, False): ((128, 64, 128, 4), 8),
    (128, True): ((128, 128, 128, 8), 6),
}
_MOST_ROWS = 128  # of a tile


@triton.jit
def tile_matmul_kernel(a, b, epilogue, out, M, N, K, stride_om, tile: tl.constexpr):
    """Compute out [M, N] = (a_scales * a [M, K]) @ (b_scales * b [N, K]).T + bias; a and b are descriptors."""
    arch.follow()
    BLOCK_M: tl.constexpr = tile.BLOCK_M
    BLOCK_N: tl.constexpr = tile.BLOCK_N
    A, B = Matrix(a, M, K, K, 1), Matrix(b, K, N, 1, K, True)
    num_m = tl.cdiv(M, BLOCK_M)
    tiles = num_m * tl.cdiv(N, BLOCK_N)
    for t in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, col = t % num_m * BLOCK_M, t // num_m * BLOCK_N
        first = first_row(row, M, BLOCK_M)
        acc = multiply_transposed(A, B, first, col, K, tile)
        r, own_row = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, A.FOLDED)
        product = scale_transposed(acc, epilogue.a_scales, epilogue.b_scales, r, col, M, N).T
        if epilogue.bias is not None:
            product = add_bias(product, epilogue.bias, col, N, BLOCK_N)
        if t + tl.num_programs(0) >= tiles:
            arch.lead()
        target, inside = Matrix(out, M, N, stride_om, 1).places(r, col + tl.arange(0, BLOCK_N))
        tl.store(target, arch.round_to(product, out.dtype.element_ty), mask=inside & own_row[:, None])


def is_faster(rows: int, columns: int, device: torch.device) -> bool:
    """Return whether this kernel is faster than torch: on Hopper, with few rows, if each program has a tile."""
    if not platform.has_warp_specialisation(device):
        return False
    tiles = triton.cdiv(rows, _MOST_ROWS) * triton.cdiv(columns, 64)
    return 0 < rows <= _MOST_ROWS or tiles <= platform.num_programs(device)


def multiply(
    out: torch.Tensor,
    rows: torch.Tensor,
    row_scales: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> None:
    """Compute out [M, N] = rows [M, K] @ weight [N, K].T + bias with `tile_matmul_kernel`.

    Rows consist of whole vectors; the bias is contiguous.
    """
    (M, K), N = rows.shape, weight.shape[0]
    programs = platform.num_programs(rows.device)
    most = min(max(32, triton.next_power_of_2(M)), _MOST_ROWS)
    (m, n, k, warps), stages = TILES[most, N > programs * 64]
    a, described = rows_operand(rows, (m, k))
    a, b = a if described else operand(rows, (m, k))[0], operand(weight, (n, k))[0]
    grid = min(programs, triton.cdiv(M, m) * triton.cdiv(N, n))
    tile_matmul_kernel[(grid,)](
        a, b, TileEpilogue(bias, row_scales, scale), out, M, N, K, out.stride(0), Tile(m, n, k, B_TRANSPOSED=True),
        num_warps=warps, num_stages=stages, **platform.launch_options(rows.device),
    )  # fmt: skip
