"""The dates of the results in the tables, and what has changed since; earlier results in a separate table."""

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
    """Return the result files with digests of which tables are made: their dates, and what has changed since."""
    rows = []
    for run in _tabled():
        if current(run):
            marks = {changed(run, row) for row in run.get("rows", [])} or {changed(run)}
            rows.append([*_origin(run, folder), run["commit"] or "", run["versions"]["torch"], together(marks)])
    return lines_of(["result", "GPUs", "measured", "commit", "torch", CHANGED], rows, 4)


def earlier(folder: str) -> str:
    """Return the result files without digests, and why they are kept."""
    rows = []
    for run in _tabled():
        if not current(run):
            newer = [each for each in newest(_pattern(run["file"])) if current(each)]
            names = [f"{gpus(run)}; newer on {gpus(each)}: {_linked(each['file'], folder)}" for each in newer]
            rows.append([*_origin(run, folder), run["versions"]["torch"], *(names or ["no newer run has these rows"])])
    return lines_of(["result", "GPUs", "measured", "torch", "why it is kept"], rows, 4)


def _tabled() -> list[Run]:
    runs = [run_of(path.stem) for path in sorted(report.RESULTS.glob("*.json"))]
    return [run for run in runs if str(run.get("benchmark", "")).startswith(TABLED)]


def _pattern(file: str) -> str:
    return re.sub("h[12]00", "{gpu}", file)


def _origin(run: Run, folder: str) -> list[str]:
    return [_linked(run["file"], folder), gpus(run), run["date"]]


def _linked(file: str, folder: str) -> str:
    """Return a link to the table of all rows next to the result file, if there is one, else to the file."""
    suffix = "md" if (report.RESULTS / f"{file}.md").exists() else "json"
    return f"[{file}]({folder}{file}.{suffix})"
