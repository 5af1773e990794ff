"""Rivals that are installed: found or told to be absent, held to the same results, captured in their own way."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
import os
from pathlib import Path

from iris_tp.bench import timing
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team
import pytest
import torch

from benchmarks import again, ccl, norms, ops
from benchmarks.cases import ccl_case, ccl_installed, ccl_rivals, vllm_engine
from benchmarks.rivals import of_flashinfer, of_kraken, of_nccl, of_vllm
from benchmarks.rivals.contender import RIVAL, Contender, installed
from tests.test_benchmarks import alone  # noqa: F401  (a fixture)

ROWS = [Row("ar", 16, 64, 32), Row("ag", 16, 64, 32)]
GPUS = Team(1, 2, torch.device("cuda"))  # nothing of it is touched until a contender gets ready


@pytest.mark.parametrize("others", [of_vllm, of_flashinfer, of_kraken])
def test_what_is_not_installed_is_no_contender_and_told(others, capsys: pytest.CaptureFixture) -> None:
    first = replace(GPUS, rank=0)
    assert others.contenders(first, ROWS, torch.bfloat16) == []
    assert "without " in capsys.readouterr().out


def test_what_the_environment_names_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    first = replace(GPUS, rank=0)
    assert installed(first, "torch", "Torch")
    monkeypatch.setenv("IRIS_WITHOUT", "vllm,torch")
    assert not installed(first, "torch", "Torch")
    assert "without Torch: IRIS_WITHOUT names it" in capsys.readouterr().out


def test_rows_are_those_that_a_rival_would_take_itself() -> None:
    bf16, mib = torch.bfloat16, 1 << 20
    assert of_vllm.serves(8 * mib - 16, 2, bf16) and not of_vllm.serves(8 * mib, 2, bf16)
    assert not of_vllm.serves(1024, 3, bf16) and not of_vllm.serves(1000, 2, bf16)
    assert of_flashinfer.serves(True, 1, 8192, 2, bf16) and not of_flashinfer.serves(False, 2, 8192, 2, bf16)
    assert not of_flashinfer.serves(True, 2048, 8192, 2, bf16)  # 32 MiB
    assert of_flashinfer.serves(False, 4096, 8192, 2, bf16)
    assert not of_flashinfer.serves(True, 1, 8192, 2, torch.float32)
    (symmetric,) = of_nccl.contenders(GPUS, ROWS, bf16)
    assert symmetric.takes(Row("rs", 16, 64, 32), 2, bf16) and not symmetric.takes(Row("rs", 15, 64, 32), 2, bf16)


@pytest.mark.parametrize("elements, world", [(1024, 2), (1 << 20, 4), (12 << 10, 2), (128 << 20, 2)])
def test_a_message_is_a_matrix_with_more_rows_than_ranks(elements: int, world: int) -> None:
    rows, columns = ccl_installed.as_matrix(elements, world)
    assert rows * columns == elements and rows > world and columns % 8 == 0 and columns <= of_flashinfer.HIDDEN


def test_a_graph_is_made_in_the_contender_s_own_context(alone, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    inside: list[bool] = []

    @contextmanager
    def capturing() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def captured(call, calls, inputs):
        assert inside, "the ranks exchange what was captured when the context ends"
        return timing.eager_batch(call, calls, inputs), call(inputs - 1)

    def right(inputs):
        out = inputs.new(*inputs.out_shape)
        return lambda i: torch.matmul(inputs.A[i], inputs.B[i], out=out)

    monkeypatch.setattr(timing, "graph_batch", captured)
    args = argparse.Namespace(modes=["graph"], quick=True)
    found = [Contender("a", RIVAL, {"ar": right}, capture=capturing)]
    measured = ops.run_row(Row("ar", 8, 32, 64), alone, found, torch.bfloat16, args)
    row: dict = {"results": []}
    contender = replace(ccl_rivals.torch_distributed(alone), capture=capturing)
    ccl.measure(ccl_case.Case("all_gather", 2048, alone, torch.float32), [contender], row, args)
    for result in measured["results"] + row["results"]:
        assert result["graph_us"] > 0, result
    assert not inside


def without_residual(inputs):
    return norms._ended(
        inputs, inputs.new(*inputs.out_shape), lambda: torch.zeros(inputs.out_shape, dtype=inputs.dtype)
    )


def without_weight(inputs):
    pair = inputs.pair()

    def call(i: int) -> torch.Tensor:
        norms._add_norm(inputs.A[i] @ inputs.B[i], inputs.residual, torch.ones_like(inputs.weight), pair)
        return pair

    return call


def leaves_the_residual(inputs):
    pair = inputs.pair()

    def call(i: int) -> torch.Tensor:
        made = torch.empty_like(pair)
        norms._add_norm(inputs.A[i] @ inputs.B[i], inputs.residual, inputs.weight, made)
        pair[1] = made[1]
        return pair

    return call


def test_norms_that_are_wrong_are_named_and_not_timed(alone) -> None:  # noqa: F811
    prepared = {"right": norms._with_torch, "a": without_residual, "b": without_weight, "c": leaves_the_residual}
    found = [Contender(name, RIVAL, {"ar": prepare}) for name, prepare in prepared.items()]
    args = argparse.Namespace(modes=["eager"], quick=True)
    measured = ops.run_row(Row("ar", 5, 128, 64), alone, found, torch.bfloat16, args, norms.NormInputs)
    status = {result["name"]: result["status"] for result in measured["results"]}
    assert status == {"right": "ok", "a": "WRONG", "b": "WRONG", "c": "WRONG"}, measured["results"]


def test_vllm_that_is_not_there_is_a_note(tmp_path: Path) -> None:
    args = argparse.Namespace(device="cuda", ranks=2, rounds=1, dtype="bfloat16", vllm_limit=1)
    assert vllm_engine.measure_apart(args, [(1, 128)], None) == [{"failed": "not installed"}]


FAKE_VLLM = """
import os, time
from pathlib import Path
from types import SimpleNamespace as Some
__version__ = "0"
KEPT = os.environ["VLLM_BATCH_INVARIANT"] == "1"
class SamplingParams:
    def __init__(self, max_tokens, **rest): self.length = max_tokens
class LLM:
    def __init__(self, model, **given):
        if KEPT and (Path(model) / "broken").exists(): raise RuntimeError("no kernel")
        self.llm_engine = Some(engine_core=Some(call_utility=lambda *given: None))
        time.sleep(0.5)
    def enqueue(self, prompts, options, use_tqdm): self.asked = len(prompts), options.length
    def wait_for_completion(self, use_tqdm):
        rows, length = self.asked
        with open(os.environ["FAKE_LOG"], "a") as log: print(time.time(), KEPT, file=log)
        time.sleep(1e-5 * length)
        return [Some(outputs=[Some(token_ids=[0] * length)])] * rows
"""


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_two_of_vllm_start_together_and_are_timed_in_turn(tmp_path: Path, monkeypatch, broken: bool) -> None:
    (tmp_path / "vllm.py").write_text(FAKE_VLLM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "log"))
    args = argparse.Namespace(device="cuda", ranks=2, rounds=1, dtype="bfloat16", vllm_limit=60)
    sizes = dict(num_key_value_heads=4, hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
    saved = (lambda folder: (Path(folder) / "broken").touch()) if broken else (lambda folder: None)
    config = argparse.Namespace(**sizes, save_pretrained=saved)
    free, kept = vllm_engine.measure_apart(args, [(1, 8), (3, 8)], config, [False, True])
    assert [row["batch"] for row in free["rows"]] == [1, 3] and not free["invariant"]
    if broken:
        assert "no kernel" in kept["failed"]
        return
    assert [row["batch"] for row in kept["rows"]] == [1, 3] and kept["invariant"]
    turns = [line.split()[1] for line in sorted((tmp_path / "log").read_text().splitlines())]
    assert sorted(turns) == turns, "the second began before the first had ended"


def test_vllm_s_rows_become_results() -> None:
    figures = {"first_graph_ms": 12.0, "step_graph_ms": 4.0, "tokens_per_s": 250.0}
    found = {"version": "0.23.0", "fused": True, "rows": [{"batch": 1, "prompt": 128, **figures}]}
    result = vllm_engine.result_of(found, 1, 128)
    assert result["name"] == "vLLM 0.23.0" and result["status"] == "ok" and figures.items() <= result.items()
    assert "FlashInfer" in result["notes"][0]
    assert vllm_engine.result_of(found, 16, 128)["status"] == "n/a"


def test_a_step_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']).wait()"
    )
    assert not again.run(["python3", "-c", script], 0.5)
    assert again.run(["true", "", ""], 10)
