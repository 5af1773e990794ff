"""The tables of the scaling study over hosts (`benchmarks/hosts.py`), from its result file."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.measuring.report import RESULTS

_FILE = RESULTS / "simulated" / "hosts.json"


def steps(folder: str) -> str:
    """Return one line for each number of hosts: the step by stages of one host each, and by the fastest layout."""
    run = json.loads(_FILE.read_text())
    counts = list(dict.fromkeys(row["rows"] for row in run["rows"]))
    head = (
        f"**A step of a 405B model, simulated, ms: TP 8 x PP, and where another layout is faster, that one.** "
        f"{run['gpus_of_a_host']} x {run['machine']} a host, {run['gbs_of_a_gpu_between_hosts']:g} GB/s a GPU and "
        f"{run['hop_us_between_hosts']:g} µs a message between hosts, bf16, {run['date']}, planner's arithmetic. "
        f"[All layouts]({folder}simulated/hosts.json)."
    )
    return f"{head}\n\n" + _table(run, counts, "step_ms", min)


def rates(folder: str) -> str:
    """Return the same for tokens per second with a batch in each stage, by the layout with the most."""
    run = json.loads(_FILE.read_text())
    counts = list(dict.fromkeys(row["rows"] for row in run["rows"]))
    head = (
        f"**Tokens per second with a batch of so many rows in each stage, simulated: TP 8 x PP, and where another "
        f"layout makes more, that one.** As above, {run['date']}."
    )
    return f"{head}\n\n" + _table(run, counts, "tokens_per_s", max)


def _table(run: dict[str, Any], counts: list[int], key: str, best: Any) -> str:
    lines = ["| hosts | " + " | ".join(f"{count} rows" for count in counts) + " |", "|---:|" + "---|" * len(counts)]
    for hosts in dict.fromkeys(row["hosts"] for row in run["rows"]):
        cells = []
        for count in counts:
            rows = [row for row in run["rows"] if (row["hosts"], row["rows"]) == (hosts, count)]
            stages = next(row for row in rows if row["tp"] == run["gpus_of_a_host"])
            chosen = best(rows, key=lambda row: row[key])
            cell = _shown(stages[key])
            if chosen is not stages:
                cell += f"; **{_shown(chosen[key])}** by TP {chosen['tp']} x PP {chosen['pp']}"
            cells.append(cell)
        lines.append(f"| {hosts} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
