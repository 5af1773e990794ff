"""Turns what kernels ask of the host in the interpreter (`arch.py`) into operations, so that a replay asks anew."""

from __future__ import annotations

from collections.abc import Callable
import inspect
from typing import Any

import numpy as np

from ...triton_private import InterpretedFunction, TensorHandle, core
from . import replay

_TYPES = {int: (core.int64, np.int64), bool: (core.int1, np.bool_)}


def prepare() -> None:
    """Does so for all device functions that are made from now on."""
    InterpretedFunction.__init__ = _noting(InterpretedFunction.__init__)


def _noting(init: Callable) -> Callable:
    def made(self, fn, **options):
        init(self, fn, **options)
        if replay.serves(fn):
            for name in fn.__code__.co_names:
                function = fn.__globals__.get(name)
                if _asks_the_host(function, fn.__module__):
                    fn.__globals__[name] = _operation(function)

    return made


def _asks_the_host(function: Any, module: str) -> bool:
    """Whether `module` has made `function` a builtin of the language, which Triton calls and does not compile."""
    marked = inspect.isfunction(function) and getattr(function, "__triton_builtin__", False)
    return marked and function.__module__ == module and not hasattr(function, "is_operation")


def _operation(function: Callable) -> Callable:
    """Wraps `function`: its result, a number or None, becomes a value of the language."""

    def computed(*args: Any) -> Any:
        result = function(*args)
        if result is None:
            return None
        made, kind = _TYPES[type(result)]
        return core.tensor(TensorHandle(np.array([result], kind), made), made)

    def asked(*args: Any) -> Any:
        return replay.called(computed, args, {}, effect=True)

    asked.is_operation = True  # type: ignore[attr-defined]
    return asked
