"""Make Triton's interpreter compute what a GPU would.

`builder`, `floats` and `reductions` correct numbers that it computes wrong; `launching` leaves tensors where they are.
`fast` runs the library's own kernels faster. All names of Triton's that are private come from `iris/triton_private.py`.
"""


def prepare() -> None:
    """Correct the interpreter of this process, in which TRITON_INTERPRET is 1."""
    from ...triton_private import TensorHandle, replace_builder, represent_bfloat16
    from . import launching, reductions
    from .builder import Builder

    reductions.prepare()
    represent_bfloat16()
    TensorHandle.__init__ = _init_handle  # Triton's refuses a bfloat16 of 32 bits
    replace_builder(Builder)
    launching.prepare()


def _init_handle(self, data, dtype, attr=None) -> None:
    self.data, self.dtype = data, dtype
    self.attr = {} if attr is None else attr
