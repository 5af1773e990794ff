"""vLLM itself on the rows of `benchmarks.llm`: `--contenders ours,nccl,vllm`. It runs apart, before the ranks start.

vLLM starts its own ranks. Its weights are random and its own, so its tokens can be compared with nobody's; that each
prompt yields as many tokens as requested is checked. It runs as it does by default, torch.compile and full CUDA graphs
(of the rows' batches only, which makes its start shorter), with the fastest all-reduce that it has without multicast:
FlashInfer's, fused with the residual and the norm, where FlashInfer is installed, else its own custom all-reduce.

    first token   from a full queue: the scheduler pauses while the prompts are added, and the clock starts when it
                  goes on
    step          (time of 129 tokens - time of 1 token) / 128, so scheduling and sampling count

Each is the median over the rounds, after others of its kind until the chip is warm.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
import copy
from dataclasses import dataclass
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
MEMORY_SHARE = 0.93  # of a GPU: weights of 66 GiB have room on 80
WARM_S, MOST_WARM = 0.5, 6
GRAPHED = 512  # tokens up to which vLLM captures a prompt's graph, too
SETTINGS = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it would take multicast
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",  # for fp8 products, which these models do not have
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "HF_HUB_OFFLINE": "1",
}

Rows = list[tuple[int, int]]


@dataclass(frozen=True)
class Variant:
    """A way to run vLLM. `invariant`: with VLLM_BATCH_INVARIANT=1, with which its ranks add by NCCL's tree on one
    channel. `weights`: the `quantization_config` of the model."""

    title: str = ""
    invariant: bool = False
    weights: dict | None = None


def _compressed(weights: dict, inputs: dict | None, kind: str) -> dict:
    """Return compressed-tensors' configuration of all linears but the head."""
    scheme = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    scheme |= {"input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": scheme},
    }


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
VARIANTS = {
    "vllm": Variant(),
    "vllm-batch": Variant("VLLM_BATCH_INVARIANT=1", invariant=True),
    "vllm-int4": Variant("int4", weights=_compressed(
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}, None, "pack-quantized")),
    "vllm-fp8": Variant("fp8", weights=_compressed(
        {**_FP8, "strategy": "channel"}, {**_FP8, "strategy": "token", "dynamic": True}, "float-quantized")),
    "vllm-mxfp4": Variant("mxfp4", weights={
        "quant_method": "mxfp4", "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}),
}  # fmt: skip
"""By a contender's key. mxfp4 is gpt-oss's, whose experts alone are quantized."""


def measure_apart(args: argparse.Namespace, rows: Rows, config: Any, keys: Sequence[str] = ("vllm",)) -> list[dict]:
    """Return what vLLM takes for `rows` of (batch, prompt length), or why it does not run: {"failed": reason}.

    `keys`: of `VARIANTS`, each measured. Several start at once, for a start takes a minute, and are timed one after the
    other.
    """
    without = os.environ.get("IRIS_WITHOUT", "").split(",")
    if importlib.util.find_spec("vllm") is None or "vllm" in without:
        return [{"failed": "not installed" if "vllm" not in without else "IRIS_WITHOUT names it"}] * len(keys)
    if args.device != "cuda":
        return [{"failed": "needs GPUs"}] * len(keys)
    with tempfile.TemporaryDirectory() as name:
        every = []
        fusing = importlib.util.find_spec("flashinfer") is not None and "flashinfer" not in without
        for key in keys:
            variant, folder = VARIANTS[key], Path(name) / key
            own = copy.deepcopy(config)
            if variant.weights:
                own.quantization_config = variant.weights
            own.save_pretrained(folder)
            request = {"folder": str(folder), "ranks": args.ranks, "rows": rows, "rounds": args.rounds, "key": key}
            request |= {"dtype": args.dtype, "limit_s": args.vllm_limit, "share": 1 / len(keys), "cache": None}
            if len(keys) > 1:  # else vLLM sees how much memory is free, but not while another takes some
                request["cache"] = cache_bytes(rows, config, args.ranks)
            every.append({**request, "fused": fusing and not variant.invariant, "invariant": variant.invariant})
        results = _children(every, Path(name), args.vllm_limit)
        for i, given in enumerate(every):  # FlashInfer's kernels may be missing for this model
            if given["fused"] and "rows" not in results[i] and "late" not in results[i]:
                (results[i],) = _children([{**given, "fused": False}], Path(name), args.vllm_limit)
    return results


def cache_bytes(rows: Rows, config: Any, ranks: int) -> int:
    """Return the bytes of a rank's keys and values, with a fifth to spare."""
    heads = -(-config.num_key_value_heads // ranks)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokens = max(batch * (prompt + STEPS + 64) for batch, prompt in rows)
    return int(1.2 * tokens * config.num_hidden_layers * 2 * heads * width * 2) + (256 << 20)


def _children(every: list[dict], folder: Path, limit_s: float) -> list[dict]:
    """Start an engine for each request, and let them measure in turn once all are ready."""
    began = time.monotonic()
    with ExitStack() as ending:
        children = []
        for request in every:
            own = Path(tempfile.mkdtemp(dir=folder))
            request |= {"out": str(own / "out.json"), "ready": str(own / "ready"), "go": str(own / "go")}
            environment = {**os.environ, **SETTINGS, "VLLM_CACHE_ROOT": str(own / "cache")}
            environment["VLLM_BATCH_INVARIANT"] = str(int(request["invariant"]))
            line = [sys.executable, "-m", "benchmarks.cases.vllm_engine", json.dumps(request)]
            log_file = ending.enter_context((own / "log").open("w"))
            child = subprocess.Popen(line, env=environment, stdout=log_file, stderr=log_file, start_new_session=True)
            ending.callback(_end, child)
            children.append((child, request, own))

        def late() -> bool:
            return time.monotonic() - began > limit_s

        while not late() and any(
            child.poll() is None and not Path(request["ready"]).exists() for child, request, _ in children
        ):
            time.sleep(0.1)
        print(f"vLLM: ready after {time.monotonic() - began:.0f} s", flush=True)
        results = []
        for child, request, own in children:
            Path(request["go"]).touch()
            while child.poll() is None and not late():
                time.sleep(0.1)
            print(f"vLLM: {child.poll()} after {time.monotonic() - began:.0f} s", flush=True)
            results.append(_result(child.poll(), Path(request["out"]), own / "log", limit_s))
    return results


def _end(child: subprocess.Popen) -> None:
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)  # its ranks, too, which would keep the GPUs' memory
    child.wait()


def _result(code: int | None, out: Path, log: Path, limit_s: float) -> dict:
    if out.exists():  # each row is written when it is done
        return json.loads(out.read_text())
    print(log.read_text()[-8000:], file=sys.stderr, flush=True)
    if code is None:
        return {"failed": f"not ready after {limit_s:.0f} s", "late": True}
    reasons = [text for text in log.read_text().splitlines() if "Error" in text] or ["no reason given"]
    return {"failed": reasons[-1][-160:]}


def measure(request: dict) -> dict:
    import vllm

    rows = [tuple(row) for row in request["rows"]]
    longest = max(prompt for _, prompt in rows) + STEPS + 8
    captured = sorted({batch for batch, _ in rows} | {batch * prompt for batch, prompt in rows})
    llm = vllm.LLM(
        model=request["folder"],
        load_format="dummy",
        skip_tokenizer_init=True,
        tensor_parallel_size=request["ranks"],
        dtype=request["dtype"],
        max_model_len=longest,
        max_num_seqs=max(batch for batch, _ in rows),
        max_num_batched_tokens=max(8192, *(batch * prompt for batch, prompt in rows)),
        enable_prefix_caching=False,
        gpu_memory_utilization=MEMORY_SHARE * request["share"],
        kv_cache_memory_bytes=request["cache"],
        kernel_config={"enable_flashinfer_autotune": False},
        compilation_config={
            "cudagraph_capture_sizes": [size for size in captured if size <= GRAPHED],
            "pass_config": {"fuse_allreduce_rms": request["fused"]},
        },
    )
    report: dict[str, Any] = {
        "version": vllm.__version__,
        "key": request["key"],
        "fused": request["fused"],
        "rows": [],
    }
    wait_for_turn(request)
    for batch, prompt in rows:
        report["rows"].append({"batch": batch, "prompt": prompt, **_row(llm, vllm, batch, prompt, request["rounds"])})
        Path(request["out"]).write_text(json.dumps(report))
    return report


def wait_for_turn(request: dict) -> None:
    """Announce that the engine is ready, and wait until no other is timed."""
    Path(request["ready"]).touch()
    end = time.monotonic() + request["limit_s"]
    while not Path(request["go"]).exists():
        if time.monotonic() > end:
            raise TimeoutError(f"not asked to measure within {request['limit_s']:.0f} s")
        time.sleep(0.05)


def _row(llm: Any, vllm: Any, batch: int, prompt: int, rounds: int) -> dict[str, float]:
    random = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 30000, (batch, prompt), generator=random).tolist()
    prompts = [{"prompt_token_ids": row} for row in tokens]

    def seconds(length: int) -> float:
        options = vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        outputs, taken = from_full_queue(llm, prompts, options)
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        if counts != [length] * batch:
            raise RuntimeError(f"{batch} x {prompt}: vLLM made {counts} tokens, asked for {length} each")
        return taken

    first, whole = _warm_median(lambda: seconds(1), rounds), _warm_median(lambda: seconds(1 + STEPS), rounds)
    step = (whole - first) / STEPS
    return {"first_graph_ms": 1e3 * first, "step_graph_ms": 1e3 * step, "tokens_per_s": batch / step}


def from_full_queue(llm: Any, prompts: list, options: Any) -> tuple[list, float]:
    """Return the results of all prompts, and the time since the scheduler could see them all."""
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


def result_of(engine_result: dict, batch: int, prompt: int) -> dict:
    """Return vLLM's entry of a row, as `benchmarks.llm` writes those of the others."""
    (row,) = [row for row in engine_result["rows"] if (row["batch"], row["prompt"]) == (batch, prompt)] or [None]
    key = engine_result["key"]
    name = ", ".join(filter(None, (f"vLLM {engine_result['version']}", VARIANTS[key].title)))
    entry: dict[str, Any] = {"key": key, "name": name, "status": "ok", "notes": []}
    if row is None:
        return {**entry, "status": "n/a", "notes": ["stopped before this row"]}
    kind = "FlashInfer's all-reduce with residual and norm" if engine_result["fused"] else "its custom all-reduce"
    kind = "NCCL's tree on one channel" if VARIANTS[key].invariant else kind
    figures = {key: value for key, value in row.items() if key not in ("batch", "prompt")}
    return {**entry, **figures, "notes": [f"with {kind}; weights of its own, so its tokens are compared with nobody's"]}


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
