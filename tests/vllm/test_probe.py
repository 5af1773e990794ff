"""The plug-in inside vLLM's own compiler, two CPU ranks a stage (`probe.py`). Skipped where vLLM is not installed."""

from __future__ import annotations

from importlib.util import find_spec
import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

from tests.processes import free_port

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")]
PROBE = Path(__file__).with_name("probe.py")


def probed(on: bool, cache: Path, stages: int = 1) -> dict:
    """Return what the last stage found."""
    command = [sys.executable, str(PROBE), str(free_port()), "on" if on else "off", str(stages)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PROBE_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=True)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    actual = sorted(map(json.loads, lines), key=lambda each: each["stage"])
    assert [each["stage"] for each in actual] == list(range(stages))
    return actual[-1]


def test_the_plug_in_takes_its_ranges_and_leaves_the_others(tmp_path: Path) -> None:
    ours, stock = probed(True, tmp_path / "on"), probed(False, tmp_path / "off")
    assert (ours["layer"], stock["layer"]) == ("IrisRowParallelLinear", "RowParallelLinear")
    calls = {rows: row["calls"] for rows, row in ours["rows"].items()}
    few = {"matmul_all_reduce_norm": 1, "matmul_all_reduce_rms_norm": 1, "matmul_all_reduce": 1}
    assert calls["8"] == calls["64"] == few  # a part of the second norm feeds the last product, so it stays whole
    assert calls["65"] == calls["128"] == {"matmul_all_reduce_rms_norm": 2, "matmul_all_reduce": 1}
    assert calls["1200"] == {}
    assert ours["rows"]["1200"]["digest"] == stock["rows"]["1200"]["digest"]  # bit for bit
    for rows in ("8", "64", "65", "128"):
        actual, expected = (each["rows"][rows]["digest"] for each in (ours, stock))
        assert max(abs(a - b) for a, b in zip(actual, expected, strict=True)) <= 0.02 * max(map(abs, expected)) + 0.2
    warm = probed(True, tmp_path / "on")  # loads what it compiled before
    assert {rows: row["calls"] for rows, row in warm["rows"].items()} == calls
    assert all(warm["rows"][rows]["digest"] == ours["rows"][rows]["digest"] for rows in calls)


def test_the_plug_in_stays_on_inside_each_stage(tmp_path: Path) -> None:
    one, ours, stock = (probed(on, tmp_path / f"{on}{n}", n) for on, n in ((True, 1), (True, 2), (False, 2)))
    assert (ours["layer"], stock["layer"]) == ("IrisRowParallelLinear", "RowParallelLinear")
    assert ours["ranges"] == one["ranges"] != stock["ranges"]
    for rows, row in ours["rows"].items():
        assert row["calls"] == one["rows"][rows]["calls"] and bool(row["calls"]) == (rows != "1200")
        expected = stock["rows"][rows]["digest"]
        bound = 0.0 if rows == "1200" else 0.02 * max(map(abs, expected)) + 0.4  # above the ranges, bit for bit
        assert max(abs(a - b) for a, b in zip(row["digest"], expected, strict=True)) <= bound
