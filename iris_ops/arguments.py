"""What kernels are given: for each op one small function that names the arguments, and says on which grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from iris import platform
from iris.device.waits import WAITERS
import torch
import triton

from .config import FusedConfig
from .fp8 import lamport_stream, weight_stream
from .fp8.lamport_stream import few_rows_fp8_kernel
from .kernels.descriptors import as_stored, operand, rows_operand
from .kernels.gather_matmul import all_gather_matmul_kernel
from .kernels.hopper import lamport_pair, lamport_pair_scatter, lamport_two_shot, operands
from .kernels.hopper.matmul_gather import matmul_all_gather_roles_kernel
from .kernels.hopper.matmul_reduce import reduce_scatter_roles_kernel
from .kernels.lamport_gather_matmul import few_rows_gather_kernel
from .kernels.lamport_matmul import few_rows_kernel
from .kernels.matmul_gather import matmul_all_gather_kernel
from .kernels.matmul_reduce import reduce_scatter_kernel
from .kernels.rmsnorm_epilogue import AHEAD_NAMES
from .planning.kinds import scatters, swaps, words_with_roles
from .planning.machine import machine_of
from .planning.overlap_model import spread_us
from .planning.tile_model import tile_us
from .planning.waves import columns_together, cut_tiles, early_tiles, gemm_tiles, shared_tiles, skew_steps
from .planning.workspace_size import exchange_ld, exchanged_part, gathered_part, pieces, staged, tiles_of
from .problem import ALL_REDUCE, FP8, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem, owned_part, part_of

if TYPE_CHECKING:
    from iris.rank import Rank

    from .workspace import Workspace

# A kernel, its grid and its arguments by name.
Launch = tuple[triton.JITFunction, tuple[int, int, int], dict]

# Columns of a piece of A that a program of the gather for few rows moves.
_PIECE_K = 512
# Where no operand is in eight bits.
_NO_SCALES = {"a_scales": None, "b_scales": None}
# Blocks of rows from which on a rank's rows are worth reading all weights for.
_TALL = 4


def _grid(device: torch.device, config: FusedConfig, units: int) -> tuple[int, int, int]:
    """At most one program a multiprocessor: all of them are resident, so they may wait for peers."""
    limit = platform.num_programs(device)
    return max(1, min(units, config.num_programs or limit, limit)), 1, 1


def _product(
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, config: FusedConfig,
    k_step: int = 0, n_step: int = 0, folds: bool = True,
) -> dict:  # fmt: skip
    """The arguments that say how what is multiplied lies in memory. `k_step`, `n_step`: where in B parts begin.

    `folds`: see `operands.rows_operand`.
    """
    depth = config.depth(A.dtype == FP8)
    a, tma_a = rows_operand(A, (config.block_m, depth), folds)
    stored = as_stored(B)
    transposed = stored is not B
    block_b = (config.block_n, depth) if transposed else (depth, config.block_n)
    b, tma_b = operand(stored, block_b, k_step if transposed else n_step)
    return dict(
        a=a,
        b=b if tma_b else B,
        bias=bias,
        stride_am=A.stride(0),
        stride_ak=A.stride(1),
        stride_bk=B.stride(0),
        stride_bn=B.stride(1),
        stride_on=out.stride(1),
        HAS_BIAS=bias is not None,
        TMA_A=tma_a,
        TMA_B=tma_b,
        B_TRANSPOSED=transposed,
    )


def _parts(workspace: Workspace, problem: Problem, config: FusedConfig, count: int) -> torch.Tensor:
    """Where `count` parts of tiles meet: float32, behind what the ranks stage for each other."""
    first = staged(problem, config)[1]
    return workspace.staging[first : first + count * config.block_m * config.block_n * 4].view(torch.float32)


def _common(ctx: Rank, sync: torch.Tensor, problem: Problem, config: FusedConfig, out: torch.Tensor) -> dict:
    return dict(
        **_any(ctx, sync, problem, out),
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.depth(problem.fp8),
    )


def _any(ctx: Rank, sync: torch.Tensor, problem: Problem, out: torch.Tensor) -> dict:
    """What every kernel is given."""
    return dict(
        out=out,
        sync=sync,
        words=ctx.get_device_context(),
        K=problem.K,
        stride_om=out.stride(0),
        WORLD_SIZE=problem.world_size,
        WAITER=WAITERS.index(problem.asked),
    )


def _reduce_scatter(
    ctx: Rank, workspace: Workspace, problem: Problem, config: FusedConfig,
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None,
) -> Launch:  # fmt: skip
    rows, cols, by_cols = owned_part(problem, config)
    args = dict(
        staging=workspace.staging.view(problem.dtype),
        flags=workspace.flags,
        M=problem.M,
        N=problem.N,
        part_rows=rows,
        part_cols=cols,
        early=early_tiles(problem, config, platform.num_programs(ctx.device)),
        BY_COLS=by_cols,
        ALL_REDUCE=problem.op == ALL_REDUCE,
        GROUP_M=config.group_m,
        **_common(ctx, workspace.sync, problem, config, out),
    )
    step = cols if by_cols else 0
    if operands.serve(config, A, B, out, step):
        return reduce_scatter_roles_kernel, *_roles(ctx, workspace, problem, config, args | _NO_SCALES, A, B, bias)
    args |= dict(stagger=platform.ticks(config.stagger_us * 1e-6), **_product(out, A, B, bias, config, n_step=step))
    return reduce_scatter_kernel, _grid(ctx.device, config, gemm_tiles(problem, config)), args


def _roles(
    ctx: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, args: dict,
    A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None,
) -> tuple[tuple[int, int, int], dict]:  # fmt: skip
    """Grid and arguments of a kernel whose programs' warps have roles; see `units.Units` of shared tiles."""
    programs, rates = platform.num_programs(ctx.device), machine_of(ctx.device)
    shared, sharers = shared_tiles(problem, config, programs)
    grid = _grid(ctx.device, config, max(gemm_tiles(problem, config), sharers))
    own = dict(
        parts=_parts(workspace, problem, config, sharers),
        left=workspace.flags[staged(problem, config)[0] :],
        shared_tiles=shared,
        sharers=sharers,
        skew=skew_steps(problem, config, programs, tile_us(problem, config, rates)),
        spread=platform.ticks(spread_us(problem, config, rates) * 1e-6),
        SHARED=shared > 0,
    )
    return grid, args | own | operands.arguments(A, B, bias, config)


def _few_rows(
    ctx: Rank, workspace: Workspace, problem: Problem, config: FusedConfig,
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None,
) -> Launch:  # fmt: skip
    w, by_cols, gather = problem.world_size, problem.form == "cols", problem.op == MATMUL_GATHER
    rows, cols = exchanged_part(problem, config)
    tile_rows, tile_cols = (rows, cols) if gather else (problem.M, problem.N)
    tiles = tiles_of(tile_rows, tile_cols, config)
    grid = _grid(ctx.device, config, tiles)
    args = dict(
        **_NO_SCALES,
        **_exchange(workspace, problem, cols),
        M=part_of(problem.M, w, ctx.cur_rank) if gather and not by_cols else problem.M,
        N=part_of(problem.N, w, ctx.cur_rank) if gather and by_cols else problem.N,
        part_rows=rows,
        **_common(ctx, workspace.exchange_sync, problem, config, out),
    )
    if words_with_roles(problem, config) and operands.serve(config, A, B, out):
        args |= dict(
            spread=platform.ticks(spread_us(problem, config, machine_of(ctx.device)) * 1e-6),
            **operands.arguments(A, B, bias, config),
        )
        if swaps(problem, config):
            stagger = platform.ticks(config.stagger_us * 1e-6)
            args |= dict(GROUP_M=config.group_m, PLACES=lamport_pair.PLACES, stagger=stagger)
            return lamport_pair.swap_roles_kernel, grid, args
        if scatters(problem, config):
            args |= dict(PLACES=lamport_pair.PLACES, group=columns_together(problem, config, grid[0]))
            return lamport_pair_scatter.scatter_roles_kernel, grid, args
        args |= lamport_two_shot.layouts(config.block_m, config.block_n, w)
        return lamport_two_shot.exchange_roles_kernel, grid, args
    exchange = {ALL_REDUCE: "all", REDUCE_SCATTER: "scatter", MATMUL_GATHER: "gather"}[problem.op]
    if config.algorithm == "two_shot":
        exchange = "owners"
    args |= dict(
        whole=problem.N if by_cols else problem.M,
        part_cols=cols,
        stagger=platform.ticks(config.stagger_us * 1e-6),
        EXCHANGE=exchange,
        ONE_TILE=tiles == grid[0],
        BY_COLS=by_cols,
        **dict.fromkeys(AHEAD_NAMES),
        **_product(out, A, B, bias, config),
    )
    return few_rows_kernel, grid, args


def streamed(
    ctx: Rank, workspace: Workspace, problem: Problem, config: FusedConfig,
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None,
) -> Launch:  # fmt: skip
    M, N = out.shape
    programs = min(config.num_programs or platform.num_programs(ctx.device), platform.num_programs(ctx.device))
    T = weight_stream.tiles_at_once(N, programs)
    grid, stages = weight_stream.grid_and_stages(N, M, T, programs)
    args = dict(
        **weight_stream.operands(A, B),
        T=T,
        STAGES=stages,
        scales=scale,
        bias=bias,
        **dict.fromkeys(AHEAD_NAMES),
        **_exchange(workspace, problem, N),
        M=M,
        N=N,
        stride_on=out.stride(1),
        HAS_BIAS=bias is not None,
        **_any(ctx, workspace.exchange_sync, problem, out),
    )
    args |= lamport_stream.layouts(args["BLOCK_M"])
    return few_rows_fp8_kernel, (grid, 1, 1), args


def _exchange(workspace: Workspace, problem: Problem, cols: int) -> dict:
    words = workspace.exchange.view(torch.int32 if problem.dtype == torch.float32 else torch.int16)
    return dict(staging=words, ld=exchange_ld(cols), slot_words=words.numel() // 2)


def _gathered(problem: Problem, A: torch.Tensor, gathered: torch.Tensor, tile: object, tma: bool) -> dict:
    """What gathers first are given: this rank's part of A, and where all ranks' meet."""
    rows, cols, _ = gathered_part(problem)
    return dict(
        a=A,
        a_rows=A.shape[0],
        a_cols=A.shape[1],
        gathered=gathered,
        gathered_tile=tile,
        M=problem.M,
        N=problem.N,
        part_rows=rows,
        part_cols=cols,
        BY_K=problem.form == "k",
        TMA_G=tma,
    )


def _few_rows_gather(
    ctx: Rank, workspace: Workspace, problem: Problem, config: FusedConfig,
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None,
) -> Launch:  # fmt: skip
    rows, cols, _ = gathered_part(problem)
    ld = exchange_ld(problem.K)
    gathered = workspace.staging.view(problem.dtype)[: problem.M * ld].view(problem.M, ld)[:, : problem.K]
    gathered_tile, tma_g = rows_operand(gathered, (config.block_m, config.block_k))
    product = {name: value for name, value in _product(out, A, B, bias, config).items() if name not in ("a", "TMA_A")}
    # pieces: about as many as programs, so that all move data at once
    across = triton.cdiv(cols, _PIECE_K)
    programs = config.num_programs or platform.num_programs(ctx.device)
    piece_m = min(32, triton.next_power_of_2(max(1, triton.cdiv(rows * across, programs))))
    pieces = triton.cdiv(rows, piece_m) * across
    args = dict(
        **_gathered(problem, A, gathered, gathered_tile, tma_g),
        gathered_ld=ld,
        **_exchange(workspace, problem, cols),
        PIECE_M=piece_m,
        PIECE_K=_PIECE_K,
        **product,
        **_common(ctx, workspace.exchange_sync, problem, config, out),
    )
    grid = _grid(ctx.device, config, max(pieces, tiles_of(problem.M, problem.N, config)))
    return few_rows_gather_kernel, grid, args


def _matmul_gather(
    ctx: Rank, workspace: Workspace, problem: Problem, config: FusedConfig,
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None,
) -> Launch:  # fmt: skip
    w, by_cols = problem.world_size, problem.form == "cols"
    rows, cols = problem.part_rows, problem.part_cols
    args = dict(
        M=problem.M if by_cols else part_of(problem.M, w, ctx.cur_rank),
        N=part_of(problem.N, w, ctx.cur_rank) if by_cols else problem.N,
        row_step=0 if by_cols else rows,
        col_step=cols if by_cols else 0,
        GROUP_M=config.group_m,
        **_common(ctx, workspace.sync, problem, config, out),
    )
    if args["M"] * args["N"] and operands.serve(config, A, B, out, args["col_step"]):
        return matmul_all_gather_roles_kernel, *_roles(ctx, workspace, problem, config, args, A, B, bias)
    args |= dict(stagger=platform.ticks(config.stagger_us * 1e-6), **_product(out, A, B, bias, config))
    return matmul_all_gather_kernel, _grid(ctx.device, config, gemm_tiles(problem, config)), args


def _gather_matmul(
    ctx: Rank, workspace: Workspace, problem: Problem, config: FusedConfig,
    out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None,
) -> Launch:  # fmt: skip
    w, by_k = problem.world_size, problem.form == "k"
    rows, cols, ld = gathered_part(problem)
    gathered = workspace.staging.view(problem.dtype)[: w * rows * ld].view(w * rows, ld)[:, :cols]
    tile = (config.block_m, config.block_k)
    gathered_tile, tma_g = operand(gathered, tile)
    product = _product(out, A, B, bias, config, k_step=cols if by_k else 0, folds=False)
    tiles = gemm_tiles(problem, config)
    cut = cut_tiles(problem, config, platform.num_programs(ctx.device))
    grid = _grid(ctx.device, config, max(tiles + cut * (config.splits - 1), config.comm_programs))
    # Where a rank has few rows, weights would be read anew for each rank's: then a round of programs works on the same.
    low, wide = triton.cdiv(rows, config.block_m), triton.cdiv(problem.N, config.block_n)
    columns = wide if by_k or low >= _TALL else max(1, min(wide, grid[0] // (low * w)))
    args = dict(
        a_tile=product.pop("a"),
        **_gathered(problem, A, gathered, gathered_tile, tma_g),
        ld=ld,
        columns=columns,
        COMM_PROGRAMS=min(config.comm_programs, grid[0]),
        PIECES=pieces(problem, config),
        rounded=tiles - cut,
        SPLITS=config.splits if cut else 1,
        GROUP_M=config.group_m,
        **product,
        parts=_parts(workspace, problem, config, cut * (config.splits - 1)),
        flags=workspace.flags,
        **_common(ctx, workspace.sync, problem, config, out),
    )
    return all_gather_matmul_kernel, grid, args


_FEW_ROWS = {GATHER_MATMUL: _few_rows_gather}
_OVERLAPPED = {
    ALL_REDUCE: _reduce_scatter,
    GATHER_MATMUL: _gather_matmul,
    MATMUL_GATHER: _matmul_gather,
    REDUCE_SCATTER: _reduce_scatter,
}


def way_of(problem: Problem, config: FusedConfig) -> Callable[..., Launch]:
    """The function that names the arguments of what `config` has launched, but for `few_rows_fp8`'s stream."""
    if config.algorithm == "overlapped":
        return _OVERLAPPED[problem.op]
    return _FEW_ROWS.get(problem.op, _few_rows)
