"""The library's lines and branches that tests run: `python -m tests.line_coverage` (or `make coverage`).

    python -m tests.line_coverage                                        what `make test` runs, into build/push.json
    python -m tests.line_coverage --marks "slow and not gpu" --out build/slow.json

coverage.py is on in every process of a test: ranks, examples, benchmarks. The interpreter runs kernels as Python, so
that their lines and branches count, in a row of their own. Kernels in Gluon have no interpreter and are not looked at.
A rank that a test kills takes with it what it had run.
"""

from __future__ import annotations

import argparse
import ast
from dataclasses import dataclass, field
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time

from tests.processes import ROOT

PACKAGES = "iris", "iris_ops", "layers", "iris_tp"
KERNELS = "kernels"
_MARKS = "not gpu and not slow"  # of `make test`
_SETTINGS = """[run]
branch = True
parallel = True
data_file = {folder}/reached
source =
    {sources}
patch = subprocess, _exit
disable_warnings = no-data-collected, module-not-measured, module-not-imported, already-imported, couldnt-parse,
    trace-changed
"""


@dataclass
class Reached:
    """Of a file, or several: what there is, and what of it was run, as (file, line) and (file, line, next line)."""

    lines: set[tuple] = field(default_factory=set)
    branches: set[tuple] = field(default_factory=set)
    run_lines: set[tuple] = field(default_factory=set)
    run_branches: set[tuple] = field(default_factory=set)

    def add(self, other: Reached) -> None:
        for name, values in vars(self).items():
            values |= getattr(other, name)

    def __str__(self) -> str:
        return f"{share(self.run_lines, self.lines)} {share(self.run_branches, self.branches)}"


def share(part: set, whole: set) -> str:
    return f"{len(part):6} of {len(whole):6} {100 * len(part) / max(1, len(whole)):5.1f} %"


def measure(marks: str, jobs: int, out: Path, pytest_args: list[str]) -> int:
    """Runs the tests that `marks` choose, and writes coverage.py's report; returns pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="iris-coverage-") as folder:
        sources = "\n    ".join(str(ROOT / name) for name in PACKAGES)
        Path(folder, "settings").write_text(_SETTINGS.format(folder=folder, sources=sources))
        coverage = [sys.executable, "-m", "coverage"]
        settings = ["--rcfile", str(Path(folder, "settings"))]
        tests = ["-m", "pytest", "-q", "-m", marks, "-n", str(jobs), "--dist", "worksteal", *pytest_args]
        # a test's time-out is meant for processes that nobody watches
        environment = os.environ | {"IRIS_TEST_TIMEOUT": os.environ.get("IRIS_TEST_TIMEOUT", "360")}
        code = subprocess.run([*coverage, "run", *settings, *tests], cwd=ROOT, env=environment).returncode
        subprocess.run([*coverage, "combine", "-q", *settings, folder], cwd=ROOT, check=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([*coverage, "json", "-q", *settings, "-o", str(out)], cwd=ROOT, check=True)
    return code


def jitted(path: Path) -> tuple[set[int], set[int]]:
    """The lines of a file's kernels, and of those in Gluon."""
    triton: set[int] = set()
    gluon: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            given = " ".join(map(ast.unparse, node.decorator_list))
            if "jit" in given or "device_function" in given:
                (gluon if "gluon" in given else triton).update(range(node.lineno, node.end_lineno + 1))
    return triton, gluon


def read(report: Path) -> dict[tuple[str, str], Reached]:
    """By (row of the table, file): packages have what the host runs."""
    rows: dict[tuple[str, str], Reached] = {}
    for name, file in json.loads(report.read_text())["files"].items():
        triton, gluon = jitted(ROOT / name)
        for part in ("lines", "branches"):
            for seen in ("executed", "missing"):
                for each in file[f"{seen}_{part}"]:
                    place = (name, *each) if part == "branches" else (name, each)
                    if place[1] in gluon:
                        continue
                    row = KERNELS if place[1] in triton else name.partition("/")[0]
                    reached = rows.setdefault((row, name), Reached())
                    getattr(reached, part).add(place)
                    if seen == "executed":
                        getattr(reached, f"run_{part}").add(place)
    return rows


def table(rows: dict[tuple[str, str], Reached]) -> str:
    lines = [f"{'':10}{'lines':>24}{'branches':>25}"]
    for row in (*PACKAGES, KERNELS):
        whole = Reached()
        for (of, _), reached in rows.items():
            if of == row:
                whole.add(reached)
        lines.append(f"{row:10}{whole}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.line_coverage", description=__doc__.splitlines()[0])
    parser.add_argument("--marks", default=_MARKS, help=f"which tests run, as pytest's -m (default: {_MARKS!r})")
    parser.add_argument("--jobs", type=int, default=2, help="processes that run tests (default: 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "build/push.json", help="default: build/push.json")
    parser.add_argument("pytest_args", nargs="*", help="what else pytest is given, behind --")
    given = parser.parse_args()
    begin = time.monotonic()
    code = measure(given.marks, given.jobs, given.out, given.pytest_args)
    print(f"{given.out}, after {time.monotonic() - begin:.0f} s", table(read(given.out)), sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
