"""Results of `benchmarks.rma` as pictures.

NAME_pairs.svg is a heat map of GB/s per pair of ranks for each operation and of the round trip, and
NAME_rates.svg has GB/s over the size and over the number of programs.
"""

import json
from pathlib import Path

import numpy as np

from benchmarks.plots.pictures import legend_above, plt, save, sign
from benchmarks.tables.rma_table import size


def heat_maps(report: dict) -> plt.Figure:
    """Draw callers as rows and peers as columns; the largest size that all pairs have, all programs."""
    pairs = [case for case in report["cases"] if case["caller"] is not None and case["status"] == "ok"]
    pairs = [case for case in pairs if case["programs"] == report["programs"]]
    ops = list(dict.fromkeys(case["op"] for case in pairs if not case["op"].startswith("atomic")))
    maps = {}
    for op in ops:
        nbytes = max(case["nbytes"] for case in pairs if case["op"] == op)
        chosen = [case for case in pairs if (case["op"], case["nbytes"]) == (op, nbytes)]
        maps[f"{op}, GB/s, {size(nbytes)}"] = _grid(chosen, "gb_s", report["world"])
    maps["round trip of a signal, µs"] = _grid(report["round_trips"], "us", report["world"])
    figure, axes = plt.subplots(1, len(maps), figsize=(3.2 * len(maps), 3.4), layout="constrained", squeeze=False)
    for place, (title, values) in zip(axes[0], maps.items(), strict=True):
        place.imshow(values, cmap="viridis")
        middle = np.nanmean(values)
        for (caller, peer), value in np.ndenumerate(values):
            if not np.isnan(value):
                color = "white" if value <= middle else "black"
                place.text(peer, caller, f"{value:.3g}", ha="center", va="center", color=color, fontsize=9)
        ranks = range(report["world"])
        place.set(title=title, xlabel="peer", ylabel="caller", xticks=ranks, yticks=ranks)
    return sign(figure, report)


def rates(report: dict) -> plt.Figure:
    """Draw rates of all ranks at once: over the size with all programs, over the programs at the largest size."""
    together = [case for case in report["cases"] if case["caller"] is None and case["status"] == "ok"]
    together = [case for case in together if not case["op"].startswith("atomic")]
    largest = max((case["nbytes"] for case in together), default=0)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for op in dict.fromkeys(case["op"] for case in together):
        by_size = [c for c in together if c["op"] == op and c["programs"] == report["programs"]]
        by_programs = [c for c in together if c["op"] == op and c["nbytes"] == largest]
        for axes, chosen, key in ((left, by_size, "nbytes"), (right, by_programs, "programs")):
            chosen = sorted(chosen, key=lambda case, key=key: case[key])
            axes.plot([c[key] for c in chosen], [c["gb_s"] for c in chosen], marker=".", label=op)
    nbytes = sorted({case["nbytes"] for case in together})
    left.set(title=f"{report['programs']} programs", xlabel="size", ylabel="GB/s a rank", xscale="log", ylim=0)
    left.set_xticks(nbytes, map(size, nbytes), rotation=45, ha="right", minor=False)
    left.minorticks_off()
    right.set(title=size(largest), xlabel="programs", xscale="log", ylim=0)
    programs = sorted({case["programs"] for case in together})
    right.set_xticks(programs, map(str, programs), minor=False)
    right.minorticks_off()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    legend_above(figure, left)
    return sign(figure, report)


def _grid(cases: list[dict], key: str, world: int) -> np.ndarray:
    values = np.full((world, world), np.nan)
    for case in cases:
        values[case["caller"], case["peer"]] = case[key]
    return values


def draw(file: Path, folder: Path) -> list[Path]:
    report = json.loads(file.read_text())
    pictures = {"pairs": heat_maps, "rates": rates}
    return [save(picture(report), folder / f"{file.stem}_{name}.svg") for name, picture in pictures.items()]
