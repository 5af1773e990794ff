"""The kernels of a mixture of experts, in the forms that differ, for ahead-of-time compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iris_ops.moe.activation import GPT_OSS, Activation
from iris_ops.moe.combine import moe_combine_kernel
from iris_ops.moe.grouped_matmul import moe_matmul_kernel
from iris_ops.moe.routing import moe_route_kernel
from iris_ops.planning.machine import Machine
from iris_ops.planning.moe_problem import DOWN_ALL_REDUCE, GATE_UP, MoeProblem
from iris_ops.planning.moe_ways import candidates
import torch
from triton.backends.compiler import GPUTarget


def moe_variants(target: GPUTarget, machine: Machine, world_size: int) -> Iterator[tuple[str, Any, dict, dict]]:
    """(name, kernel, options, constants), as `kernel_variants.variants` has them."""
    cuda = target.backend == "cuda"
    ranks = dict(WORLD_SIZE=world_size, WAITER=13)
    for experts in (32, 256):
        constants = dict(BLOCK=128, SCANNED=4096, BINS=experts, **ranks)
        yield f"moe_route_{experts}", moe_route_kernel, dict(num_warps=8, num_stages=2), constants
    for tokens, gated in ((8, True), (8, False), (4096, True), (4096, False)):
        op = GATE_UP if gated else DOWN_ALL_REDUCE
        problem = MoeProblem(op, tokens, 8, 128, 768, 2048, world_size, torch.bfloat16, gated)
        for config in candidates(problem, machine):
            turns = gated and config.block_m in (16, 128)
            function = (GPT_OSS if turns else Activation()) if gated else None
            constants = dict(
                KIND=function and function.kind, ALPHA=function.alpha if function else 1.0,
                LIMIT=function and function.limit, SHIFT=function.shift if function else 0.0,
                GATE=("turns" if turns else "halves") if gated else None, SORTED=tokens > 8,
                SEARCHED=128 if tokens > 8 else 64, HAS_BIAS=config.block_m != 32, TMA_B=cuda,
                B_TRANSPOSED=not turns, BLOCK_M=config.block_m, BLOCK_N=config.block_n // (2 if gated else 1),
                BLOCK_K=config.block_k, GROUP_M=config.group_m, stride_ak=1, stride_on=1, **ranks,
            )  # fmt: skip
            constants |= dict(stride_bn=1) if turns else dict(stride_bk=1)
            name = f"moe_{'gate_up' if gated else 'down'}_{config.block_m}x{config.block_n}_{tokens}"
            options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
            yield name, moe_matmul_kernel, options, constants
            if cuda and config.block_m in (16, 128) and not gated:
                yield f"{name}_pointers", moe_matmul_kernel, options, {**constants, "TMA_B": False}
    constants = dict(TOP_K=8, HAS_SHARED=True, BLOCK_M=4, BLOCK_N=512, stride_on=1, stride_sn=1)
    yield "moe_combine", moe_combine_kernel, dict(num_warps=4, num_stages=1), constants
