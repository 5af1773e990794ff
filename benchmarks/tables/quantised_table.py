"""The tables of kept quantised weights: linear layers and experts of mixtures, beside bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
import json
import math
from typing import Any

from benchmarks.measuring.report import RESULTS

_LINEARS = RESULTS / "quantised_variants_h200_x2.json"
_EXPERTS = RESULTS / "experts_formats_h200_x2.json"
_TOUCHED = RESULTS / "experts_touched_h200_x2.json"
_MODELS = "quantised_models_*.json"
_MANY = {kind: RESULTS / f"quantised_many_h200_x{world}.json" for kind, world in (("local", 1), ("sum", 2))}
_LEAST = {"local": 33, "sum": 1}  # rows: fewer go by the stream
_FACTOR = "In brackets: bfloat16's time divided by this time."
_FORMATS = "bf16", "fp8", "fp8_block", "int4", "mxfp4"
_MANY_FORMATS = *_FORMATS, "int4/128", "int4_zeros", "nvfp4", "int8"


def linears(folder: str) -> str:
    """Return the time of `matmul_all_reduce` by rows and format."""
    run = json.loads(_LINEARS.read_text())
    sums = [row for row in run["rows"] if row["call"] == "matmul_all_reduce"]
    shape = f"{sums[0]['N']} x {sums[0]['K']} a rank"
    head = f"**`matmul_all_reduce` of few rows, {shape}, \u00b5s. {_FACTOR}** {_header(run)}"
    lines = [[str(row["rows"]), *_cells(row["us"])] for row in sums]
    return f"{head} [All figures]({folder}{_LINEARS.name}).\n\n" + _table("rows", lines)


def many(kind: str, folder: str) -> str:
    """Return the time of many rows by rows and format, "local" or the "sum" over ranks, by the fastest tile of each."""
    run, path = json.loads(_MANY[kind].read_text()), _MANY[kind]
    best: dict[int, dict[str, float]] = {}
    for row in run["rows"]:
        name, *how = row["label"].split()
        if ("local" in how) == (kind == "local") and row["rows"] >= _LEAST[kind]:
            us = best.setdefault(row["rows"], {})
            us[name] = min(row["us"], us.get(name, math.inf))
    product = f"{run['N']} x {run['K']}"
    title = {"local": f"A product, {product}", "sum": f"`matmul_all_reduce`, {product} a rank"}[kind]
    names = [name for name in _MANY_FORMATS if any(name in us for us in best.values())]
    head = f"**{title}, \u00b5s, by the fastest tile. {_FACTOR}** {_header(run)} [All tiles]({folder}{path.name})."
    lines = [[str(rows), *_cells(best[rows], names)] for rows in sorted(best)]
    return f"{head}\n\n" + _table("rows", lines, names)


def experts(folder: str) -> str:
    """Return the time of a mixture's two products by model, tokens and format."""
    run = json.loads(_EXPERTS.read_text())
    times: dict[tuple[str, int], dict[str, float]] = {}
    for row in run["rows"]:
        times.setdefault((row["shape"], row["T"]), {})[row["format"]] = row["up"] + row["down"]
    head = f"**`moe_gate_up` and `moe_down_all_reduce`, \u00b5s. {_FACTOR}** {_header(run)}"
    lines = [[f"{shape}, {tokens}", *_cells(us)] for (shape, tokens), us in times.items()]
    return f"{head} [All figures]({folder}{_EXPERTS.name}).\n\n" + _table("model, tokens", lines)


def models(folder: str) -> str:
    """Return the steps of whole models, ours in bf16 and in formats, and vLLM's."""
    parts = []
    for path in sorted(RESULTS.glob(_MODELS)):
        run = json.loads(path.read_text())
        names = list(dict.fromkeys(each["name"] for row in run["rows"] for each in row["results"] if "key" in each))
        lines = []
        for row in run["rows"]:
            us = {each["name"]: each.get("step_graph_ms") for each in row["results"]}
            lines.append([str(row["batch"]), *(f"{us[name]:.2f}" if us.get(name) else "-" for name in names)])
        head = (
            f"**{run['model']}, a decode step after {run['rows'][0]['prompt']} tokens, compiled, ms.** {_header(run)}"
        )
        parts.append(
            f"{head} [All figures]({folder}{path.name}).\n\n"
            + _table("batch", lines, ["ours, bf16" if name == "ours" else name for name in names])
        )
    return "\n\n".join(parts)


def touched(folder: str) -> str:
    """Return the time of both ops by model and tokens, by the stream of touched experts and by tiles."""
    run = json.loads(_TOUCHED.read_text())
    times: dict[tuple[str, str, int], dict[str, dict]] = {}
    for row in run["rows"]:
        ops, kind = times.setdefault((row["shape"], row["format"], row["T"]), {}), row["kernel"]
        us = ops.setdefault(row["op"], {"bytes at 4.3 TB/s": row["floor"]})
        us["stream" if "touched" in kind else "tiles"] = row["us"]
    title = "Both ops of few tokens, \u00b5s. In brackets: the time by tiles divided by this time."
    head = f"**{title}** {_header(run)}"
    kinds = "tiles", "stream", "bytes at 4.3 TB/s"
    columns = [f"{op}: {kind}" for op in ("gate and up", "down") for kind in kinds]
    lines = [f"| model, format | tokens | {' | '.join(columns)} |", "| --- " + "| ---: " * 7 + "|"]
    for (shape, stored, tokens), ops in times.items():
        cells = []
        for us in (ops["moe_gate_up"], ops["moe_down_all_reduce"]):
            gain = f"{us['stream']:.1f} ({us['tiles'] / us['stream']:.2f})"
            cells += [f"{us['tiles']:.1f}", gain, f"{us[kinds[2]]:.1f}"]
        lines.append(f"| {shape}, {stored} | {tokens} | {' | '.join(cells)} |")
    return f"{head} [All figures]({folder}{_TOUCHED.name}).\n\n" + "\n".join(lines)


def _header(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {run['versions'][name]}" for name in ("torch", "triton"))
    gpu = run["gpu"].removeprefix("NVIDIA ")
    return f"{run['world']} x {gpu}, CUDA graphs, {versions}, {run['date']}, commit {run['commit']}."


def _cells(us: dict[str, float], names: Sequence[str] = _FORMATS) -> list[str]:
    plain = us["bf16"]
    factors = {name: "" if name == "bf16" else f" ({plain / us[name]:.2f})" for name in us}
    return [f"{us[name]:.1f}{factors[name]}" if name in us else "-" for name in names]


def _table(first: str, lines: list[list[str]], names: Sequence[str] = _FORMATS) -> str:
    head = [first, *names]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---", *["---:"] * len(names)], *lines])
