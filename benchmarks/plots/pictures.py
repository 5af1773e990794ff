"""What all pictures share: how they are saved and signed. Needs matplotlib."""

from pathlib import Path
import textwrap

import matplotlib

from benchmarks.measuring.report import headline

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "iris"  # the same picture from the same figures
matplotlib.rcParams["svg.fonttype"] = "none"

from matplotlib import pyplot as plt  # noqa: E402

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "plots"
OURS = dict(color="tab:red", zorder=3)


def sign(figure: plt.Figure, report: dict, text: str = "") -> plt.Figure:
    """Says below the picture who measured what, where, in lines as wide as the picture."""
    told = textwrap.fill(f"{headline(report)} {text}".strip(), int(19 * figure.get_figwidth()))
    figure.text(0.01, -0.01, told, fontsize=7, va="top")
    return figure


def save(figure: plt.Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None}, dpi=150)
    plt.close(figure)
    return path
