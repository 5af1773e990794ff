"""examples/quickstart.ipynb: two ranks from a notebook, on a CPU, with what a plain installation has."""

import json
import os
from pathlib import Path
import subprocess

import pytest

from tests.processes import ROOT, patient, python_path

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
CELLS = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
ENV = os.environ | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
SAID = (
    "ours and torch's differ by less than 0.001: True",
    "rank 0 now holds 11.0 of rank 1",
    "the split model says what the whole one says: True",
    "chosen hopper.lamport_pair",
)


def test_it_is_kept_without_outputs() -> None:
    """They would grow old."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def run_as_a_notebook_would(cells: list[str], folder: Path) -> str:
    """What cells print that have Python, `%%writefile NAME` and `!COMMAND` with names of Python in braces."""
    names: dict[str, object] = {}
    printed = []
    for cell in cells:
        if cell.startswith("%%writefile "):
            first, _, text = cell.partition("\n")
            (folder / first.split()[1]).write_text(text)
        elif cell.startswith("!"):
            command = eval(f"f{cell[1:]!r}", names)
            ended = subprocess.run(
                command, shell=True, cwd=folder, env=ENV, capture_output=True, text=True, timeout=patient(240)
            )
            assert ended.returncode == 0, ended.stdout + ended.stderr
            printed.append(ended.stdout)
        else:
            exec(cell, names)
    return "\n".join(printed)


@pytest.mark.slow
def test_its_cells_run(tmp_path: Path) -> None:
    printed = run_as_a_notebook_would(CELLS, tmp_path)
    assert [text for text in SAID if text not in printed] == []
    assert sorted(path.name for path in tmp_path.glob("*.py")) == ["kernel.py", "model.py", "op.py"]
