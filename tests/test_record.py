"""What is recorded of compiled kernels: the code decides whether it still holds, and fresh answers are compared."""

from __future__ import annotations

import os
from pathlib import Path
import shutil
import subprocess
import sys

import pytest

from tests import record
from tests.compilation import CompiledKernel
from tests.processes import ROOT, patient, python_path


@pytest.mark.compile
def test_a_kernel_is_compiled_if_its_code_has_changed_and_only_then(tmp_path: Path) -> None:
    """Other lines stand above each function, and one function that one of the kernels calls has another instruction."""
    if not record.is_of_this_triton("sm_90"):
        pytest.skip("the record was made with another triton")
    for package in ("iris", "iris_ops"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for path in tmp_path.rglob("*.py"):
        path.write_text("# A line of its own.\n" + path.read_text())
    arch = tmp_path / "iris" / "device" / "arch.py"
    before, after = "%globaltimer;", "%clock64;"
    assert arch.read_text().count(before) == 1
    arch.write_text(arch.read_text().replace(before, after))
    folder = tmp_path / "compiled"
    folder.mkdir()
    wanted = "^(device_barrier|gate|arrived)$"
    line = [sys.executable, "-m", "tests.compile_kernels", "sm_90", folder, wanted, "recorded"]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
    done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=patient(300))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["gate", "arrived", "device_barrier"]
    known = {path.stem for path in folder.glob("*.key") if path.read_text() in record.read_sources("sm_90")}
    assert known == {"gate"}, "whose source is the same, on other lines; `make compiled` writes the keys of sources"
    compiled = {path.stem: path.read_text() for path in folder.glob("*.ptx")}
    assert compiled.keys() == {"arrived", "device_barrier"} and after in compiled["device_barrier"]


def test_a_kernel_answers_from_the_record_until_it_is_compiled() -> None:
    text = ".target sm_90a\nst.global.b32 x;\nst.global.b32 y;\n"
    stores = r"st\.global"
    recorded = CompiledKernel("kernel", "", None, 0, {f"count {stores}": 7})
    assert recorded.count(stores) == 7 and recorded.asked == {f"count {stores}": 7}
    recorded.compile = lambda: text
    assert recorded.count("st") == 2, "what is not recorded is asked of the code"
    again = CompiledKernel("kernel", "", text, 0, {f"count {stores}": 7})
    with pytest.raises(AssertionError, match="2, recorded is 7: make compiled"):
        again.count(stores)
    assert CompiledKernel("kernel", "", text, 0, {}).count(stores) == 2


def test_a_record_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says nothing where triton or a check is another one."""
    monkeypatch.setattr(record, "FOLDER", tmp_path / "compiled")
    kernels = {"b": record.Known("1", 512, {"count x": 2, "narrow_stores": ["st"]}), "a": record.Known("2", 0, {})}
    assert not record.is_of_this_triton("sm_90") and record.read("sm_90") == {}
    record.write("sm_90", kernels)
    assert record.is_of_this_triton("sm_90") and record.read("sm_90") == kernels
    checks = tmp_path / "checks.py"
    checks.write_text("another check")
    monkeypatch.setattr(record, "CHECKS", checks)
    assert record.is_of_this_triton("sm_90") and record.read("sm_90") == {}
    record.write_sources("sm_90", {"key": "1"})
    assert record.read_sources("sm_90") == {"key": "1"} and record.read_sources("gfx942") == {}
    monkeypatch.setattr(record, "version", lambda name: "4.0.0")
    assert record.read_sources("sm_90") == {}
    assert not record.is_of_this_triton("sm_90")
