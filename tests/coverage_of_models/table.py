"""`docs/models.md`: which model types are split, how much of them, and what is said of the others."""

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
_HEAD = """# Models

Which causal language models `layers.parallelize` and `layers.from_pretrained` split over ranks.

`python -m tests.coverage_of_models --engine --write` made this page. It builds a tiny random model of each type that
transformers' `AutoModelForCausalLM` knows, splits it, and compares logits and greedy tokens with the unsplit model in
float64. A type is *wrong* if it is accepted and a rank's answer differs; the command fails then. Each token is found
by a call on all tokens before it, without a cache.

- **split**: the share of the tiny model's parameters of which each rank holds a part. Word embeddings are left out,
  because every rank holds them whole. Norms, routers, and towers for images and sound stay whole, too. Products that
  are split and gathered count as split.
- **plan**: *own* is the model's own tensor-parallel plan, *built in* is one of `layers/hf/plans/`. The report that
  `parallelize` returns names it.
- **engine**: whether [`layers.Engine`](guides/serving.md) serves the type. *Yes*: the logits of prompts, some of them
  padded, and of some tokens behind are the unsplit model's. *One length*: it refuses prompts of different lengths in
  one call, because the model does not pass over padding. *No*: it refuses the type, and says so; the model's own
  `generate()` serves it.
- **formats**: the [quantized layouts](guides/quantised.md) in which tests load the type. Every type that is split takes
  any of them, by the same code. Linear layers keep fp8, MXFP4 and symmetric int4 at their bytes; experts, NVFP4, int8
  and other int4 are widened.
- **refused**: the message. The model is then as it was. A plan of your own, `plan={{name: style}}`, may still split it.
- **not tried**: transformers cannot build or run the type by itself here.

Measured with transformers {transformers}, torch {torch}, {ranks}, on CPUs in Triton's interpreter.

| of {all} types | split | refused | not tried | wrong |
|---|---:|---:|---:|---:|
| | {split} | {refused} | {untried} | {wrong} |
"""

# What splitting by heads was measured to bring, when it replaced products that are split and gathered.
_STATES = """## Layers that keep a state

Layers that [keep a state for each head](guides/models.md#layers-that-keep-a-state) are split by whole heads, and their
state with them. Before, their products were split and gathered, the rest and the state whole on each rank:

| share that is split | gathered | by heads |
|---|---:|---:|
| bailing_hybrid | 90 % | 98 % |
| bamba | 97 % | 99 % |
| falcon_h1 | 97 % | 100 % |
| granitemoehybrid | 98 % | 99 % |
| kimi_linear | 91 % | 95 % |
| mamba2 | 94 % | 100 % |
| nemotron_h | 96 % | 99 % |
| olmo_hybrid | 76 % | 99 % |
| zamba2 | 91 % | 94 % |
| the recurrent state of each of these | 0 % | 100 % |
"""


def render(results: dict[str, dict[str, Any]], ranks: list[int]) -> str:
    """The page for `results` by type."""
    counts = Counter(row["outcome"] for row in results.values())
    outcomes = {key: counts.get(key, 0) for key in ("split", "refused", "untried", "wrong")}
    versions = {name: version(name).partition("+")[0] for name in ("transformers", "torch")}
    over = " and ".join(map(str, ranks)) + " ranks"
    parts = [_HEAD.format(all=len(results), ranks=over, **versions, **outcomes)]
    split = {name: row for name, row in sorted(results.items()) if row["outcome"] == "split"}
    lines = ["| type | split | plan | engine | formats | note |", "|---|---:|---|---|---|---|"]
    lines += [_split_line(name, row) for name, row in split.items()]
    parts.append("## Split\n\n" + "\n".join(lines) + "\n")
    parts.append(_STATES)
    for outcome, title in (("refused", "Refused"), ("untried", "Not tried"), ("wrong", "Wrong")):
        rows = {name: row for name, row in sorted(results.items()) if row["outcome"] == outcome}
        if rows:
            table = [f"| {name} | {_cell(row['message'])} |" for name, row in rows.items()]
            parts.append(f"## {title}\n\n" + "\n".join(["| type | why |", "|---|---|", *table]) + "\n")
    return "\n".join(parts)


def updated(page: str, results: dict[str, dict[str, Any]]) -> str:
    """`page` with other rows for the types in `results`, all of which it has as split ones."""
    lines = page.splitlines(keepends=True)
    for name, row in results.items():
        found = [i for i, line in enumerate(lines) if re.match(rf"\| {re.escape(name)} \| \d+ % \| (own|built)", line)]
        if row["outcome"] != "split" or len(found) != 1:
            raise ValueError(f"{name} is {row['outcome']}, and the page has {len(found)} rows of it: make all of it")
        lines[found[0]] = _split_line(name, row) + "\n"
    return "".join(lines)


def _split_line(name: str, row: dict[str, Any]) -> str:
    plan = "built in" if name in PLANS else "own"
    share, formats = f"{100 * row['share']:.0f} %", FORMATS.get(name, "")
    return f"| {name} | {share} | {plan} | {_engine(row)} | {formats} | {_cell(row['message'])} |"


def _engine(row: dict[str, Any]) -> str:
    return str(row.get("engine", "")).partition(":")[0]


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()[:300]


def merged(first: dict[str, dict], second: dict[str, dict]) -> dict[str, dict]:
    """Of two runs the worse outcome of each type, and the smaller share."""
    order = ("wrong", "refused", "untried", "split")
    results = {}
    for name in first.keys() | second.keys():
        rows = [each[name] for each in (first, second) if name in each]
        worst = min(rows, key=lambda row: (order.index(row["outcome"]), row["share"]))
        results[name] = worst
    return results
