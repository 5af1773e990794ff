"""Measure products of few rows with quantised weights: `python -m benchmarks.quantised --ranks 2`.

First every format multiplies small sizes, with and without a bias and a gate, and is compared with float64 of the
weights that its codes represent. Outputs hold NaN before. Then layers of published models are timed as a rank of two
has them, each by `matmul_all_reduce` and without an exchange by `skinny_matmul`, in CUDA graphs. Weights rotate, so
that none is in the L2 cache. `bound` is the time in which their bytes come at the rate of a copy, and 4 us.

`--rivals` adds vLLM's kernels (`rivals/of_vllm_quantised.py`); our own all-reduce follows their products.
"""

import argparse
from collections.abc import Callable
from functools import partial
import itertools
import math
import sys
import time

import iris
from iris_ops.local import skinny_matmul
from iris_ops.planning.epilogues import GATE
from iris_ops.planning.weights import BY_NAME
from iris_ops.quantised import stream_form, weight_stream
from iris_ops.quantised.packing import PACKINGS
from iris_tp.bench import compare
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist
from torch.nn import functional as F

from benchmarks.measuring import report
from benchmarks.measuring.ahead import compile_ahead
from benchmarks.rivals import of_vllm_quantised
from benchmarks.rivals.of_vllm_quantised import RIVALS

LAYERS = {  # name: (outputs, inputs of a rank)
    "70B o": (8192, 4096),
    "70B down": (8192, 14336),
    "Qwen3-32B o": (5120, 4096),
    "Qwen3-32B down": (5120, 12800),
    "gpt-oss o": (2880, 2048),
    "Qwen3-235B o": (4096, 4096),
}
TINY = {"tiny": (48, 96)}
FORMATS = ["fp8", "fp8_block", "int4", "int4/128", "mxfp4"]
ROWS = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]


def _variants(*choices: tuple[int, ...]) -> dict[str, stream_form.Choice]:
    """Return choices by name: columns and lines of a step, programs on a multiprocessor, warps, those along columns."""
    return {
        f"{columns}x{lines}x{resident}w{warps}c{across}": stream_form.Choice(
            columns, lines, resident, WARPS=warps, COLUMN_WARPS=across
        )
        for columns, lines, resident, warps, across in choices
    }


FEW_ROWS = _variants(
    (32, 4, 2, 4, 1), (32, 8, 2, 4, 1), (64, 4, 1, 4, 1), (64, 8, 1, 4, 1), (64, 8, 1, 8, 1), (64, 4, 1, 8, 2),
    (128, 4, 1, 8, 2), (32, 8, 1, 8, 1),
)  # fmt: skip
MORE_ROWS = _variants(
    (64, 2, 1, 8, 4), (64, 2, 1, 4, 2), (64, 4, 1, 8, 2), (128, 2, 1, 8, 4), (128, 2, 1, 8, 8), (128, 1, 1, 8, 8),
    (64, 1, 1, 4, 4), (32, 4, 1, 8, 2),
)  # fmt: skip
CHECKED = [  # rows, columns, depth
    (1, 256, 512), (1, 8192, 1440), (5, 200, 1440), (16, 1040, 2880), (8, 4224, 1152), (17, 201, 1440),
    (33, 4224, 1152), (48, 8192, 512), (64, 200, 2880), (100, 1040, 736),
]  # fmt: skip
ALLOWED, ROUNDED = 0.006, 0.045  # relative: results are rounded to bf16; rows to fp8, where K fills no lines
ROTATED_BYTES = 192 << 20
Weight = tuple[torch.Tensor, torch.Tensor | None]


def weight_of(name: str, N: int, K: int, seed: int, device: torch.device) -> tuple[Weight, torch.Tensor]:
    """Return a random weight in stored form, and its numbers in float64. Rows are of several magnitudes."""
    draw = torch.Generator(device).manual_seed(seed)
    exact = torch.randn(N, K, generator=draw, device=device).mul_(0.03)
    exact *= 2.0 ** torch.randint(-3, 4, (N, 1), generator=draw, device=device)
    if name == "bf16":
        exact = exact.to(torch.bfloat16)
        return (exact, None), exact.double()
    form = BY_NAME[name]
    packing, group = PACKINGS[form.packing], form.group or None
    codes, scales = packing.quantise(exact, group)
    if packing.zeros:
        scales[..., 1] = torch.randint(-8, 9, scales.shape[:2], generator=draw, device=device)
    stored = packing.pack(codes, scales, group)
    return stored, packing.unpack(*stored, K, torch.float64)


class Run:
    """A run: its calls by name, and what was wrong."""

    def __init__(self, team: Team, args: argparse.Namespace) -> None:
        self.team, self.args, self.wrong = team, args, []
        self.ctx = iris.iris(int(args.heap_gib * 2**30))

    def fused(self, out: torch.Tensor, x: torch.Tensor, weight: Weight, bias=None) -> torch.Tensor:
        self.ctx.ops.matmul_all_reduce(out, x, weight[0].t(), bias, scale=weight[1])
        return out

    def local(self, out: torch.Tensor, x: torch.Tensor, weight: Weight, bias=None, gated=False) -> torch.Tensor:
        stored, scale = weight
        few = x.device.type == "cuda" and weight_stream.supports(x, stored.t(), scale) is None
        if scale is None and bias is None and x.shape[0] > 64:  # as cuBLAS multiplies it
            return torch.mm(x, stored.t(), out=out)
        if few or x.device.type == "cuda" and scale is None:
            return skinny_matmul.skinny_matmul(
                x, stored, bias, scale, GATE.name if gated else "", launch=skinny_matmul.Launch(out=out)
            )
        return out.copy_(skinny_matmul.linear(x, stored, bias, scale))

    def check(self) -> None:
        """Compare each format at small sizes, and keep what is wrong."""
        cases = []
        names = [*dict.fromkeys([*self.args.formats, "fp8_block/32", "int4/channel"])]
        for name, (m, n, k) in itertools.product(names, CHECKED if self.team.cuda else [(3, 48, 96)]):
            weight, exact = weight_of(name, n, k, n + k + self.team.rank, self.team.device)
            draw = torch.Generator(self.team.device).manual_seed(m + self.team.rank)
            x = torch.randn(m, k, generator=draw, device=self.team.device).to(torch.bfloat16)
            bias = torch.arange(n, device=x.device).sin().to(torch.bfloat16)
            product = x.double() @ exact.t()
            total = product.clone()
            dist.all_reduce(total)
            out = self.ctx.empty(m, n, dtype=torch.bfloat16)
            cases.append((f"{name} {m}x{n}x{k} sum", partial(self.fused, out, x, weight), out, total))
            if m < 8:
                total_bias = total + bias.double()
                cases.append((f"{name} sum + bias", partial(self.fused, out, x, weight, bias), out, total_bias))
            own = torch.empty_like(out)
            cases.append((f"{name} {m}x{n}x{k} local", partial(self.local, own, x, weight, bias), own, product + bias))
            if (
                self.team.cuda
                and n % 2 == 0
                and m <= 64
                and weight_stream.supports(x, weight[0].t(), weight[1]) is None
            ):
                half = torch.empty(m, n // 2, dtype=out.dtype, device=out.device)
                gate, up = product.to(x.dtype).double().chunk(2, 1)
                cases.append(
                    (f"{name} {m} gate", partial(self.local, half, x, weight, gated=True), half, F.silu(gate) * up)
                )
        if self.team.cuda:
            count = compile_ahead(self.team, [self.ctx], lambda: [call() for _, call, *_ in cases])
            self.team.say(f"{count} kernels compiled for {len(cases)} checks")
        worst: dict[str, float] = {}
        for name, call, out, exact in cases:
            error = self.error(call, out, exact)
            worst[name.split()[0]] = max(worst.get(name.split()[0], 0.0), error)
            allowed = ROUNDED if name.startswith("fp8 ") else ALLOWED * (4 if "gate" in name else 1)
            if not error <= allowed:
                self.wrong.append(f"{name}: {error:.3g}")
        self.team.say("largest errors: " + ", ".join(f"{name} {error:.2g}" for name, error in worst.items()))

    def error(self, call: Callable, out: torch.Tensor, exact: torch.Tensor) -> float:
        """Return the largest error of two calls on any rank, relative to the whole result; infinity for NaN."""
        largest = 0.0
        for _ in range(2):
            out.fill_(float("nan"))  # on all ranks, before what counts
            self.team.barrier()
            self.team.synchronize()
            value, reason = self.team.attempt(lambda: compare.relative_error(call(), exact))
            if reason:
                self.team.say(str(reason)[:300])
            largest = max(largest, math.inf if value is None or math.isnan(value) else value)
        return self.team.slowest([largest])[0]

    def layer(self, name: str, n: int, k: int, copy_gbs: float) -> list[dict]:
        """Time a layer at each number of rows."""
        stored, exact = self.weights(n, k)
        cases = []
        for m in self.args.rows:
            draw = torch.Generator(self.team.device).manual_seed(m + self.team.rank)
            x = torch.randn(m, k, generator=draw, device=self.team.device).to(torch.bfloat16)
            out, own = self.ctx.empty(m, n, dtype=x.dtype), torch.empty(m, n, dtype=x.dtype, device=x.device)
            for kind, call, result in (("sum", self.fused, out), ("local", self.local, own)):
                calls = {}
                for form, weights in stored.items():
                    own_or_rival = partial(self.rival, form, kind) if form in RIVALS else call
                    calls[form] = partial(_rotated, own_or_rival, result, x, weights)
                if kind == "local" and self.args.variants:
                    calls |= self.varied(call, result, x, stored)
                if kind in self.args.kinds:
                    cases.append((m, kind, x, result, calls))
        if self.team.cuda:
            ours = [call for *_, calls in cases for form, call in calls.items() if form not in RIVALS]
            compile_ahead(self.team, [self.ctx], lambda: [call(0) for call in ours])
        return [self.timed(name, n, k, case, stored, exact, copy_gbs) for case in cases]

    def weights(self, n: int, k: int) -> tuple[dict[str, list[Weight]], dict[str, torch.Tensor]]:
        """Return by format a layer's weights, which rotate, and the numbers of each."""
        stored, exact = {}, {}
        for form in ["bf16", *self.args.formats, *self.args.rivals]:
            if form in RIVALS:
                prepared, reason = self.team.attempt(partial(RIVALS[form].prepared, exact["bf16"]))
                if prepared is None:
                    self.team.say(f"no {form}: {reason}"[:300])
                    continue
                weight, exact[form] = prepared
            else:
                weight, exact[form] = weight_of(form, n, k, 1 + self.team.rank, self.team.device)
            copies = max(2, min(16, ROTATED_BYTES // _nbytes(weight))) if self.team.cuda else 2
            stored[form] = [weight] + [tuple(t if t is None else t.clone() for t in weight) for _ in range(copies - 1)]
        return stored, exact

    def rival(self, form: str, kind: str, out: torch.Tensor, x: torch.Tensor, weight: tuple) -> torch.Tensor:
        """Multiply by a kernel of vLLM; of a sum, all-reduce the product by ours."""
        product = RIVALS[form].multiply(x, weight)
        if kind == "sum":
            self.ctx.ccl.all_reduce(out, product)
            return out
        return product

    def varied(self, call: Callable, result: torch.Tensor, x: torch.Tensor, stored: dict) -> dict[str, Callable]:
        """Return calls in which programs divide the work otherwise, of formats with scales of groups."""

        def of(choice: stream_form.Choice, weights: list[Weight], i: int) -> torch.Tensor:
            kept, weight_stream.choice = weight_stream.choice, lambda *sizes: choice
            try:
                return _rotated(call, result, x, weights, i)
            finally:
                weight_stream.choice = kept

        calls, rows = {}, stream_form.loaded_rows(x.shape[0])
        for form, weights in stored.items():
            if form in ("bf16", "fp8", *RIVALS):
                continue
            weight, scale = weights[0]
            words = weight_stream.widening_of(weight.t(), scale).WORDS
            nbytes = scale.nbytes // scale.shape[0] * stream_form.LINE // x.shape[1] if scale.ndim == 2 else 0
            for name, choice in (FEW_ROWS if rows <= 16 else MORE_ROWS).items():
                if choice.stages(rows, 1, words, nbytes, 1) >= 2:
                    calls[f"{form} {name}"] = partial(of, choice, weights)
        return calls

    def allowed(self, form: str, rows: int) -> float:
        """Return the error allowed: more where rows are rounded to fp8."""
        rival, own = RIVALS.get(form), BY_NAME.get(form.split()[0])
        rounds = rival.rounds_rows if rival else own is not None and own.rounds_rows and rows > own.unrounded_rows
        return ROUNDED if rounds else ALLOWED

    def timed(self, name: str, n: int, k: int, case: tuple, stored: dict, exact: dict, copy_gbs: float) -> dict:
        """Return the row of a case: each call is checked, then all are timed in turns."""
        m, kind, x, result, calls = case
        row = {"layer": name, "M": m, "N": n, "K": k, "kind": kind}
        products = {form: x.double() @ numbers.t() for form, numbers in exact.items()}
        if kind == "sum":
            for product in products.values():
                dist.all_reduce(product)

        def error(label: str, call: Callable) -> float:
            return self.error(partial(call, 0), result, products[label.split()[0]])

        inputs = max(map(len, stored.values()))
        row |= compare.compare(self.team, calls, error, inputs, compare.budget_of(self.team, self.args.quick))
        row["bound"] = {form: _nbytes(weights[0]) / copy_gbs / 1e3 + 4 for form, weights in stored.items()}
        row["wrong"] = [form for form, e in row["errors"].items() if not e <= self.allowed(form, m)]
        self.wrong += [f"{name} {kind} {m} {form}: {row['errors'][form]:.3g}" for form in row["wrong"]]
        self.wrong += [f"{name} {kind} {m} {form}: {reason}" for form, reason in row["failed"].items()]
        self.team.say(line(row))
        return row


def _rotated(call: Callable, result: torch.Tensor, x: torch.Tensor, weights: list[Weight], i: int) -> torch.Tensor:
    return call(result, x, weights[i % len(weights)])


def _nbytes(weight: Weight) -> int:
    return sum(t.nbytes for t in weight if t is not None)


def line(row: dict) -> str:
    cells = [f"{form} {us:.1f} ({us / row['bound'][form.split()[0]]:.2f})" for form, us in row["us"].items()]
    return f"| {row['layer']} {row['kind']} | {row['M']} | " + " | ".join(cells) + " |"


def copy_rate(team: Team) -> float:
    """Return the GB/s of a copy in a GPU's memory, read and written."""
    if not team.cuda:
        return 10.0
    source = torch.empty(1 << 30, dtype=torch.uint8, device=team.device)
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    target.copy_(source)
    start.record()
    for _ in range(8):
        target.copy_(source)
    end.record()
    end.synchronize()
    return 8 * 2 * source.nbytes / start.elapsed_time(end) / 1e6


def run(team: Team, args: argparse.Namespace) -> None:
    begin, rows = time.monotonic(), []
    if args.rivals and (reason := of_vllm_quantised.load()):
        team.say(f"no rivals: {reason}")
        args.rivals = []
    work = Run(team, args)
    with torch.no_grad():
        if not args.unchecked:
            work.check()
        for each in work.wrong:
            team.say(f"WRONG {each}")
        gbs = -team.slowest([-copy_rate(team)])[0]
        team.say(f"copy {gbs:.0f} GB/s; us of a call, in brackets over the bound")
        layers = {name: LAYERS[name] for name in args.layers} if team.cuda else TINY
        for name, (n, k) in layers.items():
            if team.slowest([time.monotonic() - begin])[0] < args.time_limit:
                rows += work.layer(name, n, k, gbs)
    work.ctx.close()
    if team.rank == 0:
        report.write(report.describe_run(team, args) | {"copy_gbs": gbs, "rows": rows}, args)
    if work.wrong:
        team.say("WRONG: " + "; ".join(work.wrong))
        sys.exit(1)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="bfloat16")
    parser.add_argument("--rows", type=report.numbers, help=f"of the input; default {ROWS}")
    parser.add_argument("--layers", type=report.some_of(LAYERS), default=[*LAYERS])
    parser.add_argument("--formats", type=report.some_of(BY_NAME), default=FORMATS)
    parser.add_argument("--kinds", type=report.some_of(["sum", "local"]), default=["sum", "local"])
    parser.add_argument("--variants", action="store_true", help="of products without ranks, how programs divide them")
    parser.add_argument("--rivals", type=report.some_of(RIVALS), default=[], help="vLLM's kernels, where installed")
    parser.add_argument("--unchecked", action="store_true", help="without the small sizes")
    parser.add_argument("--quick", action="store_true", help="shorter measurements")
    args = parser.parse_args(argv)
    report.settle(args, argv, "quantised")
    args.rows = args.rows or (ROWS if args.device == "cuda" else [3])
    return launch(run, args, args.time_limit + 60)


if __name__ == "__main__":
    sys.exit(main())
