"""Results as Markdown: one table per op and mode, with rivals and the floor; failures are listed below it.

A rival's cell is its time and the ratio to ours, blank where it does not support the row. The last line has the
geometric means over the rows that both have figures for, and their number if not all. The table of host times follows:
the host's time of an eager call, over the rows that a contender supports.
"""

from collections.abc import Iterable
import statistics

from iris_tp.bench.rows import CALLS, label

from benchmarks.measuring.report import headline, omissions
from benchmarks.measuring.tables import markdown, mean_of

NORM = "matmul_all_reduce_norm"
MODES = {"graph": "CUDA graph", "eager": "eager"}


def render(report: dict, modes: Iterable[str]) -> str:
    """Return the full report; `modes` are "graph" and "eager"."""
    parts = [f"{headline(report)} µs per call: median, slowest rank. `{report['command']}`"]
    parts += [report["note"]] if "note" in report else []
    names = {"ar": NORM} if report.get("benchmark", "").startswith("norms") else CALLS
    for op in CALLS:
        rows = [row for row in report["rows"] if row["op"] == op]
        for mode in modes:
            if any(result.get(f"{mode}_us") for row in rows for result in row["results"]):
                parts += [f"#### `{names[op]}`, {MODES[mode]}", op_table(rows, mode)]
        if "eager" in modes and any("eager_host_us" in result for row in rows for result in row["results"]):
            parts += [f"#### `{names[op]}`, host time of an eager call", host_table(rows)]
        parts += ["\n".join(f"- {note}" for note in notes(rows))] if notes(rows) else []
    return "\n\n".join(parts + omissions(report))


def op_table(rows: list[dict], mode: str) -> str:
    rivals = _names(rows, "rival")
    head = ["M, N, K", "GEMM", "floor", "ours", "ours / floor", *rivals]
    over_floor: list[float] = []
    speedups: dict[str, list[float]] = {name: [] for name in rivals}
    lines = []
    for row in rows:
        results = {result["name"]: result for result in row["results"]}
        ours = results.get("ours", {})
        ours_us, floor_us = ours.get(f"{mode}_us"), row["floor_us"]
        ratio = ours_us / floor_us if ours_us and floor_us else None
        if ratio:
            over_floor.append(ratio)
        line = [label(row), _us(row["gemm_us"]), _us(floor_us)]
        line += [_cell(ours, mode), f"{ratio:.2f}" if ratio else "-"]
        for name in rivals:
            rival = results.get(name, {})
            speedup = rival[f"{mode}_us"] / ours_us if ours_us and rival.get(f"{mode}_us") else None
            if speedup:
                speedups[name].append(speedup)
            line.append(_cell(rival, mode) + (f" ({speedup:.2f}x)" if speedup else ""))
        lines.append(line)
    means = [mean_of(speedups[name], len(rows), "x") for name in rivals]
    lines.append(["geometric mean", "", "", "", mean_of(over_floor, len(rows)), *means])
    return markdown(head, lines)


def host_table(rows: list[dict]) -> str:
    """Return how long an eager call keeps the host busy, over the rows that a contender supports."""
    taken: dict[str, list[float]] = {}
    for result in (result for row in rows for result in row["results"]):
        if "eager_host_us" in result:
            taken.setdefault(result["name"], []).append(result["eager_host_us"])
    head = ["µs", *taken]
    figures = {"median": statistics.median, "most": max}
    return markdown(head, [[name, *(_us(figure(us)) for us in taken.values())] for name, figure in figures.items()])


def notes(rows: list[dict]) -> list[str]:
    """Return the reasons of gaps in the tables, each once with the rows that it concerns."""
    where: dict[str, list[str]] = {}
    for row in rows:
        for result in row["results"]:
            for note in result["notes"]:
                where.setdefault(f"{result['name']}: {note}", []).append(label(row))
        for note in row.get("notes", []):
            where.setdefault(note, []).append(label(row))
    return [f"{note} [{'all rows' if len(at) == len(rows) else '; '.join(at)}]" for note, at in where.items()]


def _names(rows: list[dict], kind: str) -> list[str]:
    return list(dict.fromkeys(r["name"] for row in rows for r in row["results"] if r["kind"] == kind))


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _cell(result: dict, mode: str) -> str:
    status = result.get("status", "")
    return _us(result.get(f"{mode}_us")) if status == "ok" else status
