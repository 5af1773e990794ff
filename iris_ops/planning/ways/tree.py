"""Sums that are the same on any number of ranks: products are added in a tree (`kernels/tree_matmul.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from iris.machines import INTERPRETER, Machine

from ... import sum_tree
from ...config import FusedConfig
from ...problem import ALL_REDUCE, REDUCE_SCATTER, SUMS, Problem
from .. import interpreted
from ..candidates import narrow, tiled, tree_tiles
from ..overlap_model import hops, leaf_ends
from ..sums import RANKS_ALIKE
from ..waves import gemm_tiles, programs_of
from ..way import Sizes, Way
from ..workspace_size import exchange_ld, exchanged_part
from .lamport import TWICE

TREE = "tree_matmul"
# Until a program has taken back the leaves' sums that it had put by. Estimated.
_BACK_US = 0.6
# What a launch of an all-reduce stages of each of two buffers.
_MOST_ELEMENTS = 1 << 26


class Tree(Way):
    """The roots of a sum travel as Lamport values do."""

    kernel = TREE
    launcher = "kernels.tree_matmul:launcher"
    follows = True
    ops = frozenset(SUMS)
    algorithms: tuple[str, ...] = ("one_shot", "two_shot")
    sums = frozenset((RANKS_ALIKE,))

    def means(self, problem: Problem, config: FusedConfig) -> bool:
        tree = problem.tree
        return tree is not None and config.lamport and not (config.warp_specialised and tree.halved)

    def refuses_config(self, problem: Problem, config: FusedConfig, machine: Machine) -> str | None:
        if config.warp_specialised:
            return (
                f"config.warp_specialised is True; with {problem.sums.level.text} expected False, but for two ranks of"
                " which each has half of the leaves of K"
            )
        least = problem.world_size**2
        if config.algorithm == "two_shot" and problem.M < least:
            return (
                f"config.algorithm is 'two_shot' for {problem.M} rows; with {problem.sums.level.text} expected"
                f" 'one_shot' below {least}"
            )
        return None

    def tiles(self, problem: Problem, machine: Machine) -> Sequence[FusedConfig]:
        if machine.name == INTERPRETER:
            tiles = interpreted.tree_tiles(problem)
        else:
            tiles = tree_tiles(tree_of(problem).depth, problem.dtype.itemsize, machine)
            tiles = tuple(tile for tile in tiles if tile[1] >= 64 or narrow(problem, *tile[:2], machine))
        one_shot = tiled(self.kernel, tiles, ("one_shot",), FusedConfig.comm_programs)
        # each rank owns some rows then, and sends sums to all
        twice = problem.op == ALL_REDUCE and problem.world_size > 1 and problem.M >= problem.world_size**2
        return (*one_shot, *tiled(self.kernel, tiles, ("two_shot",), FusedConfig.comm_programs)) if twice else one_shot

    def together(self, problem: Problem, config: FusedConfig, machine: Machine, gemm: float) -> tuple[float, float]:
        waves = -(-gemm_tiles(problem, config) // programs_of(config, machine.num_programs))
        if machine.name != INTERPRETER:
            gemm += waves * (_BACK_US + leaf_ends(problem, config))
        w, roots = problem.world_size, max(map(len, tree_of(problem).roots))
        size = problem.dtype.itemsize * problem.M * problem.N * (w - 1)
        to_owners = problem.op == REDUCE_SCATTER or config.algorithm == "two_shot"
        nbytes = size * roots / w if to_owners else size * roots
        if config.algorithm == "two_shot":
            nbytes += size / w
        link = nbytes / (machine.link_gbs * TWICE * 1e3)
        shots = 2 if config.algorithm == "two_shot" else 1
        return link, gemm + link + hops(problem, shots) * machine.exchange_us

    def workspace(self, problem: Problem, config: FusedConfig, programs: int) -> Sizes:
        return exchanged(problem, config)

    def most_rows(self, problem: Problem, config: FusedConfig) -> int:
        return most_rows(problem, config)

    def fallback_config(self, problem: Problem, config: FusedConfig, machine: Machine) -> FusedConfig:
        """Return a portable tile, for specialised warps' tiles are not this kernel's."""
        if not config.warp_specialised:
            return config
        return min(self.tiles(problem, machine), key=lambda config: (abs(config.block_m - 64), config.block_n))


def exchanged(problem: Problem, config: FusedConfig) -> Sizes:
    """Return the exchange area of a sum by tree: its roots, and what follows them."""
    rows, cols = exchanged_part(problem, config)
    w = problem.world_size
    second_shot = rows * w if config.algorithm == "two_shot" else 1  # sums, or what ranks tell each other
    ld = exchange_ld(max(cols, w))
    return Sizes(exchange=2 * (tree_of(problem).num_roots * rows + second_shot) * ld * problem.dtype.itemsize)


def most_rows(problem: Problem, config: FusedConfig) -> int:
    """Return how many rows one launch takes: an all-reduce stages each root of its result.

    Rows of a reduce-scatter in pieces would be dealt out anew.
    """
    if problem.op != ALL_REDUCE:
        return max(1, problem.M)
    blocks = tree_of(problem).num_roots
    if config.algorithm == "two_shot":
        blocks = blocks / problem.world_size + 1
    return max(2 * problem.world_size**2, int(_MOST_ELEMENTS / (exchange_ld(problem.N) * max(1, blocks))))


def tree_of(problem: Problem) -> sum_tree.Tree:
    """Return the tree of a problem that has one."""
    assert problem.tree is not None
    return problem.tree
