"""The four fused ops against what people run otherwise: `python -m benchmarks.ops --ranks 4`.

For each row: random inputs; every contender checked against the full reference, into poisoned output; then all of
them timed in turns, as CUDA graphs and eager; graphs checked once more by a replay. A contender that raises or is
wrong is named in the table and not timed, and the run goes on.

Prints the tables and writes `ops_<gpu>_x<ranks>.json` (with `--dtype float16` `ops_float16_<gpu>_x<ranks>.json`), after
every row, so that a run that is cut short leaves what it has measured. Under torchrun it uses the ranks that are there.

`--vary "num_stages=4,5;group_m=8,16"` has ours compete with other configurations of its own, all combinations of these
fields of `FusedConfig` in place of the plan's, in the same run and checked alike.
"""

import argparse
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, fields
from functools import partial
import itertools
import sys
import time

from iris_tp.bench import timing
from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import LINK_GB_S, Row
from iris_tp.bench.team import Team, launch
import torch

from benchmarks import moe
from benchmarks.measuring import report, shapes
from benchmarks.rivals import everyone
from benchmarks.rivals.contender import GEMM, Contender
from benchmarks.tables import every_row

MIXTURES = "moe"  # among --shapes: the ops of mixtures of experts, in place of the four


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--ops", type=report.some_of(shapes.CALLS), default="ar,rs,ag,ga", help="some of ar,rs,ag,ga")
    parser.add_argument(
        "--shapes", help=f"{MIXTURES}, or some of {','.join(shapes.SETS)}; default: facts, on CPUs tiny"
    )
    parser.add_argument(
        "--rows", type=report.sizes, help='only these sizes, as "8192,8192,7168;512,8192,2048"; all, of --shapes given'
    )
    parser.add_argument(
        "--only", default="", help='only contenders with one of these words in their name, as "ours,NCCL,alone"'
    )
    parser.add_argument("--vary", default="", help='fields of our configuration, as "num_stages=4,5;group_m=8,16"')
    parser.add_argument("--modes", type=report.some_of(("graph", "eager")), default="graph,eager")
    parser.add_argument("--quick", action="store_true", help="two rows an op, a third of the time each")
    args = parser.parse_args(argv)
    report.settle(args, argv, "ops")
    gpu = args.device == "cuda"
    args.shapes = args.shapes or ("tiny" if not gpu else "quick" if args.quick else "facts")
    args.modes = report.modes(parser, args)
    args.only = [word for word in args.only.split(",") if word] or [""]
    try:
        rows = shapes.select(args.shapes, args.ops, args.ranks, args.rows)
        args.vary = variations(args.vary)
    except ValueError as error:
        parser.error(str(error))
    names = names_of_contenders(args, rows) if any(args.only) else [""]
    if unknown := [word for word in args.only if not any(word in name for name in names)]:
        parser.error(f"--only {', '.join(unknown)}: expected words in the names of {', '.join(names)}")
    return args


def names_of_contenders(args: argparse.Namespace, rows: list[Row]) -> list[str]:
    """Return all that support one of `rows`; prepare none of them."""
    team, dtype = Team(1, args.ranks, torch.device(args.device)), getattr(torch, args.dtype)  # rank 1 prints nothing
    candidates = everyone.contenders(team, rows, dtype, *everyone.heaps(team, rows, dtype, args.heap_gib))
    return list(dict.fromkeys(c.name for c in candidates if any(c.takes(row, team.world, dtype) for row in rows)))


def variations(text: str) -> list[dict[str, int | bool | str]]:
    """Return all combinations of "field=value,value;field=value"; raise ValueError for an unknown field."""
    if not text:
        return []
    from iris_ops import FusedConfig  # here, so that rivals can be measured where the library cannot start

    requested = [part.partition("=")[::2] for part in text.split(";")]
    kinds = {field.name: field.type for field in fields(FusedConfig)}
    unknown = [name for name, _ in requested if kinds.get(name) not in _READ]
    if unknown:
        raise ValueError(f"--vary has {unknown[0]!r}; expected fields of FusedConfig, such as num_stages or algorithm")
    choices = [[(name, _READ[kinds[name]](value)) for value in values.split(",")] for name, values in requested]
    return [dict(chosen) for chosen in itertools.product(*choices)]


def _flag(text: str) -> bool:
    if text not in ("True", "False"):
        raise ValueError(f"--vary has {text!r}; expected True or False")
    return text == "True"


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--vary has {text!r}; expected an integer") from None


# How values of a field are read, by its type.
_READ = {"int": _whole, "bool": _flag, "str": str}


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32 proper
    dtype = getattr(torch, args.dtype)
    rows = shapes.select(args.shapes, args.ops, team.world, args.rows)
    heaps = everyone.heaps(team, rows, dtype, args.heap_gib)
    candidates = everyone.contenders(team, rows, dtype, *heaps)
    candidates = [contender for contender in candidates if any(word in contender.name for word in args.only)]
    candidates += [everyone.varied(heaps[0], changes) for changes in args.vary]
    measured = {**report.describe_run(team, args), "link_gb_s": LINK_GB_S, "rows": []}
    begin = time.monotonic()
    for number, row in enumerate(rows, 1):
        elapsed = team.slowest([time.monotonic() - begin])[0]
        if elapsed > args.time_limit:
            team.say(f"stopped after {elapsed:.0f} s: {len(rows) - number + 1} rows left out")
            break
        result = run_row(row, team, candidates, dtype, args)
        measured["rows"].append(result)
        measured["left_out"] = [str(skipped) for skipped in rows[number:]]
        shown = [f"{r['name']} {report.summary(r)}" for r in result["results"]]
        shown = shown or result.get("notes", ["none of these contenders serves it"])
        team.say(f"[{time.monotonic() - begin:4.0f} s] {number}/{len(rows)} {row}: {' | '.join(shown)}")
        if team.rank == 0:
            report.write(measured, args)
    team.say("\n" + every_row.render(report.rounded(measured)))
    for heap in heaps:
        heap.close()


def run_row(
    row: Row,
    team: Team,
    candidates: list[Contender],
    dtype: torch.dtype,
    args: argparse.Namespace,
    make: type[Inputs] = Inputs,
) -> dict:
    if not row.supports(team.world):
        note = f"left out: {team.world} ranks do not divide the columns"
        return {**record(row), "link_us": None, "gemm_us": None, "floor_us": None, "results": [], "notes": [note]}
    inputs, reason = team.attempt(lambda: make(row, team, dtype))
    if reason:
        raise RuntimeError(f"{row}: no inputs: {reason}")
    results: dict[str, dict] = {}
    calls: dict[str, Call] = {}
    for contender in candidates:
        if contender.takes(row, team.world, dtype):
            notes = [contender.note] if contender.note else []
            result = {"name": contender.name, "kind": contender.kind, "status": "ok", "notes": notes}
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
            report.drop(results[name], "n/a", reason)
            del calls[name]
        else:
            estimates[name] = team.slowest([local])[0]
    for mode in sorted(args.modes):  # eager first: a capture that fails may leave a rival unusable
        time_mode(mode, inputs, {c.name: c for c in candidates if c.name in calls}, calls, estimates, results, budget)
    gemms = [r.get("graph_us") or r.get("eager_us") for r in results.values() if r["kind"] == GEMM]
    gemm_us = min((us for us in gemms if us), default=None)
    itemsize = dtype.itemsize
    return {
        **record(row),
        "link_us": row.link_us(team.world, itemsize),
        "gemm_us": gemm_us,
        "floor_us": row.floor_us(gemm_us, team.world, itemsize) if gemm_us else None,
        "results": list(results.values()),
    }


def get_ready(contender: Contender, inputs: Inputs, result: dict) -> Call | None:
    """Return the contender's call if it runs and is right on every rank; else its result has the reason."""
    team = inputs.team
    call, reason = team.attempt(lambda: contender.prepare[inputs.row.op](inputs))
    if not reason:
        error, reason = team.attempt(lambda: inputs.check(call, contender.alone))
    if reason:
        report.drop(result, "n/a", reason)
        return None
    result["error"] = team.slowest([error])[0]
    if result["error"] > 1:
        report.drop(result, "WRONG", f"wrong result: {result['error']:.3g} times the allowed error")
        return None
    return call


def time_mode(
    mode: str,
    inputs: Inputs,
    contenders: dict[str, Contender],
    calls: dict[str, Call],
    estimates: dict[str, float],
    results: dict[str, dict],
    budget: timing.Budget,
) -> None:
    """Time all calls in turns and write the figures into their results."""
    team, copies = inputs.team, inputs.copies
    batches: dict[str, timing.Batch] = {}
    outputs: dict[str, torch.Tensor] = {}
    for name, call in calls.items():
        count = budget.calls_for(estimates[name], copies)
        if mode == "eager":
            batches[name] = timing.eager_batch(call, count, copies)
            continue
        capture = contenders[name].capture
        captured, reason = team.attempt(partial(captured_batch, capture, call, count, copies))
        if reason:
            results[name]["notes"].append(f"no CUDA graph ({reason})")
        else:
            batches[name], outputs[name] = captured
    round_us = sum(estimates[name] * batch.calls for name, batch in batches.items())
    timings, failed = timing.interleave(team, batches, budget.repeats_for(round_us, len(batches)))
    for name, reason in failed.items():
        results[name]["notes"].append(f"failed while timed, {mode} ({reason})")
    for name, taken in timings.items():
        if name in outputs:
            alone = contenders[name].alone
            error, reason = team.attempt(
                lambda name=name, alone=alone: replayed_error(inputs, batches[name], outputs[name], alone)
            )
            error = team.slowest([error])[0] if not reason else None
            if reason or error > 1:
                reason = reason or f"wrong result of a replay: {error:.3g} times the allowed error"
                report.drop(results[name], "WRONG", reason)
                calls.pop(name)
                continue
        results[name][f"{mode}_us"] = taken.call_us
        results[name][f"{mode}_host_us"] = taken.host_us


def captured_batch(
    capture: Callable[[], AbstractContextManager], call: Call, count: int, copies: int
) -> tuple[timing.Batch, torch.Tensor]:
    with capture():
        return timing.graph_batch(call, count, copies)


def record(row: Row) -> dict:
    return {name: value for name, value in asdict(row).items() if (name, value) != ("form", "rows")}


def replayed_error(inputs: Inputs, batch: timing.Batch, out: torch.Tensor, alone: bool) -> float:
    inputs.poison(out)
    batch.run()
    return inputs.error(out, inputs.copies - 1, alone)


def main() -> None:
    """Run the benchmark; with `--shapes moe`, of mixtures' ops: `benchmarks.moe` takes the other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--shapes")
    chosen, remaining = parser.parse_known_args()
    if chosen.shapes == MIXTURES:
        sys.exit(moe.main(remaining))
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 150))


if __name__ == "__main__":
    main()
