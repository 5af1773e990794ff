"""The table of vLLM with and without the plug-in (`layers/vllm`), from its result file."""

from __future__ import annotations

import json

from benchmarks.measuring.report import RESULTS

_FILE = RESULTS / "vllm_plugin_llama-3-8b_h200_x2.json"


def steps(folder: str) -> str:
    """Return decode steps and first tokens, stock vLLM beside the plug-in."""
    run = json.loads(_FILE.read_text())
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    tokens = run["greedy_tokens"]
    head = (
        f"**Llama-3-8B's shape in vLLM, random weights, ms.** {run['gpus']} x {run['gpu'].removeprefix('NVIDIA ')}, "
        f"bfloat16, {versions}, {run['date']}, commit {run['commit']}. Stock vLLM uses FlashInfer's fused all-reduce.\n"
        f"CUDA graphs ended at 64 rows, so both first tokens ran without one; the plug-in leaves such calls to vLLM "
        f"since then. Greedy tokens of {tokens['equal_sequences']} of {tokens['prompts']} prompts are equal. "
        f"[All figures]({folder}{_FILE.name})."
    )
    lines = ["| | stock | plug-in | faster by |", "|---|---:|---:|---:|"]
    lines += [_row(f"decode step, batch {batch}", "step", run["step_ms"], batch) for batch in run["step_ms"]["stock"]]
    first = run["first_token_ms"]
    lines += [_row(f"first token, {size}", "queue", first, size) for size in first["stock"]]
    return f"{head}\n\n" + "\n".join(lines)


def _row(name: str, key: str, times: dict, case: str) -> str:
    stock, plugin = (times[side][case][key] for side in ("stock", "plugin"))
    factor = f"{stock / plugin:.2f}x" if stock >= plugin else f"**{stock / plugin:.2f}x**"
    return f"| {name} | {stock:.2f} | {plugin:.2f} | {factor} |"
