"""Mends Triton's interpreter in two ways.

`builder`, `floats` and `reductions` correct numbers that Triton's interpreter computes wrong. `repetition`, `quick` and
`launching` do once what it repeats without need; `replay`, `operations` and `host` do so for a whole kernel. All names
of Triton's that are private come from `iris/triton_private.py`.
"""


def prepare() -> None:
    """Mends the interpreter of this process, in which TRITON_INTERPRET is 1."""
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
