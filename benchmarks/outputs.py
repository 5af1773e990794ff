"""What it costs to copy an output that peers wrote: `python -m benchmarks.outputs --ranks 2`.

A row-parallel layer and the op below it, each with its output in ordinary memory, so that peers write elsewhere and
the op copies, and with it on the heap. The four take turns, eager and as a CUDA graph of as many calls. Each is checked
against the product in float64 before it is timed, and each graph's last output after a replay.
"""

import argparse
from contextlib import AbstractContextManager, nullcontext
from functools import partial
import sys

import iris
from iris.memory.outputs import Kept
from iris_ops.problem import ALL_REDUCE
from iris_tp.bench import timing
from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team, launch
import layers
import torch
import torch.distributed as dist

from benchmarks.measuring import report
from benchmarks.measuring.tables import markdown

SIZES = [*((M, 8192, K) for K in (2048, 7168) for M in (512, 1024, 2048, 8192)), (4096, 4096, 3584)]
SMALL = [(48, 64, 32), (96, 64, 32)]
CONTENDERS = "layer, copied", "layer", "op, copied", "op"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--sizes", type=report.sizes, help="M,N,K of a rank's product, by default nine")
    args = parser.parse_args(argv)
    report.settle(args, argv, "outputs")
    args.sizes = args.sizes or (SIZES if args.device == "cuda" else SMALL)
    return args


class Exact(Inputs):
    """Inputs whose result is expected in float64."""

    def expected(self, copy: int, alone: bool = False) -> torch.Tensor:
        if (copy, alone) not in self._expected:
            product = self.A[copy].double() @ self.B[copy].double()
            dist.all_reduce(product)
            self._expected[copy, alone] = product
        return self._expected[copy, alone]


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = getattr(torch, args.dtype)
    written = {**report.describe_run(team, args), "rows": []}
    with iris.iris(int(args.heap_gib * 2**30)) as ctx, torch.no_grad():
        for sizes in args.sizes:
            written["rows"].append(run_row(Row("ar", *sizes), team, ctx, dtype))
            if team.rank == 0:
                report.write(written, args)
    team.say("\n" + render(report.rounded(written)))


def calls(inputs: Inputs, ctx: iris.Iris, on_heap: torch.Tensor) -> dict[str, Call]:
    """Return what is compared, by name; a call with `copied` in its name has its output in ordinary memory."""
    row, world = inputs.row, inputs.team.world
    rows = [layers.RowParallelLinear(row.K * world, row.N, bias=False, ctx=ctx, dtype=inputs.dtype) for _ in inputs.W]
    for layer, weight in zip(rows, inputs.W, strict=True):
        layer.weight.data = weight
    anywhere = inputs.new(row.M, row.N)

    def layer(i: int) -> torch.Tensor:
        return rows[i](inputs.A[i])

    def layer_copied(i: int) -> torch.Tensor:
        ctx.ops.outputs.new = lambda op, A, B, size, *_: A.new_empty(size)
        try:
            return layer(i)
        finally:
            del ctx.ops.outputs.new

    def op(i: int, out: torch.Tensor) -> torch.Tensor:
        ctx.ops.matmul_all_reduce(out, inputs.A[i], inputs.B[i])
        return out

    functions = layer_copied, layer, partial(op, out=anywhere), partial(op, out=on_heap)
    return dict(zip(CONTENDERS, functions, strict=True))


def run_row(row: Row, team: Team, ctx: iris.Iris, dtype: torch.dtype) -> dict:
    """Time one row; raise where a result is wrong."""
    inputs = Exact(row, team, dtype)
    on_heap = ctx.empty(row.M, row.N, dtype=dtype)
    by_name = calls(inputs, ctx, on_heap)
    config = ctx.ops.plan(ALL_REDUCE, row.M, row.N, row.K, dtype, explained=False)
    result = {"M": row.M, "N": row.N, "K": row.K, "kernel": config.kernel, "algorithm": config.algorithm}
    for name, call in by_name.items():
        accept(team, f"{row}, {name}", inputs.check(call))
        where = ctx.heap.contains(call(0))
        if where == ("copied" in name) and config.algorithm == "overlapped":
            raise RuntimeError(f"{row}, {name}: the output lies {'on' if where else 'outside'} the heap")
    keeper, batches = Kept(), {}
    for name, call in by_name.items():
        calls_us = timing.estimate_us(team, call, inputs.copies)
        number = int(team.slowest([timing.QUICK.calls_for(calls_us, inputs.copies) if team.cuda else 1])[0])
        batches[f"{name}, eager"] = timing.eager_batch(call, number, inputs.copies)
        if team.cuda:
            around: AbstractContextManager = ctx.ops.outputs.keeping(keeper) if name == "layer" else nullcontext()
            with around:
                batch, out = timing.graph_batch(call, number, inputs.copies)
            inputs.poison(out)
            batch.run()
            accept(team, f"{row}, {name}, graph", inputs.error(out, (number - 1) % inputs.copies))
            batches[f"{name}, graph"] = batch
    timings, failed = timing.interleave(team, batches, 15 if team.cuda else 1)
    if failed:
        raise RuntimeError(f"{failed}")
    result |= {f"{name} us": timings[name].call_us for name in batches}
    result |= {f"{name} host us": timings[name].host_us for name in batches if name.endswith("eager")}
    team.say(f"{row}: {config.kernel}, {config.algorithm}")
    ctx.barrier()
    ctx.free(on_heap)
    return result


def accept(team: Team, what: str, error: float) -> None:
    worst = team.slowest([error])[0]
    if worst > 1:
        raise RuntimeError(f"{what}: wrong result, {worst:.3g} times the allowed error")


def render(written: dict) -> str:
    modes = [mode for mode in ("graph", "eager") if f"layer, {mode} us" in written["rows"][0]]
    head = ["M, N, K", "kernel", *(f"{name}, {mode}, µs" for mode in modes for name in CONTENDERS)]
    head += [f"layer: {mode}, gain" for mode in modes] + ["layer: host, µs before / now"]
    lines = []
    for row in written["rows"]:
        line = [f"{row['M']}, {row['N']}, {row['K']}", row["kernel"]]
        line += [f"{row[f'{name}, {mode} us']:.1f}" for mode in modes for name in CONTENDERS]
        line += [f"{row[f'layer, copied, {mode} us'] / row[f'layer, {mode} us']:.3f}" for mode in modes]
        line.append(f"{row['layer, copied, eager host us']:.1f} / {row['layer, eager host us']:.1f}")
        lines.append(line)
    return f"{report.headline(written)} `{written['command']}`\n\n{markdown(head, lines)}"


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit))


if __name__ == "__main__":
    main()
