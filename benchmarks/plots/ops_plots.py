"""Results as pictures: the distance of each op from the floor, and the time of an all-reduce of few rows.

NAME_ar.svg and so on, NAME being the result file's, and NAME_rows.svg: time over the number of rows where a product was
measured for several.
"""

from collections import defaultdict
import json
from pathlib import Path

from iris_tp.bench.rows import CALLS, label
import matplotlib

from benchmarks.plots.pictures import legend_above, plt, save, sign, style

MODE = "graph_us"
CONDITIONS = "µs per call: median, slowest rank. Multicast off for all."


def over_floor(report: dict, op: str) -> plt.Figure | None:
    """Draw each row's time over its floor, of ours and rivals; no schedule is below 1."""
    rows = [row for row in report["rows"] if row["op"] == op and row["floor_us"]]
    rows.sort(key=lambda row: (-row["M"], -row["N"], -row["K"]))
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(max(10, 0.3 * len(rows)), 4.5), layout="constrained")
    for name, values in _series(rows, lambda row, us: us / row["floor_us"]).items():
        marker = dict(marker="o", markersize=8) if name == "ours" else dict(marker="_", markersize=12)
        places, heights = zip(*((rows.index(row), value) for row, value in values), strict=True)
        axes.plot(places, heights, linestyle="", markeredgewidth=2, label=name, **marker, **style(name))
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.set_xticks(range(len(rows)), map(label, rows), rotation=60, ha="right")
    axes.set(xlabel="M, N, K", ylabel="time / floor (log scale)", title=f"{CALLS[op]}, CUDA graphs")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return sign(figure, report, CONDITIONS)


def over_rows(report: dict) -> plt.Figure | None:
    """Draw all-reduces: time over M, one picture a weight, for weights that were measured at several M up to 512."""
    weights = defaultdict(list)
    for row in sorted(report["rows"], key=lambda row: row["M"]):
        if row["op"] == "ar" and row["M"] <= 512:
            weights[row["N"], row["K"]].append(row)
    weights = {weight: rows for weight, rows in weights.items() if len(rows) > 2}
    if not weights:
        return None
    figure, all_axes = plt.subplots(
        1, len(weights), figsize=(5.5 * len(weights), 4.5), layout="constrained", squeeze=False
    )
    for axes, ((N, K), rows) in zip(all_axes[0], sorted(weights.items()), strict=True):
        for name, values in _series(rows, lambda row, us: us, everyone=True).items():
            line = dict(linewidth=2 if name == "ours" else 1.5, linestyle=":" if name.endswith("alone") else "-")
            axes.plot([row["M"] for row, _ in values], [us for _, us in values], ".", label=name, **line, **style(name))
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%d"))
        axes.set(xlabel="M (rows)", ylabel="µs a call", title=f"matmul_all_reduce, N = {N}, K = {K}", ylim=0)
        axes.grid(alpha=0.3)
    legend_above(figure, *all_axes[0])
    return sign(figure, report, CONDITIONS)


def _series(rows: list[dict], value, everyone: bool = False) -> dict[str, list[tuple[dict, float]]]:
    """Return (row, value(row, µs)) of the rows that each contender ran; without `everyone`, not the product alone."""
    series = defaultdict(list)
    for row in rows:
        for result in row["results"]:
            if result.get(MODE) and (everyone or result["kind"] != "gemm"):
                series[result["name"]].append((row, value(row, result[MODE])))
    return series


def draw(file: Path, folder: Path) -> list[Path]:
    """Draw all pictures that `file` has figures for, and return their paths."""
    report = json.loads(file.read_text())
    pictures = {op: over_floor(report, op) for op in CALLS} | {"rows": over_rows(report)}
    return [save(figure, folder / f"{file.stem}_{name}.svg") for name, figure in pictures.items() if figure is not None]
