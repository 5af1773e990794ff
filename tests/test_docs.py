"""The site builds without a warning, agrees with the code, and its Python runs as pasted, on two ranks."""

import contextlib
import html
import importlib
import importlib.util
import io
import json
from pathlib import Path
import re
import runpy
import shutil
import subprocess
import sys
from typing import Any

import iris
from iris import errors
from iris_ops.planning.ways import WAYS
from iris_tp import cli
import pytest

from benchmarks import report
from benchmarks.measuring.report import RESULTS, headline
from benchmarks.tables import pages
from tests import tiny_chat
from tests.harness import run_ranks
from tests.processes import ROOT, patient

DOCS = ROOT / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
WITH_PYTHON = [name for name, path in PAGES.items() if "```python" in path.read_text()]
NEEDED = {"guides/lm-eval.md": "lm_eval"}
"""What a page's Python needs beyond the library and its extras."""
QUICK = ("index.md", "start/op.md", "start/kernel.md", "start/laptop.md", "guides/kernels.md", "concepts/planning.md")
KERNELS = {path.read_text().split("\n", 1)[0].removeprefix("# "): path for path in (DOCS / "kernels").glob("*.md")
           if "_" in path.name or path.name.startswith("moe-")}  # fmt: skip


def test_every_block_of_python_is_found() -> None:
    for name, path in PAGES.items():
        assert len(BLOCK.findall(path.read_text())) == len(re.findall(r"```\s*(?:py|python)\b", path.read_text())), name
    assert set(QUICK) < set(WITH_PYTHON)


def test_guides_show_how_their_python_is_run() -> None:
    pages = [name for name in WITH_PYTHON if name.startswith(("guides/", "start/"))]
    assert [name for name in pages if "torchrun --nproc-per-node" not in PAGES[name].read_text()] == []


def _run(ctx: iris.Iris, path: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        left = runpy.run_path(path)
    for value in left.values():  # contexts that a page leaves open
        if isinstance(value, iris.Iris):
            value.close()
    return printed.getvalue()


@pytest.mark.parametrize(
    "page", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WITH_PYTHON]
)
def test_python_of_a_page_runs_as_pasted(page: str, tmp_path: Path) -> None:
    """Its blocks one after the other: triton reads a kernel's source from a file."""
    if page in NEEDED:
        pytest.importorskip(NEEDED[page])
    script = tmp_path / "page.py"
    text = "\n".join(BLOCK.findall(PAGES[page].read_text()))
    if tiny_chat.ON_HUB in text:
        text = text.replace(tiny_chat.ON_HUB, str(tiny_chat.save(tmp_path / "model")))
    script.write_text(text)
    first, _ = run_ranks(2, _run, str(script))
    assert first.strip(), "a page prints what it shows"


@pytest.mark.slow
def test_the_mixture_s_page_runs_where_slices_differ(tmp_path: Path) -> None:
    """48 columns on five ranks are 10, 10, 10, 10 and 8. Weights on the heap would have to be equal."""
    script = tmp_path / "mixture.py"
    script.write_text("\n".join(BLOCK.findall(PAGES["guides/mixtures.md"].read_text())))
    assert [text.splitlines()[0] for text in run_ranks(5, _run, str(script))] == ["torch.Size([5, 32])"] * 5


@pytest.mark.slow
def test_the_guide_s_hash_is_equal_on_any_number_of_ranks(tmp_path: Path) -> None:
    """It differs without `invariant="ranks"`, or the guide would show nothing."""
    pytest.importorskip("transformers")
    script = tmp_path / "same_logits.py"
    script.write_text(BLOCK.findall(PAGES["guides/same-bits.md"].read_text())[0])
    printed = "".join(run_ranks(ranks, _run, str(script))[0] for ranks in (1, 2, 3))
    hashes = re.findall(r"^(\d) ranks, invariant=(\w+): (\w{16})$", printed, re.MULTILINE)
    assert [ranks for ranks, _, _ in hashes] == list("112233")
    assert len({digest for _, level, digest in hashes if level == "ranks"}) == 1
    assert len({digest for _, level, digest in hashes if level == "None"}) == 3


def _timeline() -> Any:
    """docs/timeline.py, which is no package's."""
    spec = importlib.util.spec_from_file_location("docs_timeline", DOCS / "timeline.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def test_timelines_are_drawn_as_written() -> None:
    timeline, fence = _timeline(), re.compile(r"^```timeline\n(.*?)^```", re.MULTILINE | re.DOTALL)
    fences = [text for path in PAGES.values() for text in fence.findall(path.read_text())]
    assert len(fences) > len(KERNELS)
    for text in fences:
        spans = [span for _, lane in timeline.lanes(text) for span in lane]
        picture = timeline.draw(text)
        assert len(re.findall(r'<rect [^>]*rx="3"', picture)) == len(spans) >= 3
        assert all(f">{html.escape(span.label)}</text>" in picture for span in spans)
    for bad in ("lane: dance 0-1 tile", "lane: push 2-1", "lane push 0-1", "lane: push"):
        with pytest.raises(ValueError, match="expected 'KIND BEGIN-END LABEL'"):
            timeline.lanes(bad)


# --- the site --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["iris", "iris.ccl", "iris_ops", "layers"])
def test_public_names_are_in_the_reference(module: str) -> None:
    directives = {
        name for path in (DOCS / "reference").glob("*.md") for name in re.findall(r"^::: (\S+)", path.read_text(), re.M)
    }
    for name in importlib.import_module(module).__all__:
        value = getattr(importlib.import_module(module), name)
        value = getattr(value, "fn", value)  # the Python function inside one for kernels
        if callable(value) and f"{module}.errors" != getattr(value, "__module__", ""):
            own = getattr(value, "__name__", name)  # of an alias, the name that it stands for
            assert {f"{module}.{own}", f"{getattr(value, '__module__', '')}.{own}"} & directives, name


def test_every_exception_has_its_row() -> None:
    text = PAGES["debugging.md"].read_text()
    table = text.split("## By exception")[1].split("\n## ")[0]
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes == set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))


def test_every_kernel_that_plans_name_has_a_page() -> None:
    ccl = {f"ccl.{name}" for name in ("lamport", "flags", "transfer", "ring", "accumulate")}
    index = PAGES["kernels/index.md"].read_text()
    assert {way.kernel for way in WAYS} == set(KERNELS)
    actual = {path.read_text().split("\n", 1)[0].removeprefix("# ") for path in (DOCS / "kernels").glob("ccl-*.md")}
    assert actual == ccl
    assert set(re.findall(r"^\| \[`([\w.]+)`\]", index, re.MULTILINE)) == ccl | set(KERNELS)


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_kernel_s_page_is_right_and_whole(kernel: str, capsys: pytest.CaptureFixture) -> None:
    """Its sections are complete, its module exists, and its `iris-tp plan` commands choose the kernel."""
    text = KERNELS[kernel].read_text()
    assert re.findall(r"^## (.*)", text, re.M) == ["When it is taken", "Why it is right", "What was measured"]
    assert text.count("```timeline") == 1
    (code, *_) = re.findall(r"`(iris_ops/[\w/]+\.py)`", text)
    assert (ROOT / code).exists()
    commands = re.findall(r"`iris-tp (plan [^`]*)`", text)
    assert len(commands) >= 2
    for command in commands:
        assert cli.main(command.split()) == 0
        chosen = re.findall(r"^chosen ([\w.]+)", capsys.readouterr().out, re.MULTILINE)
        assert chosen == [kernel], command


def test_tables_are_those_of_the_results() -> None:
    actual = list(pages.pages())
    assert len(actual) > len(KERNELS)
    for path, page, new in actual:
        assert page == new, f"{path}: run `python -m benchmarks.report` and commit it"


def test_plots_are_of_the_results_as_they_stand() -> None:
    """Each is signed with date, commit and versions of its result; and none lies there that no page shows."""
    plots = {path.name: path for path in (DOCS / "plots").glob("*.svg")}
    assert plots.keys() == report.shown()
    results = {path.stem: path for path in RESULTS.glob("*.json")}
    signed = 0
    for name, path in plots.items():
        of = max((stem for stem in results if name.startswith(stem)), key=len, default=None)
        if of is not None:  # timelines are named by their rows
            line = headline(json.loads(results[of].read_text()))
            drawn = html.unescape(" ".join(re.sub(r"<[^>]*>", " ", path.read_text()).split()))
            assert line in drawn, f"{name}: run `python -m benchmarks.report --plots` and commit it"
            signed += 1
    assert signed >= 10


# --- built -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    if not (page := DOCS / "benchmarks" / "planner.html").exists():
        assert cli.main(["plan", "--html", str(page)]) == 0
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=patient(120))
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_host(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="(https?:[^"]*)"', page.read_text())
        assert loaded == [], page
    assert 'id="iris.device.sync.signal"' in (site / "reference/sync/index.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "line, message",
    [
        ("[nowhere](no-such-page.md)", "no-such-page.md"),
        ("[no anchor](kernels/index.md#no-such-anchor)", "no-such-anchor"),
        ("[no file](../iris/no_such_module.py)", "no_such_module.py"),
        ("::: iris.device.sync.no_such_function", "no_such_function"),
        ("```timeline\nlane: dance 0-1\n```", "KIND BEGIN-END LABEL"),
    ],
)
def test_what_leads_nowhere_stops_the_build(site: Path, line: str, message: str, tmp_path: Path) -> None:
    for name in ("iris", "iris_ops", "layers", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "plots"))
    shutil.copytree(DOCS / "plots", tmp_path / "docs/plots")
    shutil.copytree(ROOT / "benchmarks/results", tmp_path / "benchmarks/results")
    for name in ("mkdocs.yml", "SECURITY.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs/debugging.md"
    page.write_text(page.read_text() + f"\n{line}\n")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, timeout=patient(120))
    assert built.returncode != 0 and message in built.stdout + built.stderr
