"""Measure the cost of equal bits on any number of ranks: `python -m benchmarks.invariance_ranks --ranks 2`.

Row-parallel layers of Llama-3-8B, all-reduces of few rows and of many, by three contexts: one that promises nothing,
one with `invariant="batch"`, one with "ranks". For each row

    bits    whether "ranks" gives what each rank finds alone, of all of K: how many numbers differ
    times   of each context, in CUDA graphs, of weights that come from memory

Writes a JSON file. Exits with 1 where a bit differs.
"""

import argparse
import sys
import time

import iris
from iris_ops import sum_tree
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team, launch
import torch
from torch import distributed

from benchmarks.invariance import times_of
from benchmarks.measuring import models, report
from benchmarks.measuring.ahead import compile_ahead
from benchmarks.measuring.tables import geometric_mean

LEVELS = (None, "batch", "ranks")
NUMBERS = {"cuda": (1, 8, 64, 512, 2048), "cpu": (1, 8)}
_BEYOND_CACHES = 1 << 28  # bytes of weights, among which calls take turns


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    args = parser.parse_args(argv)
    report.settle(args, argv, "invariance_ranks")
    return args


def layers(team: Team) -> list[tuple[str, int, int]]:
    """Return (name, N, all ranks' K) of each layer."""
    if not team.cuda:
        return [("small", 80, 640)]
    model = models.LLAMA_8B
    return [("o_proj", model.hidden, model.attention), ("down_proj", model.hidden, model.mlp)]


class Layer:
    """One all-reduce: what all ranks have of A and of as many weights as no cache holds."""

    def __init__(self, team: Team, M: int, N: int, K: int) -> None:
        self.team, self.M, self.N, self.K = team, M, N, K
        self.k_per_rank = sum_tree.shares(K, team.world)
        begin = sum(self.k_per_rank[: team.rank])
        self.own = slice(begin, begin + self.k_per_rank[team.rank])
        draw = torch.Generator(team.device).manual_seed(M + K)  # on all ranks the same
        self.A, self.W = (
            torch.randn(*size, generator=draw, device=team.device).bfloat16() for size in ((M, K), (N, K))
        )
        count = max(2, _BEYOND_CACHES // (2 * N * self.k_per_rank[team.rank])) if team.cuda else 2
        self.weights = [self.W[:, self.own].clone() for _ in range(count)]
        self.rows = self.A[:, self.own].contiguous()

    def result(self, ctx: iris.Iris) -> torch.Tensor:
        """Compute the result by a context of all ranks, or of this one alone."""
        out = ctx.zeros(self.M, self.N, dtype=torch.bfloat16)
        if ctx.num_ranks == 1:
            ctx.ops.matmul_all_reduce(out, self.A, self.W.t())
        else:
            ctx.ops.matmul_all_reduce(out, self.rows, self.weights[0].t(), k_per_rank=self.k_per_rank)
        return out.clone()

    def call(self, ctx: iris.Iris):
        out = ctx.empty(self.M, self.N, dtype=torch.bfloat16)
        given = {"k_per_rank": self.k_per_rank} if ctx.invariant == "ranks" else {}

        def call(i: int) -> torch.Tensor:
            ctx.ops.matmul_all_reduce(out, self.rows, self.weights[i].t(), **given)
            return out

        return call


def measured(team: Team, contexts: dict, alone: iris.Iris) -> list[dict]:
    rows = []

    def calls() -> None:
        for _, N, K in layers(team):
            for M in NUMBERS["cuda"]:
                layer = Layer(team, M, N, K)
                layer.result(alone)
                for ctx in contexts.values():
                    layer.call(ctx)(0)

    if team.cuda:
        begin = time.monotonic()
        kernels = compile_ahead(team, [alone, *contexts.values()], calls)
        team.say(f"{kernels} kernels compiled in {time.monotonic() - begin:.0f} s")
    for name, N, K in layers(team):
        for M in NUMBERS[team.device.type]:
            layer = Layer(team, M, N, K)
            expected = layer.result(alone)
            differing = team.slowest([float((layer.result(contexts["ranks"]) != expected).sum())])[0]
            if differing:
                team.say(f"{name}, {M} rows: {differing:.0f} numbers differ")
            row: dict = {"row": str(Row("ar", M, N, K)), "layer": name, "M": M, "differing": int(differing)}
            shares, plan = layer.k_per_rank, contexts["ranks"].ops.plan
            row["plan"] = plan("matmul_all_reduce", M, N, shares[team.rank], torch.bfloat16, k_per_rank=shares).kernel
            if team.cuda:
                calls = {str(level): (layer.call(ctx), len(layer.weights)) for level, ctx in contexts.items()}
                row["us"] = times_of(team, calls)
                team.say(f"{name}, {M} rows: " + ", ".join(f"{level} {us:.1f} us" for level, us in row["us"].items()))
            rows.append(row)
    return rows


def run(team: Team, args: argparse.Namespace) -> None:
    heap = int(args.heap_gib * 2**30)
    contexts = {level: iris.iris(heap, invariant=level) for level in LEVELS}
    groups = [distributed.new_group([rank]) for rank in range(team.world)]
    alone = iris.iris(heap, group=groups[team.rank], invariant="ranks")
    rows = measured(team, contexts, alone)
    written = report.describe_run(team, args) | {"times": rows}
    if team.rank == 0:
        report.write(written, args)
    differing = sum(each["differing"] for each in rows)
    team.say(f"{len(rows)} products on {team.world} ranks and on one: {differing} numbers differ")
    for level in LEVELS[:2] if team.cuda else ():
        for few, least, most in (("decode", 1, 64), ("prefill", 65, 1 << 20)):
            costs = [each["us"]["ranks"] / each["us"][str(level)] for each in rows if least <= each["M"] <= most]
            team.say(f"{few}: {geometric_mean(costs):.3f} times the time of {level}, {max(costs):.3f} at most")
    for ctx in (alone, *contexts.values()):
        ctx.close()
    if differing:
        sys.exit(1)


def main(argv: list[str] | None = None) -> int:
    return launch(run, parse(argv), limit_s=300)


if __name__ == "__main__":
    sys.exit(main())
