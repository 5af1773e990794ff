"""A table as Markdown, and the means in its last line."""

import math


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """Return a table that reads well unrendered too: figures right-aligned in columns of equal width."""
    widths = [max(len(line[i]) for line in [head, *lines]) for i in range(len(head))]
    shown = [
        [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        for line in [head, *lines]
    ]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join("| " + " | ".join(line) + " |" for line in [shown[0], rule, *shown[1:]])


def geometric_mean(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def mean_of(ratios: list[float], rows: int, unit: str = "") -> str:
    """Return the geometric mean, and its number of rows if not all, so that means of other rows look different."""
    if not ratios:
        return "-"
    return f"{geometric_mean(ratios):.2f}{unit}" + (f" ({len(ratios)} of {rows})" if len(ratios) < rows else "")


def size_name(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def figure(value: float | None) -> str:
    """Return a figure with three digits, or as a whole number; nothing for None."""
    return (
        "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    )
