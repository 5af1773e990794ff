"""The rows up to which the plug-in replaces layers, and the memory that it reserves for them. Imports no vLLM."""

from __future__ import annotations

from iris.ccl.norm import staged_bytes
import torch

FEW_ROWS = 64  # up to which products stream their weights, and take a norm's factor
ROWS = (1024, 512, 256, 128, FEW_ROWS)
HEAP_BYTES = 64 << 20
_MOST_STAGED = 56 << 20  # the rest is for flags, epochs and what overlapped kernels stage


def most_rows(world: int, hidden: int, mixtures: bool = False) -> int:
    """Return the most rows of an all-reduce [rows, hidden] whose message buffers fit the heap.

    There are three, each of a power of two bytes: of a fused product, of an all-reduce after torch's product, and of an
    all-reduce that ends in a norm. With `mixtures` of experts there is a fourth. All but the norm's hold all ranks'
    rows twice.
    """
    dtype = torch.bfloat16

    def staged(rows: int) -> int:
        exchanged = 2 * world * rows * hidden * dtype.itemsize
        return (2 + mixtures) * _power_of_2(exchanged) + _power_of_2(staged_bytes(rows, hidden, dtype, world))

    return next((rows for rows in ROWS if staged(rows) <= _MOST_STAGED), FEW_ROWS)


def _power_of_2(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length()
