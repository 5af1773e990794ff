"""Look up functions and objects that planning names, without importing the kernels in their modules."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def named(where: str) -> Any:
    """Return `module:name` below `iris_ops`, or of an absolute module where the name begins with `tests.`."""
    module, _, name = where.partition(":")
    package = module if module.startswith("tests.") else f"iris_ops.{module}"
    return getattr(import_module(package), name)
