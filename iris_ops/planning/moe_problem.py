"""From tensors to a `MoeProblem`: one grouped product, and what follows it. Nothing here knows triton."""

from __future__ import annotations

from dataclasses import dataclass

from iris.errors import ArgumentError
from iris.invariance import RANKS
import torch

from ..problem import part_size

ROUTE = "moe_route"
GATE_UP = "moe_gate_up"
DOWN_ALL_REDUCE = "moe_down_all_reduce"
DOWN_REDUCE_SCATTER = "moe_down_reduce_scatter"
MOE_OPS = (GATE_UP, DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER)
MOST_EXPERTS = 4096
MOST_CHOSEN = 64  # experts of a token


@dataclass(frozen=True)
class MoeProblem:
    """`tokens` tokens, each with `top_k` of `experts` experts: rows of K by experts' [K, N], on one of the ranks.

    N: columns of the result, for gate and up once. `gated`: of `moe_gate_up`, whether experts have as many more.
    """

    op: str
    tokens: int
    top_k: int
    experts: int
    N: int
    K: int
    world_size: int
    dtype: torch.dtype
    gated: bool = False
    invariant: str | None = None

    def __post_init__(self) -> None:
        if self.invariant == RANKS:
            raise ArgumentError(
                f"{self.op}: the context has invariant='ranks', which mixtures of experts do not keep; expected 'batch'"
                " or None"
            )

    """"batch": a token's result has the same bits however many tokens there are."""

    @property
    def pairs(self) -> int:
        """Rows of the product: one for each token and expert of its."""
        return self.tokens * self.top_k

    @property
    def reduces(self) -> bool:
        return self.op != GATE_UP

    @property
    def scatters(self) -> bool:
        return self.op == DOWN_REDUCE_SCATTER

    @property
    def columns(self) -> int:
        """Of an expert's weight."""
        return 2 * self.N if self.gated else self.N

    @property
    def touched(self) -> float:
        """How many experts have rows, if each were as likely as the next one."""
        return self.experts * (1 - (1 - 1 / max(1, self.experts)) ** self.pairs)

    @property
    def part_rows(self) -> int:
        """Tokens of the largest part that a rank owns of a scattered result."""
        return part_size(self.tokens, self.world_size) if self.scatters else self.tokens

    def blocks(self, block_m: int) -> int:
        """Blocks of rows at most, each of one expert's, whatever the routing."""
        return self.pairs // block_m + min(self.experts, self.pairs)
