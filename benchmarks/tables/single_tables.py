"""Tables of results that have a page each: mixtures of experts, outputs on the heap, collectives with a root,
collectives on tiles.
"""

from __future__ import annotations

from typing import Any

from benchmarks.measuring.tables import size_name
from benchmarks.tables.cells import lines_of, us, versus
from benchmarks.tables.marks import CHANGED, FACTOR, GRAPHS, by_age, changed, gpus, header, in_short, newest

_MIXTURES = "moe*_{gpu}_x2"
_MOST = 6  # rows on a kernel's page


def mixtures(folder: str) -> str:
    """Return the two ops of a mixture's layer and the best grouped product with an all-reduce."""
    measured = _mixtures()
    rows = []
    for run, row in measured:
        ours, best = row["us"]["ours"], _best_rival(row)
        floor = f"{us(row['floor_us'])} ({ours / row['floor_us']:.2f})"
        size = [gpus(run), row["shape"], str(row["T"]), f"{row['touched']:.0f}"]
        rows.append([*size, us(ours), floor, versus(best[1], ours, best[0]), changed(run)])
    text = (
        f"µs of `moe_gate_up` and `moe_down_all_reduce` {GRAPHS}. The floor is the time to read the weights of all"
        f" chosen experts at the rate of a copy. The factor beside it is our time divided by the floor. {FACTOR}"
    )
    head = ["GPUs", "model", "tokens", "experts", "ours", "floor", "best rival", CHANGED]
    return f"{_header_of(measured, folder, text)}\n\n{lines_of(head, rows, 2)}"


def _mixtures() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (run, row) of each model's latest run that has it, on all tokens."""
    measured: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for run in by_age(_MIXTURES):
        shapes = {row["shape"] for _, row in measured}
        measured += [(run, row) for row in run["rows"] if row["shape"] not in shapes]
    return measured


def _header_of(measured: list[tuple[dict[str, Any], dict[str, Any]]], folder: str, text: str) -> str:
    runs = {run["file"]: run for run, _ in measured}
    links = ", ".join(f"[{gpus(run)}]({folder}{file}.json)" for file, run in runs.items())
    return in_short(runs.values(), f"{text} All figures: {links}.")


def of_mixture_kernel(name: str, folder: str) -> str:
    """Return the rows whose plan names this kernel: the time of its op, of both ops, and of the best rival."""
    measured = _mixtures()
    rows = []
    for run, row in measured:
        for part, plan in zip(("ours gate_up", "ours down"), row["plans"], strict=True):
            if plan.split()[1] == name:
                op = f"`moe_{part.split()[1]}`".replace("down", "down_all_reduce")
                size = [gpus(run), row["shape"], str(row["T"])]
                cells = [*size, op, plan.split()[2], us(row["us"][part]), us(row["us"]["ours"])]
                name_of_best, time = _best_rival(row)
                rows.append([*cells, versus(time, row["us"]["ours"], name_of_best), changed(run)])
    if not rows:
        return "The benchmarks never ran this kernel, because the plan chose others on the GPUs that were measured."
    rows = [rows[index * (len(rows) - 1) // (_MOST - 1)] for index in range(_MOST)] if len(rows) > _MOST else rows
    text = f"µs of the op alone, and of both ops with the best rival's, {GRAPHS}. {FACTOR}"
    head = ["GPUs", "model", "tokens", "op", "tile", "alone", "both ops", "best rival", CHANGED]
    return f"{_header_of(measured, folder, text)}\n\n{lines_of(head, rows, 4)}"


def _best_rival(row: dict[str, Any]) -> tuple[str, float]:
    """Return name and time of the best rival that reduces over the ranks; such names contain a plus."""
    return min((each for each in row["us"].items() if " + " in each[0]), key=lambda each: each[1])


def outputs(folder: str) -> str:
    """Return a row-parallel layer whose output is copied, and one whose output lies on the heap."""
    (run,) = newest("outputs_{gpu}_x2")
    rows = []
    for row in run["rows"]:
        copied, kept = row["layer, copied, graph us"], row["layer, graph us"]
        cells = [f"{row['M']}, {row['N']}, {row['K']}", f"`{row['kernel']}`", us(copied), us(kept)]
        rows.append([*cells, f"{copied / kept:.3f}", changed(run)])
    text = f"µs of a row-parallel layer {GRAPHS}. The gain is the first time divided by the second."
    head = ["M, N, K", "kernel", "copied", "on the heap", "gain", CHANGED]
    return f"{_header(run, folder, text)}\n\n{lines_of(head, rows, 2)}"


def rooted(folder: str) -> str:
    """Return collectives with a root, and messages, of ours and NCCL, by call and size; and the rows NCCL leads."""
    (run,) = newest("rooted_{gpu}_x2")
    calls: dict[str, dict[int, tuple[float, float]]] = {}
    for row in run["rows"]:
        if len(row["us"]) == 2:
            nbytes = int(row["size"].split()[0])
            calls.setdefault(row["what"], {})[nbytes] = row["us"]["ctx.ccl"], row["us"]["torch"]
    sizes = sorted({nbytes for times in calls.values() for nbytes in times})
    rows = [
        [f"`{call}`", *(f"{us(times[n][0])}, {versus(times[n][1], times[n][0])}" if n in times else "" for n in sizes)]
        for call, times in calls.items()
    ]
    text = (
        f"µs a call of ours, then of NCCL's, {GRAPHS}. {FACTOR}"
        " A size is that of the root's whole tensor, or of the message that a rank sends."
    )
    table = lines_of(["call", *map(size_name, sizes), CHANGED], [[*row, changed(run)] for row in rows], 1)
    leads = [
        [f"`{call}`", size_name(n), us(ours), us(nccl), f"{100 * (ours / nccl - 1):.1f} %"]
        for call, times in calls.items()
        for n, (ours, nccl) in times.items()
        if nccl < ours
    ]
    if leads:
        table += f"\n\nNCCL leads in these rows:\n\n{lines_of(['call', 'size', 'ours', 'NCCL', 'by'], leads, 2)}"
    else:
        table += "\n\nNCCL leads in none of these rows."
    return f"{header([run], folder, text)}\n\n{table}"


def tiles(folder: str) -> str:
    """Return collectives on tiles in a user's kernels, and the op or the collective on tensors."""
    (run,) = newest("tiles_{gpu}_x2")
    rows = []
    for row in run["rows"]:
        times = dict(row["us"])
        torch_us, op_us = times.pop("torch", None), times.pop("ctx.ops", None) or times.pop("ctx.ccl", None)
        own = [us(times[name]) if name in times else "" for name in _TILES]
        ratio = f"{min(times.values()) / op_us:.2f}" if op_us and times else ""
        rows.append([f"`{row['what']}`", row["size"], *own, us(op_us), ratio, us(torch_us), changed(run)])
    text = (
        f"µs a call {GRAPHS}. The first three columns are kernels that use `iris.tiles`; the fourth is `ctx.ops` or"
        " `ctx.ccl`. The ratio is the fastest of the three divided by the fourth. torch is its product and NCCL."
    )
    head = ["what", "size", "one shot", "two shots", "specialised warps", "`ctx`", "ratio", "torch", CHANGED]
    return f"{header([run], folder, text)}\n\n{lines_of(head, rows, 2)}"


_TILES = ("tiles", "tiles, two shots", "tiles, specialised warps")


def _header(run: dict[str, Any], folder: str, text: str) -> str:
    return in_short([run], f"{text} [All figures]({folder}{run['file']}.json).")
