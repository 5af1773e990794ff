"""Each planted fault applies to the tree, and the tool distinguishes caught faults from missed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planted.__main__ import try_fault
from tests.planted.faults import FAULTS, Fault
from tests.processes import ROOT, patient


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_python_and_its_tests_are_there(fault: Fault) -> None:
    compile(fault.planted((ROOT / fault.file).read_text()), fault.file, "exec")
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), test


@pytest.mark.slow
@pytest.mark.parametrize("old, new, outcome", [("a + b", "a - b", "caught"), ("a + b", "b + a", "missed")])
def test_a_fault_is_caught_or_missed_and_taken_out_again(tmp_path: Path, old: str, new: str, outcome: str) -> None:
    kept = "def add(a, b):\n    return a + b\n"
    (tmp_path / "add.py").write_text(kept)
    (tmp_path / "test_add.py").write_text("from add import add\n\ndef test_add():\n    assert add(2, 1) == 3\n")
    fault = Fault("swapped", "add.py", "add", old, new, ("test_add.py",))
    assert try_fault(tmp_path, fault, patient(60))[0] == outcome
    assert (tmp_path / "add.py").read_text() == kept
    with pytest.raises(LookupError, match="a / b is not in add"):
        Fault("gone", "add.py", "add", "a / b", "a", ()).planted(kept)
