"""How long a configuration should take: an analytical model in the manner of tritonBLAS.

(https://github.com/ROCm/tritonBLAS). The product takes waves of tiles (`tile_model.py`). The collective takes its bytes
over the link's rate, and a fixed latency for each hop. How much of one hides behind the other was measured on H200s.
Each function gives (link, total) in microseconds: the transfer alone, and all of the call, for a product of `gemm`
microseconds. `ways.py` says which function is a kernel's.
"""

from __future__ import annotations

from ..config import FusedConfig
from ..problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem, owned_part
from .kernel_names import LAMPORT_TWO_SHOT, keeps_own, kernel_for
from .machine import INTERPRETER, Machine
from .tile_model import tile_us
from .torch_ways import BARRIER_US, COPY_US
from .waves import early_tiles, gemm_tiles, programs_of, skew_steps

# Hops that nothing hides: the entry, then what the last tiles wait for.
_HOPS = {ALL_REDUCE: 2, REDUCE_SCATTER: 2, GATHER_MATMUL: 2, MATMUL_GATHER: 1}
# Of the link's rate, what Lamport values get, which are polled, overwritten by the sentinel and stored once more.
_LAMPORT = {ALL_REDUCE: 0.75, REDUCE_SCATTER: 0.85, GATHER_MATMUL: 0.85, MATMUL_GATHER: 0.85}
_LAMPORT_TWICE = 0.8  # in two shots
# Of sums by tree: what the end of a leaf takes of a program's time, 64 x 128 of it; until a portable kernel's programs
# have taken back the leaves' sums that they had put by. Estimated.
_LEAF_US, _BACK_US = 0.1, 0.6
_KEPT_US = 0.6  # what one shot of an all-reduce takes less where a rank's own part stays in registers
_ONE_GROUP_US = 0.3  # what one warp group takes longer than two for the values of 64 x 64
_HIDDEN_BY_MORE = 0.3  # how much of the values' way more than two waves of products hide
# How much of the shorter of product and transfer the longer one does not hide; measured on H200s.
_EXPOSED = {REDUCE_SCATTER: 0.35, GATHER_MATMUL: 0.3, MATMUL_GATHER: 0.7}
# What one program stores to its peers, GB/s, while few others do.
_PUSH_GBS = 43.0
# Of the link's rate, what programs get that push tiles to everyone and then multiply the next.
_PUSHED = 0.75
# Of warp-specialised programs: what the sum of an own tile of 128 x 256 adds at the end; between two pushes of a
# program.
_LAST_SUM_US = 10.0
_BETWEEN_US = 5.0
# In two shots by warp-specialised programs, for each 64 x 128 of a tile: how long the link rests between two waves, and
# what comes behind the last. Programs drift apart: each wave adds that part to the rest.
_LAMPORT_BETWEEN_US, _LAMPORT_LAST_US, _LAMPORT_DRIFT = 3.0, 3.5, 0.15
# Between two ranks: the share of the link's rate where it is full; what comes behind the last wave, as above; what a
# single wave adds, before which nothing came. Programs drift apart: each wave beyond so many adds that part of a
# product in 16 bits; in eight bits none was seen.
_PAIR, _PAIR_LAST_US, _PAIR_ALONE_US, _PAIR_WAVES, _PAIR_DRIFT = 0.9, 1.5, 1.3, 4, 0.014
# The same two times for a reduce-scatter, in which each rank sums its own rows of a tile.
_PAIR_SCATTER_LAST_US, _PAIR_SCATTER_ALONE_US = 2.5, 1.5
# Of a tile's product, the part over which the tile before may be pushed: then there is its signal.
_SPREAD = 0.8
# What a hop takes less where tiles are small.
_SMALL_HOP_US = 1.5
# What each rank beyond two adds, of which one more is waited for.
_RANK_US = 1.8
# Of an all-reduce with own tiles among others': until the first have arrived, and the last sums are everywhere.
_MIXED_US = 14.0


def copy_gathered(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    """(link, total) of programs that multiply what copy engines bring, a rank's rows after the other's."""
    w, entry = problem.world_size, BARRIER_US * problem.world_size
    copy = problem.part_rows * problem.K * problem.dtype.itemsize / (machine.link_gbs * 1e3) + COPY_US
    # rows come late, or when those before them are multiplied; then all that is left is, one tile at least
    tile = tile_us(problem, config, machine)
    late = max((i * copy + max(gemm * (w - i) / w, tile) for i in range(1, w)), default=0.0)
    return (w - 1) * copy, entry + max(gemm, late)


def lamport(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    """(link, total): values travel behind the product; the last wave hides those of the waves before."""
    # in one shot of an all-reduce every rank gets everything
    shots = 2 if config.algorithm == "two_shot" else 1
    nbytes = problem.link_bytes * (problem.world_size / 2 if problem.op == ALL_REDUCE and shots == 1 else 1)
    kept = keeps_own(problem, config, machine)
    rate = _LAMPORT_TWICE if shots == 2 else _PAIR if kept and problem.world_size == 2 else _LAMPORT[problem.op]
    link = nbytes / (machine.link_gbs * rate * 1e3)
    if problem.op in (ALL_REDUCE, REDUCE_SCATTER) and config.block_m >= 64:  # else there is little to hide
        # sums, which are the second shot, begin behind all products
        waves = max(1, -(-gemm_tiles(problem, config) // programs_of(config, machine.num_programs)))
        hidden = 1 - 1 / waves
        if problem.op == ALL_REDUCE and waves > 2:  # so many values slow the products behind them
            hidden = _HIDDEN_BY_MORE
        gemm -= min(link / shots, gemm) * hidden
    shots += problem.op == GATHER_MATMUL  # until all programs know that all have come
    one_group = config.num_warps == 4 and config.block_m >= 64 and not problem.fp8
    rest = _ONE_GROUP_US * config.block_m / 64 if one_group else 0.0
    if kept:
        rest -= _KEPT_US
    return link, gemm + link + rest + _hops(problem, shots) * machine.exchange_us


def tree(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    """(link, total): the roots of a sum travel behind the product, each as `lamport`'s values do."""
    waves = -(-gemm_tiles(problem, config) // programs_of(config, machine.num_programs))
    if machine.name != INTERPRETER:
        gemm += waves * (_BACK_US + _leaf_ends(problem, config))
    w, roots = problem.world_size, max(map(len, problem.tree.roots))
    size = problem.dtype.itemsize * problem.M * problem.N * (w - 1)
    to_owners = problem.op == REDUCE_SCATTER or config.algorithm == "two_shot"
    nbytes = size * roots / w if to_owners else size * roots
    if config.algorithm == "two_shot":
        nbytes += size / w
    link = nbytes / (machine.link_gbs * _LAMPORT_TWICE * 1e3)
    shots = 2 if config.algorithm == "two_shot" else 1
    return link, gemm + link + _hops(problem, shots) * machine.exchange_us


def lamport_two_shot(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    """(link, total): values of one wave of tiles travel, there and back, while the next wave is multiplied."""
    link = problem.link_bytes / (machine.link_gbs * 1e3)
    tiles, programs = gemm_tiles(problem, config), programs_of(config, machine.num_programs)
    waves = -(-tiles // programs)
    last = (tiles - (waves - 1) * programs) / tiles if tiles else 0
    area = config.block_m * config.block_n / (64 * 128)
    # where the link is full, it rests while the values of a wave are summed
    rests = (waves - 1) * area * _LAMPORT_BETWEEN_US * (1 + _LAMPORT_DRIFT * (waves - 2))
    full = tile_us(problem, config, machine) + link + rests
    return link, max(gemm + link * last, full) + area * _LAMPORT_LAST_US


def lamport_pair(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    """(link, total): a tile's values travel while the next is multiplied; those of the last wave behind it."""
    link = problem.link_bytes / (machine.link_gbs * 1e3)
    waves = max(1, -(-gemm_tiles(problem, config) // programs_of(config, machine.num_programs)))
    gemm += waves * _leaf_ends(problem, config)
    if not problem.fp8:
        gemm *= 1 + _PAIR_DRIFT * max(0, waves - _PAIR_WAVES)
    full = tile_us(problem, config, machine) + link / _PAIR
    area = config.block_m * config.block_n / (64 * 128)
    # the last wave sends as much as each, full or not: programs without a tile there do not hold back their values
    alone = _PAIR_ALONE_US if waves == 1 else 0.0
    return link, max(gemm + link / waves, full) + area * _PAIR_LAST_US + alone


def _leaf_ends(problem: Problem, config: FusedConfig) -> float:
    """What the ends of leaves take of a program's time for a tile."""
    if not problem.by_tree:
        return 0.0
    leaves = max(last - first for first, last in problem.tree.spans)
    return leaves * _LEAF_US * config.block_m * config.block_n / (64 * 128)


def lamport_pair_scatter(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    """(link, total): the peer's values travel while own tiles are multiplied, as far as those are other waves' work."""
    link = problem.link_bytes / (machine.link_gbs * 1e3)
    tiles, programs = gemm_tiles(problem, config), programs_of(config, machine.num_programs)
    waves = max(1, -(-tiles // programs))
    gemm += waves * _leaf_ends(problem, config)
    sending = max(1, -(-tiles // 2 // programs))
    area = config.block_m * config.block_n / (64 * 128)
    sent = gemm * sending / waves + link / _PAIR / sending
    alone = _PAIR_SCATTER_ALONE_US if waves == 1 else 0.0
    return link, max(gemm, sent) + area * (_PAIR_SCATTER_LAST_US + alone)


def hopper_overlapped(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    """(link, total) on Hopper: tiles are moved while the next are multiplied, all but the last ones."""
    link = problem.link_bytes / (machine.link_gbs * 1e3)
    tile, area = tile_us(problem, config, machine), config.block_m * config.block_n / (128 * 256)
    # at the end all programs push a tile, to one peer or to all; sums are pushed more or less at once
    ending = min(gemm_tiles(problem, config), programs_of(config, machine.num_programs))
    everyone = push_us(problem, config, machine, ending * (problem.world_size - 1))
    if problem.op == MATMUL_GATHER:
        programs, steps = programs_of(config, machine.num_programs), max(1, -(-problem.gemm[2] // config.block_k))
        turn = skew_steps(problem, config, programs, tile) * tile / steps  # over which programs end
        last = turn / 2 + max(everyone - turn, 0.1 * everyone)
    else:
        last = _LAST_SUM_US * area
        last += 0.4 * everyone if problem.op == ALL_REDUCE else 0
    # where the link is full, a push of all programs takes this long, and then the link waits for the next
    push = push_us(problem, config, machine, machine.num_programs)
    steady = link + _BETWEEN_US * max(0.0, link / push - 1)
    hop = machine.hop_us - (_SMALL_HOP_US if area < 1 else 0) + _RANK_US * (problem.world_size - 2)
    return link, max(gemm + last, steady + min(tile, gemm)) + _hops(problem) * hop


def _pushed_in_turn(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    link = problem.link_bytes / (machine.link_gbs * 1e3)
    tiles, programs = gemm_tiles(problem, config), programs_of(config, machine.num_programs)
    waves = -(-tiles // programs)
    # of the programs with most tiles the last starts latest, and each pushes without the others' company
    late = config.stagger_us * (tiles % programs or programs) / programs
    # one tile, by one program to all peers
    push = waves * (problem.world_size - 1) * _tile_bytes(problem, config) / (_PUSH_GBS * 1e3)
    return link, max(gemm + late + push, link / _PUSHED + gemm / waves) + _hops(problem) * machine.hop_us


def _summed_for_all(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    w, (rows, cols, _) = problem.world_size, owned_part(problem, config)
    # the rank that owns most receives, sums and sends most
    link = problem.link_bytes / (machine.link_gbs * 1e3) * min(rows * cols * w / max(1, problem.M * problem.N), w)
    if early_tiles(problem, config, programs_of(config, machine.num_programs)) < gemm_tiles(problem, config) // w:
        # the link has about as much to do at any time
        total = max(gemm + 0.38 * link, 1.15 * link) + _MIXED_US
    else:
        # others' tiles are pushed while theirs and then our own are multiplied, the sums while our own are
        total = max(gemm * (w - 1) / w, link / 2) + max(gemm / w, link / 2)
        # at the end all programs push their sums, more or less at once
        total += min(link, 0.7 * push_us(problem, config, machine, (w - 1) * machine.num_programs))
    return link, total + _hops(problem, _HOPS[problem.op]) * machine.hop_us


def reduced(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    way = _summed_for_all if problem.op == ALL_REDUCE else overlapped
    return way(problem, config, machine, gemm)


def gathered(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    way = _pushed_in_turn if config.stagger_us else overlapped
    return way(problem, config, machine, gemm)


def overlapped(problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
    link = problem.link_bytes / (machine.link_gbs * 1e3)
    hops, exposed = _HOPS[problem.op], _EXPOSED[problem.op]
    if problem.op == REDUCE_SCATTER:
        hops += 0.5 * (problem.world_size - 2)
    else:
        # a single wave of tiles that are pushed as they end, or wait for rows that they multiply, hides nothing
        waves = gemm_tiles(problem, config) / programs_of(config, machine.num_programs)
        exposed = 1 if waves <= 1 else 0.7 if waves <= 2 else exposed
    return link, max(gemm, link) + exposed * min(gemm, link) + _hops(problem, hops) * machine.hop_us


def _hops(problem: Problem, hops: float = 1) -> float:
    return 0 if problem.world_size == 1 else hops


def _tile_bytes(problem: Problem, config: FusedConfig) -> int:
    return config.block_m * config.block_n * problem.dtype.itemsize


def push_us(problem: Problem, config: FusedConfig, machine: Machine, tiles: int) -> float:
    """So many tiles, by the link's rate."""
    return tiles * _tile_bytes(problem, config) / (machine.link_gbs * 1e3)


def spread_us(problem: Problem, config: FusedConfig, machine: Machine) -> float:
    """Over what time a program warp-specialised pushes a tile, while it multiplies the next.

    As long as the link takes for a tile of every program, of product first to all peers: faster ones would queue for it
    and hold up the loads behind them. Sums of an all-reduce do not keep to it, by measurement.
    """
    copies = problem.world_size - 1 if problem.op == MATMUL_GATHER else min(1, problem.world_size - 1)
    together = push_us(problem, config, machine, copies * programs_of(config, machine.num_programs))
    most = (
        _SPREAD / 2 if kernel_for(problem, config) == LAMPORT_TWO_SHOT else _SPREAD
    )  # there, a tile and sums take turns
    return min(together, most * tile_us(problem, config, machine))
