"""What the recipe for coverage makes of a report, and that it sees what ranks run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.line_coverage import KERNELS, gaps, jitted, measure, read, table
from tests.processes import ROOT

GATING = "iris_ops/local/gating.py"


def report(path: Path, lines: range) -> Path:
    """As coverage.py writes it, of a file whose every line counts and which no branch leaves."""
    every = range(1, len((ROOT / GATING).read_text().splitlines()) + 1)
    file = dict(executed_lines=[*lines], missing_lines=[line for line in every if line not in lines])
    file |= dict(executed_branches=[[lines[0], lines[1]]], missing_branches=[[lines[0], -1]])
    path.write_text(json.dumps({"files": {GATING: file}}))
    return path


def test_kernels_are_a_row_of_their_own(tmp_path: Path) -> None:
    inside, _ = jitted(ROOT / GATING)
    found = read(report(tmp_path / "one.json", range(min(inside), max(inside) + 1)))
    kernels, host = found[KERNELS, GATING], found["iris_ops", GATING]
    assert kernels.lines == {(GATING, line) for line in inside} and kernels.run_lines >= kernels.lines
    assert host.lines and not host.lines & kernels.lines
    assert len(kernels.branches) == 2 and len(kernels.run_branches) == 1 and not host.branches
    assert f"{KERNELS:10}{len(inside):6} of {len(inside):6} 100.0 %      1 of      2  50.0 %" in table(found)


def test_what_another_run_reaches_is_named(tmp_path: Path) -> None:
    first, second = (read(report(tmp_path / "one.json", lines)) for lines in (range(1, 9), range(1, 12)))
    assert gaps(first, second) == f"    3 lines and branches  {GATING}: lines 9, 10, 11"
    assert gaps(second, first) == ""


@pytest.mark.slow
def test_lines_that_only_ranks_run_are_seen(tmp_path: Path) -> None:
    pytest.importorskip("coverage")
    test = "tests/iris_ops/test_lamport_matmul.py::test_programs_of_one_tile_are_known_as_such"
    assert measure("not gpu", 1, tmp_path / "found.json", [test, "-p", "no:cacheprovider"]) == 0
    found = read(tmp_path / "found.json")
    kernel = found[KERNELS, "iris_ops/kernels/lamport_matmul.py"]
    assert len(kernel.run_lines) > 20 and kernel.run_branches
    assert len(found["iris_ops", "iris_ops/kernels/lamport_matmul.py"].run_lines) > 20
