"""vLLM itself on the rows of `benchmarks.llm`: `--contenders ours,nccl,vllm`. It runs apart, before the ranks start.

vLLM starts its own ranks. Its weights are random and its own, so its tokens can be compared with nobody's; that each
prompt got as many tokens as it asked for is checked. It runs as it does by default, torch.compile and full CUDA graphs
(of the rows' batches only, which makes its start shorter), with the fastest all-reduce that it has without multicast:
FlashInfer's, fused with the residual and the norm, where FlashInfer is installed, else its own custom all-reduce.

    first token   from a full queue: the scheduler pauses while the prompts are added, and the clock starts when it
                  goes on
    step          (time of 129 tokens - time of 1 token) / 128, so scheduling and sampling count

Each is the median over the rounds, behind others of its kind until the chip is warm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import importlib.util
import json
import os
from pathlib import Path
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

STEPS = 128
WARM_S, MOST_WARM = 0.5, 6
GRAPHED = 512  # tokens up to which vLLM captures a prompt's graph, too
SETTINGS = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it would take multicast
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",  # for products in eight bits, which these models have none of
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "HF_HUB_OFFLINE": "1",
}

Rows = list[tuple[int, int]]


def measure_apart(args: argparse.Namespace, rows: Rows, config: Any, invariant: bool = False) -> dict:
    """What vLLM takes for `rows` of (batch, prompt length), or why it does not run: {"failed": reason}.

    `invariant`: with VLLM_BATCH_INVARIANT=1, with which its ranks add by NCCL's tree on one channel.
    """
    without = os.environ.get("IRIS_WITHOUT", "").split(",")
    if importlib.util.find_spec("vllm") is None or "vllm" in without:
        return {"failed": "not installed" if "vllm" not in without else "IRIS_WITHOUT names it"}
    if args.device != "cuda":
        return {"failed": "needs GPUs"}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        asked = {"folder": folder, "ranks": args.ranks, "rows": rows, "rounds": args.rounds, "dtype": args.dtype}
        # the second attempt is without FlashInfer, whose kernels may be missing for this model
        fusing = importlib.util.find_spec("flashinfer") is not None and "flashinfer" not in without and not invariant
        for fused in [True, False] if fusing else [False]:
            given = {**asked, "fused": fused, "invariant": invariant, "out": f"{folder}/{fused}.json"}
            found = _child(given, folder, args.vllm_limit)
            if "rows" in found or "late" in found:
                break
    return found


def _child(asked: dict, folder: str, limit_s: float) -> dict:
    environment = {**os.environ, **SETTINGS, "VLLM_CACHE_ROOT": f"{folder}/cache"}
    environment["VLLM_BATCH_INVARIANT"] = str(int(asked["invariant"]))
    line = [sys.executable, "-m", "benchmarks.cases.vllm_engine", json.dumps(asked)]
    started = time.monotonic()
    out, log = Path(asked["out"]), Path(folder) / "log"
    with (
        log.open("w") as told,
        subprocess.Popen(line, env=environment, stdout=told, stderr=told, start_new_session=True) as child,
    ):
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # its ranks, too, which would keep the GPUs' memory
            code = None
    print(f"vLLM: {code} after {time.monotonic() - started:.0f} s", flush=True)
    if out.exists():  # each row is written when it is done
        return json.loads(out.read_text())
    print(log.read_text()[-8000:], file=sys.stderr, flush=True)
    if code is None:
        return {"failed": f"not ready after {limit_s:.0f} s", "late": True}
    reasons = [text for text in log.read_text().splitlines() if "Error" in text] or ["no reason told"]
    return {"failed": reasons[-1][-160:]}


def measure(asked: dict) -> dict:
    import vllm

    rows = [tuple(row) for row in asked["rows"]]
    longest = max(prompt for _, prompt in rows) + STEPS + 8
    captured = sorted({batch for batch, _ in rows} | {batch * prompt for batch, prompt in rows})
    llm = vllm.LLM(
        model=asked["folder"],
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=asked["ranks"],
        dtype=asked["dtype"],
        max_model_len=longest,
        max_num_seqs=max(batch for batch, _ in rows),
        max_num_batched_tokens=max(8192, *(batch * prompt for batch, prompt in rows)),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.7,
        kernel_config={"enable_flashinfer_autotune": False},
        compilation_config={
            "cudagraph_capture_sizes": [size for size in captured if size <= GRAPHED],
            "pass_config": {"fuse_allreduce_rms": asked["fused"]},
        },
    )
    found: dict[str, Any] = {"version": vllm.__version__, "fused": asked["fused"], "invariant": asked["invariant"]}
    found["rows"] = []
    for batch, prompt in rows:
        found["rows"].append({"batch": batch, "prompt": prompt, **_row(llm, vllm, batch, prompt, asked["rounds"])})
        Path(asked["out"]).write_text(json.dumps(found))
    return found


def _row(llm: Any, vllm: Any, batch: int, prompt: int, rounds: int) -> dict[str, float]:
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 30000, (batch, prompt), generator=random).tolist()
    prompts = [{"prompt_token_ids": row} for row in tokens]

    def seconds(length: int) -> float:
        options = vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        outputs, taken = _from_full_queue(llm, prompts, options)
        made = [len(output.outputs[0].token_ids) for output in outputs]
        if made != [length] * batch:
            raise RuntimeError(f"{batch} x {prompt}: vLLM made {made} tokens, asked for {length} each")
        return taken

    first, whole = _warm_median(lambda: seconds(1), rounds), _warm_median(lambda: seconds(1 + STEPS), rounds)
    step = (whole - first) / STEPS
    return {"first_graph_ms": 1e3 * first, "step_graph_ms": 1e3 * step, "tokens_per_s": batch / step}


def _from_full_queue(llm: Any, prompts: list, options: Any) -> tuple[list, float]:
    """What came of all prompts, and the time since the scheduler could see them all."""
    core = llm.llm_engine.engine_core
    core.call_utility("pause_scheduler", "keep", False)
    llm.enqueue(prompts, options, use_tqdm=False)
    start = time.perf_counter()
    core.call_utility("resume_scheduler")
    outputs = llm.wait_for_completion(use_tqdm=False)
    return outputs, time.perf_counter() - start


def _warm_median(once: Callable[[], float], rounds: int) -> float:
    taken = once()
    for _ in range(min(MOST_WARM, 1 + int(WARM_S / taken))):
        once()
    return statistics.median(once() for _ in range(rounds))


def result_of(found: dict, batch: int, prompt: int) -> dict:
    """vLLM's entry of a row, as `benchmarks.llm` writes those of the others."""
    (row,) = [row for row in found["rows"] if (row["batch"], row["prompt"]) == (batch, prompt)] or [None]
    kept = found.get("invariant", False)
    name = f"vLLM {found['version']}" + (", VLLM_BATCH_INVARIANT=1" if kept else "")
    entry: dict[str, Any] = {"key": "vllm-batch" if kept else "vllm", "name": name, "status": "ok", "notes": []}
    if row is None:
        return {**entry, "status": "n/a", "notes": ["stopped before this row"]}
    kind = "FlashInfer's all-reduce with residual and norm" if found["fused"] else "its custom all-reduce"
    kind = "NCCL's tree on one channel" if kept else kind
    figures = {key: value for key, value in row.items() if key not in ("batch", "prompt")}
    return {**entry, **figures, "notes": [f"with {kind}; weights of its own, so its tokens are compared with nobody's"]}


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
