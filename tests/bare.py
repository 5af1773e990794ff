"""Source code as its syntax tree has it. This module imports nothing of the library, so that it can come first."""

from __future__ import annotations

import ast


def bare(source: str) -> str:
    """Return Python source without comments and docstrings, those of attributes too, as the syntax tree has it."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
