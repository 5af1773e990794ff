"""The tables of whole models and mixtures in docs, as Markdown, from result files (see `page_tables.py`)."""

from __future__ import annotations

from typing import Any

from benchmarks.measuring.tables import figure
from benchmarks.tables.cells import Run, lines_of, nothing
from benchmarks.tables.marks import (
    CHANGED,
    FACTOR,
    by_age,
    changed,
    current,
    gpu_of,
    header,
    newest,
)

MODELS = {"llama-3-8b": "Llama-3-8B", "qwen3-32b": "Qwen3-32B", "llama-3-70b": "Llama-3-70B"}
MIXTURES = ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v3")


def models(ranks: int, folder: str) -> str:
    """Return steps and first tokens of compiled models, of ours, cuBLAS + NCCL and, where it was measured, vLLM."""
    shown = [each for model in MODELS for each in latest_rows(model, ranks)]
    with_vllm = any(vllm_of(*each, kind) for each in shown for kind in ("step", "first"))
    several = len({gpu_of(run) for run, _ in shown}) > 1
    rows, used, before = [], [run for run, _ in shown], ""
    for run, row in shown:
        name = MODELS[run["model"]] + f", {gpu_of(run)}" * several
        cells = [name if name != before else "", f"{row['batch']} x {row['prompt']}"]
        for kind in ("step", "first"):
            cells += [figure(ms_of(results_by_key(row)["ours"], kind)), versus_ms(results_by_key(row), "nccl", kind)]
            vllm = vllm_of(run, row, kind)
            cells += [vllm_ms(run, vllm, kind)] * with_vllm
            used += vllm[:1]
        rows.append([*cells, changed(run)])
        before = name
    rivals = ["cuBLAS + NCCL", *["vLLM"] * with_vllm]
    head = ["model", "batch x prompt", "step", *rivals, "first token", *rivals, CHANGED]
    text = (
        "ms, in CUDA graphs, with NVLink multicast off for every contender and compiled decoder layers."
        f" A step is one decode step of the batch. {FACTOR}"
    )
    if with_vllm:
        text += (
            " vLLM's factor compares it with ours in the same run. Where several runs have vLLM, the table shows its"
            " best one. A cell that begins with a GPU's name comes from a run on that GPU."
        )
    return f"{header(used, folder, text)}\n\n{lines_of(head, rows, 2)}" if rows else nothing()


def latest_rows(model: str, ranks: int) -> list[tuple[Run, dict[str, Any]]]:
    """Return each batch and prompt of a compiled model, from the latest current run that has it, with that run.

    A batch for which a run had too little memory comes from an earlier run. Without a current run, take the newest.
    """
    runs = by_age(f"llm_{model}_compiled_{{gpu}}_x{ranks}")
    by_size: dict[tuple[int, int], tuple[Run, dict[str, Any]]] = {}
    for run in [each for each in runs if current(each)] or runs[:1]:
        for row in run["rows"]:
            if "ours" in results_by_key(row):
                by_size.setdefault((row["batch"], row["prompt"]), (run, row))
    return list(by_size.values())


def mixtures(ranks: int, folder: str) -> str:
    """Return steps and first tokens of mixtures of experts, or of some of their layers, of ours and cuBLAS + NCCL."""
    kinds = ("", "_compiled")  # eager layers, and compiled ones
    runs = [run for model in MIXTURES for kind in kinds for run in newest(f"llm_{model}*layers{kind}_{{gpu}}_x{ranks}")]
    rows = []
    for run in runs:
        of = f"{run['model']}, {run['layers']} layers{', compiled' * run['compiled']}"
        for number, row in enumerate(run["rows"]):
            results = results_by_key(row)
            if "ours" in results:
                cells = [of if not number else "", f"{row['batch']} x {row['prompt']}"]
                for kind in ("step", "first"):
                    cells += [figure(ms_of(results["ours"], kind)), versus_ms(results, "nccl", kind)]
                rows.append([*cells, changed(run)])
    head = ["model", "batch x prompt", "step", "cuBLAS + NCCL", "first token", "cuBLAS + NCCL", CHANGED]
    text = (
        "ms, in CUDA graphs, with random weights and uneven routers. The rival multiplies its experts by torch's"
        f" grouped product. Layers are compiled where the row says so. {FACTOR}"
    )
    return f"{header(runs, folder, text)}\n\n{lines_of(head, rows, 2)}" if rows else nothing()


def vllm_of(run: Run, row: dict, kind: str) -> tuple[Run, dict[str, dict]] | tuple[()]:
    """Return the run in which vLLM is fastest relative to ours at the batch and prompt of `row`, and its results.

    Runs on the same GPUs come first; others count only where there is none.
    """
    candidates = []
    for other in by_age(f"llm_{run['model']}_*{{gpu}}_x{run['world']}"):
        for measured in other["rows"] if current(other) and other["layers"] == run["layers"] else ():
            results = results_by_key(measured)
            same_size = all(measured[size] == row[size] for size in ("batch", "prompt"))
            if same_size and ms_of(results.get("vllm", {}), kind) and ms_of(results.get("ours", {}), kind):
                candidates.append((other, results))
    candidates = [candidate for candidate in candidates if candidate[0]["gpu"] == run["gpu"]] or candidates
    return min(
        candidates,
        key=lambda candidate: ms_of(candidate[1]["vllm"], kind) / ms_of(candidate[1]["ours"], kind),
        default=(),
    )


def vllm_ms(run: Run, vllm: tuple[Run, dict[str, dict]] | tuple[()], kind: str) -> str:
    """Return vLLM's time, after the name of its GPU where that differs from the GPU of `run`."""
    if not vllm:
        return ""
    other, results = vllm
    return f"{gpu_of(other)}: " * (other["gpu"] != run["gpu"]) + versus_ms(results, "vllm", kind)


def results_by_key(row: dict) -> dict[str, dict]:
    return {each["key"]: each for each in row["results"] if each["status"] == "ok"}


def ms_of(result: dict, kind: str) -> float | None:
    return result.get(f"{kind}_graph_ms") or result.get(f"{kind}_eager_ms")


def versus_ms(results: dict[str, dict], key: str, kind: str) -> str:
    """Return a rival's time and its ratio to ours in the same run, in bold where the rival is faster."""
    rival, ours = ms_of(results.get(key, {}), kind), ms_of(results.get("ours", {}), kind)
    if not rival or not ours:
        return ""
    text = f"{figure(rival)} ({rival / ours:.2f}x)"
    return f"**{text}**" if rival < ours else text
