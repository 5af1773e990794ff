"""Run the library's own kernels faster in Triton's interpreter: enabled by `IRIS_REPLAY=1`, else not imported.

`repetition` and `quick` do once what the interpreter repeats without need. Both hold while a kernel of the library runs
(`scope`): a user's kernels, and all else in the process, run on Triton unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import triton.language as tl

from ....triton_private import builder, core, interpreter, semantic
from . import quick, repetition
from .scope import Scope


class Fast:
    """The language for the library's kernels, which belong to `packages`."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages
        self._scope: Scope | None = None
        self._builder = type(builder)()
        self._builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)

    def supports(self, fn: Callable) -> bool:
        """Return whether the kernel belongs to one of these packages."""
        return fn.__module__.partition(".")[0] in self._packages

    def run(self, fn: Callable, arguments: Callable[[], dict[str, Any]], places: Callable) -> None:
        """Run a kernel on `arguments()` at each of the `places` of a grid of the size that `places(given)` gives."""
        given = arguments()
        size, every = places(given)
        self._builder.set_grid_dim(*size)
        with self._scope or Scope() as scope:
            if self._scope is None:
                self._fill(scope)
            for place in every:
                self._builder.set_grid_idx(*place)
                fn(**given)

    def _fill(self, scope: Scope) -> None:
        scope.set(interpreter, "_LangPatchScope", lambda: SimpleNamespace(set_attr=scope.set))
        scope.set(interpreter, "interpreter_builder", self._builder)
        scope.set(semantic, "builder", self._builder)
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))  # what kernels may see of it
        scope.set(core.dtype, "to_ir", repetition.itself)
        repetition.prepare(scope)
        quick.prepare(scope)
        self._scope = scope
