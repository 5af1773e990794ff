"""GEMM + all-scatter, overlapped in the ways of `examples/all_scatter`: `python -m benchmarks.all_scatter`.

Every rank multiplies A (M, K) by its columns of B (K, N) and all need the whole product. On the same tensors: each
variant; `ctx.ops.matmul_all_gather`; torch's product, NCCL's all-gather and the copy that brings the parts into
columns. Each result is checked, into poisoned output, before it is timed, and a graph's once more by a replay. Beside
them what bounds them: the product alone (torch's and the variants' own), and the bytes over the link.

Prints the table and writes `all_scatter_<gpu>_x<ranks>.json`; `benchmarks.report` draws the bars.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
import importlib
import sys
import time

import iris  # before triton on a machine without a GPU
from iris import platform
from iris_tp.bench import timing
from iris_tp.bench.rows import LINK_GB_S
from iris_tp.bench.team import Team, launch
import torch
import torch.distributed as dist

from benchmarks.measuring import report
from benchmarks.tables.every_row import ALONE, render
from examples.all_scatter.common import SMALL, Blocks, Case

VARIANTS = ("bulk_synchronous", "producer_consumer", "fused_sequential", "fused_specialized")
SHAPES = ((8192, 8192, 7168), (8192, 8192, 2048), (4096, 4096, 3584), (2048, 8192, 7168), (512, 8192, 7168))


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str
    call: Callable[[int], torch.Tensor]
    out: torch.Tensor  # where the result stands: the whole, or this rank's columns


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--rows", type=report.sizes, help='sizes M,N,K, as "8192,8192,7168;512,8192,2048"')
    parser.add_argument("--store-warp", action="store_true", help="also the variant with a store warp; Hopper only")
    parser.add_argument("--quick", action="store_true", help="two shapes, a third of the time each")
    parser.set_defaults(time_limit=50)
    args = parser.parse_args(argv)
    report.settle(args, argv, "all_scatter")
    default = (SHAPES[1:4:2] if args.quick else SHAPES) if args.device == "cuda" else ((64, 96, 64),)
    args.shapes = args.rows or default
    for M, N, K in args.shapes:
        if N % args.ranks or K % 8:
            parser.error(f"{M},{N},{K}: expected N a multiple of the {args.ranks} ranks and K of 8")
    if args.store_warp and not platform.has_warp_specialisation(torch.device(args.device)):
        parser.error(f"--store-warp on {args.device}: expected NVIDIA Hopper GPUs, whose warps can do different work")
    return args


class Inputs:
    """A and this rank's weight, and the whole product in float32."""

    def __init__(
        self,
        team: Team,
        ctx: iris.Iris,
        M: int,
        N: int,
        K: int,
        dtype: torch.dtype,
        variants: tuple[str, ...] = VARIANTS,
    ) -> None:
        self.team, self.ctx, self.variants = team, ctx, variants
        generator = torch.Generator(team.device).manual_seed(M + N + K)  # all ranks draw all, alike
        self.A = torch.randn(M, K, device=team.device, generator=generator).to(dtype)
        weights = torch.randn(N, K, device=team.device, generator=generator).to(dtype)
        self.columns = slice(team.rank * N // team.world, (team.rank + 1) * N // team.world)
        self.weight = weights[self.columns].contiguous()
        self.expected = self.A.float() @ weights.float().T
        usual = (self.A @ weights.T).float()
        self.allowed = 2 * (usual - self.expected).abs().max().clamp_min(1e-6 * self.expected.abs().max())
        self.case = Case(ctx, self.A, self.weight, Blocks() if team.cuda else SMALL)

    def contenders(self) -> list[Contender]:
        A, weight, case, world = self.A, self.weight, self.case, self.team.world
        contenders = []
        for name in self.variants:
            variant = importlib.import_module(f"examples.all_scatter.{name}").all_scatter
            call = _returning(lambda i, run=variant: run(case), case.out)
            contenders.append(Contender(name, "variant", call, case.out))
        out = self.ctx.empty(*case.out.shape, dtype=A.dtype)
        op = self.ctx.ops.matmul_all_gather
        contenders.append(Contender("ctx.ops", "op", _returning(lambda i: op(out, A, weight.T), out), out))
        local, parts = A.new_empty(case.M, case.N), A.new_empty(world * case.M, case.N)
        whole = torch.empty_like(out)

        def usual(i: int) -> None:
            torch.matmul(A, weight.T, out=local)
            dist.all_gather_into_tensor(parts, local)
            whole.view(case.M, world, case.N).copy_(parts.view(world, case.M, case.N).transpose(0, 1))

        backend = "NCCL" if self.team.cuda else "gloo"
        contenders.append(Contender(f"torch + {backend}", "rival", _returning(usual, whole), whole))
        alone = A.new_empty(case.M, case.N)
        multiply = _returning(lambda i: torch.matmul(A, weight.T, out=alone), alone)
        contenders.append(Contender("torch alone", ALONE, multiply, alone))
        kernel = importlib.import_module("examples.all_scatter.bulk_synchronous").product_kernel
        ours = case.out[:, self.columns]
        contenders.append(
            Contender("tiles alone", ALONE, _returning(lambda i: kernel[case.grid()](**case.args()), ours), ours)
        )
        return contenders

    def poison(self, contender: Contender) -> None:
        contender.out.fill_(float("nan"))
        self.team.synchronize()
        self.team.barrier()
        self.team.synchronize()

    def error(self, contender: Contender) -> float:
        """Return the largest error in units of what is allowed; infinite where nothing was written."""
        self.team.synchronize()
        self.team.barrier()
        expected = self.expected[:, self.columns] if contender.kind == ALONE else self.expected
        worst = ((contender.out.float() - expected).abs().max() / self.allowed).item()
        return worst if worst == worst else float("inf")


def _returning(call: Callable[[int], object], out: torch.Tensor) -> Callable[[int], torch.Tensor]:
    def returning(i: int) -> torch.Tensor:
        call(i)
        return out

    return returning


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    begin = time.monotonic()
    ctx = iris.iris(int(args.heap_gib * 2**30))
    dtype = getattr(torch, args.dtype)
    variants = VARIANTS + (("fused_store_warp",) if args.store_warp else ())
    measured = {**report.describe_run(team, args), "link_gb_s": LINK_GB_S, "rows": [], "left_out": []}
    for shape in args.shapes:
        if team.slowest([time.monotonic() - begin])[0] > args.time_limit:
            measured["left_out"].append(",".join(map(str, shape)))
            continue
        row, reason = team.attempt(lambda shape=shape: Inputs(team, ctx, *shape, dtype, variants))
        if reason:
            raise RuntimeError(f"{shape}: no inputs: {reason}")
        measured["rows"].append(run_row(team, row, shape, args))
        team.say(f"[{time.monotonic() - begin:4.0f} s] {shape}")
        if team.rank == 0:
            report.write(measured, args)
    team.say("\n" + render(report.rounded(measured)))
    wrong = [r for row in measured["rows"] for r in row["results"] if r["status"] != "ok"]
    ctx.close()
    if wrong:
        sys.exit(1)


def run_row(team: Team, inputs: Inputs, shape: tuple[int, int, int], args: argparse.Namespace) -> dict:
    results: dict[str, dict] = {}
    ready: dict[str, Contender] = {}
    estimates: dict[str, float] = {}
    for contender in inputs.contenders():
        result = results[contender.name] = {"name": contender.name, "kind": contender.kind, "status": "ok"}
        if right(team, inputs, contender, lambda contender=contender: contender.call(0), result):
            local, reason = team.attempt(lambda c=contender: timing.estimate_us(team, c.call, 1))
            if reason:
                result["status"] = reason
            else:
                ready[contender.name], estimates[contender.name] = contender, team.slowest([local])[0]
    budget = timing.INTERPRETED if not team.cuda else timing.QUICK if args.quick else timing.Budget()
    for mode in ("eager", "graph") if team.cuda else ("eager",):
        batches: dict[str, timing.Batch] = {}
        for name, contender in ready.items():
            calls = budget.calls_for(estimates[name], 1)
            if mode == "eager":
                batches[name] = timing.eager_batch(contender.call, calls, 1)
                continue
            captured, reason = team.attempt(lambda c=contender, n=calls: timing.graph_batch(c.call, n, 1))
            if reason:
                results[name]["note"] = f"no CUDA graph ({reason})"
            elif right(team, inputs, contender, captured[0].run, results[name]):
                batches[name] = captured[0]
        repeats = budget.repeats_for(
            sum(estimates[name] * b.calls for name, b in batches.items()), max(1, len(batches))
        )
        timings, failed = timing.interleave(team, batches, repeats)
        for name, reason in failed.items():
            results[name]["status"] = reason
        for name, taken in timings.items():
            results[name][f"{mode}_us"] = taken.call_us
    M, N, K = shape
    link_us = (team.world - 1) * M * N // team.world * inputs.A.element_size() / LINK_GB_S / 1e3
    alone = [report.time_of(r) for r in results.values() if r["kind"] == ALONE and report.time_of(r)]
    gemm_us = min(alone, default=None)
    floor_us = max(gemm_us, link_us) if gemm_us else None
    return {"M": M, "N": N, "K": K, "link_us": link_us, "gemm_us": gemm_us, "floor_us": floor_us} | {
        "results": list(results.values())
    }


def right(team: Team, inputs: Inputs, contender: Contender, act: Callable[[], object], result: dict) -> bool:
    """Run `act` into poisoned output; return whether all ranks hold the product; else the result has the reason."""

    def step() -> float:
        inputs.poison(contender)
        act()
        return inputs.error(contender)

    error, reason = team.attempt(step)
    worst = team.slowest([error or 0.0])[0]
    if reason or worst > 1:
        result["status"] = reason or f"wrong: {worst:.3g} times the allowed error"
        return False
    result["error"] = worst
    return True


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 60))


if __name__ == "__main__":
    main()
