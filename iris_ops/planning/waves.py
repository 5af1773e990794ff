"""Count the tiles of a rank's product, and those that are cut, shared or computed early: arithmetic.

`programs` is how many programs run at once on the device. All of them taking a tile is a wave. A configuration may take
fewer programs.
"""

from __future__ import annotations

from ..config import SHARED_BYTES, FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, REDUCE_SCATTER, Problem, owned_part
from .needs import LINE, WeightFormat

L2_BYTES = 50 << 20  # of an H200
_BF16, _MOST_STAGES = 2, 8  # bytes of a number of A where codes are widened; of such a kernel's ring


def programs_of(config: FusedConfig, programs: int) -> int:
    """Return the programs of the persistent grid."""
    return min(config.num_programs or programs, programs)


def gemm_tiles(problem: Problem, config: FusedConfig) -> int:
    """Return the tiles of one rank's product; they do not cross the borders of the ranks' parts."""
    m, n, _ = problem.gemm
    if config.algorithm == "overlapped" and problem.op in (REDUCE_SCATTER, ALL_REDUCE):
        rows, cols, _ = owned_part(problem, config)
        return problem.world_size * _count(rows, cols, config)
    by_sources = config.algorithm == "overlapped" or (config.algorithm == "copy_gather" and config.warp_specialised)
    if by_sources and problem.op == GATHER_MATMUL and problem.form == "rows":
        return problem.world_size * _count(problem.part_rows, n, config)
    return _count(m, n, config)


def cut_tiles(problem: Problem, config: FusedConfig, programs: int) -> int:
    """Return how many tiles are cut along K: those that do not fill a wave of programs; of few waves all of them.

    Only all_gather_matmul by rows cuts tiles so.
    """
    if config.splits == 1 or config.algorithm != "overlapped" or (problem.op, problem.form) != (GATHER_MATMUL, "rows"):
        return 0
    tiles, programs = gemm_tiles(problem, config), config.num_programs or programs
    return tiles % programs if tiles >= 2 * programs else tiles


def loose_tiles(problem: Problem, config: FusedConfig, programs: int) -> int:
    """Return how many tiles fill no wave of warp-specialised programs, which may share them: the same whatever K is."""
    if config.splits == 1 or not config.warp_specialised or problem.op == GATHER_MATMUL:
        return 0
    return gemm_tiles(problem, config) % programs_of(config, programs)


def shared_tiles(problem: Problem, config: FusedConfig, programs: int) -> tuple[int, int]:
    """Return (tiles that warp-specialised programs share, the number of programs): those that do not fill a wave
    (`stream_k.Units`).

    A tile is cut into at most about `config.splits` parts, each of at least one step along K.
    """
    programs = programs_of(config, programs)
    shared, steps = loose_tiles(problem, config, programs), steps_along_k(problem, config)
    sharers = min(programs, config.splits * shared, shared * steps)
    return (shared, sharers) if countable(shared, sharers, steps) else (0, 0)


def steps_along_k(problem: Problem, config: FusedConfig) -> int:
    """Return the blocks along K of a tile, one at least."""
    return max(1, -(-problem.gemm[2] // depth_of(problem.weights, config, problem.itemsize)))


def depth_of(weights: WeightFormat, config: FusedConfig, itemsize: int) -> int:
    """Return how many products along K a step of a tile has, by operands of `itemsize` bytes."""
    return LINE if weights.widened_in_tiles else config.depth(itemsize)


def code_stages(weights: WeightFormat, config: FusedConfig) -> tuple[int, int]:
    """Return for how many half lines of A's rows and lines of codes shared memory has room: places of two rings.

    Codes of a line are free after its second half, so they need a place more than halves in use have.
    """
    room = SHARED_BYTES - _BF16 * config.finished
    half, line = _BF16 * config.block_m * LINE // 2, config.block_n * weights.line_bytes
    stages = max((s for s in range(_MOST_STAGES + 1) if s * half + (s // 2 + 1) * line <= room), default=0)
    return stages, stages // 2 + 1


def codes_refused(weights: WeightFormat, config: FusedConfig) -> str | None:
    """Return the reason why a tile's codes are not widened in shared memory, or None."""
    stages, _ = code_stages(weights, config)
    if stages > 1:
        return None
    return (
        f"config has blocks of {config.block_m} x {config.block_n}, and shared memory room for {stages} of its steps;"
        f" expected smaller blocks, of which two fit: B is {weights.name}"
    )


def countable(shared: int, sharers: int, steps: int) -> bool:
    """Return whether `stream_k.Units` can count the steps of the shared tiles in int32."""
    return 2 * sharers * shared * steps < 1 << 31


def skew_steps(problem: Problem, config: FusedConfig, programs: int, tile_us: float) -> int:
    """Return how many steps more the last sharer takes than the first, so that they end over `config.stagger_us`.

    `tile_us`: the time of a whole tile. None takes more than a tile's steps, less than half the mean, or none at all:
    whoever completes a tile waits for all between.
    """
    shared, sharers = shared_tiles(problem, config, programs)
    if not shared:
        return 0
    steps = steps_along_k(problem, config)
    mean = shared * steps // sharers
    return max(0, min(int(config.stagger_us / tile_us * steps), 2 * (steps - mean - 1), mean, 2 * (mean - 1)))


def early_tiles(problem: Problem, config: FusedConfig, programs: int) -> int:
    """Return how many tiles of each other owner a rank computes before the first of its own; see `tile_orders.turn`.

    Warp-specialised, a quarter of a wave: warps that multiply do not wait for what others move. Else all of them, but
    in an all-reduce among three or more: the sums of own tiles go to several peers each, and the link would be idle
    before and too narrow at the end. Two waves ahead, others' tiles have arrived when they are summed. Mixed owners
    share less of their operands: what a wave reads must fit in L2, unless there are few waves.
    """
    rows, cols, _ = owned_part(problem, config)
    owned, programs = _count(rows, cols, config), config.num_programs or programs
    if config.warp_specialised and problem.world_size > 1:
        return min(owned, -(-programs // (4 * (problem.world_size - 1))))
    early = -(-2 * programs // problem.world_size)
    if problem.op != ALL_REDUCE or problem.world_size < 3 or owned <= early:
        return owned
    high = problem.world_size * config.group_m
    operands = (high * config.block_m + programs / high * config.block_n) * problem.K * problem.dtype.itemsize
    return early if owned <= 2 * programs or operands <= L2_BYTES else owned


def columns_together(problem: Problem, config: FusedConfig, programs: int) -> int:
    """Return how many columns of tiles `tile_orders.OthersFirst` takes at a time, the peer's tiles first: all, or a
    wave's.

    Own tiles then read the same part of B afterwards, best from L2; but tiles are also sent after the last wave.
    """
    num_m, num_n = -(-problem.M // config.block_m), -(-problem.N // config.block_n)
    if problem.K * problem.N * problem.dtype.itemsize <= L2_BYTES:
        return num_n
    return min(num_n, -(-programs // num_m))


def _count(rows: int, cols: int, config: FusedConfig) -> int:
    return -(-rows // config.block_m) * -(-cols // config.block_n)
