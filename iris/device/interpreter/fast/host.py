"""Turn calls of interpreted kernels to the host (`arch.py`) into operations, so that a replay calls the host again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import inspect
from types import ModuleType
from typing import Any

import numpy as np

from ....triton_private import TensorHandle, core
from .replay import Tape
from .scope import Scope

_TYPES = {int: (core.int64, np.int64), bool: (core.int1, np.bool_)}


def prepare(scope: Scope, tape: Tape, modules: Sequence[ModuleType]) -> None:
    """Replace the functions of these modules that call the host."""
    for module in modules:
        for name, function in list(vars(module).items()):
            if _calls_the_host(function, module.__name__):
                scope.set(module, name, _operation(function, tape))


def _calls_the_host(function: Any, module: str) -> bool:
    """Return whether `module` has made `function` a builtin of the language, which Triton calls and never compiles."""
    marked = inspect.isfunction(function) and getattr(function, "__triton_builtin__", False)
    return marked and function.__module__ == module


def _operation(function: Callable, tape: Tape) -> Callable:
    """Wrap `function`: its result, a number or None, becomes a value of the language."""

    def computed(*args: Any) -> Any:
        result = function(*args)
        if result is None:
            return None
        type_, dtype = _TYPES[type(result)]
        return core.tensor(TensorHandle(np.array([result], dtype), type_), type_)

    def recorded(*args: Any) -> Any:
        return tape.called(computed, args, {}, effect=True)

    return recorded
