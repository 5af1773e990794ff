"""Digests of the code behind a result: of the kernels that it launched and of the planner, taken from the sources.

A part is a name and the modules in which it begins: a kernel of `iris_ops`, the collectives, the plans, an engine. Its
digest covers these modules and those modules of `DEVICE` that they import, at any depth and also inside functions: the
code that runs on GPUs, neither the host's code around it nor the interpreter that CPUs have. Comments, docstrings and
blank lines do not count, so edits of prose mark no table. The planner is a separate part.

`recorded(report)` goes into each JSON file as "code". `changes(report)` compares it with the current sources. A
file that is older than these digests is marked `UNKNOWN`.
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
    "iris.device.", "iris.ccl.", "iris_ops.kernels.", "iris_ops.with_torch.", "iris_ops.local.", "iris_ops.quantised.",
    "iris_ops.moe.",
)  # fmt: skip
_ON_CPUS = "iris.device.interpreter.", "iris_ops.planning.interpreted"
PLANS = "plans"
UNKNOWN = "unknown: before digests"
_PLANNING = ("iris_ops.planning.",)
_SEQUENTIAL = "with_torch.sequential"  # torch's product, then a collective of the context
# Code that a benchmark runs besides the kernels that its rows name. A name that ends in a dot is a package.
_BEGINNINGS = {
    "ops": (),
    "regret": (),
    "routers": ("iris_ops.moe.router", "iris_ops.moe.routing"),
    "norms": ("iris_ops.kernels.rmsnorm_epilogue",),
    "ccl": ("iris.ccl.",),
    "rma": ("iris.device.", "benchmarks.cases.rma_kernels"),
    "rooted": ("iris.ccl.messages", "iris.ccl.rings", "iris.ccl.rooted", "iris.ccl.transfer"),
    "tiles": ("iris.device.", "examples.tile_all_reduce"),
    "moe": ("iris_ops.moe.",),
    "outputs": ("iris_ops.kernels.",),
    "invariance": DEVICE,
    "hosts": (*DEVICE, "iris.across", "iris.pending", "iris_ops.hierarchical"),
    "llm": (*DEVICE, "layers.serving.", "layers.linear", "layers.merged_linear", "layers.sharded"),
}
# Modules that have moved since results were measured, by the names that their digests know.
_MOVED = {"benchmarks.cases.rma_kernels": "benchmarks.rma_kernels"}
_PLANNED = (
    "ops",
    "regret",
    "norms",
    "moe",
    "outputs",
    "invariance",
    "hosts",
    "llm",
)  # benchmarks that use `iris_ops/planning/`


def recorded(report: dict) -> dict[str, str]:
    """Return the digest of each part's current sources; empty for a benchmark without a table."""
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
    """Return the parts whose sources have changed since `report` was measured; `[UNKNOWN]` without a record."""
    if not report.get("code"):
        return [UNKNOWN]
    now = recorded(report)
    return sorted(name for name, value in report["code"].items() if now.get(name) != value)


def launched(report: dict) -> list[str]:
    """Return the sorted names of our kernels in the plans of the rows."""
    plans = [result.get("plan") or {} for row in report.get("rows", []) for result in row.get("results", [])]
    return sorted({plan["kernel"] for plan in plans if plan.get("kernel")})


def module_of(kernel: str) -> str:
    """Return the module of a kernel, by its name in a plan."""
    for package in ("iris_ops.kernels.", "iris_ops."):
        # one module has two kernels: hopper.lamport_pair_scatter stands in hopper/lamport_pair.py
        for name in (kernel, kernel.removesuffix("_scatter")):
            if _file(package + name):
                return package + name
    return f"iris_ops.kernels.{kernel}"  # missing, so it counts as changed


def beginnings_of(kernel: str) -> tuple[str, ...]:
    return module_of(kernel), *(("iris.ccl.",) if kernel == _SEQUENTIAL else ())


def commit() -> str | None:
    """Return the commit that is checked out, or IRIS_COMMIT, for sources without their history."""
    if given := os.environ.get("IRIS_COMMIT"):
        return given
    query = ["git", "-C", str(ROOT), "rev-parse", "--short=9", "HEAD"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def digest(beginnings: tuple[str, ...]) -> str:
    """Return twelve digits for the modules that `beginnings` name and what they import of `DEVICE`."""
    total = hashlib.sha256()
    for name in sorted(_reached(beginnings)):
        file = _file(name)
        total.update(f"{_MOVED.get(name, name)}\n{_code_of_file(file) if file else 'is gone'}\n".encode())
    return total.hexdigest()[:12]


def _reached(beginnings: Iterable[str]) -> set[str]:
    reached: set[str] = set()
    pending = [module for name in beginnings for module in _modules(name)]
    while pending:
        name = pending.pop()
        if name in reached:
            continue
        reached.add(name)
        if file := _file(name):
            pending += [each for each in _imports_of_file(name, file) if _is_measured(each)]
    return reached


def _is_measured(name: str) -> bool:
    return name.startswith(DEVICE) and not name.startswith(_ON_CPUS)


@functools.cache
def _imports_of_file(name: str, file: Path) -> list[str]:
    return imports(name, file.read_text(), file.name == "__init__.py")


@functools.cache
def _code_of_file(file: Path) -> str:
    return code_of(file.read_text())


def _modules(name: str) -> list[str]:
    """Return a module, or all modules of a package, whose name ends in a dot."""
    if not name.endswith("."):
        return [name]
    folder = ROOT / name[:-1].replace(".", "/")
    files = [file for file in sorted(folder.rglob("*.py")) if file.name != "__init__.py"]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [each for each in names if not each.startswith(_ON_CPUS)]


def imports(name: str, text: str, package: bool = False) -> list[str]:
    """Return the modules of this checkout that a module imports, except each `__init__`, which imports everything."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = name.split(".") if node.level else []
            above = above[: len(above) - node.level + package] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{origin}.{alias.name}" for alias in node.names] + [origin]
    return [each for each in names if (file := _file(each)) and file.name != "__init__.py"]


def _file(name: str) -> Path | None:
    place = ROOT / name.replace(".", "/")
    if not place.name:
        return None
    files = place.with_name(place.name + ".py"), place / "__init__.py"
    return next((file for file in files if file.is_file()), None)


def code_of(text: str) -> str:
    """Return a module's text without comments, docstrings and blank lines, which do not change its behaviour."""
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
