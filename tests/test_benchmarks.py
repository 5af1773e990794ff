"""Benchmarks run from end to end on CPUs, refuse what they cannot do, and leave a wrong result without a time."""

from __future__ import annotations

import argparse
from dataclasses import replace
import json
import math
from pathlib import Path
import sys

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are run from the checkout, they are not installed

import iris  # noqa: E402
from iris_tp.bench import timing  # noqa: E402
from iris_tp.bench.inputs import Inputs  # noqa: E402
from iris_tp.bench.rows import Row  # noqa: E402
from iris_tp.bench.team import Team  # noqa: E402

from benchmarks import all_scatter, ccl, fp8, litmus, llm, moe, ops, rma, rooted, stress  # noqa: E402
from benchmarks.cases import ccl_case, ccl_rivals, engines, whole_models  # noqa: E402
from benchmarks.plots import (  # noqa: E402
    all_scatter_plots,
    llm_plots,
    step_plots,
)  # fmt: skip
from benchmarks.rivals.contender import GEMM, OURS, RIVAL, Contender  # noqa: E402
from benchmarks.tables import every_row, rma_table  # noqa: E402
from tests.processes import run_benchmark  # noqa: E402

# --- from end to end --------------------------------------------------------------------------------------------------

# Benchmark, ranks, arguments, how many rows, what draws its picture. A row's results are right, or they have no times.
RUNS = (
    ("ops", 2, ["--rows", "16,48,32", "--vary", "block_m=16;num_programs=1"], 4, None),
    ("ccl", 2, ["--sizes", "2048", "--ops", "all_reduce,all_to_all"], 2, None),
    ("fp8", 2, [], 1, None),
    ("step", 1, [], 3, step_plots.draw),
)
SLOW_RUNS = (
    ("all_scatter", 2, ["--dtype", "float16"], 1, all_scatter_plots.draw),
    ("regret", 2, ["--shapes", "4", "--each", "1", "--without", "matmul_reduce"], 4, None),
    ("rooted", 3, ["--dtype", "float32"], len(rooted.OPS), None),
    ("tiles", 2, ["--dtype", "float32"], 5, None),
    ("fp8", 1, [], 1, None),
    ("ops", 3, ["--shapes", "tiny-forms", "--dtype", "float16"], None, None),
    ("moe", 2, ["--shapes", "tiny-gpt-oss", "--tokens", "2,30"], 2, None),
    ("llm", 2, ["--model", "tiny", "--contenders", "ours,nccl,transformers,ours-fp8,ours-int4", "--rounds", "1",
                "--batches", "2", "--prompts", "3", "--name", "llm_tiny"], 1, llm_plots.draw),
    ("llm", 2, ["--model", "tiny-gpt-oss-20b", "--contenders", "ours,nccl,ours-mxfp4", "--rounds", "1",
                "--batches", "1", "--prompts", "5", "--output", "3"], 1, None),
    ("llm", 2, ["--model", "tiny-gpt-oss-20b", "--alone", "--contenders", "ours-mxfp4", "--rounds", "1",
                "--batches", "1", "--prompts", "5", "--output", "3", "--name", "llm_alone"], 1, None),
)  # fmt: skip
_ALL = [*RUNS, *(pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_RUNS)]


@pytest.mark.parametrize("name, ranks, arguments, rows, draw", _ALL)
def test_it_runs_from_end_to_end(name: str, ranks: int, arguments: list[str], rows: int | None, draw, tmp_path: Path):
    printed = run_benchmark(name, ranks, *arguments, "--out", str(tmp_path))
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    assert printed and str(tmp_path) not in file.read_text()
    assert len(report["rows"]) == rows or rows is None and report["rows"]
    for row in report["rows"]:
        for result in row.get("results", ()):
            assert result["status"] == "ok", (row, result)
            assert any(value > 0 for key, value in result.items() if key.endswith(("_us", "_ms"))), result
        assert not row.get("failed") and not row.get("wrong"), row
        times = [us for us in row.get("us", {}).values() if us is not None]
        assert all(us > 0 for us in times) and (times or row.get("results") or "plain_us" in row)
    if name in ("ops", "step"):
        assert every_row.render(report) in printed.replace("\r", "")
    if draw is not None:
        assert all(picture.stat().st_size for picture in draw(file, tmp_path))


@pytest.mark.slow
def test_stress_and_rma_from_end_to_end(tmp_path: Path) -> None:
    printed = run_benchmark("rma", 3, "--quick", "--ops", "load,store,copy,atomic_cas", "--out", str(tmp_path))
    report = json.loads((tmp_path / "rma_cpu_x3.json").read_text())
    assert all(case["status"] == "ok" and case["us"] > 0 for case in report["cases"])
    assert rma_table.render(report) in printed
    run_benchmark("stress", 2, "--calls", "30", "--replays", "1", "--graph-calls", "12", "--out", str(tmp_path))
    report = json.loads((tmp_path / "stress_cpu_x2.json").read_text())
    assert report["calls"]["done"] == 30 and not report["deviating"]


# --- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "benchmark, arguments, words",
    [
        (ops, ["--ranks", "0"], "--ranks: invalid number from 1 on value: '0'"),
        (ops, ["--device", "cpu", "--rows", "1,2,3"], "no row of 'tiny'"),
        (ops, ["--device", "cpu", "--vary", "foo=1"], "--vary has 'foo'"),
        (ops, ["--device", "cpu", "--only", "ours,nothing"], "--only nothing: expected words in the names of ours, "),
        (ops, ["--device", "cpu", "--modes", "graph"], "--modes graph: expected eager, for CPUs have no CUDA graphs"),
        (ccl, ["--sizes", "-5"], "--sizes: invalid list of numbers from 1 on"),
        (rooted, ["--device", "cpu", "--ranks", "1"], "--ranks 1: expected 2 or more"),
        (rma, ["--dtype", "float16"], "unrecognized arguments: --dtype float16"),
        (litmus, ["--dtype", "float16"], "unrecognized arguments: --dtype float16"),
        (fp8, ["--dtype", "float16"], "unrecognized arguments: --dtype float16"),
        (moe, ["--shapes", "switch"], "--shapes: switch; expected some of qwen3-30b-a3b, mixtral-8x7b"),
        (all_scatter, ["--device", "cpu", "--store-warp"], "--store-warp on cpu: expected NVIDIA Hopper GPUs"),
        (stress, ["--device", "cpu", "--calls", "0", "--replays", "0"], "--calls and --replays are 0"),
        (llm, ["--model", "/no/such"], "--model /no/such: expected one of llama-3-8b"),
        (llm, ["--alone"], "--alone: expected one of ours-fp8, "),
        (llm, ["--device", "cpu", "--contenders", "async-tp"], "--contenders async-tp: expected others on CPUs"),
    ],
)
def test_what_cannot_be_asked_is_refused(benchmark, arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        getattr(benchmark, "parse", benchmark.main)(arguments)
    assert end.value.code == 2 and words in capsys.readouterr().err


# --- floors, and wrong results ----------------------------------------------------------------------------------------

# Four H200s: op, size, product alone and the floor with its collective, µs.
FLOORS = (
    ("ar", (8192, 8192, 7168), 1313, 1313), ("ar", (8192, 8192, 2048), 371, 518), ("ar", (2048, 8192, 2048), 95, 129),
    ("ar", (512, 8192, 2048), 26, 32), ("ar", (1, 8192, 2048), 8.0, 8.0), ("rs", (8192, 8192, 2048), 371, 371),
    ("ag", (8192, 2560, 8192), 455, 455), ("ga", (8192, 2560, 8192), 120, 120),
)  # fmt: skip


@pytest.mark.parametrize("op, size, gemm, floor", FLOORS)
def test_floors(op: str, size: tuple[int, int, int], gemm: float, floor: float) -> None:
    assert Row(op, *size).floor_us(gemm, 4) == pytest.approx(floor, rel=0.03)


def test_link_bytes_by_hand():
    M, N, K, itemsize = 64, 48, 32, 2
    assert Row("ar", M, N, K).link_bytes(2) == M * N * itemsize  # half of the sums out, half of the totals out
    assert Row("rs", M, N, K).link_bytes(2) == M // 2 * N * itemsize
    assert Row("ag", M, N, K).link_bytes(4) == 3 * (M // 4) * K * itemsize
    assert Row("ga", M, N, K).link_bytes(4) == 3 * (M // 4) * N * itemsize


def report() -> dict:
    def result(name, kind, us, **more):
        return {"name": name, "kind": kind, "status": "ok", "notes": [], "graph_us": us, **more}

    sizes = [(512, 64, 32), (128, 64, 32)]
    first = [result("ours", "ours", 20.0), result("rival", "rival", 40.0), result("alone", "gemm", 10.0)]
    second = [
        result("ours", "ours", 10.0),
        {"name": "rival", "kind": "rival", "status": "WRONG", "notes": ["wrong result"]},
    ]
    rows = [
        {"op": "ar", "M": m, "N": n, "K": k, "link_us": 1.0, "gemm_us": 10.0, "floor_us": 10.0, "results": results}
        for (m, n, k), results in zip(sizes, (first, second), strict=True)
    ]
    head = {"gpu": "GPU", "world": 4, "dtype": "bfloat16", "date": "2026-01-01", "command": "python -m benchmarks.ops"}
    return {**head, "versions": {"torch": "2"}, "rows": rows}


def test_table_shows_ratios_failures_and_means():
    text = every_row.render(report())
    assert "4 x GPU, bfloat16, 2026-01-01; torch 2" in text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert cells[0] == ["size", "floor", "ours / floor", "ours", "rival", "alone"]
    assert cells[2] == ["512, 64, 32", "10.0", "2.00", "20.0", "40.0 (2.00x)", "10.0 (0.50x)"]
    assert cells[3] == ["128, 64, 32", "10.0", "1.00", "10.0", "WRONG", ""]
    assert cells[4] == ["geometric mean", "", "1.41", "", "2.00x (1 of 2)", "0.50x (1 of 2)"]
    assert "- rival: wrong result [128, 64, 32]" in text
    assert "eager" not in text  # nothing was measured there


@pytest.fixture
def alone():
    """A team of one rank in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Team(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


def right(inputs: Inputs):
    out = inputs.new(*inputs.out_shape)
    return lambda i: torch.matmul(inputs.A[i], inputs.B[i], out=out)


def lacks_a_block_of_k(inputs: Inputs):
    out = inputs.new(*inputs.out_shape)
    return lambda i: torch.matmul(inputs.A[i][:, 16:], inputs.B[i][16:], out=out)


def leaves_an_element(inputs: Inputs):
    out = inputs.new(*inputs.out_shape)

    def call(i):
        out.view(-1)[:-1] = (inputs.A[i] @ inputs.B[i]).view(-1)[:-1]
        return out

    return call


def always_reads_the_first_copy(inputs: Inputs):
    out = inputs.new(*inputs.out_shape)
    return lambda i: torch.matmul(inputs.A[0], inputs.B[0], out=out)


def raises(inputs: Inputs):
    raise RuntimeError("no such device")


def test_check_accepts_the_product_and_refuses_less(alone):
    inputs = Inputs(Row("ar", 32, 32, 512), alone, torch.bfloat16)
    assert inputs.check(right(inputs)) < 0.5
    assert inputs.check(lacks_a_block_of_k(inputs)) > 1
    assert inputs.check(leaves_an_element(inputs)) == math.inf
    assert inputs.check(always_reads_the_first_copy(inputs)) > 1


def test_wrong_and_failing_contenders_are_named_and_not_timed(alone):
    prepared = {"right": right, "wrong": lacks_a_block_of_k, "absent": raises}
    actual = [Contender(name, RIVAL, {"ar": prepare}) for name, prepare in prepared.items()]
    args = argparse.Namespace(modes=["eager"], quick=True)
    measured = ops.run_row(Row("ar", 32, 32, 512), alone, actual, torch.bfloat16, args)
    results = {result["name"]: result for result in measured["results"]}
    assert results["right"]["status"] == "ok" and results["right"]["eager_us"] > 0
    assert results["wrong"]["status"] == "WRONG" and "eager_us" not in results["wrong"]
    assert results["absent"]["status"] == "n/a" and "no such device" in results["absent"]["notes"][0]


def leaves_a_replay_undone(call, calls, inputs):
    """In place of a capture: the graph that it gives does nothing."""
    return timing.Batch(calls, lambda: None, lambda: None), call(inputs - 1)


def test_a_wrong_replay_leaves_no_figure_anywhere(alone, monkeypatch):
    monkeypatch.setattr(timing, "graph_batch", leaves_a_replay_undone)
    kinds = {"ours": OURS, "rival": RIVAL, "alone": GEMM}
    actual = [Contender(name, kind, {"ar": right}) for name, kind in kinds.items()]
    args = argparse.Namespace(modes=["eager", "graph"], quick=True)
    measured = ops.run_row(Row("ar", 32, 32, 512), alone, actual, torch.bfloat16, args)
    assert measured["gemm_us"] is measured["floor_us"] is None
    for result in measured["results"]:
        assert result["status"] == "WRONG" and "wrong result of a replay" in result["notes"][0]
        assert not [key for key in result if key.endswith("_us")], "what it took when it was called counts in no mean"
    case = ccl_case.Case("all_gather", 2048, alone, torch.float32)
    ours = replace(ccl_rivals.torch_distributed(alone), name="ours", kind="ours")
    row = {"results": []}
    ccl.measure(case, [ours], row, args)
    (result,) = row["results"]
    assert result["status"] == "WRONG" and not [key for key in result if key.endswith("_us")]


def test_contenders_take_turns_in_every_order(alone):
    came: list[str] = []
    batches = {name: timing.Batch(1, lambda name=name: came.append(name), lambda: None) for name in "abc"}
    rounds = []
    for _ in range(2):
        came.clear()
        timings, failed = timing.interleave(alone, batches, 29)
        assert timings.keys() == set("abc") and not failed
        rounds.append(["".join(came[i : i + 3]) for i in range(0, len(came), 3)])
    assert len(set(rounds[0])) == 6 and {"".join(sorted(order)) for order in rounds[0]} == {"abc"}
    assert rounds[0] == rounds[1], "ranks, which do not ask each other, have to agree"


class HeadsExchanged(engines.NcclOps):
    """The first two heads' outputs, eight columns each."""

    def matmul_all_reduce(self, out, A, B, bias=None, config=None):
        order = [*range(8, 16), *range(8), *range(16, A.shape[1])]
        super().matmul_all_reduce(out, A[:, order], B, bias)


class Raises(engines.NcclOps):
    def matmul_all_gather(self, out, A, B, bias=None, config=None):
        raise ValueError("no such gather")


def test_a_model_with_wrong_logits_and_one_that_raises_are_named(alone):
    with iris.iris(1 << 24) as ctx:
        model = whole_models.build("tiny", 1, ctx, torch.float32)
        actual, failed = engines.contenders(alone, ctx, model, ["nccl", "ours"])
        assert not failed
        for wrong in (HeadsExchanged(), Raises()):
            swapped = argparse.Namespace(**{**vars(actual[0].context), "ops": wrong})
            serve = lambda swapped=swapped: engines.serve(model, swapped)  # noqa: E731
            actual.append(engines.Contender("ours", model, serve))  # any key that is not the yardstick's
        args = argparse.Namespace(output=3, dtype="float32", rounds=1, torch_attention=False, profile=False)
        args.contenders, args.compile = ["nccl", "ours"], False
        right, ours, exchanged, raising = llm.run_row(alone, ctx, actual, 2, 3, args, lambda: False)["results"]
    assert right["status"] == ours["status"] == "ok" and ours["tokens_per_s"] > 0
    assert exchanged["status"] == "WRONG" and "logits are off by" in exchanged["notes"][0]
    assert not [key for key in exchanged if key.endswith(("_ms", "_per_s"))]
    assert raising["status"] == "n/a" and "no such gather" in raising["notes"][0]
