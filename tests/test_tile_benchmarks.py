"""The benchmarks of tile collectives, and of collectives with a root: they run to the end, and name wrong results."""

import json
from pathlib import Path
import sys
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # benchmarks are run from the checkout

from benchmarks import rooted, tiles  # noqa: E402
from benchmarks.cases import contenders  # noqa: E402
from tests.processes import run_benchmark  # noqa: E402

ALONE = SimpleNamespace(call_us=5.0)


def test_tile_collectives_on_two_cpu_ranks(tmp_path):
    run_benchmark("tiles", 2, "--dtype", "float32", "--out", str(tmp_path))
    report = json.loads((tmp_path / "tiles_float32_cpu_x2.json").read_text())
    products = ["matmul_all_reduce", "matmul_all_reduce", "matmul_reduce_scatter"]
    assert [row["what"] for row in report["rows"]] == [*products, "all_gather", "all_to_all"]
    assert all(not row["failed"] and all(us > 0 for us in row["us"].values()) for row in report["rows"])
    timed = {name for row in report["rows"] for name in row["us"]}
    assert timed == set(tiles.NAMES) - {"tiles, specialised warps"} and not report["left_out"]  # those need a GPU


def test_collectives_with_a_root_and_messages_on_three_cpu_ranks(tmp_path):
    run_benchmark("rooted", 3, "--dtype", "float32", "--out", str(tmp_path))
    report = json.loads((tmp_path / "rooted_float32_cpu_x3.json").read_text())
    assert [row["what"] for row in report["rows"]] == list(rooted.OPS)
    assert all(not row["failed"] and set(row["us"]) == {"ctx.ccl", "torch"} for row in report["rows"])


def test_a_contender_that_is_wrong_is_named_and_not_timed(monkeypatch):
    monkeypatch.setattr(
        contenders.timing, "interleave", lambda team, batches, rounds: (dict.fromkeys(batches, ALONE), {})
    )
    team = SimpleNamespace(cuda=False, rank=0, attempt=lambda step: (step(), None), slowest=list)
    exact, right, wrong = torch.arange(4.0), torch.zeros(4), torch.zeros(4)
    lazy, asked = torch.zeros(4), []
    found = contenders.timed(
        team,
        {
            "right": contenders.Contender(lambda: right.copy_(exact), right),
            "wrong": contenders.Contender(lambda: wrong.copy_(exact + 1), wrong),
            "lazy": contenders.Contender(lambda: asked.append(1) or (len(asked) == 1 and lazy.copy_(exact)), lazy),
        },
        exact,
        0.0,
    )
    assert found["us"] == {"right": 5.0} and set(found["failed"]) == {"wrong", "lazy"}
    assert found["failed"]["wrong"] == "wrong result, off by 0.333 of the largest value"
    assert found["failed"]["lazy"].endswith("when repeated")
