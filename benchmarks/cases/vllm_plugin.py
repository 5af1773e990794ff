"""One engine of `benchmarks.vllm`, with the plug-in on or off, in a process of its own.

A step is (time of 129 tokens - time of 1 token) / 128, so scheduling and sampling count. Prompts start from a full
queue. Figures are medians over the rounds, and the file is written anew after each.
"""

from __future__ import annotations

import json
from pathlib import Path
import statistics
import sys
import time
from typing import Any

from benchmarks.cases.vllm_engine import GRAPHED, STEPS, from_full_queue, wait_for_turn

GREEDY_PROMPTS, GREEDY_TOKENS = 64, 32
PROMPT = 128  # tokens before a step that is timed
WARM = 2
_CAPTURED = (1, 2, 4, 8, 16, 32, 64, 128)


class Engine:
    """An engine with random weights, which are those of every engine of the same model and ranks."""

    def __init__(self, request: dict) -> None:
        import vllm

        prompts, batches = [tuple(each) for each in request["prompts"]], request["batches"]
        tokens = [batch * length for batch, length in prompts]
        captured = {*_CAPTURED, *batches, *(count for count in tokens if count <= GRAPHED)}
        self.vllm = vllm
        self.llm = vllm.LLM(
            model=request["folder"],
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=request["ranks"],
            dtype="bfloat16",
            seed=0,
            max_model_len=max([PROMPT, *(length for _, length in prompts)]) + STEPS + 8,
            max_num_seqs=max([GREEDY_PROMPTS, *batches, *(batch for batch, _ in prompts)]),
            max_num_batched_tokens=max(8192, *tokens),
            enable_prefix_caching=False,
            gpu_memory_utilization=request.get("memory", 0.9),
            kv_cache_memory_bytes=request.get("cache"),
            logprobs_mode="raw_logits",
            kernel_config={"enable_flashinfer_autotune": False},
            compilation_config={"cudagraph_capture_sizes": sorted(captured)},
        )

    def options(self, length: int, **more: Any) -> Any:
        return self.vllm.SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, **more)

    def seconds(self, prompts: list[dict], length: int) -> float:
        """Return the time in which all `prompts` get `length` tokens, from a full queue."""
        outputs, taken = from_full_queue(self.llm, prompts, self.options(length))
        counts = [len(each.outputs[0].token_ids) for each in outputs]
        if counts != [length] * len(prompts):
            raise RuntimeError(f"vLLM made {counts} tokens, expected {length} for each of {len(prompts)} prompts")
        return taken

    def step(self, batch: int, rounds: int) -> dict:
        """Return the milliseconds of a decode step: the median, and each round's."""
        prompts = drawn([PROMPT] * batch, seed=7)
        self.seconds(prompts, 1 + STEPS)
        pairs = [(self.seconds(prompts, 1), self.seconds(prompts, 1 + STEPS)) for _ in range(rounds)]
        first, whole = (statistics.median(side) for side in zip(*pairs, strict=True))
        return {"step": 1e3 * (whole - first) / STEPS, "each": [1e3 * (b - a) / STEPS for a, b in pairs]}

    def first_token(self, batch: int, length: int, rounds: int) -> dict:
        """Return the milliseconds until all of `batch` prompts have their first token: the median, and each round's."""
        prompts = drawn([length] * batch, seed=8)
        for _ in range(WARM):
            self.seconds(prompts, 1)
        each = [1e3 * self.seconds(prompts, 1) for _ in range(max(rounds, 5))]
        return {"queue": statistics.median(each), "each": each}

    def greedy(self) -> list[dict]:
        """Return tokens of fixed prompts, and for each token the two largest logits."""
        prompts = drawn([16 + i for i in range(GREEDY_PROMPTS)], seed=11)
        outputs = self.llm.generate(prompts, self.options(GREEDY_TOKENS, logprobs=2), use_tqdm=False)
        results = [each.outputs[0] for each in outputs]
        return [{"tokens": list(each.token_ids), "logits": [_best(of) for of in each.logprobs]} for each in results]


def drawn(lengths: list[int], seed: int) -> list[dict]:
    """Return a random prompt of each length."""
    import torch

    random = torch.Generator().manual_seed(seed)
    return [{"prompt_token_ids": torch.randint(0, 30000, (length,), generator=random).tolist()} for length in lengths]


def _best(choice: dict) -> list[float]:
    return sorted((each.logprob for each in choice.values()), reverse=True)[:2]


def measure(request: dict) -> None:
    from vllm import platforms

    began = request["began"]
    engine = Engine(request)
    used = engine.llm.llm_engine.vllm_config.compilation_config
    report: dict[str, Any] = {
        "version": engine.vllm.__version__,
        "gpu": platforms.current_platform.get_device_name(),
        "startup_s": round(time.time() - began, 1),
        "config": {"passes": str(used.pass_config), "ranges": str(used.compile_ranges_endpoints)},
        "step_ms": {},
        "first_token_ms": {},
    }

    def keep() -> None:
        Path(request["out"]).write_text(json.dumps(report))

    keep()
    print(f"ready after {report['startup_s']} s", flush=True)
    wait_for_turn(request)
    for batch in request["batches"]:
        if time.time() - began < request["limit_s"]:
            report["step_ms"][str(batch)] = engine.step(batch, request["rounds"])
            keep()
    for batch, length in request["prompts"]:
        if time.time() - began < request["limit_s"]:
            report["first_token_ms"][f"{batch}x{length}"] = engine.first_token(batch, length, request["rounds"])
            keep()
    if time.time() - began < request["limit_s"]:
        report["greedy"] = engine.greedy()
        keep()


if __name__ == "__main__":
    measure(json.loads(sys.argv[1]))
