"""What Triton's interpreter does again and again without need, done once.

That is most of the time of kernels on small tensors, and nothing that they compute or check changes. Triton, at each
launch and each call of a jit function inside a kernel, looks through the whole language for functions to put its
own in place of; computes whether an int32 overflows, though without its debug option it drops the answer; and writes
down a table of numpy's dtypes, and what a value's type and shape are called, for each value made.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ...triton_private import builder, core, interpreter
from . import quick


def prepare() -> None:
    """For this process, in which the interpreter is on."""
    quick.direct_builtins()
    interpreter._patch_lang = _once_a_module(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    core.block_type.__init__ = _once_a_type(core.block_type.__init__, core)
    core.block_type.to_ir = core.pointer_type.to_ir = _itself
    core.block_type.with_element_ty = _once_an_element(core.block_type.with_element_ty)
    core.tensor.__init__ = _once_a_kind(core.tensor.__init__)
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)


def _itself(dtype, builder):
    """What the interpreter's builder has types of."""
    return dtype


class _Kept:
    """What a launch would take back at its end: nothing, for nothing is compiled where the interpreter is on."""

    @staticmethod
    def restore() -> None:
        pass


def _once_a_module(patch: Callable) -> Callable:
    known = {}

    def patched(fn):
        names = fn.__globals__
        if id(names) not in known:
            known[id(names)] = names  # kept, so that the id stays its own
            patch(fn)
            core.dtype.to_ir = _itself  # Triton's knows fewer types
            quick.prepare()
        return _Kept

    return patched


def _once_a_name(np_dtype: Callable) -> Callable:
    known = {"bf16": np.dtype(np.float32)}  # as `floats` has it

    def found(dtype):
        element = dtype.scalar
        name = "pointer" if element.is_ptr() else element.name
        if name not in known:
            known[name] = np_dtype(element)
        return known[name]

    return found


def _once_a_type(init: Callable, core) -> Callable:
    known = {}

    def made(self, element_ty, shape):
        kind = element_ty.name, tuple(core._unwrap_shape(shape))
        if kind not in known:
            init(self, element_ty, shape)
            known[kind] = dict(self.__dict__)
        else:
            self.__dict__.update(known[kind], element_ty=element_ty)

    return made


def _once_an_element(type_with: Callable) -> Callable:
    known = {}

    def found(self, element_ty):
        kind = self.name, element_ty.name
        if kind not in known:
            known[kind] = type_with(self, element_ty)
        return known[kind]

    return found


def _once_a_kind(init: Callable) -> Callable:
    """Of tensors, which know their shape in several forms."""
    known = {}

    def made(self, handle, type):
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = known[type.name]

    return made
