"""Measure a decode step between exchanges, on one GPU: `python -m benchmarks.step`, ours against torch's.

Products of few rows (`iris_ops/local/skinny_matmul.py`), alone and with a gate, and attention over a static cache
(`iris_ops/local/decode_attention.py`), each in CUDA graphs, with weights and caches that rotate, so that none lies
in the L2 cache: weights and the filled part of caches must be read once, so what counts is GB/s. Each is compared with
float64 first. torch's attention is there twice: with the mask that a static cache needs, and over the filled part
alone, which a captured step cannot know. With several ranks each does the same on its GPU, and the slowest counts.
"""

import argparse
from collections.abc import Callable, Iterable
from itertools import product as combinations
import math
import sys
import time

import iris  # noqa: F401  (before triton: it may set up the interpreter)
from iris_ops.local.decode_attention import decode_attention
from iris_ops.local.skinny_matmul import most_rows, skinny_matmul
from iris_ops.planning.epilogues import GATE
from iris_tp.bench import compare
from iris_tp.bench.team import Team, launch
import torch
from torch.nn import functional as F

from benchmarks.measuring import report
from benchmarks.tables import every_row

ROTATED_BYTES, MOST_COPIES = 256 << 20, 96
ALLOWED = 0.01  # relative, of the whole result in bf16

ROWS = (1, 8, 16, 32, 64, 128)
# Outputs, inputs; query, key and value of 8B on one of two ranks and of four, and of 70B on one of four.
WEIGHTS = [
    *combinations((4096, 5120, 7168, 8192), (1024, 2048, 3584, 7168, 14336)),
    (3072, 4096),
    (1536, 4096),
    (2560, 8192),
]
# Half of the outputs, and inputs: gate and up of 8B, Qwen3-32B and 70B, on one of two ranks and of four.
GATED = [(7168, 4096), (3584, 4096), (12800, 5120), (6400, 5120), (14336, 8192), (7168, 8192)]
# Rows, query heads, heads of the cache, its length, and how much of it is filled.
CACHES = [
    (1, 16, 4, 192, 160), (16, 16, 4, 192, 160), (64, 16, 4, 192, 160), (256, 16, 4, 192, 160),
    (1, 16, 4, 2112, 2080), (16, 16, 4, 2112, 2080), (64, 16, 4, 2112, 2080), (1, 16, 4, 16448, 16400),
    (1, 16, 4, 16448, 300), (4, 16, 4, 65600, 65536), (1, 8, 2, 2112, 2080), (16, 32, 4, 2112, 2080),
    (64, 32, 4, 1088, 1000), (16, 16, 2, 4160, 4100),
]  # fmt: skip
TINY = {"product": [(3, 96, 64)], "gated": [(3, 48, 64)], "attention": [(2, 4, 2, 24, 17)]}

Case = tuple[dict[str, compare.Call], torch.Tensor, int, int]
"""Calls by name, what they should give for the first input, how many inputs there are, and bytes that a call moves."""


def run(team: Team, args: argparse.Namespace) -> None:
    begin, budget = time.monotonic(), compare.budget_of(team, args.quick)
    torch.manual_seed(team.rank)
    written = report.describe_run(team, args) | {"rows": [], "left_out": []}
    for kind, size in sizes(team):
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            written["left_out"].append(f"{kind} {size}")
            continue
        calls, exact, inputs, moved = CASES[kind](team.device, getattr(torch, args.dtype), *size)

        def error(_: str, call: Callable, exact=exact) -> float:
            poison(exact, args.dtype)
            return compare.relative_error(call(0), exact)

        row = {"kind": kind, "size": list(size), "moved_bytes": moved}
        row |= compare.compare(team, calls, error, inputs, budget)
        row["used"] = kind == "attention" or size[0] <= most_rows(size[1], 1 + (kind == "gated"), True, team.device)
        row["wrong"] = [name for name, share in row["errors"].items() if not share <= ALLOWED]
        written["rows"].append(row)
        team.say(f"{kind} {size}: " + ", ".join(f"{name} {us:.1f}" for name, us in row["us"].items()))
    if team.rank == 0:
        report.write(written, args)
    team.say("\n" + every_row.render(report.rounded(written)))
    if any(row["wrong"] or row["failed"] for row in written["rows"]):
        team.say("WRONG: " + str([row for row in written["rows"] if row["wrong"] or row["failed"]]))
        sys.exit(1)


def sizes(team: Team) -> Iterable[tuple[str, tuple[int, ...]]]:
    if not team.cuda:
        return [(kind, size) for kind, all_of in TINY.items() for size in all_of]
    products = [("product", (m, *weight)) for weight, m in combinations(WEIGHTS, ROWS)]
    gated = [("gated", (m, *weight)) for weight, m in combinations(GATED, ROWS)]
    return [("attention", cache) for cache in CACHES] + gated + products


def poison(like: torch.Tensor, dtype: str) -> None:
    """Leave NaN where a result is allocated next, for a kernel that writes too little to be seen."""
    torch.full(like.shape, math.nan, dtype=getattr(torch, dtype), device=like.device)


def rotated(bytes_each: int, device: torch.device) -> int:
    """Return how many inputs there are, so that together they do not fit into a cache."""
    return max(2, min(MOST_COPIES, -(-ROTATED_BYTES // bytes_each))) if device.type == "cuda" else 2


def product_case(device: torch.device, dtype: torch.dtype, M: int, N: int, K: int) -> Case:
    x = torch.randn(M, K, device=device, dtype=dtype)
    inputs = rotated(N * K * dtype.itemsize, device)
    weights = [torch.randn(N, K, device=device, dtype=dtype) for _ in range(inputs)]
    calls = {"ours": lambda i: skinny_matmul(x, weights[i]), "torch": lambda i: F.linear(x, weights[i])}
    return calls, x.double() @ weights[0].double().t(), inputs, (N * K + M * (N + K)) * dtype.itemsize


def gated_case(device: torch.device, dtype: torch.dtype, M: int, N: int, K: int) -> Case:
    x = torch.randn(M, K, device=device, dtype=dtype) / math.sqrt(K)
    inputs = rotated(2 * N * K * dtype.itemsize, device)
    weights = [torch.randn(2 * N, K, device=device, dtype=dtype) for _ in range(inputs)]
    gate = torch.compile(gated) if device.type == "cuda" else gated

    def torch_s(i: int) -> torch.Tensor:
        return gate(F.linear(x, weights[i]))

    calls = {"ours": lambda i: skinny_matmul(x, weights[i], epilogue=GATE.name), "torch": torch_s}
    exact = gated(x.double() @ weights[0].double().t())
    return calls, exact, inputs, (2 * N * K + M * (N + K)) * dtype.itemsize


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def attention_case(
    device: torch.device,
    dtype: torch.dtype,
    B: int,
    heads: int,
    kv_heads: int,
    length: int,
    filled: int,
    dim: int = 128,
) -> Case:
    dim = 128
    q = torch.randn(B, heads, dim, device=device, dtype=dtype)
    inputs = rotated(2 * B * kv_heads * length * dim * dtype.itemsize, device)
    keys, values = (
        [torch.randn(B, kv_heads, length, dim, device=device, dtype=dtype) for _ in range(inputs)] for _ in range(2)
    )
    mask = (torch.arange(length, device=device) < filled).expand(B, length).contiguous()

    def attend(q, k, v, mask=None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q[:, :, None], k, v, mask, enable_gqa=True)[:, :, 0]

    calls = {
        "ours": lambda i: decode_attention(q, keys[i], values[i], mask, dim**-0.5),
        "torch": lambda i: attend(q, keys[i], values[i], mask[:, None, None]),
        "torch, filled part": lambda i: attend(q, keys[i][:, :, :filled], values[i][:, :, :filled]),
    }
    exact = torch.stack(
        [attention_of(q[row], keys[0][row, :, :filled], values[0][row, :, :filled]) for row in range(B)]
    )
    return calls, exact, inputs, (2 * B * kv_heads * filled + 2 * B * heads) * dim * dtype.itemsize


def attention_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention in float64: q [heads, D] over k, v [kv_heads, filled, D]."""
    grouped = q.double().unflatten(0, (len(k), -1))
    chances = (grouped @ k.double().mT * q.shape[-1] ** -0.5).softmax(-1)
    return (chances @ v.double()).flatten(0, 1)


CASES = {"product": product_case, "gated": gated_case, "attention": attention_case}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    args = parser.parse_args(argv)
    args.ranks = args.ranks or 1
    report.settle(args, argv, "step")
    return launch(run, args, args.time_limit + 60)


if __name__ == "__main__":
    sys.exit(main())
