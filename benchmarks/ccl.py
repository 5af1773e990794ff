"""The collectives of `ctx.ccl` against those of NCCL, torch, vLLM and FlashInfer: `python -m benchmarks.ccl --ranks 4`.

Sizes are what nccl-tests counts: bytes of the input of all_reduce, reduce_scatter and all_to_all, of the output of
all_gather; so bytes on the link are 2 (w - 1) / w of them for all_reduce and (w - 1) / w for the others.

Every contender of a row is checked, poisoned output first, before it is timed, and graphs once more by a replay, but
those of contenders that sum in place.
One that raises or is wrong is named and not timed. Prints the tables of `tables/every_row.py` and writes
ccl_<gpu>_x<ranks>.json after every row.
"""

import argparse
from functools import partial
import sys
import time

from iris_tp.bench import timing
from iris_tp.bench.team import Team, launch
import torch

from benchmarks.cases import ccl_installed
from benchmarks.cases.ccl_case import COPIES, Case, Contender, Ours
from benchmarks.cases.ccl_rivals import symmetric_memory, torch_distributed
from benchmarks.measuring import report
from benchmarks.measuring.tables import size_name
from benchmarks.ops import captured_batch
from benchmarks.tables import every_row

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
KIB, MIB = 1 << 10, 1 << 20
SIZES = [2 * KIB, 8 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
QUICK = [2 * KIB, 64 * KIB, MIB, 16 * MIB]
TINY = [2 * KIB, 16 * KIB]
BUDGET = timing.Budget(batch_ms=1.0, longest_ms=8.0, measure_ms=25.0, calls=(4, 40), repeats=(4, 15))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.set_defaults(time_limit=None)
    parser.add_argument("--ops", type=report.some_of(OPS), default=",".join(OPS))
    parser.add_argument("--sizes", type=report.numbers, help="bytes; default: 2 KiB to 256 MiB, on CPUs tiny ones")
    parser.add_argument("--modes", type=report.some_of(("graph", "eager")), default="graph,eager")
    parser.add_argument("--quick", action="store_true", help="four sizes")
    args = parser.parse_args(argv)
    report.settle(args, argv, "ccl")
    args.time_limit = args.time_limit or 45
    gpu = args.device == "cuda"
    sizes = QUICK if args.quick else SIZES
    args.sizes = args.sizes or (sizes if gpu else TINY)
    args.modes = report.modes(parser, args)
    return args


def run(team: Team, args: argparse.Namespace) -> None:
    dtype = getattr(torch, args.dtype)
    ours = Ours(team, max(args.sizes), args.heap_gib, dtype)
    contenders = [ours.contender(), torch_distributed(team)]
    if team.cuda:
        contenders += symmetric_memory(team, max(args.sizes), dtype)
        contenders += ccl_installed.contenders(team, max(args.sizes), dtype)
    measured = {**report.describe_run(team, args), "rows": []}
    begin = time.monotonic()
    # sizes outermost: a run that is cut short has every op
    for nbytes in args.sizes:
        for op in args.ops:
            elapsed = team.slowest([time.monotonic() - begin])[0]
            if elapsed > args.time_limit:
                measured.setdefault("left_out", []).append(f"{op} {nbytes}")
                continue
            case = Case(op, nbytes, team, dtype)
            row = {"op": op, "bytes": nbytes, "bus_bytes": case.bus_bytes, "results": []}
            measure(case, contenders, row, args)
            measured["rows"].append(row)
            shown = " | ".join(f"{r['name']} {report.summary(r)}" for r in row["results"])
            team.say(f"[{elapsed:4.0f} s] {op} {size_name(nbytes)}: {shown}")
            if team.rank == 0:
                report.write(measured, args)
    team.say("\n" + every_row.render(report.rounded(measured)))
    team.synchronize()
    ours.ctx.close()


def measure(case: Case, contenders: list[Contender], row: dict, args: argparse.Namespace) -> None:
    team, calls, results, estimates = case.team, {}, {}, {}
    for contender in contenders:
        if not contender.supports(case):
            continue
        result = {"name": contender.name, "kind": contender.kind, "status": "ok", "notes": []}
        results[contender.name] = result
        row["results"].append(result)
        pair, reason = team.attempt(lambda contender=contender: contender.prepare(case))
        if not reason:
            error, reason = team.attempt(lambda contender=contender, pair=pair: case.check(contender, pair[0]))
        if not reason:
            worst = team.slowest([error])[0]
            reason = f"wrong result: {worst:.3g} times the allowed error" if worst > 1 else None
        if not reason:
            estimate, reason = team.attempt(lambda pair=pair: timing.estimate_us(team, pair[1], COPIES))
        if reason:
            report.drop(result, "WRONG" if reason.startswith("wrong") else "n/a", reason)
            continue
        estimates[contender.name] = team.slowest([estimate])[0]
        calls[contender.name] = pair[1]
        if contender.plan:
            result["plan"] = contender.plan(case)
    captures = {contender.name: contender.capture for contender in contenders}
    budget = BUDGET if team.cuda else timing.INTERPRETED
    if not calls:
        return
    for mode in sorted(args.modes):  # eager first: a capture that fails may leave a rival unusable
        batches, outputs = {}, {}
        for name, call in calls.items():
            count = budget.calls_for(estimates[name], COPIES)
            if mode == "eager":
                batches[name] = timing.eager_batch(call, count, COPIES)
                continue
            captured, reason = team.attempt(partial(captured_batch, captures[name], call, count, COPIES))
            if reason:
                results[name]["notes"].append(f"no CUDA graph ({reason})")
            else:
                batches[name], outputs[name] = captured
        # a rival that sums in place has no right result after its first call
        replayable = {contender.name for contender in contenders if contender.kind == "ours" or not contender.in_place}
        round_us = sum(estimates[name] * batch.calls for name, batch in batches.items())
        timings, failed = timing.interleave(team, batches, budget.repeats_for(round_us, len(batches)))
        for name, reason in failed.items():
            results[name]["notes"].append(f"failed while timed, {mode} ({reason})")
        for name, taken in timings.items():
            if name in replayable and name in outputs and not _replay_is_right(case, batches[name], outputs[name]):
                report.drop(results[name], "WRONG", "wrong result of a replay")
                continue
            results[name][f"{mode}_us"] = taken.call_us
            results[name][f"{mode}_host_us"] = taken.host_us


def _replay_is_right(case: Case, batch: timing.Batch, out: torch.Tensor) -> bool:
    def replay() -> float:
        case.poison(out)
        batch.run()
        return case.error(out, COPIES - 1)

    error, reason = case.team.attempt(replay)
    return not reason and case.team.slowest([error])[0] <= 1


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit + 150))


if __name__ == "__main__":
    main()
