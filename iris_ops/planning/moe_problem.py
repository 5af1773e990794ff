"""From tensors to a `MoeProblem`: one grouped product, and what follows it. Nothing here knows triton."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from iris.errors import ArgumentError
from iris.invariance import RANKS
from iris.machines import Machine
import torch

from ..problem import Request, part_size
from ..quantised.packing import LINE, PACKINGS
from .needs import PLAIN, WeightFormat
from .sums import FREE_SUMS, ROWS_ALIKE, Sums, level_of

ROUTE = "moe_route"
GATE_UP = "moe_gate_up"
DOWN_ALL_REDUCE = "moe_down_all_reduce"
DOWN_REDUCE_SCATTER = "moe_down_reduce_scatter"
MOE_OPS = (GATE_UP, DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER)
MOST_EXPERTS = 4096
MOST_CHOSEN = 64  # experts of a token


def lies_by_lines(weights: WeightFormat) -> bool:
    """Return whether an element of a stored weight has entries of a whole line of 128, not of its own place alone."""
    return weights is not PLAIN and (PACKINGS[weights.packing].per_element > 1 or 0 < weights.group < LINE)


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
    """"batch": a token's result has the same bits however many tokens there are."""
    in_rows: bool = field(default=False, kw_only=True)
    """Whether an expert's weight lies [K, N] in memory; else its transpose does, as transformers stores most."""
    weights: WeightFormat = field(default=PLAIN, kw_only=True)
    """How experts are stored: in the tokens' dtype, or as codes with scales (`moe/coded.py`)."""

    epilogue = ()
    chooses_order = False
    counted = "tokens"
    order_text = "tiles of one instruction"

    def __post_init__(self) -> None:
        if self.invariant == RANKS:
            raise ArgumentError(
                f"{self.op}: the context has invariant='ranks', which mixtures of experts do not keep; expected 'batch'"
                " or None"
            )

    @property
    def called_op(self) -> str:
        """The op that was called."""
        return self.op

    @property
    def sums(self) -> Sums:
        """Which results of a token are to have the same bits."""
        return Sums(ROWS_ALIKE, level_of(self.invariant)) if self.invariant else FREE_SUMS

    @property
    def free(self) -> MoeProblem:
        """The same problem without a promise of equal bits."""
        return replace(self, invariant=None)

    @property
    def text(self) -> str:
        """The problem in the words of a plan's first line."""
        stored = "" if self.weights is PLAIN else f", experts {self.weights.name}"
        return f"{self.op} T={self.tokens} k={self.top_k} E={self.experts} N={self.N} K={self.K} {self.dtype}{stored}"

    @property
    def weight_bytes(self) -> float:
        """Bytes of a number of an expert's weight in memory."""
        if self.weights is PLAIN:
            return self.dtype.itemsize
        return self.weights.nbytes(1, self.K) / max(1, self.K)

    @property
    def least_k(self) -> int:
        """The least depth of a tile: codes that lie by lines are widened by lines."""
        return LINE if lies_by_lines(self.weights) else 1

    def converted(self, machine: Machine) -> str:
        """Return the reason why each call converts experts to the tokens' dtype; "" because kernels widen tiles."""
        return ""

    @property
    def may_convert(self) -> bool:
        """Whether a plan compares its ways with those for experts that each call converts."""
        return False

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
        """Return the blocks of rows at most, each of one expert's, whatever the routing."""
        return self.pairs // block_m + min(self.experts, self.pairs)


def requested_moe_problem(request: Request) -> MoeProblem:
    """Return the problem of a request; for `moe_gate_up`, N is I, and experts are gated. `top_k` is 1 by default.

    Raises `ArgumentError` where it makes no sense.
    """
    op, tokens, N, K, world_size, dtype = request.op, request.M, request.N, request.K, request.world_size, request.dtype
    form, weights, invariant, experts = request.form, request.weights, request.invariant, request.experts
    top_k = 1 if request.top_k is None else request.top_k
    if op not in MOE_OPS:
        raise ArgumentError(f"op is {op!r}; expected one of {', '.join(MOE_OPS)}, for there are experts")
    request.check_sizes()
    for name, size, most in (("experts", experts, MOST_EXPERTS), ("top_k", top_k, MOST_CHOSEN)):
        if type(size) is not int or not 1 <= size <= most:
            raise ArgumentError(f"{name} is {size!r} for {op}; expected an integer from 1 to {most}")
    assert experts is not None
    if top_k > experts:
        raise ArgumentError(f"top_k is {top_k} for {op}; expected at most {experts}, the experts that there are")
    if form not in (None, "rows"):
        raise ArgumentError(f"form is {form!r} for {op}; expected none, or 'rows' for weights that lie [E,K,N]")
    if weights is not PLAIN and form == "rows":
        raise ArgumentError(
            f"form is 'rows' for {op}, and {weights.request}; expected none: experts {weights.name} lie [E,N,K]"
        )
    return MoeProblem(
        op, tokens, top_k, experts, N, K, world_size, dtype, op == GATE_UP, invariant, in_rows=form == "rows",
        weights=weights,
    )  # fmt: skip
