"""The plug-in prepares every kernel that a captured graph launches, without vLLM and without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

ROOT = Path(__file__).parents[2]


def test_all_kernels_of_captured_sizes_are_prepared() -> None:
    command = [sys.executable, "-m", "tests.vllm.prepared"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["missing"] == []
    assert 20 <= result["needed"] <= result["prepared"] <= 50
