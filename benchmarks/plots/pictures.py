"""Functions of all pictures: style, caption, saving. Needs matplotlib."""

from pathlib import Path
import textwrap

import matplotlib

from benchmarks.measuring.report import headline
from benchmarks.plots.colours import colour, contender

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "iris"  # the same picture from the same figures
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot as plt  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "plots"


def style(name: str) -> dict:
    """Return the style of a contender's line or marker: its colour, with ours above the others."""
    return dict(color=colour(name), zorder=3 if contender(name) == "ours" else 2)


def legend_above(figure: plt.Figure, *panels: plt.Axes) -> None:
    """Put one legend of all `panels` above them, where it covers nothing."""
    entries = {}
    for panel in panels:
        entries |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    columns = max(1, min(len(entries), int(figure.get_figwidth() / 2)))
    figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns, frameon=False)


def sign(figure: plt.Figure, report: dict, text: str = "") -> plt.Figure:
    """Write machine, date and versions below the picture, in lines as wide as the picture."""
    caption = textwrap.fill(f"{headline(report)} {text}".strip(), int(19 * figure.get_figwidth()))
    figure.text(0.01, -0.01, caption, fontsize=7, va="top")
    return figure


def save(figure: plt.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None}, dpi=150)
    plt.close(figure)
    return path
