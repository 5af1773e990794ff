"""The kernels of a step as a picture.

NAME.svg: the rate at which memory is read, over the bytes that a call moves.
"""

import json
from pathlib import Path

import matplotlib

from benchmarks.plots.pictures import legend_above, plt, save, sign, style

TITLES = {"product": "Products", "gated": "Products with a gate", "attention": "Attention of a step"}


def draw(file: Path, folder: Path) -> list[Path]:
    report = json.loads(file.read_text())
    kinds = [kind for kind in TITLES if any(row["kind"] == kind for row in report["rows"])]
    figure, panels = plt.subplots(1, len(kinds), figsize=(5.5 * len(kinds), 4.5), layout="constrained", squeeze=False)
    for axes, kind in zip(panels[0], kinds, strict=True):
        rows = [row for row in report["rows"] if row["kind"] == kind]
        for name in dict.fromkeys(name for row in rows for name in row["us"]):
            points = [
                (row["moved_bytes"] / 1e6, row["moved_bytes"] / row["us"][name] / 1e3)
                for row in rows
                if name in row["us"]
            ]
            axes.plot(*zip(*sorted(points), strict=True), linestyle="", marker=".", label=name, **style(name))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        axes.set(xlabel="MB that a call moves", ylabel="GB/s", title=TITLES[kind], ylim=0)
        axes.grid(alpha=0.3)
    legend_above(figure, *panels[0])
    sign(figure, report, "CUDA graphs.")
    return [save(figure, folder / f"{file.stem}.svg")]
