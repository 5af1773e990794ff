"""What crosses two hosts: sums beside NCCL, tokens and steps of models, and what a lost rank raises."""

from __future__ import annotations

from typing import Any

from benchmarks.measuring.report import headline
from benchmarks.measuring.tables import figure, markdown
from benchmarks.tables.marks import header, newest

_HALVES = "hosts_{gpu}_x4"


def hosts(folder: str) -> str:
    """Return the tables of the newest run on 4 GPUs as two hosts."""
    parts = []
    for run in newest(_HALVES):
        text = (
            "**2 x 2 ranks on 4 GPUs of one machine, between the halves NCCL over sockets.** Eager calls, medians,"
            f" slowest rank; {_rate(run)}"
        )
        parts += [header([run], folder, text), *_tables(run)]
    return "\n\n".join(parts) or "No run yet: `python -m benchmarks.hosts --ranks 4` makes one."


def render(run: dict[str, Any]) -> str:
    """Return the tables of a run, after machine, versions and command."""
    rate = _rate(run) if "sums" in run else ""
    return "\n\n".join([f"{headline(run)} {rate} `{run['command']}`", *_tables(run)])


def _rate(run: dict[str, Any]) -> str:
    measured = run["sums"]
    return f"between halves {figure(measured['gbs'])} GB/s a rank and {figure(measured['hop_us'])} µs a message."


def _tables(run: dict[str, Any]) -> list[str]:
    tables = []
    if "sums" in run:
        tables += [_sums(run), f"Layers over all ranks, errors relative to float64: {_pairs(run['sums']['layers'])}."]
    if "models" in run:
        equal = {name: "equal" if same else "DIFFERENT" for name, same in run["models"]["tokens"].items()}
        tables.append(f"Tokens beside the unsplit model's: {_pairs(equal)}.")
        if run["models"]["ms"]:
            tables.append(f"Milliseconds of a decode step, 8 layers of Llama 3 8B: {_pairs(run['models']['ms'])}.")
        if left_out := run["models"].get("left_out"):
            tables.append(f"Left out for want of time: {'; '.join(left_out)}.")
    if "lost" in run:
        lines = [
            [name.removeprefix("lost-"), str(each["rank"]), figure(each["seconds"]), each["error"].partition(". ")[0]]
            for name, case in run["lost"].items()
            for each in case["errors"]
        ]
        tables.append(markdown(["lost in", "rank", "seconds", "error"], lines))
    return tables


def _sums(run: dict[str, Any]) -> str:
    plain = {row["M"]: row["us"] for row in run.get("plain", {}).get("rows", ())}
    lines, replayed = [], any("graph" in row["us"] for row in run["sums"]["rows"])
    for row in run["sums"]["rows"]:
        us, worst = row["us"], max(row["error"].values())
        ways = [figure(us[way]) + " (chosen)" * (way == row["chosen"]) for way in ("share by share", "whole")]
        one_host = plain.get(row["M"], {})
        lines.append([
            str(row["M"]), *ways, figure(us["NCCL all-reduce"]), figure(one_host.get("NCCL all-reduce")) or "-",
            *[figure(us.get("graph")) or "-"] * replayed,
            figure(us["reduce-scatter"]), figure(us.get("NCCL reduce-scatter")) or "-",
            f"{worst:.2f}{'' if row['alike'] else ', ranks DIFFER'}",
        ])  # fmt: skip
    head = [
        "rows", "share by share, µs", "whole, µs", "product, one NCCL all-reduce, µs", "the same as one host, µs",
        *["the chosen way in a CUDA graph, µs"] * replayed, "reduce-scatter, µs",
        "product, one NCCL reduce-scatter, µs", "largest error / rounding",
    ]  # fmt: skip
    return markdown(head, lines)


def _pairs(values: dict[str, Any]) -> str:
    return "; ".join(f"{name} {value if isinstance(value, str) else f'{value:.3g}'}" for name, value in values.items())
