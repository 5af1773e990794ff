"""The plug-in inside vLLM's own compiler, on two CPU ranks (`probe.py`). Skipped where vLLM is not installed."""

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


def probed(on: bool, cache: Path) -> dict:
    command = [sys.executable, str(PROBE), str(free_port()), "on" if on else "off"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PROBE_CACHE": str(cache)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


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
        found, expected = (each["rows"][rows]["digest"] for each in (ours, stock))
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= 0.02 * max(map(abs, expected)) + 0.2
    warm = probed(True, tmp_path / "on")  # loads what it compiled before
    assert {rows: row["calls"] for rows, row in warm["rows"].items()} == calls
    assert all(warm["rows"][rows]["digest"] == ours["rows"][rows]["digest"] for rows in calls)
