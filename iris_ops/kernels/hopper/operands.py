"""Prepare the arguments of warp-specialised kernels (`pipeline.py`), and explain why one cannot compute a call.

A launcher describes A and B as the hardware loads them, a block at a time. It says as layouts which thread holds what:
of the product the MMA warps' threads (`mma.py`), of a finished tile's parts the mover warps'. Layouts are constants of
the kernel, so they are made here, on the host, from the configuration alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris import platform
from iris.machines import machine_of
from iris.triton_private import GluonDescriptor
import torch
from triton.experimental.gluon import language as gl

from ...config import FusedConfig
from ...named import named
from ...planning.needs import LINE, PLAIN, WeightFormat
from ...planning.overlap_model import spread_us
from ...planning.tile_model import tile_us
from ...planning.waves import code_stages, gemm_tiles, shared_tiles, skew_steps
from ...planning.workspace_size import staged
from ...problem import Problem
from ..arguments import Pipeline, SharedTiles, Tile, TileEpilogue
from ..descriptors import as_stored, folded, of_whole_vectors
from ..lamport_matmul import lamport_arguments
from ..launching import grid_of, parts_memory
from . import scaled_mma, widened_mma
from .mma import LOADER_REGISTERS, MMA_WARPS, MOVER_REGISTERS, accumulator

if TYPE_CHECKING:
    from iris.rank import Rank

    from ...operands import Operands
    from ...workspace import Workspace

MOVER_WARPS, FEWER_MOVER_WARPS = 4, 2
# Elements of a tile that each thread of the mover warps holds at a time.
_HELD = 32
_GLUON_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.int32: gl.int32,
}
SCALE_TYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.uint8: gl.uint8,
}


def supports(A: torch.Tensor, B: torch.Tensor, out: torch.Tensor, step: int = 0) -> str | None:
    """Return why warp-specialised programs cannot compute a call, or None.

    `step`: the width of a part in a row of B or `out`. Ranks may differ in this: the portable kernel does the same.
    """
    if A.dtype not in _GLUON_TYPES:
        return f"it does not multiply {A.dtype}"
    if not platform.has_warp_specialisation(A.device):
        return "it needs a Hopper GPU"
    if not (A.numel() and B.numel() and out.numel()):
        return "there is nothing to multiply"
    if not all(of_whole_vectors(t, step) for t in (A, as_stored(B), out)):
        return "rows of A, B or out begin between vectors of 16 bytes"
    return None


def arguments(
    A: torch.Tensor,
    B: torch.Tensor,
    bias: torch.Tensor | None,
    config: FusedConfig,
    folds: bool = True,
    weights: WeightFormat = PLAIN,
    scale: torch.Tensor | None = None,
    movers: int = MOVER_WARPS,
) -> dict:
    """Return what all kernels warp-specialised are given: operands, blocks, and, as layouts, which thread holds what.

    `folds`: as in `descriptors.rows_operand`. `movers`: how many mover warps suffice, where a loader takes the place of
    two: for weights that are stored as codes, or with scales of blocks. Large tiles leave no registers for more.
    """
    if not (weights.widened_in_tiles or weights.scales_blocks):
        movers = MOVER_WARPS
    elif _is_large(config):
        movers = FEWER_MOVER_WARPS
    if weights.widened_in_tiles:
        return _of_codes(A, B, bias, config, weights, scale, movers)
    stored = as_stored(B)
    transposed = stored is not B
    depth = config.depth(A.dtype.itemsize)
    block_b = (config.block_n, depth) if transposed else (depth, config.block_n)
    loader = int(movers < MOVER_WARPS)
    pipeline = layouts(config.block_m, config.block_n, A.element_size(), config.num_warps, movers, loader)
    if config.block_n == 256 and A.element_size() == 1:
        pipeline |= _more_registers(pipeline)
    if weights.scales_blocks:
        pipeline["ACC"] = scaled_mma.accumulator(config.block_m, config.block_n, config.num_warps)
        pipeline["TOGETHER"] = scaled_mma.together(config.block_n, config.num_warps)
    return dict(
        a=(rows_described if folds else described)(A, (config.block_m, depth)),
        b=described(stored, block_b),
        epilogue=TileEpilogue(bias),
        tile=Tile(config.block_m, config.block_n, depth, config.group_m, transposed),
        pipeline=Pipeline(config.num_stages, **pipeline),
    )


def _of_codes(
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, config: FusedConfig, weights: WeightFormat,
    scale: torch.Tensor | None, movers: int,
) -> dict:  # fmt: skip
    """Return the same of B's codes, which the MMA warps widen while a loader loads."""
    assert scale is not None
    widening, codes = named(weights.widening), B.t().view(torch.int32)
    words = widening.WORDS
    stages, slots = code_stages(weights, config)
    pipeline = layouts(config.block_m, config.block_n, warps=config.num_warps, movers=movers, loader=1)
    if _is_large(config):
        pipeline |= _more_registers(pipeline)
    apart = [words, codes.stride(0), 1]
    by_groups, groups = dict(b_scales=scale), LINE // weights.group if weights.group else 0
    if groups:
        in_words = scale.flatten(1).view(torch.int32)
        by_groups = dict(block_scales=in_words, block_stride=in_words.stride(0))
    return dict(
        a=described(A, (config.block_m, LINE // widened_mma.BLOCKS)),
        b=described(codes, (1, config.block_n, words), ([codes.shape[1] // words, codes.shape[0], words], apart)),
        epilogue=TileEpilogue(bias, **by_groups),
        tile=Tile(config.block_m, config.block_n, LINE, config.group_m, True),
        pipeline=Pipeline(
            stages,
            **pipeline | dict(ACC=widened_mma.accumulator(config.block_m, config.num_warps)),
            SLOTS=slots,
            WIDENING=widening,
            GROUPS=groups,
            ZEROS=weights.zeros,
            SCALES=SCALE_TYPES[scale.dtype],
            WORDS=groups * (1 + weights.zeros) * scale.itemsize // 4,
        ),
    )


def _is_large(config: FusedConfig) -> bool:
    """Return whether the sums of a tile take half of the MMA warps' registers."""
    return config.num_warps == MMA_WARPS and config.block_m * config.block_n > 128 * 128


def _more_registers(pipeline: dict) -> dict:
    """Return what gives MMA warps more registers: mover warps hold half as much at a time, and have fewer."""
    rows = pipeline["ROWS"] // 2
    return dict(MOVER_REGISTERS=120, ROWS=rows, PRODUCT=_swizzled(rows))


def _swizzled(rows: int) -> gl.SwizzledSharedLayout:
    """Return the layout of finished tiles in parts of `rows` rows, in which all parts are alike."""
    return gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=min(8, rows), order=[1, 0])


def layouts(
    block_m: int, block_n: int, itemsize: int = 2, warps: int = MMA_WARPS, movers: int = MOVER_WARPS, loader: int = 0
) -> dict:
    """Return the layouts of a tile in the MMA warps' registers, in shared memory and in the mover warps' registers.

    They are fields of `Pipeline`. `itemsize` is in bytes an operand's element; `warps` is the number that multiply,
    `movers` that of mover warps, and `loader` that of warps which load.
    """
    rows = movers * 32 * _HELD // block_n
    registers = LOADER_REGISTERS[movers][warps] if loader else (MOVER_REGISTERS[warps], 0)
    return dict(
        ACC=accumulator(block_m, block_n, itemsize, warps),
        PRODUCT=_swizzled(rows),
        MOVE=in_rows(movers, block_n),
        ROWS=rows,
        MOVER_WARPS=movers,
        LOADER_WARPS=loader,
        MOVER_REGISTERS=registers[0],
        LOADER_REGISTERS=registers[1],
    )


def in_rows(warps: int, block_n: int) -> gl.BlockedLayout:
    """Return the layout over the threads of `warps` warps of rows of `block_n` elements: whole vectors each."""
    across = min(32, block_n // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [warps, 1], [1, 0])


def described(
    t: torch.Tensor, block: tuple[int, ...], lies: tuple[list[int], list[int]] | None = None
) -> GluonDescriptor:
    """Return `t` as a descriptor that loads a block at a time.

    `lies` is (shape, strides), where they differ from the tensor's.
    """
    shape, strides = lies or (list(t.shape), list(t.stride()))
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _GLUON_TYPES[t.dtype])
    return GluonDescriptor(t, shape, strides, list(block), layout)


def rows_described(A: torch.Tensor, block: tuple[int, int]) -> GluonDescriptor:
    """Return A as kernels load its rows: folded, where they are fewer than a tile's (`tiles.first_row`)."""
    high = block[0]
    if high // 2 <= A.shape[0] < high:
        return described(A, (2, high // 2, block[1]), folded(A, high))
    return described(A, block)


def specialised_arguments(
    rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, args: dict, tensors: Operands
) -> tuple[tuple[int, int, int], dict]:
    """Return the grid and all arguments of a kernel that pushes tiles, some of them shared (`stream_k.Units`)."""
    programs, rates = platform.num_programs(rank.device), machine_of(rank.device)
    shared, sharers = shared_tiles(problem, config, programs)
    grid = grid_of(rank.device, config, max(gemm_tiles(problem, config), sharers))
    own = dict(
        joins=SharedTiles(
            parts_memory(workspace, problem, config, sharers), workspace.flags[staged(problem, config)[0] :]
        ),
        stride_om=tensors.out.stride(0),
        shared_tiles=shared,
        sharers=sharers,
        skew=skew_steps(problem, config, programs, tile_us(problem, config, rates)),
        spread=platform.ticks(spread_us(problem, config, rates) * 1e-6),
        SHARED=shared > 0,
    )
    out, A, B, bias, scale = tensors
    return grid, args | own | arguments(A, B, bias, config, True, problem.weights, scale)


def lamport_specialised_arguments(
    rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands
) -> tuple[tuple[int, int, int], dict]:
    """Return the grid and the arguments that all warp-specialised Lamport kernels are given."""
    grid, args = lamport_arguments(rank, workspace, problem, config, tensors.out)
    spread = platform.ticks(spread_us(problem, config, machine_of(rank.device)) * 1e-6)
    own = arguments(tensors.A, tensors.B, tensors.bias, config, True, problem.weights, tensors.scale)
    return grid, args | dict(spread=spread, stride_om=tensors.out.stride(0), **own)
