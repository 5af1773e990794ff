"""A kernel has one name in triton's cache on disk, whatever its process compiled before."""

from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

import pytest

from tests.processes import ROOT, patient, python_path

KERNELS = """
import sys

import iris
import triton
import triton.language as tl

LIMIT = tl.constexpr(64)


@triton.jit
def inner(x):
    return tl.minimum(x, LIMIT)


@triton.jit
def outer(x):
    return inner(x) + 1


@triton.jit
def first(out):
    tl.store(out, inner(tl.load(out)))


@triton.jit
def second(out):
    tl.store(out, outer(tl.load(out)))


names = {name: globals()[name].cache_key for name in sys.argv[1:]}
print(names["first"], names["second"])
"""


@pytest.mark.slow
def test_the_name_of_a_kernel_does_not_depend_on_what_was_compiled_before(tmp_path: Path) -> None:
    script = tmp_path / "kernels.py"
    script.write_text(KERNELS)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}

    def named(*order: str) -> str:
        line = [sys.executable, str(script), *order]
        run = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(120))
        assert run.returncode == 0, run.stderr[-2000:]
        return run.stdout

    assert named("first", "second") == named("second", "first")
