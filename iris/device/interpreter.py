"""What Triton's interpreter does again and again without need, done once, and words of 16 bits that it loads whole.

The first is most of the time of kernels on small tensors, and nothing that they compute or check changes. Triton 3.6,
at each launch and each call of a jit function inside a kernel, looks through the whole language for functions to put
its own in place of; computes whether an int32 overflows, though without its debug option it drops the answer; writes
down a table of numpy's dtypes, and what a value's type and shape are called, for each value made; and takes bfloat16
apart into sign, exponent and significand to make the upper half of a float32 of it.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np


def spare_repetition() -> None:
    """For this process, in which the interpreter is on."""
    from triton.language import core
    from triton.runtime import interpreter

    interpreter._patch_lang = _once_a_module(interpreter._patch_lang)
    interpreter._get_np_dtype = _once_a_name(interpreter._get_np_dtype)
    core.block_type.__init__ = _once_a_type(core.block_type.__init__, core)
    core.block_type.with_element_ty = _once_an_element(core.block_type.with_element_ty)
    core.tensor.__init__ = _once_a_kind(core.tensor.__init__)
    interpreter._convert_float = _by_halves(interpreter._convert_float, core)
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


def load_words_whole() -> None:
    """Has integers of 16 bits loaded at once, for words that say themselves whether they have arrived (`exchange`).

    The interpreter copies each element by memcpy, of which a C library may make a load of two bytes and one of the last
    byte again: of a word that is stored between them, half is new and half is old.
    """
    from triton.language import core
    from triton.runtime import interpreter

    load = interpreter.InterpreterBuilder.create_masked_load

    def load_whole(self, ptrs, mask, other, *hints, **named_hints):
        if ptrs.get_element_ty() != core.int16:
            return load(self, ptrs, mask, other, *hints, **named_hints)
        asked = np.broadcast_to(mask.data, ptrs.data.shape).astype(bool)
        found = np.zeros(ptrs.data.shape, np.int16)
        if other is not None:
            found[...] = other.data
        at = ptrs.data[asked]
        if at.size:
            first, last = int(at.min()), int(at.max())
            found[asked] = np.asarray(_Words(first, (last - first) // 2 + 1))[(at.astype(np.int64) - first) // 2]
        return interpreter.TensorHandle(found, core.int16)

    interpreter.InterpreterBuilder.create_masked_load = load_whole


class _Words:
    """Memory from an address on, as numpy takes it: `count` integers of 16 bits."""

    def __init__(self, address: int, count: int) -> None:
        self.__array_interface__ = {"data": (address, True), "shape": (count,), "typestr": "<i2", "version": 3}


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
        return _Kept

    return patched


def _once_a_name(np_dtype: Callable) -> Callable:
    known = {}

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


def _by_halves(convert: Callable, core) -> Callable:
    """Between bfloat16 and float32, which it is the upper half of; downwards what is below is dropped, as there."""

    def converted(data, from_dtype, to_dtype, rounding_mode):
        if from_dtype == core.bfloat16 and to_dtype == core.float32:
            return data.view(np.uint16).astype(np.uint32) << 16
        if from_dtype == core.float32 and to_dtype == core.bfloat16 and rounding_mode is None:
            return (data.view(np.uint32) >> 16).astype(np.uint16)
        return convert(data, from_dtype, to_dtype, rounding_mode)

    return converted
