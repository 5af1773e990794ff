"""A mixture whose experts are shared out among the ranks, in one kernel: tokens go to their experts and come back.

Each rank has its own tokens and some experts. Every choice of a token becomes a row for the rank that has the expert.
There is room for as many rows as a rank may send to one other, so no token is dropped and no shape depends on the
choices. A program exchanges a tile of rows with all ranks by `iris.tiles`, computes what came, and sends it back.

`ctx.ops.moe_gate_up` and `ctx.ops.moe_down_all_reduce` split every expert over all ranks instead. They are faster if
every rank has all tokens.

    python -m examples.expert_mixture
"""

import iris
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def expert_mixture_kernel(
    ctx_ptr, space, sent, chosen, received, ids, done, back, up, down, room,
    H: tl.constexpr, F: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute back [world, room, H]: for each row of `sent`, which has the same shape, the result of its expert.

    chosen [world, room]: the expert of a row, numbered at that rank, or -1 for no row. up [EXPERTS, H, F] and down
    [EXPERTS, F, H]: this rank's experts. Memory for peers' rows: `received` and `done` with the shape of `sent`, and
    `ids`, the experts of these rows, with the shape of `chosen`. All tensors are fp32 and contiguous.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    tiles = iris.tiles.open_tiles(ctx, space)
    h, f, whole = tl.arange(0, H), tl.arange(0, F), room * H
    for i in range(tl.program_id(0), tl.cdiv(room, ROWS), tl.num_programs(0)):
        row = i * ROWS + tl.arange(0, ROWS)
        at, inside = row[:, None] * H + h[None, :], (row < room)[:, None] & (h >= 0)[None, :]
        tiles.all_to_all(chosen + row, room, 3 * i, ids + row, room, row < room)
        tiles.all_to_all(sent + at, whole, 3 * i + 1, received + at, whole, inside)
        tl.debug_barrier()  # threads read what others have stored
        for source in range(WORLD_SIZE):
            x = tl.load(received + source * whole + at, inside, 0.0)
            expert = tl.load(ids + source * room + row, row < room, -1.0)
            y = tl.zeros((ROWS, H), tl.float32)
            for e in range(EXPERTS):
                middle = tl.dot(x, tl.load(up + (e * H + h[:, None]) * F + f[None, :]), input_precision="ieee")
                product = tl.load(down + (e * F + f[:, None]) * H + h[None, :])
                product = tl.dot(tl.maximum(middle, 0.0), product, input_precision="ieee")
                y = tl.where((expert == e)[:, None], product, y)
            tl.store(done + source * whole + at, y, inside)
        tl.debug_barrier()
        tiles.all_to_all(done + at, whole, 3 * i + 2, back + at, whole, inside)
    tiles.close()


def mixture(ctx, tokens, experts, weights, up, down, space, ROWS=16):  # noqa: ANN001, ANN201
    """Return each token's weighted sum over its `experts` [T, k], which are numbered over all ranks: [T, H]."""
    (T, k), (own, H, F), w, room = experts.shape, up.shape, ctx.num_ranks, experts.numel()
    to = experts.flatten() // own
    slot = torch.nn.functional.one_hot(to, w).cumsum(0).gather(1, to[:, None])[:, 0] - 1  # among rows for that rank
    sent, chosen = tokens.new_zeros(w, room, H), tokens.new_full((w, room), -1.0)
    sent[to, slot], chosen[to, slot] = tokens.repeat_interleave(k, 0), (experts.flatten() % own).float()
    received, ids, done, back = (torch.empty_like(t) for t in (sent, chosen, sent, sent))
    grid = (min(triton.cdiv(room, ROWS), ctx.get_cu_count()),)  # all programs of a grid that waits run at once
    expert_mixture_kernel[grid](
        ctx.get_device_context(), space, sent, chosen, received, ids, done, back, up, down, room, H, F, own, ROWS, w
    )
    return (back[to, slot].view(T, k, H) * weights[:, :, None]).sum(1)


def rank_main(T: int = 13, k: int = 2, own: int = 2, H: int = 32, F: int = 64) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        generator, w, rank = torch.Generator().manual_seed(0), ctx.num_ranks, ctx.cur_rank
        up, down = torch.randn(w * own, H, F, generator=generator) / 8, torch.randn(w * own, F, H, generator=generator)
        tokens, scores = torch.randn(w, T, H, generator=generator), torch.randn(w, T, w * own, generator=generator)
        space = ctx.ccl.tile_space(3 * triton.cdiv(T * k, 16), 16 * H, torch.float32)
        mine, sound = slice(rank * own, (rank + 1) * own), []
        for call in range(2):
            # the second time all tokens of all ranks want the experts of one rank
            weights, experts = (scores if call == 0 else scores[:, :, :own])[rank].softmax(-1).topk(k)
            given = tokens[rank], experts, weights, up[mine], down[mine]
            out = mixture(ctx, *(t.contiguous().to(ctx.device) for t in given), space)
            hidden = torch.einsum("th,ehf->tef", tokens[rank].double(), up.double()).relu()
            all_of_them = torch.einsum("tef,efh->teh", hidden, down.double())
            exact = (all_of_them.gather(1, experts[:, :, None].expand(T, k, H)) * weights[:, :, None]).sum(1)
            sound.append(((out.cpu() - exact).abs().max() / exact.abs().max()).item())
        ctx.barrier()
        ctx.info(f"{T} tokens and {own} of {w * own} experts here; largest error {max(sound):.1e} of the largest value")
        assert max(sound) < 1e-5


if __name__ == "__main__":
    launch.run(rank_main)
