"""`matmul_all_reduce_norm` against what ends in a whole RMSNorm: `python -m benchmarks.norms --ranks 2`.

What follows an all-reduce in a decoder: h = residual + sum over ranks of A @ B, then the RMSNorm of h. Ours leaves h,
h * weight and the sums of its squares; the product that follows applies the factor of a row (`rmsnorm_epilogue.py`).
Everybody else leaves h and the whole norm, and so does ours where the norm's reader is no product of ours:

    ours, whole norm    what the plug-in for vLLM runs above 64 rows, by the plan one of the next two
    ... in the sum      torch.matmul, then `ctx.ccl.all_reduce_norm`
    ... after           `ctx.ops.matmul_all_reduce`, then the norm's kernel
    NCCL, vLLM    torch.matmul, then the all-reduce, then residual and norm in one kernel of torch.compile
    FlashInfer    torch.matmul, then one kernel for all-reduce, residual and norm: in one shot and in two

All are checked against both results in a higher precision, for ours with the factor applied, and timed in turns.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
import functools
from functools import partial
import sys
import time

from iris import Iris
from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team, launch
from layers.vllm import ops as vllm_ops
import torch
import torch.distributed as dist

from benchmarks import ops
from benchmarks.measuring import models, report
from benchmarks.rivals import everyone, of_flashinfer, of_nccl, of_vllm
from benchmarks.rivals.contender import OURS, RIVAL, Contender
from benchmarks.tables import every_row

EPS = 1e-5
ROWS = (1, 6, 16, 64, 128, 256, 512)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--rows", type=report.numbers, help="values of M; default: 1 to 512, on CPUs 1,5")
    parser.add_argument("--modes", type=report.some_of(("graph", "eager")), default="graph,eager")
    parser.add_argument("--quick", action="store_true", help="a third of the time for each")
    args = parser.parse_args(argv)
    report.settle(args, argv, "norms")
    args.rows = args.rows or (list(ROWS) if args.device == "cuda" else [1, 5])
    args.modes = report.modes(parser, args)
    return args


def sizes(team: Team) -> list[tuple[int, int]]:
    """Return (N, K) of the row-parallel layers of three models."""
    if not team.cuda:
        return [(128, 48)]
    served = (models.LLAMA_8B, models.QWEN3_32B, models.LLAMA_70B)
    return [layer for model in served for layer in model.row_linears(team.world)]


class NormInputs(Inputs):
    """An all-reduce's inputs, a residual and a norm's weight; expected are h and its norm, one upon the other."""

    def __init__(self, row: Row, team: Team, dtype: torch.dtype) -> None:
        super().__init__(row, team, dtype)
        generator = torch.Generator(team.device).manual_seed(row.M * row.N + row.K)  # alike on all ranks
        random = {"generator": generator, "device": team.device, "dtype": dtype}
        self.residual = torch.randn(row.M, row.N, **random)
        self.weight = torch.randn(row.N, **random).mul_(0.1).add_(1)

    def expected(self, copy: int, alone: bool = False) -> torch.Tensor:
        product = super().expected(copy, alone)
        if alone:
            return product
        h = product + self.residual.to(product.dtype)
        norm = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS) * self.weight.to(product.dtype)
        return torch.stack([h, norm])

    def pair(self) -> torch.Tensor:
        """Return room for h and its norm: [2, M, N]."""
        return self.new(2, *self.out_shape)


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = getattr(torch, args.dtype)
    rows = [Row("ar", M, *size) for size in dict.fromkeys(sizes(team)) for M in args.rows]
    heaps = everyone.heaps(team, rows, dtype, args.heap_gib)
    entries = contenders(team, rows, dtype, *heaps)
    measured = {**report.describe_run(team, args), "rows": []}
    begin = time.monotonic()
    for number, row in enumerate(rows, 1):
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            team.say(f"stopped: {len(rows) - number + 1} rows left out")
            break
        result = ops.run_row(row, team, entries, dtype, args, NormInputs)
        measured["rows"].append(result)
        measured["left_out"] = [str(skipped) for skipped in rows[number:]]
        shown = " | ".join(f"{r['name']} {report.summary(r)}" for r in result["results"])
        team.say(f"[{time.monotonic() - begin:4.0f} s] {number}/{len(rows)} {row}: {shown}")
        if team.rank == 0:
            report.write(measured, args)
    team.say("\n" + every_row.render(report.rounded(measured)))
    for heap in heaps:
        heap.close()


def contenders(
    team: Team, rows: list[Row], dtype: torch.dtype, heap: everyone.Heap, alone: everyone.Heap
) -> list[Contender]:
    blas = "cuBLAS" if team.cuda else "torch"
    entries = [Contender("ours", OURS, {"ar": partial(_ours, heap)}, plan=partial(_plan, heap))]
    for name, whole in WHOLE.items():
        entries.append(Contender(f"ours, whole norm{name}", OURS, {"ar": partial(_whole, heap.ctx, whole)}, _many))
    entries.append(Contender(f"{blas} + {'NCCL' if team.cuda else 'gloo'}, norm", RIVAL, {"ar": _with_torch}))
    if team.cuda:
        windows = of_nccl.Windows(team, rows, dtype)
        entries.append(Contender("cuBLAS + NCCL symmetric, norm", RIVAL, {"ar": partial(_symmetric, windows)}))
        if of_vllm.installed(team):
            capture = partial(of_vllm.capturing, team.device)
            entries.append(Contender(f"cuBLAS + {of_vllm.NAME}, norm", RIVAL, {"ar": _vllm}, _small, capture=capture))
        if of_flashinfer.installed(team):
            for one_shot, name in of_flashinfer.NAMES.items():
                served = of_flashinfer.served(one_shot)
                entries.append(
                    Contender(f"cuBLAS + {name} with norm", RIVAL, {"ar": partial(_flashinfer, one_shot)}, served)
                )
    entries += [each for each in everyone.contenders(team, rows, dtype, heap, alone) if each.alone]
    return entries


def _plan(heap: everyone.Heap, row: Row) -> dict:
    planned = asdict(heap.ctx.ops.plan("matmul_all_reduce_norm", row.M, row.N, row.K, heap.dtype))
    return {name: value for name, value in planned.items() if name != "reasons"}


def _ours(heap: everyone.Heap, inputs: Inputs) -> Call:
    assert isinstance(inputs, NormInputs)
    from iris_ops.kernels.rmsnorm_epilogue import second_half, spans

    rows, columns = inputs.out_shape
    out, scaled = inputs.new(rows, columns), inputs.new(rows, columns)
    squares = torch.empty(spans(columns), rows, dtype=torch.float32, device=inputs.team.device)
    op = heap.ctx.ops.matmul_all_reduce_norm
    checked = _Halves(out, scaled, squares, second_half)

    def call(i: int) -> torch.Tensor:
        op(out, scaled, squares, inputs.A[i], inputs.B[i], inputs.residual, inputs.weight)
        return checked

    return call


def _in_the_sum(
    A: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.iris_vllm.all_reduce_norm(A @ weight.t(), residual, norm_weight, eps, group)


def _after(
    A: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, group: str
) -> tuple[torch.Tensor, torch.Tensor]:
    total = torch.ops.iris_vllm.matmul_all_reduce(A, weight, group)
    h, normed = torch.ops.iris_ops.add_rms_norm(total, residual, norm_weight, eps)
    return normed, h


WHOLE: dict[str, Callable] = {
    "": lambda *args: torch.ops.iris_vllm.matmul_all_reduce_rms_norm(*args),
    " in the sum": _in_the_sum,
    " after": _after,
}


def _many(row: Row, world: int, dtype: torch.dtype) -> bool:
    return row.M > 64 and dtype == torch.bfloat16


def _whole(ctx: Iris, whole: Callable, inputs: Inputs) -> Call:
    assert isinstance(inputs, NormInputs)
    vllm_ops.serve("benchmark", ctx)
    results = _Results()

    def call(i: int) -> torch.Tensor:
        normed, h = whole(inputs.A[i], inputs.B[i].t(), inputs.residual, inputs.weight, EPS, "benchmark")
        results.tensors = (h, normed)
        return results

    return call


class _Results:
    """New tensors of each call, as the benchmark's check sees them."""

    tensors: tuple[torch.Tensor, ...] = ()

    def fill_(self, value: float) -> None:
        for each in self.tensors:
            each.fill_(value)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack(self.tensors).to(dtype)


class _Halves:
    """The op's result as the benchmark checks it: poisoned as a whole, read with the rows' factors applied."""

    def __init__(self, out: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor, finish: Callable) -> None:
        self.parts, self.finish = (out, scaled, squares), finish

    def fill_(self, value: float) -> None:
        for part in self.parts:
            part.fill_(value)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        out, scaled, squares = self.parts
        return torch.stack([out, self.finish(scaled, squares, EPS)]).to(dtype)


def _add_norm(total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, pair: torch.Tensor) -> None:
    """Write h = total + residual, rounded, and its norm."""
    h = total + residual
    pair[0] = h
    wide = h.float()
    pair[1] = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(h.dtype)


@functools.cache
def _finishing(cuda: bool) -> Callable:
    """Return `_add_norm`, on GPUs as one kernel."""
    return torch.compile(_add_norm, dynamic=True, fullgraph=True) if cuda else _add_norm


def _ended(inputs: Inputs, partial_sums: torch.Tensor, reduce: Callable[[], torch.Tensor]) -> Call:
    """Return a call of torch's product into `partial_sums`, the all-reduce, residual and norm."""
    assert isinstance(inputs, NormInputs)
    pair, finish = inputs.pair(), _finishing(inputs.team.cuda)

    def call(i: int) -> torch.Tensor:
        torch.matmul(inputs.A[i], inputs.B[i], out=partial_sums)
        finish(reduce(), inputs.residual, inputs.weight, pair)
        return pair

    return call


def _with_torch(inputs: Inputs) -> Call:
    total = inputs.new(*inputs.out_shape)

    def reduce() -> torch.Tensor:
        dist.all_reduce(total)
        return total

    return _ended(inputs, total, reduce)


def _symmetric(windows: of_nccl.Windows, inputs: Inputs) -> Call:
    total = windows.place("sent", *inputs.out_shape)

    def reduce() -> torch.Tensor:
        dist.all_reduce(total)
        return total

    return _ended(inputs, total, reduce)


def _vllm(inputs: Inputs) -> Call:
    partial_sums, total = inputs.new(*inputs.out_shape), inputs.new(*inputs.out_shape)
    return _ended(inputs, partial_sums, lambda: of_vllm.reduced(inputs.team.device, partial_sums, total))


def _small(row: Row, world: int, dtype: torch.dtype) -> bool:
    return of_vllm.supports(row.M * row.N * dtype.itemsize, world, dtype)


def _flashinfer(one_shot: bool, inputs: Inputs) -> Call:
    assert isinstance(inputs, NormInputs)
    partial_sums, pair = inputs.new(*inputs.out_shape), inputs.pair()
    ends = dict(residual_in=inputs.residual, residual_out=pair[0], norm_out=pair[1], rms_gamma=inputs.weight)

    def call(i: int) -> torch.Tensor:
        torch.matmul(inputs.A[i], inputs.B[i], out=partial_sums)
        of_flashinfer.reduced(inputs.team, one_shot, partial_sums, **ends, rms_eps=EPS)
        return pair

    return call


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 150))


if __name__ == "__main__":
    main()
