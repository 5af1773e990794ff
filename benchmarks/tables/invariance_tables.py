"""Tables of the page on the same bits: the cost of each guarantee, and the number of bits that differed.

invariance            time of ops with the same bits at any number of rows over the time without, measured
invariance ranks      row-parallel layers with the same bits on any number of ranks
invariance costs      a sentence of the README: the cost of each level in a decode step of these models
invariance models     steps and first tokens of a model at each level, and vLLM's with its own guarantee
"""

from __future__ import annotations

from collections.abc import Sequence
import statistics
from typing import Any

from benchmarks.measuring.tables import figure, geometric_mean
from benchmarks.tables.cells import lines_of, us
from benchmarks.tables.marks import CHANGED, by_age, changed, gpu_of, gpus, header, in_short, newest
from benchmarks.tables.model_tables import MODELS

_FEW = 64  # rows of a decode step, at most
_KINDS = {"ar": "`matmul_all_reduce`", "rs": "`matmul_reduce_scatter`", "ag": "`all_gather_matmul`",
          "ga": "`matmul_all_gather`", "linear": "a product without a collective"}  # fmt: skip


def invariance(folder: str) -> str:
    """Return the measured cost of the same bits at every number of rows, by kind of call."""
    (run,) = newest("invariance_{gpu}_x2")
    kinds: dict[str, list[float]] = {}
    for row in run["times"]:
        kinds.setdefault(row["row"].split()[0], []).append(row["us"]["batch"] / row["us"]["None"])
    everything = [cost for costs in kinds.values() for cost in costs]
    rows = [_cost(_KINDS[kind], costs, run) for kind, costs in kinds.items()] + [_cost("all", everything, run)]
    text = 'Time with `invariant="batch"` over the time with `None`, in CUDA graphs. '
    counted = [each for each in [run, *newest("invariance_random_{gpu}_x2")] if "products" in each]
    text += " ".join(map(_compared, counted))
    head = ["call", "rows", "geometric mean", "median", "worst row", CHANGED]
    return f"{_header(run, folder, text)}\n\n{lines_of(head, rows, 1)}"


def models(folder: str) -> str:
    """Return steps and first tokens of a model at each level, and vLLM's with and without its own guarantee.

    Each comes from the latest run that has it, and is compared with the time without a guarantee in the same run.
    """
    runs = _of_levels()
    if not runs:
        return "Not measured yet."
    rows, shown = [], {}
    for size in _sizes(runs):
        model, layers, batch, prompt = size
        (our_run, our_results), (vllm_run, vllm) = (_latest(runs, size, key) for key in ("ours-batch", "vllm-batch"))
        shown |= {run["file"]: run for run in (our_run, vllm_run) if run}
        named = f"{gpu_of(vllm_run)}: " if our_run and vllm_run and our_run["gpu"] != vllm_run["gpu"] else ""
        for kind, name in (("step", "step"), ("first", "first token")):
            cells = [f"{model}, {gpu_of(our_run)}" if our_run else model, str(layers), f"{batch} x {prompt}", name]
            cells += _over_first(our_results, ("ours", "ours-batch", "ours-ranks"), kind)
            cells += [f"{named}{cell}" if cell else "" for cell in _over_first(vllm, ("vllm", "vllm-batch"), kind)]
            rows.append([*cells, changed(our_run) if our_run else ""])
    text = (
        "ms, with random weights and compiled decoder layers, in CUDA graphs: the median on the slowest rank. The"
        " factor in brackets compares with `None`, or with vLLM's default, in the same run. Invariant vLLM is"
        " VLLM_BATCH_INVARIANT=1."
        " A cell that begins with a GPU's name comes from a run on that GPU."
    )
    head = ["model", "layers", "batch x prompt", "", "`None`", '`"batch"`', '`"ranks"`', "vLLM", "vLLM, invariant"]
    return f"{header(shown.values(), folder, text)}\n\n{lines_of([*head, CHANGED], rows, 4)}"


def step_costs(_folder: str) -> str:
    """Return a sentence: by how much each level lengthens a decode step, from the least to the most in `models`."""
    runs, parts, where, names = _of_levels(), [], {}, []
    for key in ("ours-batch", "ours-ranks"):
        costs = []
        for run, results in (_latest(runs, size, key) for size in _sizes(runs)):
            if run:
                costs.append(100 * results[key]["step_graph_ms"] / results["ours"]["step_graph_ms"] - 100)
                where[gpus(run)] = run
                names.append(MODELS.get(run["model"], run["model"]))
        span = " to ".join(dict.fromkeys(f"{cost:.0f}" for cost in (min(costs), max(costs))))
        parts.append(f'{span} %{" longer" * (not parts)} with `"{key.removeprefix("ours-")}"`')
    models = " and ".join(dict.fromkeys(names))
    return f"On {' and '.join(where)} a decode step of {models} takes {' and '.join(parts)}."


def _of_levels() -> list[dict[str, Any]]:
    return [run for run in by_age("llm_*_{gpu}_x2") if _has(run, "ours-batch") or _has(run, "vllm-batch")]


def _sizes(runs: list[dict[str, Any]]) -> list[tuple]:
    return sorted({(run["model"], run["layers"], row["batch"], row["prompt"]) for run in runs for row in run["rows"]})


def _over_first(results: dict[str, Any], keys: Sequence[str], kind: str) -> list[str]:
    """Return the times of `keys`, each but the first with its ratio to the first."""
    first, *rest = (results.get(key, {}).get(f"{kind}_graph_ms") for key in keys)
    return [figure(first), *(f"{figure(each)} ({each / first:.2f})" if each and first else "" for each in rest)]


def _latest(runs: list[dict[str, Any]], size: tuple, key: str) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the first of `runs` that has measured `key` at this size, and its results there, by key."""
    for run in runs:
        for row in run["rows"]:
            results = {each["key"]: each for each in row["results"] if each["status"] == "ok"}
            if (run["model"], run["layers"], row["batch"], row["prompt"]) == size and key in results:
                return run, results
    return None, {}


def _has(run: dict[str, Any], key: str) -> bool:
    return any(each["key"] == key and each["status"] == "ok" for row in run["rows"] for each in row["results"])


def _compared(run: dict[str, Any]) -> str:
    """Return how many products were compared, at ten numbers of rows each, and how many values differed."""
    differing, kind = run["differing"], "random products" if run["benchmark"] == "invariance_random" else "products"
    with_none = run.get("beside", run["products"])  # how many of them were compared with `None`, too
    of_those = "" if with_none == run["products"] else f" in {with_none} of them"
    ops: dict[str, int] = {}
    for name, count in run["counted"].items() if kind != "products" else ():
        for op in ["B in fp8"] * ("B in fp8" in name) or [name.rpartition(", ")[0].split(" ")[0].strip(",")]:
            ops[op] = ops.get(op, 0) + count
    which = "".join(f", {count} of `{op}`" if "_" in op else f", {count} of {op}" for op, count in ops.items())
    return (
        f"{run['products']} {kind} were compared at 10 numbers of rows each{which and f' ({which[2:]})'}:"
        f' {differing["None"]} values{of_those} differed with `None`, {differing["batch"]} with `"batch"`'
        f" ({run['date']}, {gpus(run)}, commit {run['commit']})."
    )


def invariance_ranks(folder: str) -> str:
    """Return the cost of the same bits on any number of ranks, by layer and number of rows."""
    (run,) = newest("invariance_ranks_{gpu}_x2")
    rows = []
    for row in run["times"]:
        free, batch, ranks = (row["us"][level] for level in ("None", "batch", "ranks"))
        cells = [f"`{row['layer']}`", str(row["M"]), f"`{row['plan']}`", us(free), us(batch), us(ranks)]
        rows.append([*cells, f"{ranks / free:.2f}", changed(run)])
    differing = sum(row["differing"] for row in run["times"])
    text = (
        "µs of Llama-3-8B's row-parallel layers with their all-reduce, in CUDA graphs: the median on the slowest rank."
        f' For each row the result with `"ranks"` on two ranks was compared with that of one rank: {differing} values'
        " differed."
    )
    logits = _model_logits(by_age("invariance_models*_{gpu}_x2"))
    few, many = (
        geometric_mean([row["us"]["ranks"] / row["us"]["None"] for row in run["times"] if (row["M"] <= _FEW) == is_few])
        for is_few in (True, False)
    )
    means = f"The geometric mean is {few:.2f} times the time of `None` up to {_FEW} rows, and {many:.2f} times above."
    head = ["layer", "rows", "kernel", "None", "batch", "ranks", "ranks / None", CHANGED]
    return f"{_header(run, folder, text)}\n\n{lines_of(head, rows, 3)}\n\n{means}\n\n{logits}"


def _model_logits(runs: list[dict[str, Any]]) -> str:
    """Return how many logits of models differed at each level, as a table."""
    rows = []
    for run in runs:
        for model, layers, level in dict.fromkeys((row["model"], row["layers"], row["level"]) for row in run["rows"]):
            same = [row for row in run["rows"] if (row["model"], row["layers"], row["level"]) == (model, layers, level)]
            batches = ", ".join(map(str, sorted({row["batch"] for row in same})))
            compiled = "yes" if any(row["mode"] == "compiled" for row in same) else "no"
            cells = [model, str(layers), f'`"{level}"`', compiled, batches, str(sum(row["differing"] for row in same))]
            rows.append([*cells, f"{run['date']}, {gpus(run)}, commit {run['commit']}"])
    head = ["model", "layers", "level", "also compiled", "batches", "logits that differ", "measured"]
    text = "Whole models with random weights ran a prompt and three steps, eagerly and from CUDA graphs."
    return f"{text}\n\n{lines_of(head, rows, 5)}"


def _cost(name: str, costs: list[float], run: dict[str, Any]) -> list[str]:
    figures = [geometric_mean(costs), statistics.median(costs), max(costs)]
    return [name, str(len(costs)), *(f"{each:.2f}" for each in figures if each), changed(run)]


def _header(run: dict[str, Any], folder: str, text: str) -> str:
    return in_short([run], f"{text} [All figures]({folder}{run['file']}.json).")
