"""The tables of vLLM with and without the plug-in (`layers/vllm`), from the files of `benchmarks.vllm`."""

from __future__ import annotations

import json

from benchmarks.measuring.report import RESULTS

_NAMES = {
    "llama-3-8b": "Llama-3-8B", "llama-3-70b": "Llama-3-70B", "qwen3-32b": "Qwen3-32B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
}  # fmt: skip


def steps(folder: str) -> str:
    """Return decode steps and first tokens of every model that was measured, stock vLLM beside the plug-in."""
    files = sorted(RESULTS.glob("vllm_plugin_*.json"), key=lambda path: path.name.rsplit("_x", 1)[::-1])
    return "\n\n".join(table(json.loads(path.read_text()), folder + path.name) for path in files)


def table(run: dict, link: str) -> str:
    """Return the table of one model. `link`: the place of its file."""
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    model = run.get("model", "llama-3-8b")
    layers = f", {run['layers']} layers" if "layers" in run else ""
    head = (
        f"**{_NAMES.get(model, model)}'s shape{layers} in vLLM, random weights, ms.** {run['gpus']} x "
        f"{run['gpu'].removeprefix('NVIDIA ')}, bfloat16, {versions}, {run['date']}, commit {run['commit']}. "
        f"Stock vLLM uses FlashInfer's fused all-reduce. Bold marks rows in which it is faster."
    )
    notes = [*run.get("notes", ()), *_tokens(run.get("greedy_tokens")), *_started(run.get("startup_s"))]
    source = f"`{run['command']}`, [all figures]({link})."
    lines = ["| | stock | plug-in | speedup |", "|---|---:|---:|---:|"]
    both = {
        key: [case for case in run[key]["stock"] if case in run[key]["plugin"]] for key in ("step_ms", "first_token_ms")
    }
    lines += [_row(f"decode step, batch {batch}", "step", run["step_ms"], batch) for batch in both["step_ms"]]
    lines += [_row(f"first token, {size}", "queue", run["first_token_ms"], size) for size in both["first_token_ms"]]
    return "\n\n".join([head, *([" ".join(notes)] if notes else []), source, "\n".join(lines)])


def _tokens(tokens: dict | None) -> list[str]:
    if tokens is None:
        return []
    equal, prompts = tokens["equal_sequences"], tokens["prompts"]
    text = f"Greedy tokens of {equal} of {prompts} prompts are equal"
    if equal < prompts and "within_rounding" in tokens:
        others = prompts - equal
        text += f"; at the first difference the two largest logits of {tokens['within_rounding']} of {others} others"
        text += " are within a rounding of bfloat16"
    return [text + "."]


def _started(seconds: dict | None) -> list[str]:
    return [f"Ready after {seconds['stock']:.0f} s, with the plug-in {seconds['plugin']:.0f} s."] if seconds else []


def _row(name: str, key: str, times: dict, case: str) -> str:
    stock, plugin = (times[side][case][key] for side in ("stock", "plugin"))
    factor = f"{stock / plugin:.2f}x" if stock >= plugin else f"**{stock / plugin:.2f}x**"
    return f"| {name} | {stock:.2f} | {plugin:.2f} | {factor} |"
