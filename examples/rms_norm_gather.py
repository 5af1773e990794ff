"""RMSNorm of each rank's rows and their all-gather, in one kernel: what a sequence-parallel layer begins with.

A program norms a block of rows and sends it to every rank at once, by `iris.tiles`, while others still read theirs. So
the normed rows make one way through memory, where two kernels would store them, wait, and load them again.

    python -m examples.rms_norm_gather
"""

import iris
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_gather_kernel(
    ctx_ptr, space, x, weight, out, rows, columns, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute out [world * rows, columns]: all ranks' x [rows, columns], each row normalised and times weight
    [columns].

    ROWS is the height of a tile, which has COLUMNS columns: a power of two from `columns` on. All tensors are
    contiguous.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, space)
    n = tl.arange(0, COLUMNS)
    scale = tl.load(weight + n, n < columns, 0.0).to(tl.float32)
    for number in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        m = number * ROWS + tl.arange(0, ROWS)
        at, inside = m[:, None] * columns + n[None, :], (m < rows)[:, None] & (n < columns)[None, :]
        value = tl.load(x + at, inside, 0.0).to(tl.float32)
        normed = value * tl.rsqrt(tl.sum(value * value, 1) / columns + eps)[:, None] * scale[None, :]
        tiles.all_gather(normed, number, out + at, rows * columns, inside, out.dtype.element_ty)
    tiles.close()


def rank_main(rows: int = 21, columns: int = 200, eps: float = 1e-6) -> None:
    with iris.iris(heap_size=1 << 26) as ctx:
        dtype = torch.bfloat16 if ctx.device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(ctx.num_ranks * rows, columns, generator=generator).to(ctx.device, dtype)
        weight = torch.randn(columns, generator=generator).to(ctx.device, dtype)
        out, block = torch.empty_like(x), (4, triton.next_power_of_2(columns))
        number = triton.cdiv(rows, block[0])
        space = ctx.ccl.tile_space(number, block[0] * block[1], dtype)
        grid = (min(number, ctx.get_cu_count()),)  # all programs of a grid that waits run at once
        mine = x[ctx.cur_rank * rows : (ctx.cur_rank + 1) * rows]
        for _ in range(2):
            rms_norm_gather_kernel[grid](
                ctx.get_device_context(), space, mine, weight, out.fill_(7.0), rows, columns, eps, *block, ctx.num_ranks
            )
            exact = torch.nn.functional.rms_norm(x.double(), (columns,), weight.double(), eps)
            error = ((out - exact).abs().max() / exact.abs().max()).item()
            assert error < (1e-2 if dtype is torch.bfloat16 else 1e-5)
        ctx.barrier()
        ctx.info(f"{tuple(out.shape)} {dtype}, {rows} rows from here; largest error {error:.1e} of the largest value")


if __name__ == "__main__":
    launch.run(rank_main)
