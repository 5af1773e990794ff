"""The four fused ops beside what people run otherwise: `python -m benchmarks.ops --ranks 4`.

For each row: random inputs; every contender checked against the full reference, into poisoned output; then all of
them timed in turns, as CUDA graphs and eager; graphs checked once more by a replay. A contender that raises or is
wrong is named in the table and not timed, and the run goes on.

Prints the tables and writes `ops_<gpu>_x<ranks>.json`, after every row, so that a run that is cut short leaves what it
has measured. Under torchrun it uses the ranks that are there.
"""

import argparse
from dataclasses import asdict
import datetime
import importlib.metadata
import json
from pathlib import Path
import platform
import re
import subprocess
import sys
import time

import torch

from benchmarks import rivals, shapes, table, timing
from benchmarks.inputs import Call, Inputs
from benchmarks.launch import Team, launch
from benchmarks.shapes import Row

RESULTS = Path(__file__).parent / "results"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, help="default: all GPUs, or two CPU ranks")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", default="ar,rs,ag,ga", help="some of ar,rs,ag,ga")
    parser.add_argument("--shapes", choices=tuple(shapes.SETS), help="default: facts, on CPUs tiny")
    parser.add_argument("--rows", help='only these sizes, as "8192,8192,7168;512,8192,2048"')
    parser.add_argument("--only", help='only contenders with one of these words in their name, as "ours,NCCL,alone"')
    parser.add_argument("--modes", default="graph,eager")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--heap-gib", type=float, help="symmetric heap of a rank; default 4, on CPUs 0.25")
    parser.add_argument("--quick", action="store_true", help="two rows an op, a third of the time each")
    parser.add_argument("--time-limit", type=float, default=400, help="seconds after which no new row starts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    args = parser.parse_args(argv)
    gpu = args.device == "cuda"
    args.ranks = args.ranks or (torch.cuda.device_count() if gpu else 2)
    args.shapes = args.shapes or ("tiny" if not gpu else "quick" if args.quick else "facts")
    args.heap_gib = args.heap_gib or (4 if gpu else 0.25)
    args.modes = [mode for mode in args.modes.split(",") if gpu or mode == "eager"]
    args.ops = args.ops.split(",")
    args.command = command(sys.argv[1:] if argv is None else argv)
    shapes.select(args.shapes, args.ops, args.rows)
    return args


def command(argv: list[str]) -> str:
    """The command line as anybody can repeat it: without this machine's output folder."""
    line = " ".join(f"'{word}'" if re.search(r"[\s;]", word) else word for word in argv)
    return re.sub(r" ?--out[ =]\S+", "", f"python -m benchmarks.ops {line}").strip()


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32 proper
    dtype = getattr(torch, args.dtype)
    rows = shapes.select(args.shapes, args.ops, args.rows)
    words = args.only.split(",") if args.only else [""]
    heap = rivals.Heap(team, rows, dtype, int(args.heap_gib * 2**30))
    found = rivals.contenders(team, rows, dtype, heap)
    found = [contender for contender in found if any(word in contender.name for word in words)]
    report = describe_run(team, args)
    begin = time.monotonic()
    for number, row in enumerate(rows, 1):
        elapsed = team.slowest([time.monotonic() - begin])[0]
        if elapsed > args.time_limit:
            team.say(f"stopped after {elapsed:.0f} s: {len(rows) - number + 1} rows left out")
            report["left_out"] = [str(left) for left in rows[number - 1 :]]
            break
        measured = run_row(row, team, found, dtype, args)
        report["rows"].append(measured)
        shown = [f"{r['name']} {summary(r)}" for r in measured["results"]] or measured["notes"]
        team.say(f"[{time.monotonic() - begin:4.0f} s] {number}/{len(rows)} {row}: {' | '.join(shown)}")
        if team.rank == 0:
            write(report, args.out)
    team.say("\n" + table.render(rounded(report), args.modes))
    heap.close()


def run_row(row: Row, team: Team, found: list[rivals.Contender], dtype: torch.dtype, args: argparse.Namespace) -> dict:
    if not row.divides(team.world):
        note = f"left out: {team.world} ranks do not divide M"
        return {**asdict(row), "link_us": None, "gemm_us": None, "floor_us": None, "results": [], "notes": [note]}
    inputs, reason = team.attempt(lambda: Inputs(row, team, dtype))
    if reason:
        raise RuntimeError(f"{row}: no inputs: {reason}")
    results: dict[str, dict] = {}
    calls: dict[str, Call] = {}
    for contender in found:
        if row.op in contender.prepare:
            result = {"name": contender.name, "kind": contender.kind, "status": "ok", "notes": []}
            results[contender.name] = result
            call = get_ready(contender, inputs, result)
            if call and contender.plan:
                result["plan"], _ = team.attempt(lambda plan=contender.plan: plan(row))
            if call:
                calls[contender.name] = call
    budget = timing.INTERPRETED if not team.cuda else timing.QUICK if args.quick else timing.Budget()
    estimates: dict[str, float] = {}
    for name, call in list(calls.items()):
        local, reason = team.attempt(lambda call=call: timing.estimate_us(team, call, inputs.copies))
        if reason:
            drop(results[name], "n/a", reason)
            del calls[name]
        else:
            estimates[name] = team.slowest([local])[0]
    for mode in sorted(args.modes):  # eager first: a capture that fails may leave a rival unusable
        time_mode(mode, inputs, calls, estimates, results, budget)
    gemms = [r.get("graph_us") or r.get("eager_us") for r in results.values() if r["kind"] == rivals.GEMM]
    gemm_us = min((us for us in gemms if us), default=None)
    itemsize = dtype.itemsize
    return {
        **asdict(row),
        "link_us": row.link_us(team.world, itemsize),
        "gemm_us": gemm_us,
        "floor_us": row.floor_us(gemm_us, team.world, itemsize) if gemm_us else None,
        "results": list(results.values()),
    }


def get_ready(contender: rivals.Contender, inputs: Inputs, result: dict) -> Call | None:
    """The contender's call if it runs and is right on every rank; else its result says why not."""
    team = inputs.team
    call, reason = team.attempt(lambda: contender.prepare[inputs.row.op](inputs))
    if not reason:
        error, reason = team.attempt(lambda: inputs.check(call) if contender.checked else call(0))
    if reason:
        drop(result, "n/a", reason)
        return None
    if contender.checked:
        result["error"] = team.slowest([error])[0]
        if result["error"] > 1:
            drop(result, "WRONG", f"wrong result: {result['error']:.3g} times the allowed error")
            return None
    return call


def time_mode(
    mode: str,
    inputs: Inputs,
    calls: dict[str, Call],
    estimates: dict[str, float],
    results: dict[str, dict],
    budget: timing.Budget,
) -> None:
    """Times all calls in turns and writes the figures into their results."""
    team, copies = inputs.team, inputs.copies
    batches: dict[str, timing.Batch] = {}
    outputs: dict[str, torch.Tensor] = {}
    for name, call in calls.items():
        count = budget.calls_for(estimates[name], copies)
        if mode == "eager":
            batches[name] = timing.eager_batch(call, count, copies)
            continue
        captured, reason = team.attempt(lambda call=call, count=count: timing.graph_batch(call, count, copies))
        if reason:
            results[name]["notes"].append(f"no CUDA graph ({reason})")
        else:
            batches[name], outputs[name] = captured
    round_us = sum(estimates[name] * batch.calls for name, batch in batches.items())
    repeats = budget.repeats_for(round_us, len(batches)) if batches else 0
    timings, failed = timing.interleave(team, batches, repeats)
    for name, reason in failed.items():
        results[name]["notes"].append(f"failed while timed, {mode} ({reason})")
    for name, taken in timings.items():
        if name in outputs and results[name]["kind"] != rivals.GEMM:
            error, reason = team.attempt(
                lambda name=name: replayed_error(inputs, batches[name].run, outputs[name], copies - 1)
            )
            error = team.slowest([error])[0] if not reason else None
            if reason or error > 1:
                drop(results[name], "WRONG", reason or f"wrong result of a replay: {error:.3g} times the allowed error")
                calls.pop(name)
                continue
        results[name][f"{mode}_us"] = taken.call_us
        results[name][f"{mode}_host_us"] = taken.host_us


def replayed_error(inputs: Inputs, replay, out: torch.Tensor, copy: int) -> float:
    inputs.poison(out)
    replay()
    return inputs.error(out, copy)


def drop(result: dict, status: str, reason: str) -> None:
    result["status"] = status
    result["notes"].append(reason)


def summary(result: dict) -> str:
    if result["status"] != "ok":
        return f"{result['status']} ({result['notes'][-1]})"
    return " / ".join(f"{result[key]:.1f}" if key in result else "-" for key in ("graph_us", "eager_us"))


def describe_run(team: Team, args: argparse.Namespace) -> dict:
    gpu = torch.cuda.get_device_name() if team.cuda else "CPU"
    versions = {"torch": torch.__version__, "triton": importlib.metadata.version("triton")}
    if team.cuda:
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["CUDA"] = torch.version.cuda
        versions["driver"] = driver_version()
    versions["Python"] = platform.python_version()
    return {
        "benchmark": "ops",
        "command": args.command,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "gpu": gpu,
        "world": team.world,
        "dtype": args.dtype,
        "versions": versions,
        "link_gb_s": shapes.LINK_GB_S,
        "rows": [],
    }


def driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write(report: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    gpu = re.sub(r"[^a-z0-9]+", "-", report["gpu"].lower().removeprefix("nvidia")).strip("-")
    text = json.dumps(rounded(report), indent=1, allow_nan=False)
    (folder / f"ops_{gpu}_x{report['world']}.json").write_text(text + "\n")


def rounded(value):
    """Figures to three decimals; what is not finite as text, which JSON can hold."""
    if isinstance(value, float):
        return round(value, 3) if abs(value) < float("inf") else str(value)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 150))


if __name__ == "__main__":
    main()
