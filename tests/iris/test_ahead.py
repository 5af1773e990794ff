"""Kernels that other processes compile before they are launched: `iris/launch/ahead.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

from iris.launch import ahead, relaunch
import torch

ROOT = Path(__file__).parents[2]


def test_forms_compile_in_other_processes_and_load_from_their_cache(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.ahead_probe", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["forms"] == 3, "5 and 7 rows share a kernel"
    (error,) = result["errors"]
    assert "no_such_kernel" in error
    assert result["anew"] == 0 and result["forgotten"] == 2
    assert result["waited"], "one that cannot be compiled is not waited for"
    assert not result["moved"] and result["folder"] == str(tmp_path / "second"), "it looks in the folder of compiling"


def test_each_form_is_compiled_by_one_of_the_ranks_that_need_it() -> None:
    names = [[f"all {i}" for i in range(40)] + [f"of {rank}"] for rank in range(4)]
    shares = [ahead.share_of(rank, names) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == sorted({name for known in names for name in known})
    assert all(f"of {rank}" in share for rank, share in enumerate(shares))
    assert min(map(len, shares)) > 3, "and every rank has a part"


def test_calls_that_are_recorded_are_neither_launched_nor_remembered() -> None:
    recorded: list[dict] = []
    calls, key = relaunch.EarlierCalls(), relaunch.Key((16,), ("kind",), None)
    with relaunch.recording(lambda kernel, **arguments: recorded.append({"kernel": kernel, **arguments})):
        launched = relaunch.launch({}, torch.device("cpu"), "kernel", (1, 2, 3), {"x": 5}, num_warps=4)  # type: ignore[arg-type]
        calls.keep(key, (lambda: True, None, None))
    assert launched is None and not calls.known
    assert recorded == [{"kernel": "kernel", "grid": (1, 2, 3), "x": 5, "num_warps": 4, "enable_fp_fusion": True}]
    calls.keep(key, (lambda: True, None, None))
    assert key in calls.known
