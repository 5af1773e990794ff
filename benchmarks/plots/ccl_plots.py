"""Results of benchmarks.ccl as a picture, NAME_bus.svg: bus bandwidth over size in CUDA graphs, a panel an op."""

import json
from pathlib import Path

from benchmarks.measuring.tables import size_name
from benchmarks.plots.pictures import legend_above, plt, save, sign, style


def draw(file: Path, folder: Path) -> list[Path]:
    report = json.loads(file.read_text())
    ops = list(dict.fromkeys(row["op"] for row in report["rows"]))
    figure, panels = plt.subplots(1, len(ops), figsize=(4.2 * len(ops), 3.8), layout="constrained", squeeze=False)
    for op, axes in zip(ops, panels[0], strict=True):
        rows = [row for row in report["rows"] if row["op"] == op]
        for name in dict.fromkeys(r["name"] for row in rows for r in row["results"]):
            points = [
                (row["bytes"], row["bus_bytes"] / us / 1e3)
                for row in rows
                for r in row["results"]
                if r["name"] == name and (us := r.get("graph_us") or r.get("eager_us"))
            ]
            if not points:
                continue
            axes.plot(*zip(*points, strict=True), marker=".", label=name, **style(name))
        axes.set_xscale("log", base=2)
        sizes = [row["bytes"] for row in rows]
        axes.set_xticks(sizes[::2], [size_name(size) for size in sizes[::2]], rotation=45, ha="right")
        axes.set(title=op, ylabel="bus GB/s", ylim=0)
        axes.grid(alpha=0.3)
    legend_above(figure, *panels[0])
    return [save(sign(figure, report), folder / f"{file.stem}_bus.svg")]
