"""What kernels ask of the host in the interpreter (`arch.py`), as operations, so that a replay asks anew."""

from __future__ import annotations

from collections.abc import Callable
import inspect
from typing import Any

import numpy as np

from ...triton_private import InterpretedFunction, TensorHandle, core
from . import replay

_TYPES = {int: (core.int64, np.int64), bool: (core.int1, np.bool_)}


def prepare() -> None:
    """For functions of kernels that are made from now on."""
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
    """Whether it is a function of `module` that triton's compiler passes over as if it were the language's."""
    marked = inspect.isfunction(function) and getattr(function, "__triton_builtin__", False)
    return marked and function.__module__ == module and not hasattr(function, "is_operation")


def _operation(function: Callable) -> Callable:
    """`function` with its result, a number of the host or None, as a value of the language."""

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
