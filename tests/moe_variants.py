"""The kernels of a mixture of experts, in the forms that differ, for ahead-of-time compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iris_ops.moe.activation import GPT_OSS, Activation
from iris_ops.moe.combine import moe_combine_kernel
from iris_ops.moe.grouped_matmul import moe_matmul_kernel
from iris_ops.moe.lamport_combine import moe_lamport_combine_kernel
from iris_ops.moe.lamport_down import moe_lamport_down_kernel
from iris_ops.moe.lamport_token import moe_lamport_token_kernel
from iris_ops.moe.routing import moe_count_kernel, moe_route_kernel
from iris_ops.planning.machine import Machine
from iris_ops.planning.moe_problem import DOWN_ALL_REDUCE, GATE_UP, MoeProblem
from iris_ops.planning.plan import weigh
import torch
from triton.backends.compiler import GPUTarget

# name: tokens, rows and columns of a tile, gate (or None: the product back), whether weights are transposed.
PRODUCTS = {
    "moe_gate_up_few": (8, 16, 128, "halves", True),
    "moe_gate_up_one": (1, 16, 64, "halves", True),
    "moe_gate_up_one_columns": (1, 16, 64, "halves", False),
    "moe_gate_up_turns": (8, 16, 128, "turns", False),
    "moe_gate_up_sorted": (4096, 64, 128, "halves", True),
    "moe_gate_up_large": (4096, 128, 256, "turns", False),
    "moe_gate_up_halves": (4096, 128, 256, "halves", True),
    "moe_down_sorted": (4096, 64, 128, None, True),
    "moe_down_large": (4096, 128, 256, None, False),
}
# name: tokens, rows and columns of a tile, ranks.
HOPS = {
    "moe_lamport_down_one": (1, 16, 64, 2),
    "moe_lamport_down_few": (8, 16, 64, 2),
    "moe_lamport_down_sorted": (64, 64, 128, 4),
}


def moe_variants(target: GPUTarget, machine: Machine, world_size: int) -> Iterator[tuple[str, Any, dict, dict]]:
    """(name, kernel, options, constants), as `kernel_variants.variants` has them."""
    cuda = target.backend == "cuda"
    yield "moe_count", moe_count_kernel, dict(num_warps=4, num_stages=1), dict(BLOCK=512, BINS=256)
    for name, blocks, scanned in (("moe_route", 1, 4096), ("moe_route_counted", 4, 0)):
        constants = dict(BLOCK=128, BLOCKS=blocks, SCANNED=scanned, BINS=256, WORLD_SIZE=world_size, WAITER=13)
        yield name, moe_route_kernel, dict(num_warps=8, num_stages=2), constants
    for name, (tokens, rows, cols, gate, transposed) in PRODUCTS.items():
        options, constants = _product(machine, tokens, rows, cols, gate, transposed, cuda)
        function = None if gate is None else Activation() if gate == "halves" else GPT_OSS
        constants |= dict(
            KIND=function and function.kind, ALPHA=function.alpha if function else 1.0,
            LIMIT=function and function.limit, SHIFT=function.shift if function else 0.0, GATE=gate, GROUP_M=8,
            BLOCK_N=cols // 2 if gate else cols,
        )  # fmt: skip
        yield name, moe_matmul_kernel, options, constants
        if cuda and name in ("moe_gate_up_few", "moe_down_large"):
            yield f"{name}_pointers", moe_matmul_kernel, options, {**constants, "TMA_B": False}
    for name, (tokens, rows, cols, ranks) in HOPS.items():
        options, constants = _product(machine, tokens, rows, cols, None, True, cuda)
        constants.pop("TOGETHER")
        constants |= dict(WORLD_SIZE=ranks, TOP_K=8, HAS_SHARED=True, ONE_TILE=ranks == 2, BLOCK_T=16, stride_sn=1)
        yield name, moe_lamport_down_kernel, options, constants
    for name, transposed, choices, cols, depth in (("", True, 8, 16, 64), ("_columns", False, 4, 32, 64)):
        constants = dict(
            TOP_K=choices, CHOICES=choices, HAS_BIAS=not transposed, HAS_SHARED=True, BLOCK_N=cols, BLOCK_K=depth,
            STAGES=5, WORLD_SIZE=2, WAITER=15, stride_ak=1, stride_sn=1, stride_on=1,
        )  # fmt: skip
        constants |= dict(stride_bk=1) if transposed else dict(stride_bn=1)
        yield f"moe_lamport_token{name}", moe_lamport_token_kernel, dict(num_warps=4, num_stages=5), constants
    constants = dict(TOP_K=8, HAS_SHARED=True, BLOCK_M=8, BLOCK_N=256, stride_on=1, stride_sn=1, WAITER=15)
    for exchange, ranks in (("all", 2), ("owners", 4), ("scatter", 4)):
        known = constants | dict(EXCHANGE=exchange, WORLD_SIZE=ranks)
        yield f"moe_lamport_combine_{exchange}", moe_lamport_combine_kernel, dict(num_warps=4, num_stages=1), known
    constants = dict(TOP_K=8, HAS_SHARED=True, BLOCK_M=4, BLOCK_N=512, stride_on=1, stride_sn=1)
    yield "moe_combine", moe_combine_kernel, dict(num_warps=4, num_stages=1), constants


def _product(
    machine: Machine, tokens: int, rows: int, cols: int, gate: str | None, transposed: bool, cuda: bool
) -> tuple[dict, dict]:
    """Options and constants of what a plan would launch on tiles of so many rows and columns."""
    op = DOWN_ALL_REDUCE if gate is None else GATE_UP
    problem = MoeProblem(op, tokens, 8, 128, 2048, 2048, 2, torch.bfloat16, gate is not None)
    config = next(
        c
        for c in (each.config for each in weigh(problem, machine).candidates)
        if (c.block_m, c.block_n) == (rows, cols)
    )
    constants = dict(
        SORTED=tokens > 8, SEARCHED=128 if tokens > 8 else 64 if tokens > 1 else 1, HAS_BIAS=gate != "halves",
        TMA_B=cuda,
        TOGETHER=gate == "halves" and (cols < 128 if rows < 64 else transposed and cuda),
        B_TRANSPOSED=transposed, BLOCK_M=rows, BLOCK_N=cols,
        BLOCK_K=config.block_k, stride_ak=1, stride_on=1,
        WORLD_SIZE=2, WAITER=14,
    )  # fmt: skip
    constants |= dict(stride_bk=1) if transposed else dict(stride_bn=1)
    return dict(num_warps=config.num_warps, num_stages=config.num_stages), constants
