"""The benchmark of whole models: it runs from end to end with every contender; a wrong one is named and not timed."""

import argparse
import json
import subprocess
import sys

from iris.errors import ArgumentError  # noqa: F401  (iris first: it may set up the interpreter)
import pytest

from benchmarks import engines, llm, plot_llm  # noqa: E402
from tests.test_benchmarks import ROOT, alone  # noqa: F401  (a fixture)


def test_every_contender_from_end_to_end(tmp_path):
    command = [sys.executable, "-m", "benchmarks.llm", "--ranks", "2", "--device", "cpu", "--model", "tiny"]
    command += ["--contenders", "ours,nccl,transformers,sequence", "--rounds", "1", "--batches", "2", "--prompts", "3"]
    command += ["--out", str(tmp_path), "--name", "tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "tiny.json").read_text())
    (row,) = report["rows"]
    assert (row["batch"], row["prompt"], report["layers"], report["shortened"]) == (2, 3, 2, False)
    assert [result["key"] for result in row["results"]] == ["ours", "nccl", "transformers", "sequence"]
    for result in row["results"]:
        assert result["status"] == "ok" and result["first_ms"] > 0 and result["step_eager_ms"] > 0, result
        assert result["tokens_per_s"] == pytest.approx(2e3 / result["step_eager_ms"], rel=0.01)
        assert max(result["errors"].values()) <= report["tolerance"]
    assert "| 2 x 3" in done.stdout and "left out" not in done.stdout
    picture = plot_llm.draw(tmp_path / "tiny.json", tmp_path)[0].read_text()
    assert "transformers" in picture and "first token" in picture


class TooMuch(engines.NcclOps):
    def matmul_all_reduce(self, out, A, B, bias=None, config=None):
        super().matmul_all_reduce(out, A, B, bias)
        out *= 1.1


class Raises(engines.NcclOps):
    def matmul_all_gather(self, out, A, B, bias=None, config=None):
        raise ValueError("no such gather")


def test_a_wrong_contender_and_one_that_raises_are_named(alone, monkeypatch):  # noqa: F811
    import iris
    import torch

    with iris.iris(1 << 24) as ctx:
        model = engines.build("tiny", 1, ctx, torch.float32)
        found, failed = engines.contenders(alone, ctx, model, ["nccl", "ours"])
        assert not failed
        others = [("ours", TooMuch()), ("transformers", Raises())]  # any key that is not the reference's
        for key, ops in others:
            swapped = argparse.Namespace(**{**vars(found[0].context), "ops": ops})
            found.append(engines.Contender(key, model, lambda swapped=swapped: engines.serve(model, swapped)))
        args = argparse.Namespace(output=3, dtype="float32", rounds=1, torch_attention=False, profile=True)
        args.tolerance = 1e-3
        right, ours, wrong, raising = llm.run_row(alone, ctx, found, 1, 2, args, lambda: False)
        assert right["status"] == ours["status"] == "ok" and ours["tokens_per_s"] > 0
        assert wrong["status"] == "WRONG" and "logits differ by" in wrong["notes"][0] and "first_ms" not in wrong
        assert raising["status"] == "n/a" and "no such gather" in raising["notes"][0]
        text = llm.render(
            {
                **{"model": "tiny", "layers": 1, "shortened": True, "gpu": "CPU", "world": 1, "dtype": "float32"},
                **{"date": "", "versions": {}, "command": "", "tolerance": 1e-3, "notes": []},
                "rows": [{"batch": 1, "prompt": 2, "results": [right, ours, wrong, raising]}],
            }
        )
        assert "SHORTENED" in text and "WRONG" in text and "no such gather" in text


def test_rows_are_batches_at_the_first_prompt_and_prompts_at_the_first_batch():
    args = llm.parse(["--ranks", "2", "--batches", "1,16", "--prompts", "128,8192", "--model", "llama-3-8b"])
    assert llm.rows_of(args) == [(1, 128), (16, 128), (1, 8192)]
    with pytest.raises(SystemExit):
        llm.parse(["--contenders", "ours,theirs"])
