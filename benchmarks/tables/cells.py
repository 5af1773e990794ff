"""Lines and cells that the tables of results share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Run = dict[str, Any]


def lines_of(head: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int) -> str:
    """Return a table whose first `text_columns` columns are text, and the others figures."""
    rule = ["---"] * text_columns + ["---:"] * (len(head) - text_columns - 1) + ["---"]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def us(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def versus(rival: float | None, ours: float, name: str = "") -> str:
    """Return a rival's time and its ratio to ours, in bold where the rival is faster."""
    if rival is None:
        return ""
    text = f"{name} {us(rival)} ({rival / ours:.2f}x)".strip()
    return f"**{text}**" if rival < ours else text


def timed(row: dict[str, Any], mode: str = "graph") -> dict[str, float]:
    """Return the time in µs of each contender that ran correctly, by name, without products alone."""
    return {
        each["name"]: each[f"{mode}_us"]
        for each in row["results"]
        if each["status"] == "ok" and each["kind"] != "gemm" and each.get(f"{mode}_us")
    }


def nothing() -> str:
    return "Not measured yet."
