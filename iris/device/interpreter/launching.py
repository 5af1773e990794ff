"""Launches kernels in the interpreter: it reads a signature once, and uses tensors where they are, on the CPU.

An error of this library reaches the caller as it is. Triton's launcher would wrap it, and its type would be lost.
"""

import inspect
import itertools

import numpy as np

from ...errors import IrisError
from ...triton_private import GridExecutor, InterpreterError, builder, implicit, interpreter
from . import replay


def prepare() -> None:
    """Puts `Launch` in the place of Triton's launcher."""
    interpreter.GridExecutor = Launch


class Launch(GridExecutor):
    """Triton's launcher, for tensors on the CPU."""

    constexprs: frozenset[str]
    _known: dict = {}  # by function: the names of its constants, and its defaults

    def __init__(self, fn, arg_names, grid, pre_run_hooks=()):
        self.fn, self.arg_names, self.grid, self.pre_run_hooks = fn, arg_names, grid, pre_run_hooks
        if fn not in self._known:
            super().__init__(fn, arg_names, grid, pre_run_hooks)
            parameters = inspect.signature(fn).parameters.values()
            defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
            self._known[fn] = frozenset(self.constexprs), defaults
        self.constexprs, self.defaults = self._known[fn]

    def __call__(self, *args, **kwargs):
        named = {name: value for name, value in kwargs.items() if name in self.arg_names}
        if any(getattr(each, "is_cuda", False) for each in (*args, *named.values())):
            return super().__call__(*args, **kwargs)
        for hook in self.pre_run_hooks:
            hook(*args, **named)
        interpreter._patch_lang(self.fn)
        given = self.defaults | dict(zip(self.arg_names, args, strict=False)) | named
        twice = not named.keys().isdisjoint(self.arg_names[: len(args)])
        if twice or len(args) > len(self.arg_names) or given.keys() != set(self.arg_names):
            inspect.getcallargs(self.fn, *args, **named)  # says which is missing, or one too many
        given = {name: value if name in self.constexprs else implicit(value) for name, value in given.items()}
        grid = self.grid(given) if callable(self.grid) else self.grid
        assert len(grid) <= 3, "grid must have at most 3 dimensions"
        columns, rows, layers = (*grid, 1, 1)[:3]
        builder.set_grid_dim(columns, rows, layers)
        run = replay.runner(self.fn, given)
        places = itertools.product(range(columns), range(rows), range(layers))
        try:
            with np.errstate(all="ignore"):  # no GPU warns
                for place in places:
                    builder.set_grid_idx(*place)
                    run()
        except Exception as error:
            found = error
            while isinstance(found, InterpreterError) and found.__cause__ is not None:  # of functions that are called
                found = found.__cause__
            if isinstance(found, IrisError):
                raise found from None
            raise InterpreterError(repr(found)) from error
