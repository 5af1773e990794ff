"""A timeline of what every program does: an own kernel that records its steps, and a fused op that records itself.

Each rank puts blocks of a vector into the next rank's memory, and marks each put, as it would mark any step. Then
`ctx.tracing.enable()` alone makes fused kernels record their products, pushes and waits. `export` writes one file of
all ranks on a common clock; open it in ui.perfetto.dev or chrome://tracing.

    python -m examples.tracing
"""

from pathlib import Path
import tempfile

import iris
from iris.device import tracing
from iris_tp import launch
import torch
import triton
import triton.language as tl

ADD_UP = tracing.USER  # our own kind of event


@triton.jit
def put_kernel(ctx_ptr, x, sums, n, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr, TRACING: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, tl.load(ctx_ptr), WORLD_SIZE, tracing=TRACING)
    block = tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    peer = (ctx.rank + 1) % WORLD_SIZE
    span = ctx.tracing.record_event_start(tracing.PUT, peer, x + offsets, block, mask=mask)
    ctx.put(x + offsets, x + offsets, peer, mask=mask)
    ctx.tracing.record_event_end(span)
    span = ctx.tracing.record_event_start(ADD_UP, ctx.rank, x + offsets, block, mask=mask)
    tl.store(sums + block, tl.sum(tl.load(x + offsets, mask=mask, other=0)))
    ctx.tracing.record_event_end(span)


def rank_main(folder: str, n: int = 1000, M: int = 48, N: int = 64, K: int = 32) -> None:
    with iris.iris(heap_size=1 << 26) as ctx:
        x = ctx.ones(n)
        A, B = torch.randn(M, K, device=ctx.device), torch.randn(K, N, device=ctx.device)
        out = ctx.empty(M // ctx.num_ranks, N)
        sums = torch.empty(4, device=ctx.device)
        ctx.tracing.names[ADD_UP.value] = "add up"

        ctx.tracing.enable(max_events=10_000)
        put_kernel[(4,)](ctx.get_device_context(), x, sums, n, WORLD_SIZE=ctx.num_ranks, BLOCK=256, TRACING=True)
        ctx.ops.matmul_reduce_scatter(out, A, B)
        events = ctx.tracing.aligned()
        path = ctx.tracing.export(Path(folder, "trace.json"), merge=True)
        ctx.tracing.disable()

        nbytes = events["bytes"][events["event"] == tracing.PUT.value].sum()
        assert nbytes == n * x.element_size() and sums.sum() == n, (nbytes, sums)
        longest = max(events, key=lambda event: event["end"] - event["begin"])
        kinds = sorted({ctx.tracing.names[int(kind)] for kind in events["event"]})
        ctx.info(f"{len(events)} spans ({', '.join(kinds)}); {nbytes} bytes put")
        microseconds = (longest["end"] - longest["begin"]) / 1e3
        ctx.info(f"the longest: {ctx.tracing.names[int(longest['event'])]}, {microseconds:.1f} us")
        if ctx.cur_rank == 0:
            ctx.info(f"all ranks: {path}, {path.stat().st_size} bytes")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        launch.run(rank_main, None, folder)


if __name__ == "__main__":
    main()
