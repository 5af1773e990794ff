"""`benchmarks.moe` from end to end on CPUs: ours and the rival are right, and the file says what was measured."""

import json
from pathlib import Path
import sys

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks are run from the checkout, they are not installed

from benchmarks import moe, ops  # noqa: E402
from tests.processes import run_benchmark  # noqa: E402


def test_the_ops_of_mixtures_are_shapes_of_the_ops_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr(moe, "main", lambda argv: given.append(argv) or 7)
    monkeypatch.setattr(sys, "argv", ["ops", "--ranks", "2", "--shapes", "moe", "--tokens", "3"])
    with pytest.raises(SystemExit, match="7"):
        ops.main()
    assert given == [["--ranks", "2", "--tokens", "3"]]


@pytest.mark.slow
def test_ours_and_the_rival_are_right_and_timed(tmp_path: Path) -> None:
    asked = ("--shapes", "tiny-gpt-oss", "--tokens", "2,30")
    printed = run_benchmark("moe", 2, *asked, "--out", str(tmp_path), "--name", "tiny")
    report = json.loads((tmp_path / "tiny.json").read_text())
    assert [row["T"] for row in report["rows"]] == [2, 30] and "tiny-gpt-oss" in printed
    for row in report["rows"]:
        assert row["us"].keys() >= {"ours", "ours gate_up", "ours down", "torch + NCCL"}
        assert not row["failed"] and not row["wrong"]
        assert 0 < row["errors"]["ours"] < 0.02 and row["load"] >= 1 and 1 <= row["touched"] <= 6


@pytest.mark.slow
def test_all_configurations_are_tried(tmp_path: Path) -> None:
    run_benchmark("moe", 2, "--shapes", "tiny", "--tokens", "2", "--tune", "--out", str(tmp_path), "--name", "tuned")
    (row,) = json.loads((tmp_path / "tuned.json").read_text())["rows"]
    assert {label.split()[-1] for label in row["tuned"]["moe_down_all_reduce"]} == {
        "one_shot", "overlapped", "sequential"
    }  # fmt: skip
