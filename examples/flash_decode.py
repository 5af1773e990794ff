"""Attention of one new token over a cache that the ranks share by length, in one kernel: distributed flash-decode.

Each rank attends to its own positions. A head's result is then a weighted mean of what the ranks found, by the
logarithm of the sum of exponentials that each has seen. So a tile [2, D], of result and logarithm, goes to every rank
(`iris.tiles`), and each rank joins them by itself: one hop, and the same bits everywhere.

    python -m examples.flash_decode
"""

import iris
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def flash_decode_kernel(
    ctx_ptr, space, q, k, v, parts, out, length, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute out [H,D], a head in each program.

    q [H,D]; k, v [H,length,D], this rank's; parts fp32 [world,H,2,D].
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, space)
    head, heads, d = tl.program_id(0), tl.num_programs(0), tl.arange(0, D)
    query = tl.load(q + head * D + d).to(tl.float32) * scale
    most, total = tl.full((), -float("inf"), tl.float32), tl.full((), 0.0, tl.float32)
    acc = tl.zeros((D,), tl.float32)
    for start in range(0, length, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at, there = (head * length + i)[:, None] * D + d[None, :], (i < length)[:, None]
        scores = tl.sum(query[None, :] * tl.load(k + at, there, 0.0).to(tl.float32), 1)
        scores = tl.where(i < length, scores, -float("inf"))
        higher = tl.maximum(most, tl.max(scores, 0))
        weights, faded = tl.exp(scores - higher), tl.exp(most - higher)
        acc = acc * faded + tl.sum(weights[:, None] * tl.load(v + at, there, 0.0).to(tl.float32), 0)
        total, most = total * faded + tl.sum(weights, 0), higher
    # a rank without positions has seen nothing, which weighs nothing
    seen = tl.where(total > 0, most + tl.log(tl.maximum(total, 1e-38)), -1e30)
    row = tl.arange(0, 2)[:, None]
    mine = tl.where(row == 0, (acc / tl.maximum(total, 1e-38))[None, :], seen)
    tiles.all_gather(mine, head, parts + head * 2 * D + row * D + d[None, :], heads * 2 * D)
    tiles.close()
    tl.debug_barrier()  # the program reads what other threads of it have stored
    rank = tl.arange(0, triton.next_power_of_2(WORLD_SIZE))
    place = parts + (rank * heads + head)[:, None] * 2 * D + d[None, :]
    real = (rank < WORLD_SIZE)[:, None]
    logarithm = tl.load(place + D, real, -float("inf"))
    weight = tl.exp(logarithm - tl.max(logarithm, 0)[None, :])
    joined = tl.sum(weight * tl.load(place, real, 0.0), 0) / tl.sum(weight, 0)
    tl.store(out + head * D + d, joined.to(out.dtype.element_ty))


def rank_main(H: int = 3, D: int = 32, lengths: tuple[int, ...] = (70, 1, 40, 0)) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        world, length = ctx.num_ranks, lengths[ctx.cur_rank % len(lengths)]
        generator = torch.Generator().manual_seed(0)
        whole = sum(lengths[rank % len(lengths)] for rank in range(world))
        q = torch.randn(H, D, generator=generator).to(ctx.device)
        k, v = (torch.randn(H, whole, D, generator=generator).to(ctx.device) for _ in range(2))
        first = sum(lengths[rank % len(lengths)] for rank in range(ctx.cur_rank))
        own_k, own_v = (t[:, first : first + length].contiguous() for t in (k, v))
        space = ctx.ccl.tile_space(H, 2 * D, torch.float32)
        parts, out = torch.empty(world, H, 2, D, device=ctx.device), torch.empty_like(q)
        flash_decode_kernel[(H,)](
            ctx.get_device_context(), space, q, own_k, own_v, parts, out, length, D**-0.5, D, 32, world
        )
        ctx.barrier()
        scores = torch.einsum("hd,hld->hl", q.double(), k.double()) * D**-0.5
        exact = torch.einsum("hl,hld->hd", scores.softmax(-1), v.double())
        error = (out - exact).abs().max().item()
        ctx.info(f"{whole} positions, {length} of them here; largest error {error:.1e}")
        assert error < 1e-5


if __name__ == "__main__":
    launch.run(rank_main)
