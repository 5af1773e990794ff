"""Results of benchmarks.llm as bars: the speed of each contender relative to cuBLAS + NCCL.

NAME.svg, NAME being the result file's. Above: tokens per second in steps replayed from a CUDA graph (where there are
none, eager); below: the inverse of the time to first token, in the same way. Contenders that guarantee the same bits
are not drawn.
"""

import json
from pathlib import Path

from benchmarks.cases.engines import NAMES, NCCL, PROMISING, VLLM_BATCH
from benchmarks.plots.colours import colour
from benchmarks.plots.pictures import legend_above, plt, save, sign

PANELS = {
    "decode": (("step_graph_ms", "step_eager_ms"), lambda row: f"batch {row['batch']}\nafter {row['prompt']}"),
    "first token": (("first_graph_ms", "first_eager_ms", "first_ms"), lambda row: f"{row['batch']} x {row['prompt']}"),
}


def bars(report: dict) -> plt.Figure:
    results = [result for row in report["rows"] for result in row["results"]]
    names = {each["key"]: each["name"] for each in results if each["key"] not in (*PROMISING, VLLM_BATCH)}
    figure, panels = plt.subplots(2, 1, figsize=(max(7, 1.3 * len(report["rows"])), 7), layout="constrained")
    for axes, (title, (fields, label)) in zip(panels, PANELS.items(), strict=True):
        for place, key in enumerate(names):
            speeds = [(number, speed(row, key, fields)) for number, row in enumerate(report["rows"])]
            speeds = [(number, value) for number, value in speeds if value]
            width = 0.8 / len(names)
            spots = [number + (place - (len(names) - 1) / 2) * width for number, _ in speeds]
            drawn = axes.bar(spots, [value for _, value in speeds], width, label=names[key], color=colour(names[key]))
            axes.bar_label(drawn, fmt="%.2f", fontsize=7)
        axes.axhline(1, color="black", linewidth=0.8)
        axes.set_xticks(range(len(report["rows"])), map(label, report["rows"]))
        axes.set(ylabel=f"speed / {NAMES[NCCL]}", title=f"{report['model']}, {report['layers']} layers: {title}")
        axes.margins(y=0.1)
    legend_above(figure, *panels)
    return sign(figure, report, "batch x prompt; bars above 1 are faster.")


def speed(row: dict, key: str, fields: tuple[str, ...]) -> float | None:
    """Return how many times as fast as cuBLAS + NCCL a contender is, by the first of `fields` that both have."""
    results = {result["key"]: result for result in row["results"]}
    for field in fields:
        own, base = (results.get(each, {}).get(field) for each in (key, NCCL))
        if own and base:
            return base / own
    return None


def draw(file: Path, folder: Path) -> list[Path]:
    return [save(bars(json.loads(file.read_text())), folder / f"{file.stem}.svg")]
