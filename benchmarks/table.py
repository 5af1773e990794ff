"""Results as Markdown: one table per op and mode, rivals beside us, the floor, what went wrong below it.

    python -m benchmarks.table benchmarks/results/ops_h200_x4.json [--modes graph]

A rival's cell is its time and how many times ours it takes, blank where it does not serve the row. The last line has
the geometric means over the rows that both have figures for, and of how many rows if not of all. Below, what an eager
call costs the host, over the rows that a contender serves.
"""

import argparse
from collections.abc import Iterable
import json
import math
from pathlib import Path
import statistics

from iris_tp.bench.rows import CALLS, label

from benchmarks.report import headline, left_out

NORM = "matmul_all_reduce_norm"
MODES = {"graph": "CUDA graph", "eager": "eager"}


def render(report: dict, modes: Iterable[str]) -> str:
    """The whole report; `modes` are "graph" and "eager"."""
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
    return "\n\n".join(parts + left_out(report))


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


def mean_of(ratios: list[float], rows: int, unit: str = "") -> str:
    """The geometric mean, and of how many rows it is if not of all: else those of two rivals would look comparable."""
    if not ratios:
        return "-"
    return f"{geometric_mean(ratios):.2f}{unit}" + (f" ({len(ratios)} of {rows})" if len(ratios) < rows else "")


def host_table(rows: list[dict]) -> str:
    """How long issuing an eager call keeps the host busy, over the rows that a contender serves."""
    taken: dict[str, list[float]] = {}
    for result in (result for row in rows for result in row["results"]):
        if "eager_host_us" in result:
            taken.setdefault(result["name"], []).append(result["eager_host_us"])
    head = ["µs", *taken]
    figures = {"median": statistics.median, "most": max}
    return markdown(head, [[name, *(_us(figure(us)) for us in taken.values())] for name, figure in figures.items()])


def notes(rows: list[dict]) -> list[str]:
    """What is missing from the tables and why, each reason once with the rows that it concerns."""
    where: dict[str, list[str]] = {}
    for row in rows:
        for result in row["results"]:
            for note in result["notes"]:
                where.setdefault(f"{result['name']}: {note}", []).append(label(row))
        for note in row.get("notes", []):
            where.setdefault(note, []).append(label(row))
    return [f"{note} [{'all rows' if len(found) == len(rows) else '; '.join(found)}]" for note, found in where.items()]


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table that reads well unrendered too: figures right-aligned in columns of equal width."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    shown = [
        [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        for line in [head, *lines]
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [shown[0], rule, *shown[1:]])


def _names(rows: list[dict], kind: str) -> list[str]:
    return list(dict.fromkeys(r["name"] for row in rows for r in row["results"] if r["kind"] == kind))


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _cell(result: dict, mode: str) -> str:
    status = result.get("status", "")
    return _us(result.get(f"{mode}_us")) if status == "ok" else status


def main() -> None:
    parser = argparse.ArgumentParser(description="Renders results of benchmarks.ops as Markdown.")
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--modes", default="graph,eager")
    args = parser.parse_args()
    for file in args.files:
        print(render(json.loads(file.read_text()), args.modes.split(",")), end="\n\n")


if __name__ == "__main__":
    main()
