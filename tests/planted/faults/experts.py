"""Mixtures of experts."""

from .fault import Fault

MIXTURES = ("tests/iris_ops/test_moe.py", "tests/iris_ops/test_moe_calls.py")

EXPERTS = [
    Fault(
        "a second block of an expert's rows begins a row late",
        "iris_ops/moe/grouped.py",
        "first = tl.sum(tl.where(own, begins + (block - (upto - blocks)) * BLOCK_M, 0))",
        "first = tl.sum(tl.where(own, begins + (block - (upto - blocks)) * (BLOCK_M + 1), 0))",
        MIXTURES,
    ),
    Fault(
        "pairs of an expert are sorted within their block only",
        "iris_ops/moe/routing.py",
        "place = tl.gather(begins + before, known, 0)",
        "place = tl.gather(begins, known, 0)",
        MIXTURES,
    ),
    Fault(
        "up is not bounded from below",
        "iris_ops/moe/grouped.py",
        "up = tl.clamp(up, -LIMIT, LIMIT",
        "up = tl.clamp(up, -8 * LIMIT, LIMIT",
        MIXTURES,
    ),
    Fault(
        "every rank adds the bias of the product back",
        "iris_ops/moe/lamport_down.py",
        "once = bias if ctx.cur_rank == 0 else None",
        "once = bias",
        MIXTURES,
    ),
    Fault(
        "every rank adds the bias of the only token",
        "iris_ops/moe/lamport_token.py",
        "once = bias if ctx.cur_rank == 0 else None",
        "once = bias",
        MIXTURES,
    ),
    Fault(
        "a token has the factor of the one before",
        "iris_ops/moe/combine.py",
        "factor = tl.load(weights + t.to(tl.int64) * stride_wt + j",
        "factor = tl.load(weights + tl.maximum(t - 1, 0).to(tl.int64) * stride_wt + j",
        MIXTURES,
    ),
    Fault(
        "the last program of some columns does not clear its count",
        "iris_ops/moe/lamport_down.py",
        "        tl.store(counts + tile_n, 0)\n",
        "",
        MIXTURES,
    ),
    Fault(
        "an index below 0 passes",
        "iris_ops/moe/grouped.py",
        "report_experts(ctx, expert, (expert < 0) | (expert >= experts), experts, WAITER)",
        "report_experts(ctx, expert, expert >= experts, experts, WAITER)",
        MIXTURES,
    ),
]
