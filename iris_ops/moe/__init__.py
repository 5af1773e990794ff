"""Mixtures of experts whose every expert is split over the ranks: each rank holds a slice of every expert's
intermediate size, I of it here, which may differ by rank and be 0. Routing stays on the device.

    routing = ctx.ops.moe_route(experts, E)
        experts [T,k] int32 or int64, contiguous, each in [0, E): sorted once for both products below. They take plain
        `experts` too, and then sort themselves where rows are many. One that is out of range is found on the device:
        a later call raises `ExpertError`, with IRIS_DEBUG=1 this one.

    ctx.ops.moe_gate_up(out, A, B, experts, bias=None, activation="silu", interleaved=False, config=None,
                        workspace=None) -> Workspace
        out [T*k,I]   row t*k+j: what expert experts[t,j] makes of token t; in token order, whatever the routing
        A [T,H]       tokens, the same on all ranks
        B [E,H,2I]    gate columns, then up columns, or in turn (`interleaved`, as gpt-oss stores them). Contiguous, or
                      `weight.transpose(1, 2)` of a contiguous [E,2I,H], as transformers stores most: no copy is made.
                      [E,H,I]: experts without a gate.
        experts       [T,k], or a `Routing`
        bias [E,2I]   columns as B's
        activation    a name or an `Activation`: "silu", "gelu", "gelu_tanh", "relu2", "gpt_oss"
    No ranks are involved. Sums, bias and activation are in fp32, and rounded once.

    Both products take `scale=`. B then holds codes as `iris_ops/quantised/packing.py` stores them, viewed as rows
    [E*N, K]: the transpose of a contiguous [E,N,K/packed]; scale is [E,N], or [E,N,slots] of groups along K. Kernels
    widen a tile at a time (`coded.py`).

    ctx.ops.moe_down_all_reduce(out, A, B, experts, weights, bias=None, shared=None, config=None, workspace=None)
        out [T,H]     sum over ranks of (sum over j of weights[t,j] * A[t*k+j] @ B[e] + shared[t])
                      + sum over j of weights[t,j] * bias[e], e = experts[t,j]; the same bits on all ranks
        A [T*k,I]     as `moe_gate_up` leaves it
        B [E,I,H]     contiguous, or the transpose of [E,H,I]
        weights [T,k] float32 or A's dtype, the same on all ranks
        bias [E,H]    the same on all ranks, added once
        shared [T,H]  this rank's part of what a shared expert gives, added before the sum over ranks
    ctx.ops.moe_down_reduce_scatter(...)
        out [T/w,H]   this rank's rows of the same, split as torch.chunk does

    Each product is rounded to the tensors' dtype, a token's k products are added in fp32 in the order of j, and what
    the ranks exchange is rounded once more and added in rank order: the same bits in each run.

All of one dtype (bf16, fp16, fp32) but experts and weights. T = 0, k = 1, experts that nobody chose, an expert that a
token chose twice: all are served. `tests/reference.py` has the ops in plain torch, `torch_ops.py` here registers them
with torch.library.
"""
