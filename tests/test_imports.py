"""The arrows of the house, and that nothing happens at import."""

import ast
from collections.abc import Iterator
import functools
from pathlib import Path

import pytest

from tests import fresh

ROOT = Path(__file__).parents[1]

# package, what its modules may not import, and whether a function may do so lazily
FORBIDDEN = [
    ("iris", ("iris_ops", "layers", "iris_tp", "transformers"), True),
    ("iris_ops", ("layers", "iris_tp", "transformers"), False),
    ("layers", ("iris_tp", "tests", "benchmarks", "examples"), False),
    ("iris_tp", ("tests", "benchmarks", "examples"), False),
    ("iris_tp", ("transformers", "gguf"), True),
]


def imports(
    tree: ast.AST, package: tuple[str, ...], functions: bool, typing: bool = False
) -> Iterator[tuple[int, str]]:
    """Line and absolute name of each module that `tree` imports.

    Inside functions too if `functions`, and what only type checkers read if `typing`.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not typing:
            continue
        elif functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports(node, package, functions, typing)


def imports_of(path: Path, functions: bool) -> list[tuple[int, str]]:
    package = path.relative_to(ROOT).parent.parts
    return list(imports(parsed(path), package, functions))


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.mark.parametrize("package, names, lazily_allowed", FORBIDDEN)
def test_arrows_point_one_way(package: str, names: tuple[str, ...], lazily_allowed: bool) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, name in imports_of(path, functions=not lazily_allowed)
        if name.split(".")[0] in names
    ]
    assert not wrong, "\n".join(wrong)


PACKAGES = ("iris", "iris_ops", "layers", "iris_tp", "benchmarks")


def modules() -> dict[str, Path]:
    """Each module of the packages by its name, `__init__` by that of its folder."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


@functools.cache
def arrows(lazy_and_typing: bool) -> dict[str, set[str]]:
    """What each module imports: modules of these packages, and triton."""
    known, found = modules(), {}
    for name, path in known.items():
        package = tuple(name.split(".")) if path.stem == "__init__" else tuple(name.split("."))[:-1]
        seen = {each for _, each in imports(parsed(path), package, lazy_and_typing, lazy_and_typing)}
        # `from package import module` is an arrow to the module, not to the package around it
        seen -= {each.rpartition(".")[0] for each in seen if each in known}
        found[name] = {each if each in known else "triton" for each in seen if each in known or _is_triton(each)}
        found[name].discard(name)
    return found


def _is_triton(name: str) -> bool:
    return name.split(".")[0] == "triton"


def reached(start: list[str], arrows: dict[str, set[str]]) -> set[str]:
    """Return all modules that the modules of `start` import, directly or not."""
    found, todo = set(), list(start)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += arrows.get(name, ())
    return found


def test_no_imports_go_in_a_circle() -> None:
    """Not even where a function imports when it is called, or only a type is wanted."""
    known = arrows(lazy_and_typing=True)
    circles = {name for name in known if name in reached(list(known[name]), known)}
    assert not circles, {name: sorted(known[name] & circles) for name in sorted(circles)}


# Of `benchmarks`, the lowest first; above them all the commands, which nobody imports but each other.
ROOMS = ("measuring", "rivals", "cases", "tables", "plots")


def test_rooms_of_the_benchmarks_import_only_those_below() -> None:
    folder = ROOT / "benchmarks"
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == set(ROOMS)
    below: set[str] = set()
    wrong = []
    for room in ROOMS:
        below.add(room)
        for path in sorted((folder / room).glob("*.py")):
            for line, name in imports_of(path, functions=True):
                _, _, inside = name.partition("benchmarks.")
                if inside and inside.split(".")[0] not in below:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "folder", ["iris_ops.planning", "iris_ops.problem", "iris_ops.config", "layers.shard", "iris.heap"]
)
def test_arithmetic_reaches_no_triton_and_no_kernel(folder: str) -> None:
    known = arrows(lazy_and_typing=False)
    found = reached([name for name in known if f"{name}.".startswith(f"{folder}.")], known)
    assert "triton" not in found
    pure = ("iris_ops.planning", "iris_ops.problem", "iris_ops.sum_tree", "iris_ops.config")
    pure += ("iris_ops.activation", "iris_ops.quantised.packing")  # what formats store, and what follows a product
    assert not [name for name in found if name.startswith("iris_ops.") and not name.startswith(pure)], found


# What triton and Gluon document, by the modules that have it. All else is for `iris/triton_private.py`.
PUBLIC_TRITON = ("triton", "triton.language", "triton.experimental.gluon", "triton.experimental.gluon.language")
PUBLIC_TRITON += ("triton.experimental", "triton.tools.tensor_descriptor")


@pytest.mark.parametrize("package", ["iris", "iris_ops", "layers", "iris_tp", "benchmarks", "examples"])
def test_one_module_has_all_private_names_of_triton(package: str) -> None:
    allowed = {*PUBLIC_TRITON, "triton.tools.tensor_descriptor.TensorDescriptor"}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.name != "triton_private.py"
        for line, name in imports_of(path, functions=True)
        if name.split(".")[0] == "triton" and name not in allowed
    ]
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.name != "triton_private.py":
            wrong += [f"{path.relative_to(ROOT)}:{line} reads {name}" for line, name in _of_triton(path)]
    assert not wrong, "\n".join(wrong)


def _of_triton(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that read attributes of triton that may change: `triton.runtime...`, `gl._name`."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            inner = node.value.id == "triton" and node.attr in ("runtime", "knobs", "compiler", "backends")
            if inner or node.value.id in ("triton", "tl", "gl") and node.attr.startswith("_"):
                yield node.lineno, f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("package", ["iris", "iris_ops", "layers"])
def test_each_launch_says_whether_products_and_sums_are_fused(package: str) -> None:
    """By `**FUSED`, by `platform.launch_options` or `_rounding`, which have it, or by `repeat.launch`."""
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(parsed(path)):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Subscript) and ast.unparse(called.value).endswith("kernel"):
                spread = [ast.unparse(each.value) for each in node.keywords if each.arg is None]
                if not any(word in each for each in spread for word in ("FUSED", "platform.launch_options", "options")):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def run_python(code: str) -> str:
    result = fresh.run(code)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_import_is_light() -> None:
    code = """
import importlib, logging, sys, threading
for package, absent in (("iris", ("iris_ops", "layers")), ("iris_ops", ("layers",)), ("layers", ())):
    importlib.import_module(package)
    loaded = [name for name in (*absent, "transformers", "torch._dynamo") if name in sys.modules]
    assert not loaded, f"import {package} also imports {loaded}"
import os, torch
assert torch.cuda.is_available() or os.environ["TRITON_INTERPRET"] == "1"  # nobody has to set it
assert not torch.cuda.is_initialized()
assert not torch.distributed.is_initialized()
assert [type(each) for each in logging.getLogger("iris").handlers] == [logging.NullHandler]
assert threading.active_count() == 1, threading.enumerate()
"""
    run_python(code)


def test_iris_on_amd_keeps_triton_from_cutting_addresses() -> None:
    code = "import torch, triton; torch.version.hip = '6.4'; import iris; assert not triton.knobs.amd.use_buffer_ops"
    run_python(f"import os; os.environ.update(AMDGCN_USE_BUFFER_OPS='1', TRITON_INTERPRET='0'); {code}")


@pytest.mark.parametrize(
    "given, message",
    [
        ("3.5.1", "triton is 3.5.1, with torch "),
        pytest.param("3.10.0+git1", "triton is 3.10.0+git1, with torch ", marks=pytest.mark.slow),
        (None, "needs triton, which is not installed: pip install 'triton>=3.6,<3.10'"),
    ],
)
def test_a_triton_of_another_version_is_named(given: str | None, message: str, tmp_path: Path) -> None:
    """Before it is imported, which this one cannot be."""
    if given:
        (tmp_path / "triton").mkdir()
        (tmp_path / "triton" / "__init__.py").write_text(f"__version__ = '{given}'\nraise RuntimeError('imported')\n")
        find = f"sys.path.insert(0, {str(tmp_path)!r})"
    else:
        find = "importlib.util.find_spec = lambda name: None"
    code = f"import importlib.util, sys\n{find}\ntry:\n    import iris\nexcept ImportError as error:\n    print(error)"
    printed = run_python(code)
    assert message in printed
    assert not given or "pip install 'torch>=2.10,<2.16' 'triton>=3.6,<3.10'" in printed


def test_the_range_of_triton_is_the_package_s() -> None:
    from iris import requirements

    assert f'"{requirements.SUPPORTED}"' in (ROOT / "pyproject.toml").read_text()
    assert requirements.triton_version() == __import__("triton").__version__
