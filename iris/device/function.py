"""Define `device_function`, the mark of functions that kernels call; kernels themselves are `@triton.jit`.

Compiled, the two are the same. In the interpreter, triton searches the whole language again at each call of a jit
function inside a kernel, which takes most of the time of a kernel on small tensors, and its aggregates lose methods
that are jit functions. The rewritten function alone, which runs in the language as its kernel has set it up, has
neither problem.
"""

from collections.abc import Callable
from typing import Any, ParamSpec

import triton

from .. import platform
from ..triton_private import rewritten
from . import interpreter

P = ParamSpec("P")


def device_function(fn: Callable[P, object]) -> Callable[P, Any]:
    """Return `fn` as a function that kernels and other device functions call."""
    jitted = triton.jit(fn)
    return rewritten(jitted) if platform.interpreting() else jitted


if platform.interpreting():
    interpreter.prepare()
