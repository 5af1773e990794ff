"""Triton's interpreter, mended: numbers that it computes wrong (`builder`, `reductions`), and what it repeats without
need (`repetition`, `quick`, `launching`, and, for whole kernels, `replay` and `host`). `iris/triton_private.py` names
all that is Triton's own.
"""


def prepare() -> None:
    """Mends the interpreter for this process, in which it is on."""
    from ...triton_private import TensorHandle, replace_builder
    from . import host, launching, reductions, repetition, replay
    from .builder import Builder

    repetition.prepare()
    reductions.prepare()
    launching.prepare()
    host.prepare()
    TensorHandle.__init__ = _made  # Triton's refuses a bfloat16 of 32 bits
    replace_builder(replay.told(Builder))


def _made(self, data, dtype, attr=None) -> None:
    self.data, self.dtype = data, dtype
    self.attr = {} if attr is None else attr
