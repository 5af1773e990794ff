"""The other package called `iris`, SciTools': `import iris` and the doctor name an installation of it."""

from __future__ import annotations

from pathlib import Path

from iris import requirements
from iris_tp import doctor
import pytest

from tests import fresh


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    folder = tmp_path / "scitools_iris-3.14.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: scitools-iris\nVersion: 3.14.0\n")
    return tmp_path


def test_importing_warns_of_it(installed: Path) -> None:
    done = fresh.run(f"import sys; sys.path.append({str(installed)!r}); import iris", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning: scitools-iris 3.14.0 is installed together with iris-tp" in done.stderr
    assert "RuntimeWarning" not in fresh.run("import iris", TRITON_INTERPRET="1").stderr


def test_the_doctor_names_it(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(doctor.namesake()) and not requirements.namesake()
    monkeypatch.syspath_prepend(str(installed))
    (finding,) = doctor.namesake()
    assert finding.level == doctor.FIX and "scitools-iris 3.14.0" in finding.what and finding.remedy
