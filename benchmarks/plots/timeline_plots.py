"""Recorded calls as pictures: a panel a rank, a line a multiprocessor, a colour an activity; below, the link.

NAME.svg for each row, NAME being the row's, from the .trace.json.gz that `benchmarks.timeline` left beside the JSON.
"""

import gzip
import json
from pathlib import Path

from iris_tp.bench.rows import CALLS, LINK_GB_S, label
from matplotlib.collections import PolyCollection  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402
import numpy as np

from benchmarks.plots.pictures import plt, save, sign

COLOURS = {
    "product": "#9ecae1",
    "push": "tab:orange",
    "sum": "tab:green",
    "wait": "tab:red",
    "signal": "black",
}
BINS = 240


def draw(report: dict, row: dict, ranks: list[np.ndarray], file: Path) -> None:
    """Draw a `row` of the report. `ranks`: each rank's events, aligned, in order of time."""
    start = min(events["begin"].min() for events in ranks)
    world = len(ranks)
    figure, axes = plt.subplots(
        world + 1,
        1,
        figsize=(10, 1.7 * world + 2),
        sharex=True,
        height_ratios=[*[1.7] * world, 1.2],
        layout="constrained",
    )
    for rank, (events, panel) in enumerate(zip(ranks, axes, strict=False)):
        _lines(panel, events, start, row["names"])
        panel.set_ylabel(f"rank {rank}\nmultiprocessor")
    _link(axes[-1], ranks, start, row["names"])
    shares = row["shares"][0]
    handles = [Patch(color=COLOURS.get(name, "grey"), label=f"{name} {share:.0%}") for name, share in shares.items()]
    handles[-1].set_color("white")
    axes[0].legend(handles=handles, title="of rank 0's time", loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    axes[0].set_title(f"{CALLS[row['op']]}, M, N, K = {label(row)}", loc="left")
    axes[-1].set(xlabel="µs", xlim=(0, row["span_us"]))
    taken = f"A call takes {row['plain_us']:.4g} µs, {row['traced_us']:.4g} µs while it records itself."
    save(sign(figure, report, taken), file)


def _lines(panel: plt.Axes, events: np.ndarray, start: int, names: dict[int, str]) -> None:
    """Draw one filled box for each event. Warps that do different work have lines of their own.

    An event inside another one lies on top of it, because it comes later.
    """
    places, warps = np.unique(events["multiprocessor"]), np.unique(events["thread"])
    bottom = np.searchsorted(places, events["multiprocessor"]) + np.searchsorted(warps, events["thread"]) / len(warps)
    top = bottom + 1 / len(warps)
    begin, end = ((events[name] - start) / 1e3 for name in ("begin", "end"))
    end = np.maximum(begin, end)
    corners = np.stack([[begin, bottom], [end, bottom], [end, top], [begin, top]]).transpose(2, 0, 1)
    colours = [COLOURS.get(names.get(int(kind), ""), "grey") for kind in events["event"]]
    # as pixels: thousands of boxes would make the file megabytes large
    panel.add_collection(PolyCollection(corners, facecolors=colours, linewidths=0, antialiased=False, rasterized=True))
    panel.set(ylim=(len(places), 0))


def _link(panel: plt.Axes, ranks: list[np.ndarray], start: int, names: dict[int, str]) -> None:
    """Draw the GB/s of payload that each rank's pushes hand to the link, over time."""
    stop = max(events["end"].max() for events in ranks)
    edges = np.linspace(start, stop, BINS + 1)
    shades = plt.get_cmap("cividis")(np.linspace(0, 0.9, len(ranks)))
    for rank, events in enumerate(ranks):
        pushes = events[[names.get(int(kind)) == "push" for kind in events["event"]]]
        nbytes = pushes["bytes"] * np.where(pushes["target_rank"] < 0, len(ranks) - 1, 1)  # -1: to every peer
        lasted = np.maximum(1, pushes["end"] - pushes["begin"])
        done = np.clip((edges[:, None] - pushes["begin"]) / lasted, 0, 1) @ nbytes
        panel.stairs(np.diff(done) / np.diff(edges), (edges - start) / 1e3, label=f"rank {rank}", color=shades[rank])
    panel.axhline(LINK_GB_S, color="black", linewidth=0.8, linestyle=":")
    panel.set(ylabel="pushed, GB/s", ylim=0)
    panel.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=8)


def draw_all(file: Path, folder: Path) -> list[Path]:
    """Draw every row of a report, whose events are in a file next to it, and return the paths."""
    report, recorded = json.loads(file.read_text()), file.with_suffix(".trace.json.gz")
    if not recorded.exists():
        return []  # it is too large to be kept with the results
    trace = json.loads(gzip.decompress(recorded.read_bytes()))
    written = []
    for number, row in enumerate(report["rows"]):
        row["names"] = {int(kind): name for kind, name in row["names"].items()}
        kinds = {name: kind for kind, name in row["names"].items()}
        written.append(folder / f"{row['name']}.svg")
        draw(report, row, events_in(trace, number, report["world"], kinds), written[-1])
    return written


def events_in(trace: dict, number: int, world: int, kinds: dict[str, int]) -> list[np.ndarray]:
    """Return each rank's events of row `number` in a trace, with the fields of pictures; times in ns."""
    by_rank: list[list[tuple]] = [[] for _ in range(world)]
    for event in trace["traceEvents"]:
        rank = event["pid"] - number * world
        if event["ph"] == "X" and 0 <= rank < world:
            begin, lasted = round(1e3 * event["ts"]), round(1e3 * event["dur"])
            target = event["args"]["target_rank"], event["args"]["bytes"]
            by_rank[rank].append((begin, begin + lasted, kinds[event["name"]], *divmod(event["tid"], 64), *target))
    names = ("begin", "end", "event", "multiprocessor", "thread", "target_rank", "bytes")
    fields = [(name, "<i8") for name in names]
    return [np.array(events, dtype=fields) for events in by_rank]
