"""What is recorded of compiled kernels: the code decides whether it still holds, and fresh answers are compared."""

from __future__ import annotations

import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

import pytest

from tests.compilation import recorded
from tests.processes import ROOT, patient, python_path


@pytest.mark.compile
def test_a_kernel_is_compiled_if_its_code_has_changed_and_only_then(tmp_path: Path) -> None:
    """Each kernel has another comment and docstring; a function that one of them calls has another instruction."""
    known = recorded("sm_90")
    if not known:
        pytest.skip("the record was made with another triton")
    for package in ("iris", "iris_ops"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in tmp_path.rglob("*.py"):
        opened = re.compile(r'^    """(?=\w)', re.M)
        path.write_text("# Another comment.\n" + opened.sub('    # Another comment.\n    """Now ', path.read_text()))
    arch = tmp_path / "iris" / "device" / "arch.py"
    before, after = "%globaltimer;", "%clock64;"
    assert arch.read_text().count(before) == 1
    arch.write_text(arch.read_text().replace(before, after))
    folder, keys = tmp_path / "compiled", tmp_path / "keys"
    folder.mkdir()
    keys.write_text("\n".join(each["key"] for each in known.values()))
    expected = "^(device_barrier|gate|norm)$"
    line = [sys.executable, "-m", "tests.compile_kernels", "sm_90", folder, expected, keys]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0, done.stderr[-4000:]
    assert {path.stem for path in folder.glob("*.key")} == {"device_barrier", "gate", "norm"}
    compiled = {path.stem: path.read_text() for path in folder.glob("*.ptx")}
    assert compiled.keys() == {"device_barrier"} and after in compiled["device_barrier"]
