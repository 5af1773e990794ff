"""The regret study: the shapes that it draws, the ways that compete, and its tables."""

from __future__ import annotations

from collections import Counter
import json
from pathlib import Path

from iris.machines import machine_named
from iris_ops.planning.plan import plan
from iris_tp.bench.rows import CALLS
import pytest
import torch

from benchmarks import regret
from benchmarks.tables import pages, regret_table
from tests.processes import run_benchmark

H200 = machine_named("NVIDIA H200", 132)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_shapes_are_drawn_alike_and_cover_ops_and_rows(world: int) -> None:
    rows = regret.draw(160, 5, world, list(regret.OPS))
    assert rows == regret.draw(160, 5, world, list(regret.OPS)) != regret.draw(160, 6, world, list(regret.OPS))
    assert rows[:40] == regret.draw(40, 5, world, list(regret.OPS)), "more shapes begin by the same"
    assert len(set(rows)) == 160 and all(row.supports(world) for row in rows)
    assert Counter(row.op for row in rows) == dict.fromkeys(regret.OPS, 40)
    for least, most in regret.CLASSES:
        assert sum(least <= row.M <= most for row in rows) == 40
    assert {row.form for row in rows} == {"rows", "cols", "k"}
    few = [row.M for row in regret.draw(600, 1, world, ["ar"]) if row.M <= 64]
    assert 0.35 < sum(m <= 8 for m in few) / len(few) < 0.65, "log-uniform: half of 1 to 64 is up to 8"


@pytest.mark.parametrize("world", [2, 4])
def test_the_choice_and_every_way_compete(world: int) -> None:
    kernels: set[str] = set()
    more = 0
    for row in regret.draw(64, 9, world, list(regret.OPS)):
        problem = regret.problem_of(row, world, torch.bfloat16)
        ways = regret.ways_of(problem, {"plan": H200}, 1)
        chosen = ways[regret.chosen_by(problem, H200)]
        planned = plan(problem, H200)
        assert (chosen.config.kernel, chosen.times) == (planned.kernel, planned.prediction)
        assert len({(c.config.kernel, c.config.algorithm) for c in ways.values()}) == len(ways)
        assert all(c.times.total_us <= 2.001 * planned.prediction.total_us for c in ways.values())
        kernels |= {candidate.config.kernel for candidate in ways.values()}
        several = regret.ways_of(problem, {"plan": H200}, 3)
        assert several.keys() >= ways.keys()
        more += len(several) > len(ways)
    assert more > 32
    assert {"lamport_matmul", "hopper.matmul_reduce", "with_torch.sequential", "with_torch.copy_gather"} < kernels


@pytest.mark.slow
def test_it_runs_from_end_to_end(tmp_path: Path) -> None:
    printed = run_benchmark("regret", 2, "--shapes", "4", "--dtype", "float32", "--out", str(tmp_path))
    (file,) = tmp_path.glob("*.json")
    run = json.loads(file.read_text())
    assert [row["op"] for row in run["rows"]] == list(CALLS) and run["drawn"] == 4 and run["code"]["plans"]
    for row in run["rows"]:
        us = {result["name"]: result["eager_us"] for result in row["results"]}
        assert len(us) > 1 and all(0 <= result["error"] <= 1 for result in row["results"])
        assert row["regret"]["plan"] == pytest.approx(us[row["chosen"]["plan"]] / min(us.values()), rel=0.01)
    assert regret_table.render(run) in printed.replace("\r", "") and pages.maker_of(run, pages.EVERY_ROW)


def test_tables_show_means_the_worst_shapes_and_failures() -> None:
    def result(name: str, us: float | None, predicted: float = 10.0) -> dict:
        return {"name": name + ", 3 stages, all programs, 0 us", "predicted_us": predicted, "status": "ok"} | (
            {"graph_us": us} if us else {"status": "WRONG"}
        )

    def row(op: str, M: int, *results: dict) -> dict:
        us = [r["graph_us"] for r in results if "graph_us" in r]
        shape = {"op": op, "M": M, "N": 64, "K": 32, "results": list(results)}
        chosen, first = {"plan": results[0]["name"]}, results[0]["graph_us"]
        return shape | {"chosen": chosen, "regret": {"plan": first / min(us)}, "predicted": {"plan": 10 / first}}

    rows = [
        row("ar", 8, result("a", 10.0), result("b", 20.0)),
        row("ar", 300, result("a", 22.0), result("b", 20.0), result("c", None)),
        row("ga", 4000, result("a", 12.5), result("b", 10.0, 14.0)),
    ]
    run = {
        "gpu": "GPU", "world": 2, "dtype": "bfloat16", "date": "2026-01-01", "versions": {"torch": "2.11"},
        "command": "python -m benchmarks.regret", "rates": {"plan": "of a test"}, "rows": rows, "left_out": ["ar 1"],
    }  # fmt: skip
    summary = [list(map(str.strip, line.strip("|").split("|"))) for line in regret_table.summary(run).splitlines()[2:]]
    by_name = {line[0]: line[2:] for line in summary}
    assert by_name["`matmul_all_reduce`"] == ["2", "1.049", "1.10", "27 %", "55 %"]
    assert by_name["257 to 2000 rows"] == ["1", "1.100", "1.10", "55 %", "55 %"]
    assert by_name["all"][:3] == ["3", "1.112", "1.25"] and "65 to 256 rows" not in by_name
    worst = regret_table.worst(run).splitlines()[2:]
    assert len(worst) == 2 and " 1.25 |" in worst[0] and "a, 12.5 (10.0)" in worst[0] and "b, 10.0 (14.0)" in worst[0]
    text = regret_table.render(run)
    assert "WRONG" in text and "Left out for want of time or memory: ar 1." in text and "of a test: `plan`" in text
    assert regret_table.in_short(rows[1]) == "regret plan 1.100; b 20.0 us of 2 ways, 1 failed"


def test_a_wrong_way_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error beyond the allowed one is no time, so a fast wrong way makes no regret."""

    class Wrong:
        def check(self, call: object) -> float:
            return 1.5

    with pytest.raises(ArithmeticError, match=r"wrong result: 1.5 times the allowed error"):
        regret._checked(Wrong(), lambda i: torch.zeros(1))
