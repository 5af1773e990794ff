"""Ranks of one machine as two hosts: `python -m benchmarks.hosts --ranks 4` checks and times what crosses hosts.

NCCL_HOSTID makes NCCL take each half of the ranks for a host, so that between halves it uses neither NVLink nor shared
memory, but the network: here sockets of the loopback device. A context spans one half, as it spans one host.

    sums     `ctx.ops` with `across`, beside torch's product and one NCCL collective over all ranks
    plain    torch's product and NCCL without NCCL_HOSTID, so over NVLink: the machine as the one host that it is
    models   a Llama in stages (pp) and split over both hosts (across), and a mixture over both hosts: tokens of the
             unsplit model, and times of steps
    lost     a rank is killed, in a pipeline, in a sum and in captured steps: what the others raise, and when

Sums are compared with float64 on all ranks. Calls are eager, but for one line of sums that a CUDA graph replays.
"""

import argparse
from collections.abc import Callable
from functools import partial
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time
from typing import Any

import iris
from iris_ops.planning.hosts import SCATTER, WHOLE
from iris_tp.bench.team import Team, launch
import layers
import torch
import torch.distributed as dist

from benchmarks.cases.hosts_models import LOST_SECONDS, heap_bytes, lost, mesh_of, models
from benchmarks.measuring import report
from benchmarks.tables.hosts_table import render

ROWS = (1, 16, 64, 512, 4096)
SIZE, SMALL_SIZE = (8192, 8192), (64, 96)  # N, and K of all ranks
PART, FOLDER = "IRIS_BENCHMARK_PART", "IRIS_BENCHMARK_FOLDER"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser, dtype="bfloat16")
    parser.add_argument("--rows", type=report.numbers, help="values of M; default: 1 to 4096, on CPUs 1,5,16")
    parser.add_argument("--models-s", type=report.at_least(1), default=60, help="seconds for new steps of models")
    parser.add_argument("--parts", type=report.some_of(PARTS), default=",".join(PARTS), help="default: all")
    args = parser.parse_args(argv)
    args.folder = Path(os.environ.get(FOLDER, "."))  # of the parts' results
    report.settle(args, argv, "hosts")
    if args.ranks % 2 or args.ranks < 4:
        parser.error(f"--ranks {args.ranks}: expected an even number from 4 on, two hosts of several ranks")
    args.rows = args.rows or (list(ROWS) if args.device == "cuda" else [1, 5, 16])
    return args


# --- ranks -----------------------------------------------------------------------------------------------------------


def timed(team: Team, call: Callable[[], Any]) -> float:
    """Return microseconds of a call: the median of five series, each of as many calls as take some 20 ms."""
    call()
    team.synchronize()
    begin = time.perf_counter()
    call()
    team.synchronize()
    count = int(max(2, min(50, 0.02 / team.slowest([time.perf_counter() - begin])[0])))
    series = []
    for _ in range(5):
        team.barrier()
        team.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            call()
        team.synchronize()
        series.append((time.perf_counter() - begin) / count * 1e6)
    return sorted(team.slowest(series))[2]


class Operands:
    """Every rank's A [M, K/w] and B [K/w, N], drawn anew, and the sum of their products in float64."""

    def __init__(self, team: Team, M: int, N: int, K: int, seed: int) -> None:
        draw = torch.Generator(team.device).manual_seed(seed)
        like: dict[str, Any] = {"generator": draw, "device": team.device}
        self.total = torch.zeros(M, N, dtype=torch.float64, device=team.device)
        self.rounded = torch.zeros_like(self.total)  # magnitudes of what is rounded on the way
        terms, host = torch.zeros_like(self.total), torch.zeros_like(self.total)
        for rank in range(team.world):
            A = torch.randn(M, K // team.world, **like).bfloat16()
            B = torch.randn(K // team.world, N, **like).bfloat16()
            product = A.double() @ B.double()
            self.total += product
            host = product if rank % (team.world // 2) == 0 else host + product
            self.rounded += product.abs()
            if rank % (team.world // 2) == team.world // 2 - 1:
                self.rounded += host.abs()
            terms += A.double().abs() @ B.double().abs()
            if rank == team.rank:
                self.A, self.B = A, B
        eps = torch.finfo(torch.bfloat16).eps
        self.bound = eps * (self.rounded + self.total.abs()) + 1e-5 * terms

    def error(self, team: Team, out: torch.Tensor, rows: slice = slice(None)) -> float:
        """Return the largest error of any rank as a part of what rounding allows."""
        own = (out.double() - self.total[rows]).abs() / self.bound[rows]
        return team.slowest([float(own.max()) if own.numel() else 0.0])[0]


def sums(team: Team, args: argparse.Namespace) -> dict[str, Any]:
    """Check the ops over all hosts, and time them beside one NCCL collective over all ranks."""
    mesh, rows = mesh_of(team, "hosts"), []
    N, K = SIZE if team.cuda else SMALL_SIZE
    with iris.iris(heap_bytes(args), group=mesh["tp"], across=mesh["hosts"]) as ctx:
        rate = ctx.across_rate
        assert rate is not None
        operators: Any = ctx.ops
        for number, M in enumerate(args.rows):
            team.say(f"  {M} rows")
            given = Operands(team, M, N, K, int(time.time()) // 1000 + number)
            out = given.A.new_empty(M, N)
            row: dict[str, Any] = {"M": M, "N": N, "K": K, "us": {}, "error": {}}
            plan = operators.plan("matmul_all_reduce", M, N, K // team.world, out.dtype, explained=False)
            row |= {"chosen": plan.way, "predicted_us": plan.total_us}
            real = operators._planned
            for way in (SCATTER, WHOLE):
                operators._planned = partial(_forced, real, way)
                call = partial(operators.matmul_all_reduce, out, given.A, given.B)
                out.fill_(torch.nan)
                call()
                row["error"][way] = given.error(team, out)
                row["alike"] = row.get("alike", True) and _alike(team, out)
                row["us"][way] = timed(team, call)
            operators._planned = real
            if team.cuda:
                row["error"]["graph"], row["us"]["graph"] = _replayed(team, ctx, given)
            part = -(-M // team.world)
            mine = slice(min(M, team.rank * part), min(M, (team.rank + 1) * part))
            share = given.A.new_full((mine.stop - mine.start, N), torch.nan)
            call = partial(operators.matmul_reduce_scatter, share, given.A, given.B)
            call()
            row["error"]["reduce-scatter"] = given.error(team, share, mine)
            row["us"]["reduce-scatter"] = timed(team, call)
            _rivals(team, given, row)
            rows.append(row)
        errors = _layers(team, ctx, N, K)
        ctx.barrier()
    return {"gbs": rate.gbs, "hop_us": rate.hop_us, "rows": rows, "layers": errors}


def _replayed(team: Team, ctx: Any, given: Operands) -> tuple[float, float]:
    """Return the error and the microseconds of a sum that a CUDA graph replays, captured with other values of A."""
    A, out = torch.ones_like(given.A), given.A.new_empty(given.total.shape, dtype=given.B.dtype)
    ctx.ops.matmul_all_reduce(out, A, given.B)
    ctx.across.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads query events meanwhile
        ctx.ops.matmul_all_reduce(out, A, given.B)
    A.copy_(given.A)
    out.fill_(torch.nan)

    def replay() -> None:
        graph.replay()
        ctx.across.watch()

    replay()
    ctx.across.settle()
    error = given.error(team, out)
    alike = _alike(team, out)
    us = timed(team, replay)
    ctx.across.settle()
    return error if alike else float("inf"), us


def _forced(planned: Callable, way: str, *args: Any) -> Any:
    """Return the plan of a call as if the other `way` had been slower, with this library's choice inside a host."""
    from dataclasses import replace

    plan, _ = planned(*args)
    return replace(plan, way=way), None


def _alike(team: Team, out: torch.Tensor) -> bool:
    everyone = [torch.empty_like(out) for _ in range(team.world)]
    dist.all_gather(everyone, out)
    return all(torch.equal(out, each) for each in everyone)


def _rivals(team: Team, given: Operands, row: dict[str, Any]) -> None:
    M, N = given.total.shape
    out = given.A.new_empty(M, N)

    def reduced() -> None:
        torch.mm(given.A, given.B, out=out)
        dist.all_reduce(out)

    reduced()
    row["error"]["NCCL"] = given.error(team, out)
    row["us"]["NCCL all-reduce"] = timed(team, reduced)
    row["us"]["NCCL alone"] = timed(team, lambda: dist.all_reduce(out.zero_()))
    if M % team.world == 0 and team.cuda:
        share = given.A.new_empty(M // team.world, N)

        def scattered() -> None:
            torch.mm(given.A, given.B, out=out)
            dist.reduce_scatter_tensor(share, out)

        row["us"]["NCCL reduce-scatter"] = timed(team, scattered)


def _layers(team: Team, ctx: Any, N: int, K: int) -> dict[str, float]:
    """Return the errors of layers over all hosts, relative to float64, of random weights and inputs."""
    seed = torch.Generator(team.device).manual_seed(int(time.time()) // 1000)
    like: dict[str, Any] = {"device": team.device, "dtype": torch.bfloat16}
    first, second = torch.nn.Linear(N // 2, K // 2, **like), torch.nn.Linear(K // 2, N // 2, **like)
    for each in (*first.parameters(), *second.parameters()):
        torch.nn.init.normal_(each, std=0.02, generator=seed)
    x = torch.randn(7, N // 2, generator=seed, **like)
    wide = x.double() @ first.weight.double().t() + first.bias.double()
    expected = wide @ second.weight.double().t() + second.bias.double()
    column = layers.ColumnParallelLinear.from_linear(first, ctx=ctx)
    gathered = layers.ColumnParallelLinear.from_linear(first, gather_output=True, ctx=ctx)
    row = layers.RowParallelLinear.from_linear(second, ctx=ctx)
    results = {"column, gathered": (gathered(x), wide), "column, row": (row(column(x)), expected)}
    errors = {name: float((a.double() - b).norm() / b.norm()) for name, (a, b) in results.items()}
    return {name: team.slowest([error])[0] for name, error in errors.items()}


def plain(team: Team, args: argparse.Namespace) -> dict[str, Any]:
    """Time torch's product and NCCL over all ranks as one host."""
    rows = []
    N, K = SIZE if team.cuda else SMALL_SIZE
    for number, M in enumerate(args.rows):
        row: dict[str, Any] = {"M": M, "us": {}, "error": {}}
        _rivals(team, Operands(team, M, N, K, number), row)
        rows.append(row)
    return {"rows": rows}


WORKERS: dict[str, Callable[[Team, argparse.Namespace], dict[str, Any]]] = {
    "sums": sums, "plain": plain, "models": models,
    "lost-stage": partial(lost, how="stage"), "lost-sum": partial(lost, how="sum"),
    "lost-graph": partial(lost, how="graph"),
}  # fmt: skip
PARTS = {
    "sums": ("sums",),
    "plain": ("plain",),
    "models": ("models",),
    "lost": ("lost-stage", "lost-sum", "lost-graph"),
}
TIMED = "sums", "plain"  # parts that run alone; the others run at the same time


def worker(team: Team, args: argparse.Namespace) -> None:
    name = os.environ[PART]
    result = {"run": report.describe_run(team, args), name: WORKERS[name](team, args)}
    if team.rank == 0:
        (args.folder / f"{name}.json").write_text(json.dumps(result))


# --- the parent ------------------------------------------------------------------------------------------------------


class Part:
    """The ranks of one part, each a process; those of the second half are on another host, as far as NCCL sees."""

    def __init__(self, name: str, args: argparse.Namespace, port: int, has_names: bool) -> None:
        self.name = name
        self.log = (args.folder / f"{name}.txt").open("w+")
        self.processes = []
        for rank in range(args.ranks):
            half = "hostb" if rank >= args.ranks // 2 else "hosta"
            env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), PART: name, FOLDER: str(args.folder)}
            if name != "plain":
                env |= {"NCCL_HOSTID": half, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
            if name.startswith("lost"):
                env["IRIS_TIMEOUT"] = str(LOST_SECONDS)
            command = [sys.executable, "-m", "benchmarks.hosts", *sys.argv[1:]]
            if name.startswith("lost") and has_names:
                command = ["unshare", "--uts", "sh", "-c", f'hostname {half}; exec "$0" "$@"', *command]
            self.processes.append(subprocess.Popen(command, env=env, stdout=self.log, stderr=subprocess.STDOUT))

    def wait(self, limit_s: float) -> list[int | None]:
        """Return the exit codes, None where a rank did not end in time; it is killed."""
        deadline = time.monotonic() + limit_s
        codes: list[int | None] = []
        for process in self.processes:
            try:
                codes.append(process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(None)
        return codes

    def output(self, most: int = 3000) -> str:
        self.log.seek(0)
        return self.log.read()[-most:]


def run(args: argparse.Namespace) -> int:
    tried = subprocess.run(["unshare", "--uts", "hostname", "hosta"], capture_output=True)
    begin, port = time.monotonic(), 29600 + os.getpid() % 300
    measured: dict[str, Any] = {}
    failed = False
    phases = [[part] for part in args.parts if part in TIMED]
    phases.append([name for part in args.parts if part not in TIMED for name in PARTS[part]])
    for phase in phases:
        parts = [Part(name, args, port + number, not tried.returncode) for number, name in enumerate(phase)]
        port += len(parts)
        for each in parts:
            codes = each.wait(begin + args.time_limit - time.monotonic())
            print(f"[{time.monotonic() - begin:4.0f} s] {each.name}: exit codes {codes}", flush=True)
            is_wrong = any(code != 0 for code in codes)
            if each.name.startswith("lost"):
                paths = sorted(args.folder.glob(f"{each.name}-*.json"))
                errors = [json.loads(file.read_text()) for file in paths]
                measured.setdefault("lost", {})[each.name] = {"exit": codes, "errors": errors}
                is_wrong = len(errors) < args.ranks - 1
            elif (file := args.folder / f"{each.name}.json").exists():
                result = json.loads(file.read_text())
                measured = result.pop("run") | measured | result
            if is_wrong:
                print(each.output(), flush=True)
            failed |= is_wrong
        if measured.get("gpu"):
            report.write(measured, args)
    print(render(report.rounded(measured)) if measured.get("gpu") else measured)
    return int(failed)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if PART in os.environ:
        return launch(worker, args, args.time_limit)
    with tempfile.TemporaryDirectory() as folder:
        args.folder = Path(folder)
        return run(args)


if __name__ == "__main__":
    sys.exit(main())
