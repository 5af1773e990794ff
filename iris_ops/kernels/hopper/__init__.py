"""Warp-specialised kernels for NVIDIA Hopper, named like the portable kernels that they replace.

`pipeline.py` is what they share, `mma.py` all that another architecture would do otherwise.
"""

from . import gather_matmul, lamport_pair, lamport_two_shot, matmul_gather, matmul_reduce

__all__ = [
    "gather_matmul",
    "lamport_pair",
    "lamport_two_shot",
    "matmul_gather",
    "matmul_reduce",
]
