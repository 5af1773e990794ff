"""README.md keeps to one page, its links lead to files and headings that are there, and its Python runs as pasted."""

import contextlib
import io
from pathlib import Path
import re
import runpy
import shlex
from typing import Any

from iris_tp import arguments
import pytest

from tests import tiny_chat
from tests.harness import run_ranks
from tests.processes import ROOT

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SPLIT, OP, KERNEL = range(3)


def block(number: int, folder: Path) -> str:
    """The path of a file with that block: triton reads a kernel's source from a file."""
    path = folder / f"block_{number}.py"
    path.write_text(BLOCKS[number])
    return str(path)


def test_every_block_is_tested() -> None:
    assert len(BLOCKS) == 3 and README.count("```python") == 3


def _printed(ctx, path: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path)
    return printed.getvalue()


def test_the_split_model_s_text_is_the_unsplit_one_s(tmp_path: Path) -> None:
    """With a checkpoint and a tokenizer that are made here, in place of a download."""
    pytest.importorskip("transformers")
    folder = tiny_chat.save(tmp_path / "model")
    path = Path(block(SPLIT, tmp_path))
    path.write_text(path.read_text().replace(tiny_chat.ON_HUB, str(folder)))
    prompt = re.search(r'tokenizer\("(.*?)"', BLOCKS[SPLIT])[1]
    first, second = run_ranks(2, _printed, str(path))
    assert (first.strip(), second) == (tiny_chat.answer(folder, prompt, 32, chat=False).strip(), "")


def test_the_command_is_one_that_there_is() -> None:
    """README and pages show valid `iris-tp generate` commands and how to install the CPU build of torch."""
    install, model = (ROOT / "docs/start/install.md").read_text(), (ROOT / "docs/start/model.md").read_text()
    line = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
    assert line in README and line in install
    commands = re.findall(r"^iris-tp generate .*$", README + model, re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        args = arguments.generate().parse_args(shlex.split(command)[2:])
        assert args.chat and args.model in (tiny_chat.ON_HUB, "smollm2")


def _values(ctx, path: str, name: str) -> Any:
    return runpy.run_path(path)[name].cpu().clone()


def test_the_op_sums_over_ranks(tmp_path: Path) -> None:
    for out in run_ranks(2, _values, block(OP, tmp_path), "out"):
        assert out.eq(2 * 96).all()  # two ranks' products of ones, 96 terms each


def test_the_kernel_fills_the_next_rank_s_inbox(tmp_path: Path) -> None:
    for rank, inbox in enumerate(run_ranks(3, _values, block(KERNEL, tmp_path), "inbox")):
        assert inbox.eq((rank - 1) % 3).all()


def test_it_is_one_page() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert [line for line in lines if len(line) > 200] == []


def test_prose_is_short() -> None:
    """Paragraphs of at most three lines, of sentences below 25 words."""
    text = re.sub(r"^```.*?^```", "\n", re.sub("<!--.*?-->", "", README), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"^(#.*)$", r"\1\n", text, flags=re.MULTILINE))
    prose = [part for part in re.split(r"\n{2,}", text.strip()) if part[0] not in "#|-"]
    assert prose and all(part.count("\n") < 3 for part in prose)
    assert [each for part in prose for each in re.split(r"[.;:!?]\s", part) if len(each.split()) >= 25] == []


def _anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("pages", ["README.md", "SECURITY.md", "CHANGELOG.md", "docs"])
def test_links_lead_somewhere(pages: str) -> None:
    """Links work on the repository's pages; `make docs` checks those of the site."""
    built = {ROOT / "docs/benchmarks/planner.html"}  # by `make docs`
    for path in (ROOT / "docs").rglob("*.md") if pages == "docs" else (ROOT / pages,):
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", text):
            file, _, anchor = link.partition("#")
            target = path.parent / file if file else path
            assert target.exists() or target.resolve() in built, f"{path}: {link}"
            of_a_name = anchor.startswith("iris.")  # which mkdocstrings makes
            assert not anchor or of_a_name or anchor in _anchors(target.read_text()), f"{path}: {link}"
