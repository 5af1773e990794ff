"""The names of the fused ops, and which of them have what in common."""

from __future__ import annotations

ALL_REDUCE = "matmul_all_reduce"
GATHER_MATMUL = "all_gather_matmul"
MATMUL_GATHER = "matmul_all_gather"
REDUCE_SCATTER = "matmul_reduce_scatter"
OPS = (ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER)
SUMS = (ALL_REDUCE, REDUCE_SCATTER)  # those that add up what the ranks multiply
# An all-reduce, and what follows it (`rmsnorm_epilogue.py`).
NORM = "matmul_all_reduce_norm"
# `all_gather_matmul` by rows, of whose result the first half gates the second: to plan and launch, the same problem.
GATED = "all_gather_matmul_gated"
# Those that take weights with scales (`planning/weights/`).
SCALED = (ALL_REDUCE, NORM, GATHER_MATMUL, GATED, REDUCE_SCATTER)
