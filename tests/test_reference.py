"""The reference page is what the docstrings say, and has everything that is public."""

import importlib
from pathlib import Path
import sys

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # docs are not installed

from docs import reference  # noqa: E402


def test_page_is_up_to_date() -> None:
    if reference.PAGE.read_text() != reference.page():
        pytest.fail("docs/reference.md is not what the docstrings say: run `python -m docs.reference` and commit it")


@pytest.mark.parametrize("module", ["iris", "iris.ccl", "iris_ops", "layers"])
def test_public_names_are_on_the_page(module: str) -> None:
    page = reference.page()
    public = importlib.import_module(module).__all__
    functions = [name for name in public if callable(getattr(importlib.import_module(module), name))]
    apart = {"IrisError"}
    assert [name for name in functions if f"{module}.{name}`" not in page and name not in apart] == []


def test_a_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = reference.Section("Gone", "iris/errors.py", "", ("NoSuchError",))
    monkeypatch.setattr(reference, "SECTIONS", (gone,))
    with pytest.raises(LookupError, match="iris/errors.py has no NoSuchError"):
        reference.page()
