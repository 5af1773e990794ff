"""The age of a table: machine, date and versions of its runs, and what has changed since.

A row's mark is "no", or which of its kernel and its plan have changed since it was measured, or "unknown" where the run
kept no digests (`freshness.py`). A plan has changed where today's plan of the row differs: where the planner's files
have changed, the row is planned again, which is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
import functools
import json
import subprocess
import textwrap
from typing import Any

from iris.errors import IrisError
from iris.machines import machine_named
from iris_ops.planning.plan import plan
from iris_ops.problem import NORM, Request, requested_problem
from iris_tp.bench.rows import CALLS
import torch

from benchmarks.measuring import freshness, report

CHANGED = "changed since"
GRAPHS = "in a CUDA graph: the median on the slowest rank, with NVLink multicast off for every contender"
FACTOR = "The factor in brackets is a rival's time divided by ours; bold marks a faster rival."
"""The conditions of a table's times; docs/benchmarks/how.md has the others."""
UNKNOWN = "unknown"
VERSIONS = ("torch", "triton", "NCCL")
WIDTH = 160
PROGRAMS = 132  # of an H100 and an H200
# other fields of a configuration that decide which code runs
_FIELDS = ("algorithm", "block_m", "block_n", "block_k", "num_warps", "num_stages", "warp_specialised", "splits")


@functools.cache
def run_of(file: str) -> dict[str, Any]:
    """Return a result file by its name without ".json", with that name as "file"."""
    return json.loads((report.RESULTS / f"{file}.json").read_text()) | {"file": file}


def by_age(pattern: str) -> list[dict[str, Any]]:
    """Return the runs whose names are `pattern` with a GPU for "{gpu}", the latest date, then commit, first."""
    files = [path.stem for gpu in ("h100", "h200") for path in report.RESULTS.glob(pattern.format(gpu=gpu) + ".json")]
    runs = list(map(run_of, files))
    return sorted(runs, key=lambda run: (run["date"], _committed(run), run["file"]), reverse=True)


@functools.cache
def _committed_at(commit: str) -> int:
    query = ["git", "-C", str(freshness.ROOT), "log", "-1", "--format=%ct", commit]
    try:
        return int(subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout or 0)
    except (OSError, ValueError, subprocess.SubprocessError):  # sources that came without their history
        return 0


def _committed(run: dict[str, Any]) -> int:
    """Return when the code of a run was committed, in seconds: it orders the runs of a day."""
    return _committed_at(run["commit"]) if run.get("commit") else 0


def newest(pattern: str) -> list[dict[str, Any]]:
    """Return a list of the latest run of `pattern`, empty where there is none."""
    return by_age(pattern)[:1]


def current(run: dict[str, Any]) -> bool:
    """Return whether the run kept digests, by which rows are marked as changed; else it is an earlier one."""
    return bool(run.get("code"))


def gpu_of(run: dict[str, Any]) -> str:
    return run["gpu"].removeprefix("NVIDIA ").split()[0]


def gpus(run: dict[str, Any]) -> str:
    return f"{run['world']} x {gpu_of(run)}"


def header(runs: Iterable[dict[str, Any]], folder: str, text: str = "") -> str:
    """Return `text`, GPU, dtype and versions, and each run's date and commit, linked to all of its rows."""
    by_machine: dict[str, dict[str, str]] = {}
    for run in runs:
        name = f"[{run['file']}]({folder}{run['file']}.md)"
        by_machine.setdefault(machine(run), {})[run["file"]] = f"{name} {when(run)}"
    parts = [f"{where}: {', '.join(files.values())}." for where, files in by_machine.items()]
    return filled(" ".join([*([text] if text else []), *parts]))


def in_short(runs: Iterable[dict[str, Any]], text: str) -> str:
    """Return the same as `header` without the runs' names."""
    by_machine: dict[str, dict[str, set[str]]] = {}
    for run in runs:
        dates = by_machine.setdefault(f"{gpus(run)}, {run['dtype']}; {_versions(run)}", {})
        dates.setdefault(run["date"], set()).update([run["commit"]] if run.get("commit") else [])
    parts = []
    for where, dates in by_machine.items():
        days = [f"{date}{_commits(commits)}" for date, commits in sorted(dates.items())]
        parts.append(f"{where}: {'; '.join(days)}.")
    return filled(" ".join([text, *parts]))


def in_common(runs: list[dict[str, Any]], text: str) -> str:
    """Return `text`, and dtype and versions that all rows have in common: row n of the table is of the n-th run.

    Raises `ValueError` if two rows have different ones. A version that a row lacks is reported with its number.
    """
    parts = [", ".join(dict.fromkeys(run["dtype"] for run in runs))]
    for name in VERSIONS:
        values = [run["versions"].get(name) for run in runs]
        known = set(filter(None, values))
        if len(known) > 1:
            raise ValueError(f"{name} differs between rows: {values}; expected a table whose rows name it")
        lacking = [f"row {number}" for number, value in enumerate(values, 1) if not value]
        parts += (
            [f"{name} {known.pop()}" + (f" (not recorded in {', '.join(lacking)})" if lacking else "")] if known else []
        )
    return filled(f"{text} All rows: {', '.join(parts)}.")


def _commits(commits: set[str]) -> str:
    return f", commit{'s' * (len(commits) > 1)} {', '.join(sorted(commits))}" if commits else ""


def machine(run: dict[str, Any]) -> str:
    return f"{run['world']} x {run['gpu']}, {run['dtype']}; {_versions(run)}"


def _versions(run: dict[str, Any]) -> str:
    return ", ".join(f"{name} {run['versions'][name]}" for name in VERSIONS if run["versions"].get(name))


def when(run: dict[str, Any]) -> str:
    return run["date"] + (f", commit {run['commit']}" if run.get("commit") else "")


def filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def changed(run: dict[str, Any], row: dict[str, Any] | None = None) -> str:
    """Return the mark of a `row` of a run, or of a run whose rows name no kernels."""
    parts = _changes(run["file"]) if "file" in run else tuple(freshness.changes(run))
    if freshness.UNKNOWN in parts:
        return UNKNOWN
    own_plan = _own_plan(row)
    if row is None or not own_plan.get("kernel"):
        return ", ".join("plans" if part == freshness.PLANS else "kernels" for part in parts) or "no"
    marks = ["kernel"] if set(parts) & {own_plan["kernel"], str(run["benchmark"]).partition("_")[0]} else []
    marks += ["plan"] if freshness.PLANS in parts and not planned_alike(run, row, own_plan) else []
    return ", ".join(marks) or "no"


@functools.cache
def _changes(file: str) -> tuple[str, ...]:
    return tuple(freshness.changes(run_of(file)))


def _own_plan(row: dict[str, Any] | None) -> dict[str, Any]:
    results = (row or {}).get("results", [])
    return next((each.get("plan") or {} for each in results if each.get("name") == "ours"), {})


def planned_alike(run: dict[str, Any], row: dict[str, Any], recorded: dict[str, Any]) -> bool:
    """Return whether today's plan of a `row` takes the kernel and the blocks that it was measured with."""
    op = NORM if run["benchmark"].startswith("norms") else CALLS[row["op"]]
    form = None if row["op"] == "ar" else row.get("form", "rows")
    try:
        problem = requested_problem(
            Request(op, row["M"], row["N"], row["K"], run["world"], getattr(torch, run["dtype"]), form)
        )
        now = plan(problem, machine_named(run["gpu"], PROGRAMS), explained=False)
    except IrisError:
        return False
    fields = [field for field in _FIELDS if field in recorded]
    return now.kernel == recorded["kernel"] and all(getattr(now, field) == recorded[field] for field in fields)
