"""Do once what Triton's interpreter repeats without need.

Kernels on small tensors spend most of their time so. Nothing that they compute or check changes. At each launch, and at
each call of a jit function inside a kernel, Triton searches the whole language for functions to replace. It computes
whether each int32 overflows, and drops the answer unless its debug option is set. For each value it writes a table of
numpy's dtypes, and the names of the value's type and shape.
"""

from collections.abc import Callable

from ....triton_private import core, interpreter
from .scope import Scope


def prepare(scope: Scope) -> None:
    """Replace these parts of the interpreter."""
    scope.set(interpreter, "_patch_lang", lambda fn: None)  # the language is patched already
    scope.set(interpreter, "_get_np_dtype", _once_a_name(interpreter._get_np_dtype))
    scope.set(core.block_type, "__init__", _once_a_type(core.block_type.__init__, core))
    for kind in (core.block_type, core.pointer_type):
        scope.set(kind, "to_ir", itself)
    scope.set(core.block_type, "with_element_ty", _once_an_element(core.block_type.with_element_ty))
    scope.set(core.tensor, "__init__", _once_a_kind(core.tensor.__init__))


def itself(dtype, builder):
    """Return the language's own type, which is what the interpreter's builder works with."""
    return dtype


def _once_a_name(np_dtype: Callable) -> Callable:
    known = {}

    def cached(dtype):
        element = dtype.scalar
        name = "pointer" if element.is_ptr() else element.name
        if name not in known:
            known[name] = np_dtype(element)
        return known[name]

    return cached


def _once_a_type(init: Callable, core) -> Callable:
    known = {}

    def cached_init(self, element_ty, shape):
        kind = element_ty.name, tuple(core._unwrap_shape(shape))
        if kind not in known:
            init(self, element_ty, shape)
            known[kind] = dict(self.__dict__)
        else:
            self.__dict__.update(known[kind], element_ty=element_ty)

    return cached_init


def _once_an_element(type_with: Callable) -> Callable:
    known = {}

    def cached(self, element_ty):
        kind = self.name, element_ty.name
        if kind not in known:
            known[kind] = type_with(self, element_ty)
        return known[kind]

    return cached


def _once_a_kind(init: Callable) -> Callable:
    """Keep a tensor's shape, number of elements and dtype by its type."""
    known = {}

    def cached_init(self, handle, type):
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = known[type.name]

    return cached_init
