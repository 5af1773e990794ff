"""Launch kernels in the interpreter on CPU tensors in place: Triton would copy them, heaps and all.

An error of this library reaches the caller unchanged. Triton's launcher would wrap it, and its type would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
import inspect
import itertools
from typing import Any

import numpy as np

from ... import platform
from ...errors import IrisError
from ...triton_private import GridExecutor, InterpreterError, builder, core, implicit, interpreter
from .fast import Fast


def prepare() -> None:
    """Replace Triton's launcher by `CpuGrid`, and have scalar tensors index and count with any numpy.

    Triton 3.6 makes an integer of an array of one element, which numpy 2.4 refuses. Each call of a jit function inside
    a kernel patches the language anew, so the patch function itself is replaced.
    """
    interpreter.GridExecutor = CpuGrid
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        by_item = "__index__", lambda scalar: scalar.handle.data.item()
        scope[0].set_attr(tensor, *by_item) if scope else setattr(tensor, *by_item)

    interpreter._patch_lang_tensor = patch_tensor


@cache
def fast() -> Any:
    """Return the runner that is faster on the library's own kernels; None where `IRIS_REPLAY` is off."""
    packages = platform.fast_packages()
    if not packages:
        return None
    return Fast(packages)


class CpuGrid(GridExecutor):
    """Triton's launcher, for tensors on the CPU."""

    def __call__(self, *args, **kwargs):
        named = {name: value for name, value in kwargs.items() if name in self.arg_names}
        if any(getattr(each, "is_cuda", False) for each in (*args, *named.values())):
            return super().__call__(*args, **kwargs)
        for hook in self.pre_run_hooks:
            hook(*args, **named)
        given = inspect.getcallargs(self.fn, *args, **named)

        def arguments() -> dict[str, Any]:
            return {name: value if name in self.constexprs else implicit(value) for name, value in given.items()}

        try:
            with np.errstate(all="ignore"):  # no GPU warns
                own = fast()
                run = own.run if own and own.supports(self.fn) else _run
                run(self.fn, arguments, self._places)
        except Exception as error:
            cause = error
            while isinstance(cause, InterpreterError) and cause.__cause__ is not None:  # an error of a called function
                cause = cause.__cause__
            if isinstance(cause, IrisError):
                raise cause from None
            raise InterpreterError(repr(cause)) from error

    def _places(self, given: dict[str, Any]) -> tuple[tuple[int, int, int], Iterator[tuple[int, ...]]]:
        """Return the size of the grid, and an iterator over its places."""
        grid = self.grid(given) if callable(self.grid) else self.grid
        assert len(grid) <= 3, "grid must have at most 3 dimensions"
        size = (*grid, 1, 1)[:3]
        return size, itertools.product(*map(range, size))


def _run(fn: Callable, arguments: Callable[[], dict[str, Any]], places: Callable) -> None:
    scope = interpreter._patch_lang(fn)
    scope.set_attr(core.dtype, "to_ir", lambda dtype, builder: dtype)  # Triton's knows fewer types
    try:
        given = arguments()
        size, every = places(given)
        builder.set_grid_dim(*size)
        for place in every:
            builder.set_grid_idx(*place)
            fn(**given)
    finally:
        scope.restore()
