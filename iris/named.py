"""Look up what planning names, a function or a class, without importing the kernels in its module."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def named_in(package: str, where: str) -> Any:
    """Return `module:name` below `package`, or of an absolute module where the name begins with `tests.`."""
    module, _, name = where.partition(":")
    return getattr(import_module(module if module.startswith("tests.") else f"{package}.{module}"), name)
