"""Tables of docs/ from benchmarks/results: `python -m benchmarks.docs_tables` writes them, `--check` only compares.

    <!-- measured NAME -->   some rows in which a plan took the kernel of that name, beside the strongest rivals
    <!-- lost -->            all rows in which a rival is faster than ours, by the reason

A table ends at `<!-- end -->`. Where a rival is newly ahead, `_REASONS` has to say why.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import json
from pathlib import Path
import re
import sys
from typing import Any

from iris_ops.config import FusedConfig
from iris_ops.planning.kernel_names import kernel_for
from iris_ops.problem import Problem
import torch

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).resolve().parents[1] / "docs"
OPS_FILES = ("ops_h200_x2", "ops_h200_x4", "ops_models_h200_x2", "ops_models_h200_x4")
CCL_FILES = ("ccl_h100_x2", "ccl_h200_x4")
# Why a rival of that name is ahead in an op, in graphs and in eager calls.
_TILES = "A tile of cuBLAS fills the waves of these rows; ours left multiprocessors idle"
_GATHERS = "Both have copy engines bring rows; cuBLAS's tiles are some percent ahead of ours at these widths"
_POWER = "Not known: the product of 22 ms takes nearly all of the time"
_HOST = "The host's time of an eager call; in graphs ours is ahead"
_REASONS = {
    ("ag", "torch async-TP"): (_GATHERS, _GATHERS),
    ("ag", "cuBLAS + NCCL"): ("", _HOST),
    ("ar", "cuBLAS + torch two-shot"): (_TILES, _TILES),
    ("ar", "cuBLAS + NCCL"): ("", _POWER),
    ("rs", "cuBLAS + torch reduce-scatter"): (_TILES, _TILES),
    ("all_reduce", "torch two-shot"): ("", _HOST),
}
_OF_ROWS = {(16384, 16384, 26624): _POWER}  # where a row has a reason of its own
_OPS = {"ar": "matmul_all_reduce", "rs": "matmul_reduce_scatter", "ag": "all_gather_matmul", "ga": "matmul_all_gather"}
_PROTOCOLS = {"words": "ccl.lamport", "flags": "ccl.flags"}
_MOST = 5  # rows of a table
_PLACE = re.compile(r"<!-- (measured \S+|lost) -->\n.*?<!-- end -->", re.DOTALL)


def tables() -> dict[str, str]:
    """By the kernel's name."""
    found: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for file in (*OPS_FILES, *CCL_FILES):
        run = json.loads((RESULTS / f"{file}.json").read_text()) | {"file": file}
        for row in run["rows"]:
            ours = next(each for each in row["results"] if each["kind"] == "ours")
            if ours["status"] == "ok" and ours.get("graph_us"):
                found.setdefault(_kernel(run, row, ours["plan"]), []).append((run, row))
    return {kernel: _table(rows) for kernel, rows in found.items()}


def _kernel(run: dict[str, Any], row: dict[str, Any], plan: dict[str, Any]) -> str:
    if run["benchmark"] == "ccl":
        return _PROTOCOLS[plan["protocol"]]
    if "kernel" in plan:
        return plan["kernel"]
    known = {field: value for field, value in plan.items() if field in FusedConfig.__dataclass_fields__}
    known.pop("prediction", None)
    if known["algorithm"] not in ("one_shot", "two_shot", "overlapped", "sequential", "copy_gather"):
        return "gone"  # the copy engines of earlier versions
    config = FusedConfig(**known | {"warp_specialised": plan.get("warp_specialised", plan.get("warp_roles", False))})
    form = row.get("form") or ("" if row["op"] == "ar" else "rows")
    problem = Problem(_OPS[row["op"]], form, row["M"], row["N"], row["K"], run["world"], torch.bfloat16)
    return kernel_for(problem, config)


def _table(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> str:
    """Some of `rows`: every op's smallest and largest, and others spread between them."""
    chosen = list(_spread(rows))
    lines = [
        "µs a call in a CUDA graph, bf16, median, slowest rank; in brackets how many times ours a rival takes, in bold "
        "where it wins.",
        "",
        "| GPUs, date | op | size | ours | cuBLAS + NCCL | best other rival |",
        "|---|---|---|---:|---:|---:|",
    ]
    if chosen[0][0]["benchmark"] == "ccl":
        lines[2] = lines[2].replace("cuBLAS + ", "")
    for run, row in chosen:
        ours = next(each["graph_us"] for each in row["results"] if each["kind"] == "ours")
        rivals = [each for each in row["results"] if each["kind"] == "rival" and each.get("graph_us")]
        nccl = [each for each in rivals if each["name"] in ("NCCL", "cuBLAS + NCCL")]
        others = sorted((each for each in rivals if each not in nccl), key=lambda each: each["graph_us"])
        size = f"{row['M']}, {row['N']}, {row['K']}" if "M" in row else _bytes(row["bytes"])
        op = f"`{_OPS.get(row['op'], row['op'])}`"
        cells = [_gpus(run), op, size, _us(ours), _rival(nccl, ours, False), _rival(others, ours, True)]
        lines.append(f"| {' | '.join(cells)} |")
    files = sorted({run["file"] for run, _ in chosen})
    links = ", ".join(f"[{file}](../../benchmarks/results/{file}.md)" for file in files)
    versions = chosen[0][0]["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "nccl") if name in versions)
    return "\n".join([*lines, "", f"Every row: {links}; {named}."])


def _spread(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    first = [(run, row) for run, row in rows if run["file"] == rows[0][0]["file"]] if len(rows) > _MOST else rows
    rows = first if len(first) >= _MOST else rows
    size = lambda pair: (_order(pair[1]), pair[1].get("M", 0), pair[1].get("bytes", 0))  # noqa: E731
    rows = sorted(rows, key=size)
    if len(rows) <= _MOST:
        yield from rows
    else:
        yield from (rows[index * (len(rows) - 1) // (_MOST - 1)] for index in range(_MOST))


def _order(row: dict[str, Any]) -> int:
    return list(_OPS).index(row["op"]) if row["op"] in _OPS else 0


def _gpus(run: dict[str, Any]) -> str:
    return f"{run['world']} x {run['gpu'].replace('NVIDIA ', '').split()[0]}, {run['date']}"


def _bytes(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"


def _us(us: float) -> str:
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def _rival(rivals: list[dict[str, Any]], ours: float, named: bool) -> str:
    if not rivals:
        return ""
    us, name = rivals[0]["graph_us"], rivals[0]["name"].replace("cuBLAS + ", "") + " " if named else ""
    text = f"{name}{_us(us)} ({us / ours:.2f}x)"
    return f"**{text}**" if us < ours else text


def lost() -> str:
    """Every row of the results in which a rival takes less time than ours, by the reason, the widest lead first."""
    rows: dict[str, list[tuple[float, str]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        run = json.loads(path.read_text())
        for row in run["rows"] if run.get("benchmark") in ("ops", "ccl") else ():
            timed = [each for each in row["results"] if each["status"] == "ok"]
            for called in ("graph", "eager"):
                us = {each["name"]: each[f"{called}_us"] for each in timed if each.get(f"{called}_us")}
                rivals = [each["name"] for each in timed if each["kind"] == "rival" and each["name"] in us]
                best = min(rivals, key=us.__getitem__, default="ours")
                if us.get(best, 0) < us.get("ours", 0):
                    lead = us["ours"] / us[best] - 1
                    line = _lost_row(run, row, called, us, best)
                    rows.setdefault(_why(run, row, called, best), []).append((lead, line))
    parts = []
    for why, lines in sorted(rows.items(), key=lambda each: -max(each[1])[0]):
        parts += [f"### {why}", ""]
        parts += ["| GPUs, date | op | size | called | ours, µs | the rival, µs | ahead by |"]
        parts += ["|---|---|---|---|---:|---:|---:|"]
        parts += [line for _, line in sorted(lines, reverse=True)] + [""]
    return "\n".join(parts[:-1])


def _sizes(row: dict[str, Any]) -> tuple[int, ...]:
    return (row["M"], row["N"], row["K"]) if "M" in row else (row["bytes"],)


def _why(run: dict[str, Any], row: dict[str, Any], called: str, best: str) -> str:
    why = _OF_ROWS.get(_sizes(row)) or _REASONS.get((row["op"], best), ("", ""))[called == "eager"]
    if not why:
        where = f"{run['gpu']}, {row['op']} {_sizes(row)}"
        raise LookupError(f"{where}: {best} is ahead in a {called} call; say in _REASONS why")
    return why


def _lost_row(run: dict[str, Any], row: dict[str, Any], called: str, us: dict[str, float], best: str) -> str:
    cells = [
        _gpus(run),
        f"`{_OPS.get(row['op'], row['op'])}`",
        ", ".join(map(str, _sizes(row))) if "M" in row else _bytes(row["bytes"]),
        called,
        _us(us["ours"]),
        f"{best} {_us(us[best])}",
        f"{100 * (us['ours'] / us[best] - 1):.1f} %",
    ]
    return f"| {' | '.join(cells)} |"


def rendered(page: str, made: dict[str, str]) -> str:
    """`page` with its tables as the results have them now; `made`: those of `tables`, by name, and of `lost`."""
    none = "No row of the benchmarks runs this kernel: on the GPUs that were measured the plan takes others."
    return _PLACE.sub(lambda place: f"<!-- {place[1]} -->\n{made.get(place[1], none)}\n<!-- end -->", page)


def pages() -> Iterator[tuple[Path, str, str]]:
    """Every page with such a table: its path, its text, and what it should be."""
    made = {f"measured {kernel}": table for kernel, table in tables().items()} | {"lost": lost()}
    for path in sorted(DOCS.rglob("*.md")):
        page = path.read_text()
        if _PLACE.search(page):
            yield path, page, rendered(page, made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a page is not what it should be")
    check = parser.parse_args().check
    for path, page, new in pages():
        if new != page:
            if check:
                sys.exit(f"{path} is out of date: python -m benchmarks.docs_tables")
            path.write_text(new)
            print(path)


if __name__ == "__main__":
    main()
