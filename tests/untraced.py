"""The sources without the calls that record events: what a kernel must compile to where tracing is off."""

import ast
from pathlib import Path
import re

from tests.processes import ROOT


def copy_untraced(folder: Path) -> None:
    """What kernels are compiled from, with every call that records left out."""
    changed = 0
    for package in ("iris", "iris_ops", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text()
            stripped = _without_tracing(source) if package != "tests" else source
            changed += stripped != source
            copy = folder / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(stripped)
    assert changed >= 3


def _without_tracing(source: str) -> str:
    """The source with `pass` in place of every statement that only serves to record events."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        call = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.Expr) else None
        if isinstance(call, ast.Call) and re.search(
            r"\.record_event_(start|end)$|^tile_bytes$", ast.unparse(call.func)
        ):
            lines[node.lineno - 1] = " " * node.col_offset + "pass"
            lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)
    return "\n".join(lines) + "\n"
