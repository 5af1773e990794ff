"""Tables over all result files: the rows of a kernel, and the rows that a rival leads.

    of_kernel    some rows whose plan took the kernel of that name, and the strongest rivals
    lost         all rows in which a rival is faster than ours, by the reason in `_REASONS`

`pages.py` puts them on their pages.
"""

from __future__ import annotations

from collections.abc import Iterator
import functools
from pathlib import Path
from typing import Any

from iris_ops.config import FusedConfig
from iris_ops.planning.plan import way_for
from iris_ops.problem import Problem
from iris_tp.bench.rows import CALLS
import torch

from benchmarks.measuring.report import RESULTS
from benchmarks.measuring.tables import size_name
from benchmarks.tables.marks import CHANGED, FACTOR, GRAPHS, changed, current, gpus, header, newest, run_of
from benchmarks.tables.page_tables import us, versus

KERNEL_PAGES = "docs/kernels"
ROOT = Path(__file__).resolve().parents[2]
FILES = ("ops_{gpu}_x2", "ops_{gpu}_x4", "ops_models_{gpu}_x2", "ops_models_{gpu}_x4", "ccl_{gpu}_x2", "ccl_{gpu}_x4")
PAGES = {  # the page of each kernel, by the name in its comment
    name: f"{KERNEL_PAGES}/{path.name}"
    for path in sorted((ROOT / KERNEL_PAGES).glob("*.md"))
    for line in path.read_text().splitlines()
    if line.startswith("<!-- measured ")
    for name in line.split()[2:3]
}
# Why this rival leads in this op, in graphs and in eager calls.
_TILES = "A tile of cuBLAS fills the waves of these rows; ours left multiprocessors idle"
_GATHERS = "Both move rows by copy engines; cuBLAS's tiles are a few percent faster than ours at these widths"
_OVERLAPPED = "Both overlap the exchange with the product; cuBLAS's tiles are a percent faster than ours at these sizes"
UNEXPLAINED = "The cause is unknown"
_POWER = "The cause is unknown: the product of 22 ms takes nearly all of the time"
_HALVES = "Our all-reduce kernel for these rows cannot end with the norm, so a second kernel reads its result"
_ONE_HOP = "Both send the same bytes in one hop; the difference is below 0.2 µs, and its cause is unknown"
_HOST = "The host takes longer for an eager call of ours; in CUDA graphs ours is faster"
_REASONS = {
    ("ag", "torch async-TP"): (_GATHERS, _GATHERS),
    ("ag", "cuBLAS + NCCL"): ("", _HOST),
    ("ar", "cuBLAS + torch two-shot"): (_TILES, _TILES),
    ("ar", "cuBLAS + NCCL"): ("", _POWER),
    ("rs", "cuBLAS + torch reduce-scatter"): (_TILES, _TILES),
    ("rs", "torch async-TP"): (_OVERLAPPED, _OVERLAPPED),
    ("ar", "cuBLAS + FlashInfer one-shot with norm"): (_HALVES, _HALVES),
    ("all_reduce", "torch two-shot"): ("", _HOST),
    ("all_reduce", "FlashInfer one-shot"): (_ONE_HOP, ""),
}
_OF_ROWS = {(16384, 16384, 26624): _POWER}  # where a row has a separate reason
_PROTOCOLS = {"lamport": "ccl.lamport", "words": "ccl.lamport", "flags": "ccl.flags"}  # "words": in older files
_MOST = 5  # rows of a table
_NONE = "The benchmarks never ran this kernel, because the plan chose others on the GPUs that were measured."


def of_kernel(name: str, folder: str) -> str:
    """Return some rows that ran a kernel. `folder`: the path from its page to the result files."""
    rows = _rows().get(name)
    return _table(rows, folder) if rows else _NONE


@functools.cache
def _rows() -> dict[str, list[tuple[dict[str, Any], dict[str, Any]]]]:
    """Return all rows of the newest files, by the kernel that ours ran."""
    by_kernel: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for run in (run for pattern in FILES for run in newest(pattern)):
        for row in run["rows"]:
            ours = next(each for each in row["results"] if each["kind"] == "ours")
            if ours["status"] == "ok" and ours.get("graph_us"):
                by_kernel.setdefault(_kernel(run, row, ours["plan"]), []).append((run, row))
    return by_kernel


def _kernel(run: dict[str, Any], row: dict[str, Any], plan: dict[str, Any]) -> str:
    if run["benchmark"] == "ccl":
        return _PROTOCOLS[plan["protocol"]]
    if "kernel" in plan:
        return plan["kernel"]
    known = {field: value for field, value in plan.items() if field in FusedConfig.__dataclass_fields__}
    known.pop("prediction", None)
    if known["algorithm"] not in ("one_shot", "two_shot", "overlapped", "sequential", "copy_gather"):
        return "gone"  # the copy engines of earlier versions
    config = FusedConfig(**known | {"warp_specialised": plan.get("warp_specialised", plan.get("warp_roles", False))})
    form = row.get("form") or ("" if row["op"] == "ar" else "rows")
    problem = Problem(CALLS[row["op"]], form, row["M"], row["N"], row["K"], run["world"], torch.bfloat16)
    return way_for(problem, config).kernel


def _table(rows: list[tuple[dict[str, Any], dict[str, Any]]], folder: str) -> str:
    """Return a table of `rows`: at most five, from the smallest to the largest of every op."""
    chosen = list(_spread(rows))
    text = f"µs a call {GRAPHS}. {FACTOR}"
    lines = [
        header([run for run, _ in chosen], folder, text),
        "",
        f"| GPUs, date | op | size | ours | cuBLAS + NCCL | best other rival | {CHANGED} |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    if chosen[0][0]["benchmark"] == "ccl":
        lines[2] = lines[2].replace("cuBLAS + ", "")
    for run, row in chosen:
        ours = next(each["graph_us"] for each in row["results"] if each["kind"] == "ours")
        rivals = [each for each in row["results"] if each["kind"] == "rival" and each.get("graph_us")]
        times = {each["name"].replace("cuBLAS + ", ""): each["graph_us"] for each in rivals}
        nccl = times.pop("NCCL", None)
        best = min(times, key=times.__getitem__, default="")
        size = f"{row['M']}, {row['N']}, {row['K']}" if "M" in row else size_name(row["bytes"])
        op = f"`{CALLS.get(row['op'], row['op'])}`"
        cells = [_gpus(run), op, size, us(ours), versus(nccl, ours), versus(times.get(best), ours, best)]
        lines.append(f"| {' | '.join([*cells, changed(run, row)])} |")
    return "\n".join(lines)


def _spread(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    first = [(run, row) for run, row in rows if run["file"] == rows[0][0]["file"]] if len(rows) > _MOST else rows
    rows = first if len(first) >= _MOST else rows
    size = lambda pair: (_order(pair[1]), pair[1].get("M", 0), pair[1].get("bytes", 0))  # noqa: E731
    rows = sorted(rows, key=size)
    if len(rows) <= _MOST:
        yield from rows
    else:
        yield from (rows[index * (len(rows) - 1) // (_MOST - 1)] for index in range(_MOST))


def _order(row: dict[str, Any]) -> int:
    return list(CALLS).index(row["op"]) if row["op"] in CALLS else 0


def _gpus(run: dict[str, Any]) -> str:
    return f"{gpus(run)}, {run['date']}"


def lost(of_current: bool) -> str:
    """Return every row in which a rival takes less time than ours, by the reason, the widest lead first.

    Rows come from current runs where `of_current` is true, else from earlier ones.
    """
    rows: dict[str, list[tuple[float, str]]] = {}
    runs = [run_of(path.stem) for path in sorted(RESULTS.glob("*.json"))]
    for run in (run for run in runs if current(run) == of_current):
        for row in run.get("rows", ()):
            for called, times, unit in _timed(run, row):
                ours = times.pop("ours", None)
                best = min(times, key=times.__getitem__, default=None)
                if ours and best and times[best] < ours:
                    line = _lost_row(run, row, called, (_time(ours, unit), f"{best} {_time(times[best], unit)}"))
                    lead = ours / times[best] - 1
                    rows.setdefault(_reason(row, called, best), []).append((lead, line.format(f"{100 * lead:.1f} %")))
    parts = []
    for reason, lines in sorted(rows.items(), key=lambda each: -max(each[1])[0]):
        parts += [f"### {reason}", ""]
        parts += [f"| GPUs, date | op | size | called | ours, µs | the rival, µs | ahead by | {CHANGED} |"]
        parts += ["|---|---|---|---|---:|---:|---:|---|"]
        parts += [line for _, line in sorted(lines, reverse=True)] + [""]
    return "\n".join(parts[:-1]) or "No rival leads a row."


def _timed(run: dict[str, Any], row: dict[str, Any]) -> Iterator[tuple[str, dict[str, float], str]]:
    """Yield how a row was called, the times of ours and each rival by name, and their unit."""
    benchmark = str(run.get("benchmark", "")).partition("_")[0]
    done = [each for each in row.get("results", ()) if each["status"] == "ok"]
    if benchmark in ("ops", "norms", "ccl"):
        for called in ("graph", "eager"):
            known = [each for each in done if each["kind"] != "gemm" and each.get(f"{called}_us")]
            known = [each for each in known if not each["name"].startswith("ours,")]  # other calls of ours
            yield called, {each["name"]: each[f"{called}_us"] for each in known}, ""
    elif benchmark == "moe":  # only contenders that reduce over the ranks, whose names contain a plus
        yield "graph", {name: us for name, us in row["us"].items() if name == "ours" or " + " in name}, ""
    elif benchmark == "rooted":
        names = {"ctx.ccl": "ours", "torch": "NCCL"}
        yield "graph", {names[name]: us for name, us in row["us"].items()}, ""
    elif benchmark == "llm":
        known = [each for each in done if each["key"] in ("ours", "nccl", "sequence-nccl", "transformers", "vllm")]
        for kind, called in (("step", "step"), ("first", "first token")):
            field = f"{kind}_graph_ms"
            yield called, {each["name"]: each[field] for each in known if each.get(field)}, " ms"


def _time(value: float, unit: str) -> str:
    return us(value) + unit if not unit or value >= 10 else f"{value:.2f}{unit}"


def _sizes(row: dict[str, Any]) -> tuple[int, ...]:
    return (row["M"], row["N"], row["K"]) if "M" in row else ()


def _reason(row: dict[str, Any], called: str, best: str) -> str:
    reasons = _REASONS.get((row.get("op", row.get("what", "model")), best), ("", ""))
    return _OF_ROWS.get(_sizes(row)) or reasons[called == "eager"] or UNEXPLAINED


def _lost_row(run: dict[str, Any], row: dict[str, Any], called: str, times: tuple[str, str]) -> str:
    """Return the row's line, with a placeholder for the lead."""
    if "batch" in row:
        op, size = run["model"] + (", compiled" if run.get("compiled") else ""), f"{row['batch']} x {row['prompt']}"
    elif "shape" in row:
        op, size = "`moe_gate_up`, `moe_down_all_reduce`", f"{row['shape']}, {row['T']} tokens"
    else:
        name = row.get("op", row.get("what"))
        op = "`matmul_all_reduce_norm`" if run["benchmark"] == "norms" else f"`{CALLS.get(name, name)}`"
        size = ", ".join(map(str, _sizes(row))) or size_name(row.get("bytes") or int(row["size"].split()[0]))
    return f"| {' | '.join([_gpus(run), op, size, called, *times, '{}', changed(run, row)])} |"
