"""What each multiprocessor does in a call of a fused op: `python -m benchmarks.timeline --op rs --rows 2048,8192,7168`

The op is checked, timed as it is and timed while it records itself, so that the picture shows what the recording costs.
Then the ranks meet on the device, and one call is recorded. timeline_<gpu>_x<ranks>.json has each rank's share of time
in products, pushes, waits, and .trace.json.gz the events of all rows and ranks, all rows from time 0: for
ui.perfetto.dev as it is, and for `benchmarks.report`. Both are written after every row.
"""

import argparse
from dataclasses import asdict
import gzip
import json
import sys
import tempfile

from iris.tracing import MOST_EVENTS
from iris_ops import FusedConfig
from iris_ops.config import WITH_TORCH
from iris_tp.bench import timing
from iris_tp.bench.inputs import Inputs
from iris_tp.bench.rows import CALLS, Row
from iris_tp.bench.team import Team, launch
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.measuring import report, shapes
from benchmarks.rivals import everyone

ROWS = {"cuda": [(2048, 8192, 7168), (16, 8192, 2048)], "cpu": [(48, 64, 32)]}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--op", type=report.some_of(shapes.CALLS), default="ar,rs,ag,ga", help="some of ar,rs,ag,ga")
    parser.add_argument("--rows", type=report.sizes, help='sizes, as "2048,8192,7168;16,8192,2048"')
    parser.add_argument(
        "--max-events", type=report.at_least(1, MOST_EVENTS), default=1 << 20, help="recorded on a rank at most"
    )
    parser.add_argument("--quick", action="store_true", help="only the first of the rows")
    args = parser.parse_args(argv)
    report.settle(args, argv, "timeline")
    args.rows = args.rows or ROWS[args.device]
    if args.quick:
        args.rows = args.rows[:1]
    return args


def run(team: Team, args: argparse.Namespace) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is float32 proper
    dtype = getattr(torch, args.dtype)
    rows = shapes.select("given", args.op, team.world, args.rows)
    heap, _ = everyone.heaps(team, rows, dtype, args.heap_gib)
    measured = {**report.describe_run(team, args), "rows": [], "left_out": []}
    trace: dict = {"traceEvents": []}
    for row in rows:
        if not is_recorded(config := heap.config(row)):
            team.say(f"{row}: left out, for {config.algorithm!r} has a product apart, which records nothing")
            measured["left_out"].append(str(row))
            continue
        size = "x".join(map(str, (row.M, row.N, row.K)))
        name = f"timeline_{row.op}_{size}_{report.slug(measured['gpu'])}_x{team.world}"
        result, events = record(row, team, heap, dtype, args.max_events)
        measured["rows"].append(result | {"name": name})
        shown = ", ".join(f"{name} {share:.0%}" for name, share in result["shares"][0].items())
        times = f"{result['plain_us']:.1f} us, {result['traced_us']:.1f} us while recorded"
        team.say(f"{row}: {times}; rank 0: {shown}; {result['dropped']} events dropped")
        if team.rank == 0:
            trace["traceEvents"] += in_trace(events, row, len(measured["rows"]) - 1, team.world)
            with gzip.open(report.path(measured, args, ".trace.json.gz"), "wt", compresslevel=6) as file:
                json.dump(trace, file)
            report.write(measured, args)
    heap.close()


def is_recorded(config: FusedConfig) -> bool:
    """Return whether calls of this configuration leave events (docs/guides/tracing.md)."""
    return config.warp_specialised or config.algorithm not in WITH_TORCH


def record(row: Row, team: Team, heap: everyone.Heap, dtype: torch.dtype, max_events: int) -> tuple[dict, list[dict]]:
    """Return one call's figures, and on rank 0 the events of all ranks in Chrome's trace format."""
    inputs, ctx = Inputs(row, team, dtype), heap.ctx
    out = heap.out(*inputs.out_shape)
    op = getattr(ctx.ops, CALLS[row.op])

    def call(i: int) -> torch.Tensor:
        op(out, inputs.A[i], inputs.B[i])
        return out

    def measure() -> float:
        """Return microseconds of a call that gives the right result."""
        error = team.slowest([inputs.check(call)])[0]
        if error > 1:
            raise RuntimeError(f"{row}: wrong result, {error:.3g} times the allowed error")
        calls, repeats = (10, 5) if team.cuda else (1, 1)
        timings, _ = timing.interleave(team, {"": timing.eager_batch(call, calls, inputs.copies)}, repeats)
        return timings[""].call_us

    plain_us = measure()
    ctx.tracing.enable(max_events)
    traced_us = measure()
    ctx.tracing.reset()
    if team.cuda:
        torch.cuda._sleep(timing.LEAD_CYCLES)  # the host issues the call before the ranks meet
    ctx.device_barrier()
    call(0)
    team.synchronize()
    dropped, events = ctx.tracing.dropped, ctx.tracing.aligned()
    with tempfile.TemporaryDirectory() as folder:
        exported = ctx.tracing.export(f"{folder}/trace.json", merge=True)
        written = json.loads(exported.read_text())["traceEvents"] if team.rank == 0 else []
    names = dict(ctx.tracing.names)
    ctx.tracing.disable()
    ranks: list[np.ndarray] = [events] * team.world
    dist.all_gather_object(ranks, events)
    if not all(map(len, ranks)):
        raise RuntimeError(f"{row}: a rank has recorded nothing")
    result = {
        **asdict(row),
        "plain_us": plain_us,
        "traced_us": traced_us,
        "span_us": span_us(written),
        "events": sum(map(len, ranks)),
        "dropped": int(team.slowest([dropped])[0]),
        "plan": heap.plan(row),
        "shares": [shares(events, names) for events in ranks],
        "names": names,
    }
    return result, written


def span_us(written: list[dict]) -> float | None:
    """Return the time from a trace's first event to the end of its last; None without one, on ranks not writing."""
    begins = [event["ts"] for event in written if event["ph"] == "X"]
    ends = [event["ts"] + event["dur"] for event in written if event["ph"] == "X"]
    return max(ends) - min(begins) if begins else None


def in_trace(events: list[dict], row: Row, number: int, world: int) -> list[dict]:
    """Return a call's events as a part of the trace of all rows: rank r of row n becomes process n * world + r."""
    placed = [event | {"pid": number * world + event["pid"]} for event in events]
    for event in placed:
        if event["name"] == "process_name":
            event["args"] = {"name": f"{row}: {event['args']['name']}"}
    return placed


def own_time(events: np.ndarray) -> np.ndarray:
    """Return for each event, in order of time, ns without those of the events inside it."""
    lasted = np.maximum(0, events["end"] - events["begin"])
    own = lasted.copy()
    open_: dict[tuple, list[int]] = {}  # of the warps that do the same: the events that enclose what comes next
    for i, event in enumerate(events):
        stack = open_.setdefault(tuple(event[["multiprocessor", "program", "thread"]]), [])
        while stack and events["end"][stack[-1]] <= event["begin"]:
            stack.pop()
        if stack:
            own[stack[-1]] -= lasted[i]
        stack.append(i)
    return own


def shares(events: np.ndarray, names: dict[int, str]) -> dict[str, float]:
    """Return what share of the time from the first event to the last, on all multiprocessors that have any, went where.

    Where warps are specialised, of the time of both kinds.
    """
    whole = np.ptp(np.concatenate([events["begin"], np.maximum(events["begin"], events["end"])]))
    whole = max(1, int(whole)) * len(np.unique(events[["multiprocessor", "thread"]]))
    own = own_time(events)
    by_activity = {
        names[int(kind)]: float(own[events["event"] == kind].sum() / whole) for kind in np.unique(events["event"])
    }
    return dict(sorted(by_activity.items(), key=lambda item: -item[1])) | {
        "nothing recorded": 1 - sum(by_activity.values())
    }


def main() -> None:
    args = parse()
    sys.exit(launch(run, args, limit_s=args.time_limit))


if __name__ == "__main__":
    main()
