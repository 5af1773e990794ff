"""What `benchmarks.vllm` makes of two engines' figures, and its arguments."""

from __future__ import annotations

import pytest

from benchmarks import vllm
from benchmarks.tables import vllm_table


def prompt(tokens: list[int], *gaps: float) -> dict:
    """A prompt's tokens, and two logits of each that differ by `gaps` of the larger, 4."""
    return {"tokens": tokens, "logits": [[4.0, 4.0 * (1 - gap)] for gap in gaps]}


def test_tokens_that_differ_count_by_the_gap_at_the_first_difference() -> None:
    stock = [prompt([1, 2, 3], 0.5, 0.5, 0.5), prompt([1, 2, 3], 0.5, 0.005, 0.5), prompt([1, 2, 3], 0.2, 0.5, 0)]
    plugin = [prompt([1, 2, 3], 0.5, 0.5, 0.5), prompt([1, 9, 4], 0.5, 0.3, 0.5), prompt([7, 2, 3], 0.1, 0, 0)]
    result = vllm.compared(stock, plugin)
    assert (result["prompts"], result["tokens_each"]) == (3, 3)
    assert (result["equal_sequences"], result["within_rounding"]) == (1, 1)
    assert result["gaps"] == pytest.approx([0.005, 0.1])


def test_the_table_names_each_figure_and_marks_a_loss() -> None:
    def times(step: float, first: float) -> dict:
        return {"step_ms": {"1": {"step": step}}, "first_token_ms": {"1x128": {"queue": first}}}

    stock, plugin = times(3.0, 20.0), times(2.5, 25.0)
    run = {
        "model": "qwen3-30b-a3b", "command": "python -m benchmarks.vllm", "date": "2026-01-01", "gpu": "NVIDIA H200",
        "gpus": 4, "versions": {"vllm": "0.23.0"}, "commit": "abc", "startup_s": {"stock": 100.0, "plugin": 104.4},
        "greedy_tokens": {"prompts": 64, "tokens_each": 32, "equal_sequences": 60, "within_rounding": 3},
        **{key: {"stock": stock[key], "plugin": plugin[key]} for key in stock},
    }  # fmt: skip
    text = vllm_table.table(run, "file.json")
    assert "| decode step, batch 1 | 3.00 | 2.50 | 1.20x |" in text
    assert "| first token, 1x128 | 20.00 | 25.00 | **0.80x** |" in text
    assert "60 of 64 prompts" in text and "3 of 4 others" in text and "Qwen3-30B-A3B" in text and "104 s" in text


def test_bad_arguments_are_refused(capsys: pytest.CaptureFixture) -> None:
    for bad in (["--models", "llama-9"], ["--prompts", "1x2x3"], ["--batches", "0"], ["--ranks", "1"]):
        with pytest.raises(SystemExit):
            vllm.parse(bad)
        assert bad[0] in capsys.readouterr().err
    args = vllm.parse(["--models", "llama-3-8b,qwen3-32b", "--prompts", "1x128,16x256", "--logs", "/somewhere"])
    assert args.prompts == [(1, 128), (16, 256)] and args.batches == [1, 16, 64]
    assert "/somewhere" not in args.command
