"""Tables of results that have a page each: mixtures of experts, outputs on the heap, the same bits at every batch."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.marks import CHANGED, changed, in_short, newest
from benchmarks.page_tables import beside, lines_of, us
from benchmarks.table import geometric_mean

_WHOLE = ("NCCL", "one-shot", "two-shot")  # what the names of rivals end with that reduce over the ranks


def mixtures(folder: str) -> str:
    """The two ops of a mixture's layer beside the best grouped product with an all-reduce."""
    (run,) = newest("moe_{gpu}_x2")
    rows = []
    for row in run["rows"]:
        ours = row["us"]["ours"]
        best = min((each for each in row["us"].items() if each[0].endswith(_WHOLE)), key=lambda each: each[1])
        floor = f"{us(row['floor_us'])} ({ours / row['floor_us']:.2f})"
        size = [row["shape"], str(row["T"]), f"{row['touched']:.0f}"]
        rows.append([*size, us(ours), floor, beside(best[1], ours, best[0]), changed(run)])
    text = (
        f"µs of `moe_gate_up` and `moe_down_all_reduce` in a CUDA graph, median, slowest rank. The floor is the bytes"
        f" of the experts that tokens go to over a copy's {run['copy_gbs']:.0f} GB/s; in brackets how many times that"
        " ours takes."
    )
    head = ["model", "tokens", "experts", "ours", "floor", "best rival", CHANGED]
    return f"{_header(run, folder, text)}\n\n{lines_of(head, rows, 1)}"


def outputs(folder: str) -> str:
    """A row-parallel layer whose output is copied, and one whose output lies on the heap."""
    (run,) = newest("outputs_{gpu}_x2")
    rows = []
    for row in run["rows"]:
        copied, kept = row["layer, copied, graph us"], row["layer, graph us"]
        cells = [f"{row['M']}, {row['N']}, {row['K']}", f"`{row['kernel']}`", us(copied), us(kept)]
        rows.append([*cells, f"{copied / kept:.3f}", changed(run)])
    text = "µs of a row-parallel layer in a CUDA graph, median, slowest rank. The first kernel writes no peer's output."
    head = ["M, N, K", "kernel", "copied", "on the heap", "gain", CHANGED]
    return f"{_header(run, folder, text)}\n\n{lines_of(head, rows, 2)}"


def invariance(folder: str) -> str:
    """What the same bits at every number of rows cost, by kind of call."""
    (run,) = newest("invariance_{gpu}_x2")
    kinds: dict[str, list[float]] = {}
    for row in run["times"]:
        kinds.setdefault(row["row"].split()[0], []).append(row["us"]["batch"] / row["us"]["None"])
    everything = [cost for costs in kinds.values() for cost in costs]
    rows = [_cost(_KINDS[kind], costs, run) for kind, costs in kinds.items()] + [_cost("all", everything, run)]
    numbers, differing = len(run["numbers_of_rows"]), run["differing"]
    text = (
        f'Time with `invariant="batch"` over the time with `None`, in CUDA graphs. {run["products"]} products were'
        f" compared at {numbers} numbers of rows each: {differing['None']} numbers had other bits with `None`,"
        f' {differing["batch"]} with `"batch"`.'
    )
    head = ["call", "rows", "geometric mean", "median", "worst row", CHANGED]
    return f"{_header(run, folder, text)}\n\n{lines_of(head, rows, 1)}"


def invariance_ranks(folder: str) -> str:
    """What the same bits on any number of ranks cost, by layer and number of rows."""
    (run,) = newest("invariance_ranks_{gpu}_x2")
    rows = []
    for row in run["times"]:
        free, batch, ranks = (row["us"][level] for level in ("None", "batch", "ranks"))
        cells = [f"`{row['layer']}`", str(row["M"]), f"`{row['plan']}`", us(free), us(batch), us(ranks)]
        rows.append([*cells, f"{ranks / free:.2f}", changed(run)])
    differing = sum(row["differing"] for row in run["times"])
    text = (
        "µs of Llama-3-8B's row-parallel layers with their all-reduce, in CUDA graphs, median, slowest rank. Of each"
        f' row the result with `"ranks"` on two ranks was compared with that of one rank alone: {differing} numbers had'
        " other bits."
    )
    head = ["layer", "rows", "kernel", "None", "batch", "ranks", "ranks / None", CHANGED]
    return f"{_header(run, folder, text)}\n\n{lines_of(head, rows, 3)}"


_KINDS = {"ar": "`matmul_all_reduce`", "rs": "`matmul_reduce_scatter`", "ag": "`all_gather_matmul`",
          "ga": "`matmul_all_gather`", "linear": "a product without ranks"}  # fmt: skip


def _cost(name: str, costs: list[float], run: dict[str, Any]) -> list[str]:
    figures = [geometric_mean(costs), statistics.median(costs), max(costs)]
    return [name, str(len(costs)), *(f"{each:.2f}" for each in figures if each), changed(run)]


def _header(run: dict[str, Any], folder: str, text: str) -> str:
    return in_short([run], f"{text} [All figures]({folder}{run['file']}.json).")
