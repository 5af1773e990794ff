"""A mixture's two ops with experts in each format, beside bf16: `python -m benchmarks.moe_formats --ranks 2`.

`--compare` times both of few tokens of three models, by the stream of touched experts and by the fastest other way.
`--parts 2` gives each rank half of an expert, whatever the number of ranks; `--tokens` chooses others.

Every result is compared with float64 and the widened weights. Then each op is timed by itself in a CUDA graph of calls
whose routings differ, so that no weight stays in L2. The floor is the bytes of the experts that have tokens, over 4.3
TB/s. Kernels are compiled first, by processes beside each other. One JSON line a row.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from itertools import product
import json
import os
import subprocess
import sys
import time

import iris
from iris.machines import machine_of
from iris_ops import FusedConfig
from iris_ops.planning import experts as planned
from iris_ops.planning.moe_ways import need_sorting
from iris_ops.planning.operations import BY_NAME, DOWN_ALL_REDUCE, GATE_UP
from iris_ops.planning.plan import choose
from iris_ops.planning.ways import WAYS
from iris_ops.planning.ways.touched import Touched
from iris_ops.planning.weights import format_of
from iris_ops.problem import Problem
from iris_ops.quantised.packing import PACKINGS
import torch
import torch.distributed as dist

from benchmarks.cases.moe_layer import SHAPES, TINY, Shape
from benchmarks.measuring.graph_time import graph_us

FORMATS = {"bf16": None, "fp8": None, "fp8_block": 128, "int4": 32, "mxfp4": 32}
NAMES = "qwen3-30b-a3b", "gpt-oss-120b"
TOKENS = 1, 4, 16, 64, 512
TUNED = "mxfp4", "fp8"
TILES = (
    (16, 32, 256, 4, 4), (16, 64, 128, 4, 4), (16, 64, 256, 4, 3), (16, 128, 128, 4, 3), (16, 128, 128, 8, 3),
    (32, 128, 128, 4, 3), (32, 128, 128, 8, 3), (64, 64, 128, 4, 3), (64, 128, 128, 4, 3), (64, 128, 128, 8, 3),
    (128, 128, 128, 8, 3),
)  # fmt: skip
COMPARED = (("gpt-oss-120b", "mxfp4"), ("qwen3-30b-a3b", "fp8_block"), ("deepseek-v3", "int4"))
FEW = 1, 4, 16  # tokens
ROUTINGS, CHECKED = 16, 6
GBS = 4300.0


class Experts:
    """One weight [E, N, K] of all experts on this rank, in a format."""

    def __init__(self, format: str, E: int, N: int, K: int, device: torch.device) -> None:
        self.N, self.K, self.packing = N, K, PACKINGS.get(format)
        self.scale: torch.Tensor | None = None
        if self.packing is None:
            self.weight = torch.empty(E, N, K, dtype=torch.bfloat16, device=device).normal_(std=K**-0.5)
            return
        (shape, dtype), (scales, kind) = self.packing.stored(E * N, K, FORMATS[format])
        size = K**-0.5 / 4
        if dtype == torch.float8_e4m3fn:
            self.weight = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_().to(dtype)
        else:
            self.weight = torch.randint(-(1 << 31), 1 << 31, (shape[0], shape[1] * dtype.itemsize // 4), device=device)
            self.weight = self.weight.to(torch.int32).view(dtype)
        drawn = size * (0.5 + torch.rand(scales, device=device))
        self.scale = (drawn.log2().round() + 127).to(kind) if kind == torch.uint8 else drawn.to(kind)
        self.weight, self.scale = self.weight.view(E, N, -1), self.scale.view(E, N, *scales[1:])

    @property
    def operand(self) -> torch.Tensor:
        return self.weight.transpose(1, 2)

    @property
    def bytes(self) -> float:
        """Return the bytes of one expert."""
        size = self.weight[0].numel() * self.weight.itemsize
        return size + (0 if self.scale is None else self.scale[0].numel() * self.scale.itemsize)

    def exact(self, expert: int) -> torch.Tensor:
        if self.packing is None:
            return self.weight[expert].double()
        assert self.scale is not None
        return self.packing.unpack(self.weight[expert], self.scale[expert], self.K, torch.float64)


def act(both: torch.Tensor, shape: Shape) -> torch.Tensor:
    if not shape.gpt_oss:
        gate, up = both.chunk(2, -1)
        return gate * torch.sigmoid(gate) * up
    gate, up = both[..., ::2].clamp(max=7), both[..., 1::2].clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class Layer:
    def __init__(self, name: str, format: str, ctx: iris.Iris, parts: int = 0) -> None:
        self.shape = shape = (SHAPES | TINY)[name]
        self.ctx, self.width, device = ctx, shape.width // (parts or ctx.num_ranks), ctx.device
        torch.manual_seed(ctx.cur_rank)
        self.up = Experts(format, shape.experts, 2 * self.width, shape.hidden, device)
        self.down = Experts(format, shape.experts, shape.hidden, self.width, device)

    def draw(self, tokens: int) -> None:
        shape, device = self.shape, self.ctx.device
        generator = torch.Generator().manual_seed(tokens)
        self.A = torch.randn(tokens, shape.hidden, generator=generator).to(device, torch.bfloat16)
        self.chosen = [
            torch.randn(tokens, shape.experts, generator=generator).topk(shape.top_k).indices.to(device)
            for _ in range(ROUTINGS)
        ]
        self.weights = torch.rand(tokens, shape.top_k, generator=generator).to(device)
        self.middle = self.A.new_empty(tokens * shape.top_k, self.width)
        self.out = self.A.new_empty(tokens, shape.hidden)

    def gate_up(self, i: int, config: FusedConfig | None = None) -> None:
        kind = dict(activation="gpt_oss", interleaved=True) if self.shape.gpt_oss else {}
        self.ctx.ops.moe_gate_up(
            self.middle, self.A, self.up.operand, self.chosen[i], scale=self.up.scale, config=config, **kind
        )

    def reduce(self, i: int, config: FusedConfig | None = None) -> None:
        given = self.down.operand, self.chosen[i], self.weights
        self.ctx.ops.moe_down_all_reduce(self.out, self.middle, *given, config=config, scale=self.down.scale)

    def errors(self, up: FusedConfig | None = None, down: FusedConfig | None = None) -> tuple[float, float]:
        """Return the relative errors of both ops, of a few tokens."""
        self.middle.fill_(float("nan")), self.out.fill_(float("nan"))
        self.gate_up(0, up), self.reduce(0, down)
        count, k = min(CHECKED, len(self.A)), self.shape.top_k
        first, second, wrong = [], [], []
        for t in range(len(self.A) - count, len(self.A)):
            total = torch.zeros(self.shape.hidden, dtype=torch.float64, device=self.ctx.device)
            for j, expert in enumerate(self.chosen[0][t].tolist()):
                row = act(self.up.exact(expert) @ self.A[t].double(), self.shape)
                first.append(row)
                wrong.append(self.middle[t * k + j].double() - row)
                total += self.weights[t, j].double() * (self.down.exact(expert) @ self.middle[t * k + j].double())
            second.append(total)
        both = torch.stack(second)
        dist.all_reduce(both)
        up = torch.stack(wrong).norm() / torch.stack(first).norm()
        return float(up), float((self.out[-count:].double() - both).norm() / both.norm())

    def touched(self) -> float:
        return sum(len(each.unique()) for each in self.chosen) / ROUTINGS


def tuned(layer: Layer, row: dict, warm: bool) -> None:
    """Time both ops in all tiles, by the algorithm of the plan."""
    pairs, few = layer.chosen[0].numel(), not need_sorting(layer.chosen[0].numel(), layer.shape.experts)
    for name, call in (("up", layer.gate_up), ("down", layer.reduce)):
        times = {}
        for m, n, k, warps, stages in TILES:
            if few != (m == 16) and pairs < 4096:
                continue
            algorithm = "one_shot" if few else "sequential" if name == "up" else "overlapped"
            config = FusedConfig(m, n, k, group_m=8, num_warps=warps, num_stages=stages, algorithm=algorithm)
            try:
                call(0, config)
                if not warm:
                    times[f"{m}x{n}x{k}w{warps}s{stages}"] = round(graph_us(partial(call, config=config), ROUTINGS), 1)
            except Exception as error:
                times[f"{m}x{n}x{k}w{warps}s{stages}"] = f"{type(error).__name__}: {error}"[:60]
        row[f"{name}_tiles"] = times


def compare(layer: Layer, row: dict, op: str, stream: bool, warm: bool) -> None:
    """Time an op by the stream of touched experts, or by the fastest other way."""
    shape, w, first = layer.shape, layer.ctx.num_ranks, op == GATE_UP
    weight, operation = layer.up if first else layer.down, BY_NAME[op]
    problem = Problem(
        op, operation.forms[0], len(layer.A), weight.N, weight.K, w, torch.bfloat16,
        format_of(weight.operand[0], weight.scale[0]), operation.epilogue,
        experts=planned.Experts(shape.experts, shape.top_k),
    )  # fmt: skip
    ways = tuple(way for way in WAYS if isinstance(way, Touched) == stream)
    config = choose(ways, problem, machine_of(layer.ctx.device), explained=False)
    # configurations that differ in their kernels alone are one call to the library
    config = replace(config, num_stages=config.num_stages + stream)
    call = layer.gate_up if first else layer.reduce
    error = layer.errors(*((config, None) if first else (None, config)))[not first]
    row |= dict(kernel=config.kernel, predicted=config.prediction.total_us, error=error, wrong=not error < 0.02)
    if not warm:
        row |= dict(us=graph_us(partial(call, config=config), ROUTINGS))


def run_compared(names: list[str], some: list[int], parts: int, warm: bool) -> None:
    with iris.iris(1 << 28) as ctx, torch.no_grad():
        for name, format in COMPARED:
            if name not in names:
                continue
            layer = Layer(name, format, ctx, parts)
            for tokens, op in product(some, (GATE_UP, DOWN_ALL_REDUCE)):
                layer.draw(tokens)
                for stream in (False, True):
                    weight = layer.up if op == GATE_UP else layer.down
                    floor = layer.touched() * weight.bytes / GBS / 1e3
                    row = dict(op=op, shape=name, format=format, T=tokens, floor=floor)
                    try:
                        compare(layer, row, op, stream, warm)
                    except Exception as error:
                        row |= dict(failed=f"{type(error).__name__}: {error}"[:300])
                    say(row, ctx, warm)
            del layer


def same_bits(name: str, format: str, warm: bool) -> None:
    """Check that with invariant="batch" the first token has the same bits in any batch."""
    with iris.iris(1 << 29, invariant="batch") as ctx:
        layer, equal_bits = Layer(name, format, ctx), {}
        for tokens in (1, 3, 64, 512):
            layer.draw(512)
            layer.A, layer.chosen, layer.weights = layer.A[:tokens], [layer.chosen[0][:tokens]], layer.weights[:tokens]
            layer.middle = layer.A.new_empty(tokens * layer.shape.top_k, layer.width)
            layer.out = layer.A.new_empty(tokens, layer.shape.hidden)
            layer.gate_up(0), layer.reduce(0)
            equal_bits[tokens] = torch.equal(layer.out[0], equal_bits.setdefault(0, layer.out[0].clone()))
        say(dict(shape=name, format=format, same_bits={k: v for k, v in equal_bits.items() if k}), ctx, warm)


def say(row: dict, ctx: iris.Iris, warm: bool) -> None:
    if ctx.cur_rank == 0 and not warm:
        short = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items()}
        print(json.dumps(short), flush=True)


def run(names: list[str], formats: list[str], some: list[int], parts: int, warm: bool) -> None:
    with iris.iris(1 << 30) as ctx, torch.no_grad():
        for name in names:
            for format in formats:
                layer = Layer(name, format, ctx, parts)
                for tokens in some:
                    try:
                        layer.draw(tokens)
                        errors = layer.errors()
                        row = dict(shape=name, format=format, T=tokens, errors=[float(f"{e:.3g}") for e in errors])
                        row["wrong"] = not max(errors) < 0.02
                        if not warm:
                            touched = layer.touched()
                            row |= dict(up=graph_us(layer.gate_up, ROUTINGS), down=graph_us(layer.reduce, ROUTINGS))
                            row |= dict(up_floor=touched * layer.up.bytes / GBS / 1e3)
                            row |= dict(down_floor=touched * layer.down.bytes / GBS / 1e3)
                        if format in TUNED and tokens in (1, 16, 64, 512):
                            tuned(layer, row, warm)
                        say(row, ctx, warm)
                    except Exception as error:
                        say(dict(shape=name, format=format, T=tokens, failed=f"{type(error).__name__}: {error}"[:300]),
                            ctx, warm)  # fmt: skip
                        if warm:
                            raise
                del layer
    for format in ("mxfp4", "fp8"):
        if format in formats and NAMES[0] in names:
            try:
                same_bits(NAMES[0], format, warm)
            except Exception as error:
                print(f"same bits, {format}: {type(error).__name__}: {error}"[:300], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=list(NAMES))
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--parts", type=int, default=0, help="of an expert's width; 0 for one a rank")
    parser.add_argument("--warm", action="store_true")
    args = parser.parse_args()
    args.tokens = args.tokens or list(FEW if args.compare else TOKENS)
    if args.compare and args.shapes == list(NAMES):
        args.shapes = [name for name, _ in COMPARED]
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        if args.compare:
            run_compared(args.shapes, args.tokens, args.parts, args.warm)
        else:
            run(args.shapes, args.formats, args.tokens, args.parts, args.warm)
        return
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    begin = time.monotonic()

    def started(shapes: list[str], formats: list[str], *more: str) -> subprocess.Popen:
        given = ["--shapes", *shapes, *(["--formats", *formats] if formats else []), *more]
        return subprocess.Popen([*start, "-m", "benchmarks.moe_formats", *given])

    kind = ["--parts", str(args.parts), *(["--compare"] if args.compare else [])]
    if args.compare:
        each_alone = [([name], [], *kind, "--tokens", str(n)) for name in args.shapes for n in args.tokens]
    else:
        tokens = ["--tokens", *map(str, args.tokens)]
        each_alone = [([name], [each], *kind, *tokens) for name in args.shapes for each in args.formats]
    for process in [started(*each, "--warm") for each in each_alone]:
        process.wait()
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    more = [*kind, "--tokens", *map(str, args.tokens)]
    sys.exit(started(args.shapes, args.formats, *more).wait())


if __name__ == "__main__":
    main()
