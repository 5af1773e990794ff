"""The tables of docs/reliability.md, from what soaks have left: `python -m tests.soak.report` rewrites them."""

from __future__ import annotations

import json
from pathlib import Path
import re

from benchmarks.measuring.report import RESULTS, headline

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
_MARKED = re.compile(r"(<!-- (soak_\w+) -->\n).*?(<!-- end -->)", re.S)


def rendered(run: dict) -> str:
    """A run's tables: what was called, the faults, what was left over."""
    lines = [
        f"{headline(run)} `{run['command']}`, {run['seconds']:.0f} s: "
        f"{'passed' if run.get('passed') else 'FAILED' if run['failures'] else 'cut off'}.",
        "",
        _table(_calls(run)),
    ]
    if run.get("faults"):
        lines += ["", _faults(run)]
    if run.get("resources"):
        lines += ["", _resources(run["resources"])]
    return "\n".join(lines) + "\n"


def _table(rows: list[tuple[str, str, str]]) -> str:
    return "\n".join(["| what ran | count | wrong |", "|---|---:|---:|", *(f"| {' | '.join(row)} |" for row in rows)])


def _calls(run: dict) -> list[tuple[str, str, str]]:
    rows = []
    if calls := run.get("calls"):
        ranks = ", ".join(calls["calls_by_ranks"])
        rows.append(
            (
                f"random calls on {ranks} ranks, against float64",
                f"{calls['ops']} ops, {calls['collectives']} collectives",
                str(calls["mismatches"]),
            )
        )
    stress = run.get("stress") or {}
    wrong = str(sum((stress.get("deviating") or {}).values()))
    if stress.get("calls"):
        rows.append(("calls of fixed shapes, bit by bit", str(stress["calls"]["done"]), wrong))
    if stress.get("replays"):
        replays = stress["replays"]
        what = "replays of a CUDA graph" if run["gpu"] != "CPU" else "sequences"
        rows.append((f"{what}, {replays['calls'] // replays['done']} calls each", str(replays["done"]), wrong))
    faults = [cell for row in run.get("faults", {}).values() for cell in row.values()]
    if faults:
        rows.append(("faults", str(sum(cell["cases"] for cell in faults)), str(sum(cell["wrong"] for cell in faults))))
    return rows


def _faults(run: dict) -> str:
    hows = list(dict.fromkeys(how for row in run["faults"].values() for how in row))
    lines = [
        f"Seconds from the fault to the survivors' error, median / longest, and in how many cases "
        f"(`IRIS_TIMEOUT={run['timeout_s']:g}`):",
        "",
        f"| state | {' | '.join(hows)} |",
        f"|---|{'---:|' * len(hows)}",
    ]
    if run.get("repeated"):
        lines[0] = f"{lines[0][:-1]}; {run['repeated']} were repeated, whose ranks the busy machine made late:"
    for state, row in run["faults"].items():
        lines.append(f"| {state} | {' | '.join(_cell(row.get(how)) for how in hows)} |")
    return "\n".join(lines)


def _cell(case: dict | None) -> str:
    if not case:
        return "not run"
    seconds = "no error" if case["max_s"] is None else f"{case['median_s']:.2f} / {case['max_s']:.2f}"
    wrong = f", **{case['wrong']} wrong**" if case["wrong"] else ""
    return f"{seconds} ({case['cases']}{wrong})"


def _resources(left: dict) -> str:
    messages = [
        f"{left['shared_memory_left']} names left in `/dev/shm`",
        f"{left['temporary_files_left']} temporary files left",
        f"file descriptors of the parent {left['descriptors'][0]} before, {left['descriptors'][1]} after",
    ]
    if "gpu_mib_less" in left:
        messages.append(f"each GPU has at most {max(0, left['gpu_mib_less'])} MiB less free memory than before")
    if "most_rss_mib_more" in left:
        messages.append(
            f"each rank holds at most {max(0, left['most_rss_mib_more'])} MiB of memory, "
            f"{left['most_descriptors_more']} file descriptors and {left['most_heap_bytes_more']} bytes of heap "
            "more than before"
        )
    return f"Left over: {'; '.join(messages)}."


def page(text: str, results: Path = RESULTS) -> str:
    """The page with its tables as the files have them."""

    def filled(match: re.Match) -> str:
        path = results / f"{match[2]}.json"
        body = rendered(json.loads(path.read_text())) if path.exists() else "Not run yet.\n"
        return f"{match[1]}\n{body}\n{match[3]}"

    return _MARKED.sub(filled, text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
