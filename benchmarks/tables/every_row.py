"""All rows of a result as Markdown: a table for each kind of row and each figure that was taken of it.

Rows of every benchmark have one of two forms: "results", a list of contenders with their figures, or "us", a time of
each contender. A contender's cell is its figure and, of times, the ratio to ours. The last line has the geometric
means. What failed, and why, stands below a table.
"""

from __future__ import annotations

from typing import Any

from iris_tp.bench.rows import CALLS, label

from benchmarks.measuring.report import headline, omissions
from benchmarks.measuring.tables import figure, markdown, mean_of, size_name

Row = dict[str, Any]
FIGURES = {
    "graph_us": "CUDA graph, µs",
    "eager_us": "eager, µs",
    "eager_host_us": "host time of an eager call, µs",
    "first_graph_ms": "first token, CUDA graph, ms",
    "first_eager_ms": "first token, eager, ms",
    "step_graph_ms": "decode step, CUDA graph, ms",
    "step_eager_ms": "decode step, eager, ms",
    "tokens_per_s": "tokens per second",
    "memory_gib": "memory, GiB",
}
ALONE = "alone"  # the kind of a product without its exchange
OURS = ("ours", "ctx.ccl", "tiles", "ctx.ops")  # the first of these that a result has is compared with the others


def render(run: dict[str, Any]) -> str:
    """Return the tables of a run, after machine, versions and command."""
    parts = [
        f"{headline(run)} Medians on the slowest rank. In brackets: the figure divided by ours. `{run['command']}`"
    ]
    parts += [run["note"]] if "note" in run else []
    kinds = dict.fromkeys(_kind(row) for row in run["rows"])
    for kind in kinds:
        rows = [row for row in run["rows"] if _kind(row) == kind]
        name = "matmul_all_reduce_norm" if run.get("benchmark", "").startswith("norms") else CALLS.get(kind, kind)
        for key, title in FIGURES.items():
            if any(key in result for row in rows for result in _results(row)):
                parts += [f"#### {f'`{name}`, ' if name else ''}{title}", table(rows, key)]
        parts += ["\n".join(f"- {note}" for note in notes(rows))] if notes(rows) else []
    parts += ["\n".join(f"- {note}" for note in run["notes"])] if run.get("notes") else []
    return "\n\n".join(parts + omissions(run))


def table(rows: list[Row], key: str) -> str:
    """Return one line for each row with the figure `key` of ours and the others, and the row's limits."""
    names = list(dict.fromkeys(result["name"] for row in rows for result in _results(row)))
    ours = next((name for name in OURS if name in names), names[0])
    names = [ours, *(name for name in names if name != ours)]
    timed = key.endswith(("_us", "_ms")) and "host" not in key
    floors, moved = timed and any(row.get("floor_us") for row in rows), timed and any(map(_bytes, rows))
    ratios: dict[str, list[float]] = {name: [] for name in ("floor", *names)}
    lines = []
    for row in rows:
        results = {result["name"]: result for result in _results(row)}
        mine, floor = results.get(ours, {}).get(key), row.get("floor_us")
        line = [size_of(row)]
        if floors:
            line += [figure(floor), _ratio(mine, floor, ratios["floor"])]
        if moved:
            line.append(f"{_bytes(row) / mine / 1e3:.0f}" if mine else "-")
        for name in names:
            value = results.get(name, {}).get(key)
            ratio = _ratio(value, mine, ratios[name]) if timed and name != ours else ""
            status = results.get(name, {}).get("status", "")
            line.append(figure(value) + f" ({ratio}x)" * bool(ratio) if value else status.replace("ok", "-"))
        lines.append(line)
    if timed:
        means = [mean_of(ratios[name], len(rows), "x") for name in names[1:]]
        floor_means = ["", mean_of(ratios["floor"], len(rows))] if floors else []
        lines.append(["geometric mean", *floor_means, *[""] * moved, "", *means])
    return markdown(["size", *["floor", "ours / floor"] * floors, *["GB/s"] * moved, *names], lines)


def notes(rows: list[Row]) -> list[str]:
    """Return the reasons of gaps in the tables, each once with the rows that it concerns."""
    where: dict[str, list[str]] = {}
    for row in rows:
        reasons = [f"{result['name']}: {note}" for result in _results(row) for note in result.get("notes", ())]
        for reason in [*reasons, *row.get("notes", ())]:
            where.setdefault(reason, []).append(size_of(row))
    return [f"{note} [{'all rows' if len(at) == len(rows) else '; '.join(at)}]" for note, at in where.items()]


def _results(row: Row) -> list[dict[str, Any]]:
    if "results" in row:
        return row["results"]
    timed = [{"name": name, "status": "ok", "graph_us": value} for name, value in row["us"].items()]
    failed = [{"name": name, "status": "failed", "notes": [reason]} for name, reason in row.get("failed", {}).items()]
    return timed + failed


def _kind(row: Row) -> str:
    return row.get("op") or row.get("kind") or row.get("what") or ""


def size_of(row: Row) -> str:
    """Return a row's size: of a product, of a collective, of a model's batch, or as the row says it."""
    if "batch" in row:
        return f"{row['batch']} x {row['prompt']}"
    if "bytes" in row:
        return size_name(row["bytes"])
    if "size" in row:
        return row["size"] if isinstance(row["size"], str) else ", ".join(map(str, row["size"]))
    return label(row) if "op" in row else f"{row['M']}, {row['N']}, {row['K']}"


def _bytes(row: Row) -> float:
    """Return the bytes that a call moves, over the link of a collective, or between memory and one GPU."""
    return row.get("bus_bytes") or row.get("moved_bytes") or 0


def _ratio(value: float | None, mine: float | None, ratios: list[float]) -> str:
    """Return `value` over `mine`, which is also counted among `ratios`; empty without one of them."""
    if not value or not mine:
        return ""
    ratios.append(value / mine)
    return f"{value / mine:.2f}"
