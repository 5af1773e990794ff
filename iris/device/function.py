"""`device_function`: what kernels call is marked with it; kernels themselves are `@triton.jit`.

Compiled, the two are the same. In the interpreter, triton looks through the whole language again at each call of a
jit function inside a kernel, which is most of the time of a kernel on small tensors, and its aggregates lose methods
that are jit functions. The rewritten function alone, which runs in the language as its kernel has set it up, has
neither trouble.
"""

from collections.abc import Callable
from typing import Any, ParamSpec

import triton

from .. import platform
from ..triton_private import rewritten
from . import interpreter

P = ParamSpec("P")


def device_function(fn: Callable[P, object]) -> Callable[P, Any]:
    """A function for kernels and other device functions to call."""
    jitted = triton.jit(fn)
    return rewritten(jitted) if platform.interpreting() else jitted


if platform.interpreting():
    interpreter.prepare()
