"""Results of `benchmarks.all_scatter` as bars.

NAME_bars.svg: for each shape a bar a variant, its time over the floor, which is the longer of the
product alone and the bytes over the link.
"""

import json
from pathlib import Path

from benchmarks.measuring.report import time_of
from benchmarks.plots.colours import colour
from benchmarks.plots.pictures import plt, save, sign
from benchmarks.tables.every_row import ALONE


def bars(measured: dict) -> plt.Figure:
    rows = [row for row in measured["rows"] if row["floor_us"]]
    names = list(dict.fromkeys(r["name"] for row in rows for r in row["results"] if r["kind"] != ALONE))
    figure, axes = plt.subplots(figsize=(max(8, 2.4 * len(rows)), 4.2), layout="constrained")
    width = 0.85 / max(1, len(names))
    for place, name in enumerate(names):
        for number, row in enumerate(rows):
            taken = next((time_of(r) for r in row["results"] if r["name"] == name), None)
            if taken:
                x, height = number + (place - (len(names) - 1) / 2) * width, taken / row["floor_us"]
                axes.bar(x, height, width, color=colour(name), label=name if number == 0 else None)
                axes.text(x, height, f"{taken:.0f}", ha="center", va="bottom", fontsize=7, rotation=90)
    axes.axhline(1, color="black", linewidth=0.8)
    labels = [
        f"{row['M']}, {row['N']}, {row['K']}\nproduct {row['gemm_us']:.0f}, link {row['link_us']:.0f} µs"
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), labels)
    axes.set(ylabel="time / floor", title="GEMM + all-scatter; figures in µs")
    axes.margins(y=0.15)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return sign(figure, measured, "Median, slowest rank.")


def draw(file: Path, folder: Path) -> list[Path]:
    return [save(bars(json.loads(file.read_text())), folder / f"{file.stem}_bars.svg")]
