"""The kernels of tests, examples and benchmarks, as users write them, that are compiled ahead of time: more cases like
those of `kernel_cases.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from iris import platform
import torch
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.cases import rma_kernels as benchmark
from examples import tile_all_reduce, tile_all_reduce_hopper
from examples.all_scatter import common, fused_store_warp
from tests import gluon_kernels, rma_kernels, tile_kernels
from tests.kernel_cases import BF16, FP32, WORLD_SIZE, new


def users(target: GPUTarget) -> Iterator[Any]:
    """Kernels of tests, examples and benchmarks, as users write them."""
    lane = target.warp_size

    def launch(kernel: Any, ctx: Any, *, dtype: torch.dtype = BF16, **options: Any) -> None:
        known = dict(src=new(1 << 16, dtype=dtype), dst=new(1 << 16, dtype=dtype), inp=new(1 << 16))
        known |= dict(out=new(1 << 16, dtype=FP32), flags=new(1 << 12, dtype=torch.int32), rank=2, peer=3, n=4096)
        known |= dict(sums=new(64, dtype=torch.int64), ctx_ptr=ctx.get_device_context(), num_tiles=16, rows=64)
        known |= dict(first_owner=0, owners=4, heap_bases=ctx.get_heap_bases(), WORLD_SIZE=WORLD_SIZE)
        if "sync" in kernel.arg_names or "tiles" in kernel.fn.__name__:
            known["sync"] = known["flags"] = ctx.ccl.tile_space(16, 64 * 128, BF16)
        kernel[(1,)](**{name: known[name] for name in kernel.arg_names if name in known} | options)

    def gluon_tiles(ctx: Any, **options: Any) -> None:
        launch(gluon_kernels.gluon_tiles_kernel, ctx, out=new(1 << 16), **options)

    for name, kernel in rma_kernels.ALL.items():
        yield name, partial(launch, kernel, num_warps=4, BLOCK=2048)
    for name in ("rma_load", "rma_store"):
        yield f"{name}_bytes", partial(launch, rma_kernels.ALL[name], dtype=torch.uint8, num_warps=4, BLOCK=4096)
    for op in ("store", "put"):
        options = benchmark.options(op, torch.device("cuda", 0))
        yield f"benchmark_{op}", partial(launch, benchmark.move_kernel, dtype=torch.int32, **options)
    for name in ("put_and_signal", "copies", "recorded_put", "atomics"):
        block, per_thread = (128, 1) if name == "atomics" else (2048, 8)
        layout = gl.BlockedLayout([per_thread], [lane], [4], [0])
        kernel = getattr(gluon_kernels, f"gluon_{name}_kernel")
        yield f"gluon_{name}", partial(launch, kernel, num_warps=4, BLOCK=block, LAYOUT=layout)
    rows = gl.BlockedLayout([1, 8], [lane // 16, 16], [4, 1], [1, 0])
    for suffix, two_shot in (("", False), ("_two_shot", True)):
        size = dict(M=64, N=128, TWO_SHOT=two_shot, num_warps=4)
        yield f"tile_reduce{suffix}", partial(launch, tile_kernels.tile_reduce_kernel, FLAT=False, **size)
        yield f"gluon_tiles{suffix}", partial(gluon_tiles, LAYOUT=rows, **size)
    for which in ("scatter", "gather", "exchange"):
        yield f"tile_{which}", partial(launch, getattr(tile_kernels, f"tile_{which}_kernel"), M=64, N=128, num_warps=4)
    yield "example_matmul", _example
    if target.arch == 90:
        wide = partial(new, 4096, 4096)
        of, space = tile_all_reduce_hopper, partial(tile_all_reduce_hopper.space_for, M=4096, N=4096, dtype=BF16)
        yield "example_matmul_hopper", lambda ctx: of.tile_matmul_hopper(ctx, space(ctx), wide(), wide(), wide())
        blocks = common.Blocks()
        yield "example_store_warp", lambda ctx: fused_store_warp.all_scatter(common.Case(ctx, wide(), wide(), blocks))


def _example(ctx: Any) -> None:
    a, b = (TensorDescriptor.from_tensor(new(512, 512), block) for block in ([64, 32], [32, 64]))
    space, numbers = ctx.ccl.tile_space(64, 4096), (512, 512, 512, 64, 64, 32, WORLD_SIZE)
    kernel, options = tile_all_reduce.tile_matmul_kernel[(8,)], platform.pdl_options(ctx.device)
    kernel(ctx.get_device_context(), space, a, b, new(512, 512), *numbers, ONE_TILE=True, **options)
