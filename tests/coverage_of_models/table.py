"""Render `docs/models.md`: which model types are split, how much of each, and why the others are not."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import version
from pathlib import Path
import re
from typing import Any

from layers.hf.plans import PLANS

from tests.layers.written_formats import PUBLISHED_IN_FP8

# What `tests/layers/test_quantised_models.py` loads of a type.
FORMATS = dict.fromkeys(PUBLISHED_IN_FP8, "fp8") | {
    "llama": "fp8, MXFP4, NVFP4, int4, int8, AWQ, GPTQ",
    "qwen3_moe": "fp8, int4",
    "deepseek_v3": "fp8, MXFP4, int4",
    "gpt_oss": "MXFP4",
}
PLACE = Path(__file__).parents[2] / "docs" / "models.md"
_PART = r"(<!-- {} -->\n).*?(<!-- end -->)"


def render(page: str, results: dict[str, dict[str, Any]], ranks: list[int]) -> str:
    """Return `page` with the rows of `results`, by type, between its marks."""
    counts = Counter(row["outcome"] for row in results.values())
    counted = " | ".join(str(counts.get(key, 0)) for key in ("split", "refused", "untried", "wrong"))
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("transformers", "torch"))
    over = " and ".join(map(str, ranks)) + " ranks"
    measured = f"Measured with {versions}, {over}, on CPUs in Triton's interpreter.\n\n"
    measured += f"| of {len(results)} types | split | refused | not tried | wrong |\n|---|---:|---:|---:|---:|\n"
    measured += f"| | {counted} |\n"
    split = [_split_line(name, row) for name, row in sorted(results.items()) if row["outcome"] == "split"]
    columns = ["| type | split | plan | engine | formats | note |", "|---|---:|---|---|---|---|"]
    parts = {"measured": measured, "split": "\n".join([*columns, *split]) + "\n", "others": ""}
    for outcome, title in (("refused", "Refused"), ("untried", "Not tried"), ("wrong", "Wrong")):
        rows = [(name, row["message"]) for name, row in sorted(results.items()) if row["outcome"] == outcome]
        lines = [f"## {title}\n", "| type | why |", "|---|---|", *(f"| {name} | {_cell(why)} |" for name, why in rows)]
        parts["others"] += "\n".join(lines) + "\n\n" if rows else ""
    for mark, text in parts.items():
        page = re.sub(_PART.format(mark), lambda old, text=text: old[1] + text + old[2], page, flags=re.DOTALL)
    return page


def updated(page: str, results: dict[str, dict[str, Any]]) -> str:
    """`page` with other rows for the types in `results`, all of which it has as split ones."""
    lines = page.splitlines(keepends=True)
    for name, row in results.items():
        places = [i for i, line in enumerate(lines) if re.match(rf"\| {re.escape(name)} \| \d+ % \| (own|built)", line)]
        if row["outcome"] != "split" or len(places) != 1:
            raise ValueError(f"{name} is {row['outcome']}, and the page has {len(places)} rows of it: make all of it")
        lines[places[0]] = _split_line(name, row) + "\n"
    return "".join(lines)


def _split_line(name: str, row: dict[str, Any]) -> str:
    plan = "built in" if name in PLANS else "own"
    share, formats = f"{100 * row['share']:.0f} %", FORMATS.get(name, "")
    return f"| {name} | {share} | {plan} | {_engine(row)} | {formats} | {_cell(row['message'])} |"


def _engine(row: dict[str, Any]) -> str:
    return str(row.get("engine", "")).partition(":")[0]


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()[:300]
