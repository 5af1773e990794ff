"""The benchmark tells the truth: floors as measured elsewhere, wrong results named, and it runs from end to end."""

import argparse
from dataclasses import replace
import json
import math
from pathlib import Path
import sys
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are run from the checkout, they are not installed

from iris_tp.bench import timing  # noqa: E402
from iris_tp.bench.inputs import Inputs  # noqa: E402
from iris_tp.bench.rows import Row  # noqa: E402
from iris_tp.bench.team import Team, describe  # noqa: E402

from benchmarks import ccl, ops  # noqa: E402
from benchmarks.cases import ccl_case, ccl_rivals  # noqa: E402
from benchmarks.measuring import shapes  # noqa: E402
from benchmarks.measuring.report import command  # noqa: E402
from benchmarks.plots import ops_plots, step_plots  # noqa: E402
from benchmarks.rivals.contender import GEMM, OURS, RIVAL, Contender  # noqa: E402
from benchmarks.tables import ops_table, step_table  # noqa: E402
from tests.processes import run_benchmark  # noqa: E402

# Four H200s: product alone, then the floor with its collective, µs.
REDUCE_FLOORS = {  # size: (product, all-reduce, reduce-scatter)
    (8192, 8192, 7168): (1313, 1313, 1313),
    (8192, 8192, 2048): (371, 518, 371),
    (2048, 8192, 7168): (311, 311, 311),
    (2048, 8192, 2048): (95, 129, 95),
    (512, 8192, 7168): (81, 81, 81),
    (512, 8192, 2048): (26, 32, 26),
    (64, 8192, 7168): (33, 33, None),
    (1, 8192, 2048): (8.0, 8.0, None),
    (4096, 4096, 3584): (158, 158, 158),
    (128, 4096, 3584): (12, 12, 12),
}
GATHER_FLOORS = {  # size: (product of the whole, gather first, product of a quarter and floor of gather last)
    (8192, 14336, 8192): (2802, 2802, 656),
    (8192, 2560, 8192): (455, 455, 120),
    (2048, 14336, 8192): (621, 621, 180),
    (2048, 2560, 8192): (112, 112, 32),
    (512, 14336, 8192): (173, 173, 64),
    (512, 2560, 8192): (31, 31, 18),
}


@pytest.mark.parametrize("size", REDUCE_FLOORS)
def test_reduce_floors(size):
    gemm, reduced, scattered = REDUCE_FLOORS[size]
    assert Row("ar", *size).floor_us(gemm, 4) == pytest.approx(reduced, rel=0.03)
    if scattered:
        assert Row("rs", *size).floor_us(gemm, 4) == pytest.approx(scattered, rel=0.03)


@pytest.mark.parametrize("size", GATHER_FLOORS)
def test_gather_floors(size):
    gemm, first, last = GATHER_FLOORS[size]
    assert Row("ag", *size).floor_us(gemm, 4) == pytest.approx(first, rel=0.03)
    assert Row("ga", *size).floor_us(last, 4) == last  # the product of M/4 rows takes longer than the link


def test_link_bytes_by_hand():
    M, N, K, itemsize = 64, 48, 32, 2
    assert Row("ar", M, N, K).link_bytes(2) == M * N * itemsize  # half of the sums out, half of the totals out
    assert Row("rs", M, N, K).link_bytes(2) == M // 2 * N * itemsize
    assert Row("ag", M, N, K).link_bytes(4) == 3 * (M // 4) * K * itemsize
    assert Row("ga", M, N, K).link_bytes(4) == 3 * (M // 4) * N * itemsize
    assert all(Row(op, M, N, K).link_bytes(1) == 0 for op in shapes.CALLS)


def test_select_keeps_what_was_asked():
    rows = shapes.select("facts", ["ar", "ga"], 4, [(8192, 8192, 7168), (1, 8192, 2048)])
    assert [str(row) for row in rows] == ["ar 8192, 8192, 7168", "ar 1, 8192, 2048", "ga 8192, 8192, 7168"]
    with pytest.raises(ValueError, match="no row"):
        shapes.select("facts", ["rs"], 4, [(1, 1, 1)])


@pytest.mark.parametrize("world", [2, 4])
def test_samples_have_every_op_ragged_and_in_fp16(world):
    ops = list(shapes.CALLS)
    sample = [row for row in shapes.select("prefill-sample", ops, world) if row.M in shapes.RAGGED_M]
    assert {row.op for row in sample} == set(ops) and {row.M for row in sample} == {1000, 3001, 5120}
    sample = shapes.select("fp16-sample", ops, world)
    assert [row.op for row in sample] == [op for op in ops for _ in range(2)]
    assert all(row.serves(world) and row.even(world) and (row.M > 256) == (i % 2 == 0) for i, row in enumerate(sample))


def test_variations_are_all_combinations_of_known_fields():
    found = ops.variations("num_stages=4,5;warp_specialised=False;algorithm=one_shot")
    assert found == [dict(num_stages=stages, warp_specialised=False, algorithm="one_shot") for stages in (4, 5)]
    assert ops.variations("") == []
    for text in ("stages=4", "num_stages", "prediction=1", "num_stages=four", "warp_specialised=1"):
        with pytest.raises(ValueError):
            ops.variations(text)


@pytest.mark.parametrize("device, others", [("cpu", []), ("cuda", ["cuBLAS + torch one-shot", "torch async-TP"])])
def test_names_are_those_of_contenders_that_serve_a_row(device, others):
    args = argparse.Namespace(ranks=2, device=device, dtype="bfloat16", heap_gib=1)
    rows = [Row("ar", 16, 64, 32), Row("ag", 16, 64, 32)]
    names = ops.names_of_contenders(args, rows)
    assert {"ours", "ours alone", *others} <= set(names) and len(set(names)) == len(names)
    assert "torch async-TP" not in ops.names_of_contenders(args, rows[:1])


def test_command_and_reasons_name_no_folder():
    assert command("ops", ["--ranks", "4", "--out", "/a/b", "--quick"]) == "python -m benchmarks.ops --ranks 4 --quick"
    assert command("ops", ["--rows", "1,2,3;4,5,6"]) == "python -m benchmarks.ops --rows '1,2,3;4,5,6'"
    assert describe(OSError("cannot open /a/b/c.so\nmore")) == "OSError: cannot open c.so"


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
    text = ops_table.render(report(), ["graph", "eager"])
    assert "4 x GPU, bfloat16, 2026-01-01; torch 2" in text
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    assert cells[0] == ["M, N, K", "GEMM", "floor", "ours", "ours / floor", "rival"]
    assert cells[2] == ["512, 64, 32", "10.0", "10.0", "20.0", "2.00", "40.0 (2.00x)"]
    assert cells[3] == ["128, 64, 32", "10.0", "10.0", "10.0", "1.00", "WRONG"]
    assert cells[4] == ["geometric mean", "", "", "", "1.41", "2.00x (1 of 2)"]
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
    found = [Contender(name, RIVAL, {"ar": prepare}) for name, prepare in prepared.items()]
    args = argparse.Namespace(modes=["eager"], quick=True)
    measured = ops.run_row(Row("ar", 32, 32, 512), alone, found, torch.bfloat16, args)
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
    found = [Contender(name, kind, {"ar": right}) for name, kind in kinds.items()]
    args = argparse.Namespace(modes=["eager", "graph"], quick=True)
    measured = ops.run_row(Row("ar", 32, 32, 512), alone, found, torch.bfloat16, args)
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


def refuses(call, calls, inputs):
    raise RuntimeError("no capture here")


def test_where_nothing_can_be_captured_that_is_told(alone, monkeypatch):
    monkeypatch.setattr(timing, "graph_batch", refuses)
    args = argparse.Namespace(modes=["graph"], quick=True)
    measured = ops.run_row(Row("ar", 32, 32, 512), alone, [Contender("a", RIVAL, {"ar": right})], torch.bfloat16, args)
    row = {"results": []}
    case = ccl_case.Case("all_gather", 2048, alone, torch.float32)
    ccl.measure(case, [ccl_rivals.torch_distributed(alone)], row, args)
    for result in measured["results"] + row["results"]:
        assert result["status"] == "ok" and "no capture here" in result["notes"][0], result


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


def test_end_to_end_on_two_cpu_ranks(tmp_path):
    options = ["--rows", "16,48,32", "--vary", "block_m=16,48;num_programs=1", "--out", str(tmp_path)]
    printed = run_benchmark("ops", 2, *options)
    report = json.loads((tmp_path / "ops_cpu_x2.json").read_text())
    assert [row["op"] for row in report["rows"]] == list(shapes.CALLS)
    for row in report["rows"]:
        results = {result["name"]: result for result in row["results"]}
        for name in ("ours", "torch + gloo"):
            assert results[name]["status"] == "ok", (row["op"], results[name]["notes"])
            assert results[name]["eager_us"] > 0
        changed, refused = (results[f"ours, block_m {block}, num_programs 1"] for block in (16, 48))
        assert changed["eager_us"] > 0 and changed["plan"]["block_m"] == changed["plan"]["num_programs"] << 4
        assert refused["status"] == "n/a" and "block_m is 48; expected a power of two" in refused["notes"][0]
    assert str(tmp_path) not in json.dumps(report)
    assert ops_table.render(report, ["eager"]) in printed.replace("\r", "")


def test_what_there_was_no_time_for_is_told(tmp_path):
    run_benchmark("ops", 1, "--rows", "16,48,32", "--time-limit", "0.01", "--out", str(tmp_path))
    report = json.loads((tmp_path / "ops_cpu_x1.json").read_text())
    assert [row["op"] for row in report["rows"]] == ["ar"]
    told = "Left out for want of time or memory: rs 16, 48, 32; ag 16, 48, 32; ga 16, 48, 32."
    assert ops_table.render(report, ["eager"]).endswith(told)


@pytest.mark.slow
def test_other_forms_and_uneven_parts_on_three_cpu_ranks(tmp_path):
    run_benchmark("ops", 3, "--shapes", "tiny-forms", "--dtype", "float16", "--out", str(tmp_path))
    report = json.loads((tmp_path / "ops_float16_cpu_x3.json").read_text())
    assert len(report["rows"]) == len(shapes.select("tiny-forms", list(shapes.CALLS), 3))
    for row in report["rows"]:
        assert [r["status"] for r in row["results"]] == ["ok"] * len(row["results"]), row


@pytest.mark.slow
def test_stress_on_two_cpu_ranks_sees_no_mismatch(tmp_path):
    counts = ["--calls", "60", "--replays", "2", "--graph-calls", "12", "--delay-every", "10"]
    run_benchmark("stress", 2, *counts, "--out", str(tmp_path))
    report = json.loads((tmp_path / "stress_cpu_x2.json").read_text())
    assert report["calls"]["done"] == 60 and report["replays"]["done"] == 2 and not report["deviating"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp8_products_are_right_before_they_are_timed(tmp_path, ranks):
    run_benchmark("fp8", ranks, "--out", str(tmp_path))
    (row,) = json.loads((tmp_path / f"fp8_cpu_x{ranks}.json").read_text())["rows"]
    assert row["us"].keys() == {"bf16", "fp8", "torch" if ranks == 1 else "NCCL", "rounding"} and not row["failed"]
    assert 0.01 < row["errors"]["fp8"] < row["errors"]["torch" if ranks == 1 else "NCCL"]
    assert ranks == 1 or row["plan"]["algorithm"] == "sequential"


def test_the_kernels_of_a_step_beside_torch_s(tmp_path):
    printed = run_benchmark("step", 1, "--out", str(tmp_path))
    written = json.loads((tmp_path / "step_cpu_x1.json").read_text())
    assert [row["kind"] for row in written["rows"]] == ["product", "gated", "attention"]
    for row in written["rows"]:
        assert {"ours", "torch"} <= row["us"].keys() and not row["failed"] and not row["wrong"]
        assert 0 < max(row["errors"].values()) < 0.01 and row["moved_bytes"] > 0
    assert "torch, filled part" in printed and step_table.render(written) in printed
    (picture,) = step_plots.draw(tmp_path / "step_cpu_x1.json", tmp_path)
    assert "torch, filled part" in picture.read_text()


def test_pictures_show_every_contender_and_stay_the_same(tmp_path):
    measured = ROOT / "benchmarks" / "results" / "ops_h200_x4.json"
    written = ops_plots.draw(measured, tmp_path / "one")
    assert [path.stem.rpartition("_")[2] for path in written] == [*shapes.CALLS, "rows"]
    again = ops_plots.draw(measured, tmp_path / "two")
    report = json.loads(measured.read_text())
    for path, other in zip(written, again, strict=True):
        assert path.read_bytes() == other.read_bytes()
        shown = "".join(ElementTree.parse(path).getroot().itertext())
        op = path.stem.rpartition("_")[2]
        for row in report["rows"]:
            if row["op"] == op:
                assert all(result["name"] in shown for result in row["results"] if result["kind"] != "gemm")
                assert f"{row['M']}, {row['N']}, {row['K']}" in shown
        assert report["gpu"] in shown and "µs" in shown


def test_pictures_of_what_was_not_measured_are_left_out(tmp_path):
    report = json.loads((ROOT / "benchmarks" / "results" / "ops_h200_x4.json").read_text())
    report["rows"] = [row for row in report["rows"] if row["op"] == "rs"]
    (tmp_path / "some.json").write_text(json.dumps(report))
    assert [path.name for path in ops_plots.draw(tmp_path / "some.json", tmp_path)] == ["some_rs.svg"]


def test_a_chain_of_ops_on_two_cpu_ranks(tmp_path):
    run_benchmark("chain", 2, "--rows", "1,3", "--out", str(tmp_path))
    report = json.loads((tmp_path / "chain_cpu_x2.json").read_text())
    assert [(row["M"], row["ops"]) for row in report["rows"]] == [(1, 4), (3, 4)]
    for row in report["rows"]:
        assert row["layer_us"] > 0 and len(row["alone_us"]) == 2
        assert row["over_sum"] == pytest.approx(row["layer_us"] / sum(row["alone_us"].values()), rel=0.01)
