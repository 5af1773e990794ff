"""Which code a result was made by: digests of the kernels that it launched and of the plans, taken from the sources.

A part is a name and the modules in which it begins: a kernel of `iris_ops`, the collectives, the plans, an engine. Its
digest covers these modules and those modules of `DEVICE` that they import, at any depth and also inside functions: the
code that runs on GPUs, neither the host's code around it nor the interpreter that CPUs have. Comments, docstrings and
blank lines do not count, so that words can be mended without a mark on every table. The plans are a part of their own.

`recorded(report)` goes into each JSON file as "code". `changes(report)` compares it with the sources as they stand. A
file that is older than these digests cannot be judged: it says `UNKNOWN`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
import functools
import hashlib
import io
import os
from pathlib import Path
import subprocess
import tokenize

ROOT = Path(__file__).resolve().parents[2]
DEVICE = (
    "iris.device.", "iris.ccl.", "iris_ops.kernels.", "iris_ops.with_torch.", "iris_ops.local.", "iris_ops.fp8.",
    "iris_ops.moe.",
)  # fmt: skip
_ON_CPUS = "iris.device.interpreter.", "iris_ops.planning.interpreted"
PLANS = "plans"
UNKNOWN = "unknown: before digests"
_PLANNING = ("iris_ops.planning.",)
_SEQUENTIAL = "with_torch.sequential"  # torch's product, then a collective of the context
# What a benchmark runs beside the kernels that its rows name. A name that ends in a dot stands for a whole package.
_BEGINNINGS = {
    "ops": (),
    "norms": ("iris_ops.kernels.rmsnorm_epilogue",),
    "ccl": ("iris.ccl.",),
    "rma": ("iris.device.", "benchmarks.cases.rma_kernels"),
    "rooted": ("iris.ccl.messages", "iris.ccl.rings", "iris.ccl.rooted", "iris.ccl.transfer"),
    "tiles": ("iris.device.", "examples.tile_all_reduce"),
    "moe": ("iris_ops.moe.",),
    "outputs": ("iris_ops.kernels.",),
    "invariance": DEVICE,
    "llm": (*DEVICE, "layers.serving.", "layers.linear", "layers.sharded"),
}
# Modules that have moved since results were measured, by the names that their digests know.
_MOVED = {"benchmarks.cases.rma_kernels": "benchmarks.rma_kernels"}
_PLANNED = ("ops", "norms", "moe", "outputs", "invariance", "llm")  # who asks `iris_ops/planning/`


def recorded(report: dict) -> dict[str, str]:
    """By part, the digest of its sources now; nothing for a benchmark of which no table is rendered."""
    benchmark = _benchmark(report)
    if benchmark not in _BEGINNINGS:
        return {}
    parts = {name: digest(beginnings_of(name)) for name in launched(report)}
    if _BEGINNINGS[benchmark]:
        parts[benchmark] = digest(_BEGINNINGS[benchmark])
    if benchmark in _PLANNED:
        parts[PLANS] = digest(_PLANNING)
    return parts


def changes(report: dict) -> list[str]:
    """The parts whose sources have changed since `report` was measured; `[UNKNOWN]` where nothing was recorded."""
    if not report.get("code"):
        return [UNKNOWN]
    now = recorded(report)
    return sorted(name for name, value in report["code"].items() if now.get(name) != value)


def launched(report: dict) -> list[str]:
    """Names of our kernels that the plans of the rows name, sorted."""
    plans = [result.get("plan") or {} for row in report.get("rows", []) for result in row.get("results", [])]
    return sorted({plan["kernel"] for plan in plans if plan.get("kernel")})


def module_of(kernel: str) -> str:
    """The module in which a kernel stands, by its name in a plan."""
    for package in ("iris_ops.kernels.", "iris_ops."):
        # one module has two kernels: hopper.lamport_pair_scatter stands in hopper/lamport_pair.py
        for name in (kernel, kernel.removesuffix("_scatter")):
            if _file(package + name):
                return package + name
    return f"iris_ops.kernels.{kernel}"  # which is gone: so it has changed


def beginnings_of(kernel: str) -> tuple[str, ...]:
    return module_of(kernel), *(("iris.ccl.",) if kernel == _SEQUENTIAL else ())


def commit() -> str | None:
    """The commit that is checked out, or what IRIS_COMMIT says where the sources came without their history."""
    if told := os.environ.get("IRIS_COMMIT"):
        return told
    query = ["git", "-C", str(ROOT), "rev-parse", "--short=9", "HEAD"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def digest(beginnings: tuple[str, ...]) -> str:
    """Twelve digits for the modules that `beginnings` name and what they import of `DEVICE`."""
    whole = hashlib.sha256()
    for name in sorted(_reached(beginnings)):
        file = _file(name)
        whole.update(f"{_MOVED.get(name, name)}\n{_code_of_file(file) if file else 'is gone'}\n".encode())
    return whole.hexdigest()[:12]


def _reached(beginnings: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = [module for name in beginnings for module in _modules(name)]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if file := _file(name):
            waiting += [each for each in _imports_of_file(name, file) if _is_measured(each)]
    return found


def _is_measured(name: str) -> bool:
    return name.startswith(DEVICE) and not name.startswith(_ON_CPUS)


@functools.cache
def _imports_of_file(name: str, file: Path) -> list[str]:
    return imports(name, file.read_text(), file.name == "__init__.py")


@functools.cache
def _code_of_file(file: Path) -> str:
    return code_of(file.read_text())


def _modules(name: str) -> list[str]:
    """A module, or all modules of a package, by a name that ends in a dot."""
    if not name.endswith("."):
        return [name]
    folder = ROOT / name[:-1].replace(".", "/")
    files = [file for file in sorted(folder.rglob("*.py")) if file.name != "__init__.py"]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [each for each in names if not each.startswith(_ON_CPUS)]


def imports(name: str, text: str, package: bool = False) -> list[str]:
    """The modules of this checkout that a module imports, but no package's `__init__`, which imports everything."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".") if node.level else []
            above = above[: len(above) - node.level + package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            found += [f"{origin}.{alias.name}" for alias in node.names] + [origin]
    return [each for each in found if (file := _file(each)) and file.name != "__init__.py"]


def _file(name: str) -> Path | None:
    place = ROOT / name.replace(".", "/")
    if not place.name:
        return None
    files = place.with_name(place.name + ".py"), place / "__init__.py"
    return next((file for file in files if file.is_file()), None)


def code_of(text: str) -> str:
    """A module's text without comments, docstrings and blank lines: what decides what it does."""
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                for row in range(first.lineno, (first.end_lineno or first.lineno) + 1):
                    lines[row - 1] = ""
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _benchmark(report: dict) -> str:
    return str(report.get("benchmark", "")).partition("_")[0]
