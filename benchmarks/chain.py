"""A model's all-reduces one after the other: `python -m benchmarks.chain --ranks 4`.

Each layer's two row-parallel products, all on weights of their own, as one CUDA graph (on CPUs one by one): how long
that takes against the same calls of each product by themselves. More than their sum would be gaps between the ops, or
ranks that wait for each other. The host is seen too: the same calls issued one by one.
"""

import argparse
import sys

from iris_tp.bench import timing
from iris_tp.bench.inputs import Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team, launch
import torch

from benchmarks.measuring import models, report
from benchmarks.measuring.tables import markdown
from benchmarks.rivals import everyone

ROUNDS = 9


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--layers", type=report.at_least(1), help="default: 80, on CPUs 2")
    parser.add_argument("--rows", type=report.numbers, default="1,16,64", help="values of M")
    args = parser.parse_args(argv)
    report.settle(args, argv, "chain")
    args.layers = args.layers or (80 if args.device == "cuda" else 2)
    return args


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = getattr(torch, args.dtype)
    sizes = models.LLAMA_70B.row_linears(team.world) if team.cuda else [(64, 32), (64, 48)]
    heap = everyone.Heap(team, [Row("ar", max(args.rows), *size) for size in sizes], dtype, int(args.heap_gib * 2**30))
    written = {**report.describe_run(team, args), "layers": args.layers, "rows": []}
    for M in args.rows:
        written["rows"].append(run_row([Row("ar", M, *size) for size in sizes], team, heap, dtype, args.layers))
        if team.rank == 0:
            report.write(written, args)
    team.say("\n" + render(report.rounded(written)))
    heap.close()


def run_row(rows: list[Row], team: Team, heap: everyone.Heap, dtype: torch.dtype, layers: int) -> dict:
    """Time one M; raise where a result is wrong."""
    calls = []
    for row in rows:
        inputs = Inputs(row, team, dtype, copies=layers)
        out = heap.out(*inputs.out_shape).clone()  # a layer's own: the next product reads it

        def call(i: int, inputs=inputs, out=out) -> torch.Tensor:
            heap.ctx.ops.matmul_all_reduce(out, inputs.A[i], inputs.B[i])
            return out

        error = team.slowest([inputs.check(call)])[0]
        if error > 1:
            raise RuntimeError(f"{row}: wrong result, {error:.3g} times the allowed error")
        calls.append(call)

    def layer(i: int) -> torch.Tensor:
        return [call(i) for call in calls][-1]

    def batch(call) -> timing.Batch:
        return timing.graph_batch(call, layers, layers)[0] if team.cuda else timing.eager_batch(call, layers, layers)

    batches = {"chain": batch(layer), **{str(row): batch(call) for row, call in zip(rows, calls, strict=True)}}
    batches["issued one by one"] = timing.eager_batch(layer, layers, layers)
    timings, failed = timing.interleave(team, batches, ROUNDS if team.cuda else 1)
    if failed:
        raise RuntimeError(f"{failed}")
    alone = {str(row): timings[str(row)].call_us for row in rows}
    chain = timings["chain"].call_us
    result = {"M": rows[0].M, "ops": len(rows) * layers, "alone_us": alone, "layer_us": chain}
    return result | {"over_sum": chain / sum(alone.values()), "eager_layer_us": timings["issued one by one"].call_us}


def render(written: dict) -> str:
    head = ["M", "ops in the graph", "a layer, µs", "its ops alone, µs", "ratio", "a layer eager, µs"]
    lines = [
        [
            str(row["M"]),
            str(row["ops"]),
            f"{row['layer_us']:.1f}",
            " + ".join(f"{us:.1f}" for us in row["alone_us"].values()),
            f"{row['over_sum']:.3f}",
            f"{row['eager_layer_us']:.1f}",
        ]
        for row in written["rows"]
    ]
    return f"{report.headline(written)} `{written['command']}`\n\n{markdown(head, lines)}"


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit))


if __name__ == "__main__":
    main()
