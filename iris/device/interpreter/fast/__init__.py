"""Run the library's own kernels faster in Triton's interpreter: enabled by `IRIS_REPLAY=1`, else not imported.

`repetition` and `quick` do once what the interpreter repeats without need; `replay`, `operations` and `host` do so for
a whole kernel. All of it holds while a kernel of the library runs (`scope`): a user's kernels, and all else in the
process, run on Triton unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
import sys
from types import SimpleNamespace
from typing import Any

import triton.language as tl

from ....triton_private import ReduceScan, builder, core, interpreter, semantic
from . import host, quick, repetition
from .replay import Recording, Tape, kind_of, recorded
from .scope import Scope

_MOST_RECORDINGS = 256  # the oldest is dropped first


class Fast:
    """The language for the library's kernels, and recordings of them by function and types of arguments."""

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages = packages
        self.recordings: dict[Any, Recording] = {}
        self.tape = Tape()
        self._scope: Scope | None = None
        kind = recorded(type(builder), self.tape)
        self._builder = kind()
        self._builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)

    def supports(self, fn: Callable) -> bool:
        """Return whether the kernel belongs to one of these packages."""
        return fn.__module__.partition(".")[0] in self._packages

    def run(self, fn: Callable, arguments: Callable[[], dict[str, Any]], places: Callable) -> None:
        """Run a kernel on `arguments()` at each of the `places` of a grid of the size that `places(given)` gives."""
        given = arguments()
        size, every = places(given)
        self._builder.set_grid_dim(*size)
        run = self._runner(partial(self._python, fn), fn, given)
        for place in every:
            self._builder.set_grid_idx(*place)
            run()

    def _python(self, fn: Callable, **given: Any) -> None:
        """Run a kernel's Python, which a replay does without."""
        with self._scope or Scope() as scope:
            if self._scope is None:
                self._fill(scope)
            fn(**given)

    def _fill(self, scope: Scope) -> None:
        scope.set(interpreter, "_LangPatchScope", lambda: SimpleNamespace(set_attr=scope.set))
        quick.direct_builtins(scope)
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))  # what kernels may see of it
        scope.set(core.dtype, "to_ir", repetition.itself)
        scope.set(interpreter, "interpreter_builder", self._builder)
        scope.set(semantic, "builder", self._builder)
        repetition.prepare(scope)
        quick.prepare(scope, self.tape)
        modules = (sys.modules[f"iris.device.{name}"] for name in ("arch", "bounds"))  # which import this package
        host.prepare(scope, self.tape, list(modules))
        apply, tape = ReduceScan.apply, self.tape
        scope.set(ReduceScan, "apply", lambda self, operands: tape.called(apply, (self, operands), {}))
        self._scope = scope

    def _runner(self, python: Callable, fn: Callable, given: dict[str, Any]) -> Callable[[], None]:
        """Return the call that runs one program of a kernel with these arguments."""
        arrays: list = []
        key = fn, *[kind_of(value, arrays) for value in given.values()]
        try:
            recording = self.recordings.get(key)
        except TypeError:  # a constant that cannot be hashed
            return partial(python, **given)
        if recording is None:
            if len(self.recordings) >= _MOST_RECORDINGS:
                del self.recordings[next(iter(self.recordings))]
            recording = self.recordings[key] = Recording(self.tape)
        return partial(recording.run, python, given, arrays)
