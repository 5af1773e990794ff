"""`benchmarks.ccl` runs from end to end on CPU ranks, and its report says what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.report import main
from benchmarks.tables import ccl_table
from tests.processes import run_benchmark


@pytest.mark.parametrize("options", [["--ops", "all_reduce,all_to_all"], ["--ops", "all_gather", "--sweep"]])
def test_a_run_on_cpus(tmp_path: Path, options: list[str], capsys: pytest.CaptureFixture) -> None:
    pytest.importorskip("matplotlib")
    printed = run_benchmark("ccl", 2, "--sizes", "2048", *options, "--out", str(tmp_path))
    (file,) = tmp_path.iterdir()
    report = json.loads(file.read_text())
    for row in report["rows"]:
        assert {result["status"] for result in row["results"]} == {"ok"}, row
        assert all(result["eager_us"] > 0 for result in row["results"]), row
    assert f"#### `{report['rows'][0]['op']}`, eager" in printed
    if "--sweep" not in options:
        assert [row["bus_bytes"] for row in report["rows"]] == [2048, 1024]
        main([str(file), "--plots", "--out", str(tmp_path)])
        assert ccl_table.render(report) in capsys.readouterr().out
        assert "all_to_all" in (tmp_path / f"{file.stem}_bus.svg").read_text()


def row(nbytes: int, ours: float, theirs: float) -> dict:
    plan = {"variant": "one_shot", "protocol": "lamport", "programs": 4, "block": 256}
    return {
        "op": "all_reduce",
        "bytes": nbytes,
        "bus_bytes": nbytes * 1.5,
        "results": [
            {"name": "ours", "kind": "ours", "status": "ok", "notes": [], "graph_us": ours, "plan": plan},
            {"name": "NCCL", "kind": "rival", "status": "ok", "notes": ["a note"], "graph_us": theirs},
        ],
    }


def test_the_table_shows_bandwidth_and_ratios() -> None:
    text = ccl_table.op_table([row(2048, 5.0, 10.0), row(2 << 20, 10.0, 80.0)], "graph")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert cells[2] == ["2 KiB", "one_shot lamport 4 x 256", "5.0", "1", "10.0 (2.00x)"]
    assert cells[3][:4] == ["2 MiB", "one_shot lamport 4 x 256", "10.0", "315"]
    assert cells[4] == ["geometric mean", "", "", "", "4.00x"]
    rows = [row(2048, 5.0, 10.0), row(2 << 20, 10.0, 80.0)]
    rows[0]["results"].pop()
    assert "8.00x (1 of 2)" in ccl_table.op_table(rows, "graph"), "a mean says of how many rows it is"
