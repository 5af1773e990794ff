"""Attention over a sequence that the ranks share by length, in one kernel: keys and values go round a ring of ranks.

Each rank keeps the queries of its rows. In step s it attends to the keys and values of the rank s before it, while it
passes them on to the next rank. So no rank holds more than two ranks' keys and values, whatever their number.

A program serves one head, and has two flags for it. `arrived` says what the rank before has put here; `freed` says what
the next rank has done with, so that its memory may be written again. Flags count steps over all calls, so nothing is
reset. No wait is circular: what arrives in a step was sent after what the receiver freed two steps before.

    python -m examples.ring_attention
"""

import iris
from iris.device import sync
from iris_tp import launch
import torch
import triton
import triton.language as tl


@triton.jit
def _attend(
    q, slot, values, out, most, total, length, scale, distance,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add one rank's keys and values to the running attention of the queries.

    `most` is the highest score of a row, `total` the sum of its weights, and `out` the weighted sum of values.
    `distance`: how many rows after the first key the first query is.
    """
    d = tl.arange(0, D)[None, :]
    for first in range(0, length, BLOCK):
        i = first + tl.arange(0, BLOCK)
        query = tl.load(q + i[:, None] * D + d, (i < length)[:, None], 0.0)
        high, weight = tl.load(most + i, i < length, 0.0), tl.load(total + i, i < length, 0.0)
        acc = tl.load(out + i[:, None] * D + d, (i < length)[:, None], 0.0)
        for start in range(0, length, BLOCK):
            j = start + tl.arange(0, BLOCK)
            there = (j < length)[:, None]
            key = tl.load(slot + j[:, None] * D + d, there, 0.0)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            seen = (j < length)[None, :] & ((j[None, :] <= i[:, None] + distance) | (not CAUSAL))
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(high, tl.max(scores, 1))
            weights, faded = tl.exp(scores - higher[:, None]), tl.exp(high - higher)
            value = tl.load(values + j[:, None] * D + d, there, 0.0)
            acc = acc * faded[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            weight, high = weight * faded + tl.sum(weights, 1), higher
        tl.store(most + i, high, i < length)
        tl.store(total + i, weight, i < length)
        tl.store(out + i[:, None] * D + d, acc, (i < length)[:, None])


@triton.jit
def ring_attention_kernel(
    ctx_ptr, q, k, v, kv, out, most, total, flags, calls, length, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr,
):  # fmt: skip
    """Compute out fp32 [H,L,D], a head in each program.

    q, k, v [H,L,D]: this rank's rows, from rank * L on. On the heap: kv [2,2,H,L,D], two slots of keys and values;
    flags int32 [2,H]. most, fp32 [H,L], begins as -1e30; total, fp32 [H,L], and out begin as 0. calls int32 [H]: the
    number of calls so far.
    """
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE)
    head, heads = tl.program_id(0), tl.num_programs(0)
    following, previous = (ctx.rank + 1) % WORLD_SIZE, (ctx.rank + WORLD_SIZE - 1) % WORLD_SIZE
    arrived, freed, call = flags + head, flags + heads + head, tl.load(calls + head)
    own, part, rows = head * length * D, heads * length * D, head * length
    ok = True
    for step in range(WORLD_SIZE):
        now = call * WORLD_SIZE + step
        slot, after = kv + step % 2 * 2 * part + own, kv + (step + 1) % 2 * 2 * part + own
        if step > 0 and ok:
            ok = sync.wait(ctx, arrived, now + 1, previous)
        if step + 1 < WORLD_SIZE and ok:
            ok = sync.wait(ctx, freed, now, following)
        if ok:
            for start in range(0, length * D, BLOCK * D):
                at = start + tl.arange(0, BLOCK * D)
                for which in tl.static_range(2):
                    if step == 0:
                        source = (v if which else k) + own
                        tl.store(slot + which * part + at, tl.load(source + at, at < length * D), at < length * D)
                        if WORLD_SIZE > 1:
                            ctx.put(source + at, after + which * part + at, following, at < length * D)
                    elif step + 1 < WORLD_SIZE:
                        ctx.put(slot + which * part + at, after + which * part + at, following, at < length * D)
            if step + 1 < WORLD_SIZE:
                sync.signal(ctx, arrived, now + 2, following)
            owner = (ctx.rank + WORLD_SIZE - step) % WORLD_SIZE
            tl.debug_barrier()  # threads read what others have stored
            if owner <= ctx.rank or not CAUSAL:  # else all of it comes later than the queries
                _attend(
                    q + own, slot, slot + part, out + own, most + rows, total + rows, length, scale,
                    (ctx.rank - owner) * length, CAUSAL, D, BLOCK,
                )  # fmt: skip
            sync.signal(ctx, freed, now + 1, previous)
    tl.store(calls + head, call + 1)


def rank_main(H: int = 2, L: int = 40, D: int = 32) -> None:
    with iris.iris(heap_size=1 << 24) as ctx:
        world, rank = ctx.num_ranks, ctx.cur_rank
        kv, flags = ctx.zeros(2, 2, H, L, D), ctx.zeros(2, H, dtype=torch.int32)
        calls = torch.zeros(H, dtype=torch.int32, device=ctx.device)
        ctx.barrier()  # no peer signals before the flags are zero
        for causal in (False, True, True):
            generator = torch.Generator().manual_seed(7 + causal)
            q, k, v = (torch.randn(H, world * L, D, generator=generator).to(ctx.device) for _ in range(3))
            mine = slice(rank * L, (rank + 1) * L)
            most, total = torch.full((H, L), -1e30, device=ctx.device), torch.zeros(H, L, device=ctx.device)
            out, own = torch.zeros(H, L, D, device=ctx.device), [t[:, mine].contiguous() for t in (q, k, v)]
            ring_attention_kernel[(H,)](
                ctx.get_device_context(), *own, kv, out, most, total, flags, calls, L, D**-0.5, causal, D, 16, world
            )
            scores = q[:, mine].double() @ k.double().mT * D**-0.5
            if causal:
                later = torch.ones(L, world * L, dtype=torch.bool, device=ctx.device).triu(rank * L + 1)
                scores = scores.masked_fill(later, -float("inf"))
            error = (out / total[:, :, None] - scores.softmax(-1) @ v.double()).abs().max().item()
            ctx.info(f"{world * L} positions, {'causal' if causal else 'all'}: largest error {error:.1e}")
            assert error < 1e-5
        ctx.barrier()


if __name__ == "__main__":
    launch.run(rank_main)
