"""The list of planted faults fits the tree, and the tool tells a fault that a test notices from one that none does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.planted.__main__ import FAST, run_tests, try_fault
from tests.planted.faults import FAULTS, Fault
from tests.processes import ROOT, patient


def test_names_are_different() -> None:
    assert max(Counter(fault.name for fault in FAULTS).values()) == 1 and len(FAULTS) >= 30


@pytest.mark.parametrize("file", sorted({fault.file for fault in FAULTS}))
def test_what_a_fault_replaces_is_there_once(file: str) -> None:
    """And what then stands there is Python; the tests that should fail are there too."""
    text = (ROOT / file).read_text()
    for fault in FAULTS:
        if fault.file == file:
            assert text.count(fault.old) == 1 and fault.new != fault.old, fault.name
            compile(text.replace(fault.old, fault.new), file, "exec")
            assert fault.tests and all(map(is_there, fault.tests)), fault.name


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    return not name or f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "new, outcome, by", [("a - b", "caught", ["test_add.py::test_add - assert 1 == 3"]), ("b + a", "missed", [])]
)
def test_a_fault_is_caught_or_missed_and_taken_out_again(tmp_path: Path, new: str, outcome: str, by: list[str]) -> None:
    kept = "def add(a, b):\n    return a + b\n"
    (tmp_path / "add.py").write_text(kept)
    (tmp_path / "test_add.py").write_text("from add import add\n\ndef test_add():\n    assert add(2, 1) == 3\n")
    found = try_fault(tmp_path, Fault("swapped", "add.py", "a + b", new, ("test_add.py",)), FAST, patient(60))
    assert (found["outcome"], found["by"]) == (outcome, by)
    assert (tmp_path / "add.py").read_text() == kept


@pytest.mark.slow
def test_a_text_or_tests_that_are_not_there_are_said(tmp_path: Path) -> None:
    assert try_fault(tmp_path, FAULTS[0], FAST, patient(60))["outcome"] == "not there"
    assert run_tests(tmp_path, FAULTS[0].tests, FAST, patient(60))["ended"] == "no such tests"
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    ended = run_tests(tmp_path, ["test_one.py::test_two"], FAST, patient(60))["ended"]
    assert ended == "no such tests", "a test that is not there fails nothing"
