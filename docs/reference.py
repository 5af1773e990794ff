"""Writes docs/reference.md, the API as its docstrings tell it: `python -m docs.reference` (`--check` only compares).

The source is parsed, not imported, so the page is the same on every platform and with every version of torch.
"""

import argparse
import ast
from dataclasses import dataclass
import inspect
from pathlib import Path
import sys
import textwrap

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path(__file__).with_suffix(".md")


@dataclass(frozen=True)
class Section:
    """Some functions and classes of one file, called as `prefix` and their name."""

    title: str
    file: str
    prefix: str
    names: tuple[str, ...]
    methods: str = ""  # what stands before a method, an object of the class


SECTIONS = (
    Section("Making a context", "iris/context.py", "iris.", ("iris",)),
    Section("The context", "iris/context.py", "iris.", ("Iris",), "ctx."),
    Section("Log lines", "iris/log.py", "iris.", ("set_logger_level",)),
    Section("Tensors on the heap", "iris/tensors.py", "", ("TensorMethods",), "ctx."),
    Section(
        "Remote memory access in kernels",
        "iris/device/rma.py",
        "iris.",
        ("load", "store", "get", "put", "copy")
        + tuple(f"atomic_{name}" for name in ("add", "cas", "xchg", "xor", "and", "or", "min", "max")),
    ),
    Section("The device context", "iris/device/context.py", "iris.", ("DeviceContext",), "ctx."),
    Section("Its methods", "iris/device/context.py", "", ("RemoteAccess",), "ctx."),
    Section("Signals and waits", "iris/device/sync.py", "iris.device.sync.", ("signal", "wait")),
    Section("Waits that failed", "iris/device/waits.py", "iris.device.waits.", ("healthy",)),
    Section(
        "Calls of many programs",
        "iris/device/sync.py",
        "iris.device.sync.",
        ("sync_words", "enter", "await_entered", "next_tile", "leave"),
    ),
    Section("Gluon (experimental)", "iris/experimental/iris_gluon.py", "iris_gl.", ("IrisDeviceCtx",), "ctx."),
    Section("Collectives", "iris/ccl/collectives.py", "", ("Collectives",), "ctx.ccl."),
    Section("Choices of a collective", "iris/ccl/config.py", "iris.ccl.", ("Config", "ReduceOp")),
    Section("Fused ops", "iris_ops/ops.py", "", ("Ops",), "ctx.ops."),
    Section("Choices of a fused op", "iris_ops/config.py", "iris_ops.", ("FusedConfig", "Prediction")),
    Section("Tracing", "iris/tracing.py", "", ("Tracing",), "ctx.tracing."),
    Section("Tracing in kernels", "iris/device/tracing.py", "", ("DeviceTracing",), "ctx.tracing."),
    Section(
        "Layers",
        "layers/linear.py",
        "layers.",
        ("ColumnParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"),
        "layer.",
    ),
    Section("Splitting a model", "layers/hf/parallelize.py", "layers.", ("parallelize",)),
    Section("Loading a model", "layers/checkpoint/load.py", "layers.", ("from_pretrained",)),
    Section("Inside transformers' own loading", "layers/hf/transformers_adapter.py", "layers.", ("fused_styles",)),
    Section("Saving a model", "layers/checkpoint/save.py", "layers.", ("save_pretrained",)),
    Section("What became of a model", "layers/hf/report.py", "layers.", ("Report",), "report."),
    Section("Serving", "layers/serving/engine.py", "layers.", ("Engine",), "engine."),
    Section("Sampling by generate()", "layers/hf/generation.py", "layers.", ("share_rng",)),
    Section("Errors", "iris/errors.py", "iris.errors.", ("*",)),
)


def page() -> str:
    parts = ["# Reference", "Written by `python -m docs.reference` from the docstrings; edit those."]
    for section in SECTIONS:
        parts += [f"## {section.title}", *_section(section)]
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> list[str]:
    source = (ROOT / section.file).read_text()
    found = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    missing = set(section.names) - set(found) - {"*"}
    if missing:
        raise LookupError(f"{section.file} has no {', '.join(sorted(missing))}: change SECTIONS in docs/reference.py")
    names = [name for name in found if not name.startswith("_")] if section.names == ("*",) else section.names
    parts = []
    for name in names:
        if isinstance(found[name], ast.ClassDef):
            parts += _class(found[name], section, source)
        else:
            parts += _entry(section.prefix, found[name])
    return parts


def _class(node: ast.ClassDef, section: Section, source: str) -> list[str]:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    init = next((item for item in methods if item.name == "__init__" and section.prefix), None)
    aggregate = any("_aggregate" in ast.unparse(mark) for mark in node.decorator_list)  # not made by its constructor
    name = section.prefix + node.name
    base = f" ({', '.join(map(ast.unparse, node.bases))})" if node.bases and section.names == ("*",) else ""
    parts = [f"### `{name}`{base}"] if section.prefix else []
    parts += [_code(f"{name}({_arguments(init)})")] if init and not aggregate else []
    parts += _text(node)
    if any("dataclass" in ast.unparse(mark) for mark in node.decorator_list) or _is_enum(node):
        parts += _fields(node, source)
    for item in methods:
        if not item.name.startswith("_"):
            without_object = {"staticmethod", "classmethod"} & set(map(ast.unparse, item.decorator_list))
            parts += _entry(f"{node.name}." if without_object or not section.methods else section.methods, item)
    return parts


def _is_enum(node: ast.ClassDef) -> bool:
    return any("Enum" in ast.unparse(base) for base in node.bases)


def _fields(node: ast.ClassDef, source: str) -> list[str]:
    """A dataclass's fields, an enumeration's members, with their comments."""
    lines = source.splitlines()
    kept: list[str] = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign | ast.Assign):
            above = item.lineno - 1
            while lines[above - 1].strip().startswith("#"):
                above -= 1
            kept += lines[above : item.end_lineno]
    return [_code(textwrap.dedent("\n".join(kept)))] if kept else []


def _code(text: str) -> str:
    return f"```python\n{text}\n```"


def _entry(prefix: str, node: ast.FunctionDef) -> list[str]:
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    is_value = "property" in marks or "functools.cached_property" in marks
    heading = f"#### `{prefix}{node.name}`"
    return [heading, *([] if is_value else [_code(f"{prefix}{node.name}({_arguments(node)})")]), *_text(node)]


def _arguments(node: ast.FunctionDef) -> str:
    arguments = node.args
    first = arguments.args[0].arg if arguments.args else ""
    if first in ("self", "cls"):
        arguments = ast.arguments(**{**dict(ast.iter_fields(arguments)), "args": arguments.args[1:]})
    return ast.unparse(arguments)


def _text(node: ast.ClassDef | ast.FunctionDef) -> list[str]:
    text = ast.get_docstring(node, clean=False)
    return [inspect.cleandoc(text)] if text else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if the page is not what it should be")
    if parser.parse_args().check:
        sys.exit(PAGE.read_text() != page())
    PAGE.write_text(page())
    print(PAGE)


if __name__ == "__main__":
    main()
