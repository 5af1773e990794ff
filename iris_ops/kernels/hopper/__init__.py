"""Warp-specialised kernels for NVIDIA Hopper: the same names as the portable ones, which stand in for them."""

from . import gather_matmul, lamport_pair, lamport_two_shot, matmul_gather, matmul_reduce

__all__ = [
    "gather_matmul",
    "lamport_pair",
    "lamport_two_shot",
    "matmul_gather",
    "matmul_reduce",
]
