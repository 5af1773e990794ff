"""When the results were measured that tables are made of, and what has changed since; the earlier ones apart."""

from __future__ import annotations

import re

from benchmarks.measuring import report
from benchmarks.tables.marks import CHANGED, changed, current, gpus, newest, run_of
from benchmarks.tables.page_tables import Run, lines_of, together

TABLED = (
    "ops",
    "norms",
    "ccl",
    "rma",
    "llm",
    "moe",
    "rooted",
    "tiles",
    "outputs",
    "invariance",
    "step",
    "fp8",
    "all_scatter",
)


def measured(folder: str) -> str:
    """The result files that tables are made of and that keep digests: when they were measured, and what has changed."""
    rows = []
    for run in _tabled():
        if current(run):
            marks = {changed(run, row) for row in run.get("rows", [])} or {changed(run)}
            rows.append([*_told(run, folder), run["commit"] or "", run["versions"]["torch"], together(marks)])
    return lines_of(["result", "GPUs", "measured", "commit", "torch", CHANGED], rows, 4)


def earlier(folder: str) -> str:
    """Those without digests, and why they are kept."""
    rows = []
    for run in _tabled():
        if not current(run):
            newer = [each for each in newest(_pattern(run["file"])) if current(each)]
            names = [f"{gpus(run)}; newer on {gpus(each)}: {_linked(each['file'], folder)}" for each in newer]
            rows.append([*_told(run, folder), run["versions"]["torch"], *(names or ["no newer run has these rows"])])
    return lines_of(["result", "GPUs", "measured", "torch", "why it is kept"], rows, 4)


def _tabled() -> list[Run]:
    runs = [run_of(path.stem) for path in sorted(report.RESULTS.glob("*.json"))]
    return [run for run in runs if str(run.get("benchmark", "")).startswith(TABLED)]


def _pattern(file: str) -> str:
    return re.sub("h[12]00", "{gpu}", file)


def _told(run: Run, folder: str) -> list[str]:
    return [_linked(run["file"], folder), gpus(run), run["date"]]


def _linked(file: str, folder: str) -> str:
    """The table of all rows, if there is one beside the result file, else the file."""
    suffix = "md" if (report.RESULTS / f"{file}.md").exists() else "json"
    return f"[{file}]({folder}{file}.{suffix})"
