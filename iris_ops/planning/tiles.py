"""Describe tables of tiles: the tiles of a kind of kernel, and how near each comes to the chip's rate."""

from __future__ import annotations

from dataclasses import dataclass

from .needs import WeightFormat

# (block_m, block_n, block_k, warps): (stages, fewer where shared memory has no room for them; share of the chip's rate
# that a full wave of such tiles reaches, bf16).
Tiles = dict[tuple[int, int, int, int], tuple[int, float]]


@dataclass(frozen=True)
class SpecialisedTiles:
    """The tiles of an architecture's warp-specialised kernels, by what their mover warps do meanwhile."""

    overlapped: Tiles
    """They push tiles, signal and sum: `matmul_reduce`, `matmul_gather`."""
    copy_gather: Tiles
    """They only store tiles, because copy engines bring the rows: `gather_matmul`."""
    two_shot: Tiles
    """They send Lamport values to owners, and the sums to everyone: `lamport_two_shot`."""
    scaled: dict[str, Tiles]
    """Of weights whose scales multiply blocks of a tile's sums, the tiles by algorithm."""
    widened: dict[str, Tiles]
    """The same of weights that are widened in tiles."""
    pair: dict[int, Tiles]
    """They exchange Lamport values with the one peer: `lamport_pair`; by bytes of an operand."""

    def of_codes(self, weights: WeightFormat) -> dict[str, Tiles] | None:
        """Return the tiles by algorithm of weights with scales of groups; None of others."""
        return self.scaled if weights.scales_blocks else self.widened if weights.widened_in_tiles else None
