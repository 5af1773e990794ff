"""Results of benchmarks.step as Markdown: a table for each kind of work, and the ratio of torch's time to ours."""

import math

from benchmarks.measuring import report
from benchmarks.measuring.tables import markdown

HEADS = {
    "product": "rows, outputs, inputs",
    "gated": "rows, gated outputs, inputs",
    "attention": "rows, heads, heads of the cache, length, filled",
}
UNUSED = " \u2020"
TITLES = {"product": "Products", "gated": "Products with a gate", "attention": "Attention of a step"}


def render(written: dict) -> str:
    """Return Markdown with a table for each kind."""
    lines = [
        f"{report.headline(written)} µs a call in CUDA graphs. `{written['command']}`",
        "",
        f"GB/s: of ours, as if each byte was read once.{UNUSED}: layers take torch's product there.",
        "",
    ]
    for kind, title in TITLES.items():
        rows = [row for row in written["rows"] if row["kind"] == kind]
        if not rows:
            continue
        rivals = [name for name in dict.fromkeys(name for row in rows for name in row["us"]) if name != "ours"]
        table = [
            [
                ", ".join(map(str, row["size"])),
                f"{row['us']['ours']:.1f}{'' if row['used'] else UNUSED}" if "ours" in row["us"] else "-",
                f"{gb_s(row, 'ours'):.0f}" if "ours" in row["us"] else "-",
                *(cell(row, name) for name in rivals),
            ]
            for row in rows
        ]
        lines += [f"#### {title}", "", markdown([HEADS[kind], "ours", "GB/s", *rivals], table)]
        for name in rivals:
            both = [row for row in rows if {name, "ours"} <= row["us"].keys()]
            taken = [row for row in both if row["used"]]
            if both:
                lines += ["", f"{name}: {mean_and_least(both, name)}."]
            if taken and len(taken) < len(both):
                lines += [f"Where layers take ours {mean_and_least(taken, name)}."]
        lines += [""]
    return "\n".join([*lines, *report.omissions(written)])


def mean_and_least(rows: list[dict], name: str) -> str:
    ratios = [row["us"][name] / row["us"]["ours"] for row in rows]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.2f} times ours in the geometric mean, {min(ratios):.2f} at least"


def gb_s(row: dict, name: str) -> float:
    return row["moved_bytes"] / row["us"][name] / 1e3


def cell(row: dict, name: str) -> str:
    if name not in row["us"]:
        return "failed"
    times = f" ({row['us'][name] / row['us']['ours']:.2f}x)" if "ours" in row["us"] else ""
    return f"{row['us'][name]:.1f}{times}"
