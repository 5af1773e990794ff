"""Describe the order in which the products of a row are added: ways of one order give a row the same bits.

A sum of rounded numbers depends on its order. Here is what differs between the ways of this library:

    instruction   what multiplies, and how many products along K it adds at once: by the tile's sides and the machine
    part          where along K sums are kept apart, and then added: where ranks' parts of A do not end with a step
    rows          whether, and to what, the rows of A are rounded before they are multiplied
    leaves        of a sum that is the same on any number of ranks, into how many K is cut (`sum_tree.py`)
    early_bias    whether rank 0 adds a bias to its own sum, because a collective that follows knows of none

And what does not, in no kernel: along K a tile is summed from 0 on in fp32; each rank's sum is rounded to the tensors'
dtype, its own too; the ranks' are added in fp32 from rank 0 on; a bias follows, except an early one, and then the
sum is rounded once.

Two things have no fixed order, because it depends on the number of rows: tiles that programs share along K
(`stream_k.py`), and a library's product, which may cut K, and has other kernels for few rows.

With a promise of equal bits (`Problem.sums`) a plan takes ways of one order only. Which one depends on everything but
the number of rows.
Of "ranks" it depends on nothing but dtype, machine and all ranks' K: what is fastest does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from iris.machines import INTERPRETER, Machine

from ..config import FusedConfig
from ..problem import GATHER_MATMUL, Problem

if TYPE_CHECKING:
    from collections.abc import Callable

# Elements along K that AMD's instructions add at once, by the device and the bytes of an element: in tiles of which no
# side is below 32, in others.
_MFMA = {
    ("AMD Instinct MI300X", 2): (8, 16),
    ("AMD Instinct MI350X", 2): (16, 32),
    ("AMD Instinct MI300X", 4): (2, 4),
    ("AMD Instinct MI350X", 4): (2, 4),
}
_WARP_GROUP = 64  # rows of a tensor core's product by the instruction of Hopper and newer GPUs


@dataclass(frozen=True)
class Order:
    """`instruction`: by name; `step`: how many products along K it adds at once. `part`: 0, or elements along K."""

    instruction: str
    step: int
    part: int = 0
    rows: str = ""
    leaves: int = 0
    early_bias: bool = False

    @property
    def preference(self) -> tuple[int, int]:
        """Return the rank of this order among those that no time decides; the lowest is taken."""
        return _INSTRUCTIONS.index(self.instruction), self.step

    def __str__(self) -> str:
        text = f"{self.instruction} of {self.step} along K"
        text += f", parts of {self.part}" if self.part else ""
        text += f", {self.leaves} leaves in a tree" if self.leaves else ""
        text += ", the bias before the ranks' sums" if self.early_bias else ""
        return text + (f", {self.rows}" if self.rows else "")


def of_tiles(problem: Problem, config: FusedConfig, machine: Machine) -> Order | None:
    """Return the order of kernels that sum a tile, or each leaf, from the first step along K on; None where programs
    share tiles."""
    if config.splits > 1:
        return None
    leaves = problem.tree.leaves if problem.tree else 0
    order = Order(*_instruction(problem, config, machine), rows=problem.weights.row_text, leaves=leaves)
    if problem.op == GATHER_MATMUL and problem.form == "k" and config.algorithm == "overlapped":
        part = -(-problem.K // problem.world_size)
        if part % order.step and part < problem.K:
            if problem.sums.on_any_ranks:
                return None
            order = replace(order, part=part)
    return order


def of_library(problem: Problem, config: FusedConfig, machine: Machine) -> Order | None:
    """Return the order of `with_torch`: where bits are promised, that of `local/matmul.py`; a library has none."""
    return replace(of_product(problem, machine), early_bias=problem.sums.biased) if problem.sums.promised else None


def of_product(problem: Problem, machine: Machine) -> Order:
    """Return the order of `local/matmul.py`, whichever of its kernels runs."""
    if machine.name == INTERPRETER:
        return Order("fixed order", problem.K)
    block = FusedConfig(_WARP_GROUP, _WARP_GROUP)
    return Order(*_instruction(problem, block, machine), rows=problem.weights.row_text)


def least_rows(machine: Machine) -> int:
    """Return the fewest rows of a block of `local/skinny_matmul.py`: on AMD fewer rows use another instruction than
    `of_product` says."""
    return 32 if machine.name.startswith("AMD") else 16


def _instruction(problem: Problem, config: FusedConfig, machine: Machine) -> tuple[str, int]:
    if machine.name == INTERPRETER:
        return "block", config.depth(problem.itemsize)
    itemsize = problem.itemsize
    low = min(config.block_m, config.block_n)
    if machine.name.startswith("AMD"):
        wide, narrow = _MFMA.get((machine.name, itemsize), (32, 64))
        return ("mfma of 16", narrow) if low < 32 else ("mfma of 32", wide)
    if itemsize == 4:
        return "fma", 1
    # the Lamport kernels multiply B's columns by A's rows, where that fills a product's rows
    across = config.lamport and not config.warp_specialised and config.block_n >= _WARP_GROUP
    rows = config.block_n if across else config.block_m
    return ("wgmma" if rows >= _WARP_GROUP else "mma"), 32 // itemsize


# As plans that are the same on any number of ranks prefer them. There are tiles of each machine's first for all sizes.
_INSTRUCTIONS = "wgmma", "mfma of 32", "fma", "mma", "mfma of 16", "block", "fixed order", "stream"
# Rows at which an order must have a way to be taken; the last are more than any way for few rows serves.
_ROWS = 1, 8, 24, 100, 400, 1600, 6400, 25600, 1 << 25


def chosen(problem: Problem, offers: Callable[[Problem], dict[Order, float]]) -> Order | None:
    """Return the order of all ways that serve `problem`, however many rows it has: of several, the fastest in the mean.

    `offers`: the orders that there are for a problem, each with its least microseconds. `problem.M` is not looked at.
    Where bits are portable, the first of `_INSTRUCTIONS`. None: there is no such order.
    """
    offered_at = [offers(replace(problem, M=rows)) for rows in _ROWS]
    common = [order for order in offered_at[0] if all(order in offered for offered in offered_at)]

    def mean(order: Order) -> float:
        product = 1.0
        for offered in offered_at:
            product *= max(offered[order], 1e-3) / max(min(offered.values()), 1e-3)
        return product

    return problem.sums.level.best(common, mean)
