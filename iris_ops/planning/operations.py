"""The fused ops: of each its shapes, its product and what ranks have in common. One object each; `TABLE` lists them.

To add one: a subclass of `Operation` and a line in `TABLE`. Ways list the names of those that they serve.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from iris.aliases import PAGE

from .epilogues import GATE, NO_EPILOGUE, Epilogue
from .epilogues import NORM as NORM_EPILOGUE
from .needs import PLAIN

ALL_REDUCE = "matmul_all_reduce"
GATHER_MATMUL = "all_gather_matmul"
MATMUL_GATHER = "matmul_all_gather"
REDUCE_SCATTER = "matmul_reduce_scatter"
# An all-reduce, and what follows it (`rmsnorm_epilogue.py`).
NORM = "matmul_all_reduce_norm"
# `all_gather_matmul` by rows, of whose result the first half gates the second: to plan and launch, the same problem.
GATED = "all_gather_matmul_gated"

# The ops of a mixture: a sort by experts, gate and up of each token's experts, and
# the way back, summed over experts and ranks.
ROUTE = "moe_route"
GATE_UP = "moe_gate_up"
DOWN_ALL_REDUCE = "moe_down_all_reduce"
DOWN_REDUCE_SCATTER = "moe_down_reduce_scatter"
MOE_OPS = (GATE_UP, DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER)

Size = tuple[int, ...]


class Shapes(NamedTuple):
    """The shapes of a call's tensors on one rank. `part`: how much of a size belongs to this rank."""

    A: Size
    B: Size
    out: Size
    part: Callable[[int], int]


class Operation:
    """One op. Sizes are those of the whole: M, N of the unscattered or gathered result, K of a rank's product."""

    name: str
    forms: tuple[str, ...] = ("rows", "cols")
    """Along which dimension it gathers or scatters. Of forms that fit, the first counts."""
    sums: bool = False
    """Whether it adds up what the ranks multiply."""
    scaled: bool = True
    """Whether it takes weights with scales (`planning/weights/`)."""
    shared: str = "N"
    """The dimension of the product, "N" or "K", that is equal on all ranks; the other may differ."""
    base: str = ""
    """The op that serves it, where it is one with an epilogue."""
    epilogue: Epilogue = NO_EPILOGUE
    """What follows the sum."""
    expected: str
    """The shapes, in words."""
    mixes: bool = False
    """Whether each row chooses its own experts."""
    widens: bool = False
    """Whether kernels widen all weights to A's dtype on the way into the product."""
    portable: bool = True
    """Whether sums can be the same on any number of ranks."""
    one_order: str = ""
    """By what all ways sum, where that does not depend on the tile."""
    counted: str = "rows"
    """Of what M is the number."""
    local: bool = False
    """Whether no peer takes part."""
    described: str = "launch:described"
    """`module:function` below `iris_ops` that checks a call's tensors and returns their problem."""
    steps: str = "launch:steps_of"
    """`module:function` that returns the steps of a call."""
    values: str = ""
    """`module:function` that checks values of a call's tensors, with IRIS_DEBUG=1 only, as it waits for the device."""

    def sizes(self, form: str, shapes: Shapes) -> tuple[int, int, int] | None:
        """Return M, N and K if the shapes are those of `form`."""
        raise NotImplementedError

    def matching_form(self, shapes: Shapes) -> tuple[str, int, int, int] | None:
        """Return the form that fits the shapes, with M, N and K; None where none does.

        Both forms fit a whole of one element at most. It lies on rank 0 in either form. Other ranks, whose part is
        empty, find the first form to fit, so all take that.
        """
        for form in self.forms:
            if sizes := self.sizes(form, shapes):
                return (self.forms[0] if self.single(*sizes) else form), *sizes
        return None

    def single(self, M: int, N: int, K: int) -> bool:
        """Return whether one element at most is gathered or scattered."""
        return M == N == 1

    def text(self, problem: Any) -> str:
        """Return the sizes of a problem in the words of a plan's first line."""
        return f"{problem.form} M={problem.M} N={problem.N} K={problem.K}"

    def expects(self, shapes: Shapes) -> str:
        """Return the shapes that an error names, given those of a call."""
        return self.expected

    def refuses(self, N: int) -> str | None:
        """Return the reason why no problem has these columns, or None."""
        return None

    def columns(self, mean: int) -> int:
        """Return the least number of columns from `mean` on of which there is a problem."""
        return mean

    def product(self, problem: Any) -> tuple[int, int, int]:
        """Return (m, n, k) of a rank's largest product."""
        return problem.M, problem.N, problem.K

    def facts(self, problem: Any, config: Any) -> dict[str, Any]:
        """Return what ranks compare of a call with IRIS_DEBUG=1, besides its tensors."""
        facts = dict(form=problem.form, M=problem.M, dtype=problem.dtype, config=replace(config, prediction=None))
        if problem.tree:
            facts["k_per_rank"] = problem.sums.k_per_rank
        if problem.weights is not PLAIN:
            facts["B"] = problem.weights.name
        return facts | {self.shared: getattr(problem, self.shared)}

    def sent(self, problem: Any) -> float:
        """Return how many elements of the whole each rank sends on, in the bandwidth-optimal algorithm."""
        return problem.M * problem.N


class AllReduce(Operation):
    name, forms, sums = ALL_REDUCE, ("",), True
    expected = "A (M,K), B (K,N), out (M,N)"

    def sizes(self, form: str, shapes: Shapes) -> tuple[int, int, int] | None:
        (m, k), (kb, n), out, _ = shapes
        return (m, n, k) if kb == k and out == (m, n) else None

    def sent(self, problem: Any) -> float:
        return 2 * problem.M * problem.N


class GatherMatmul(Operation):
    name, shared = GATHER_MATMUL, "K"
    forms: tuple[str, ...] = ("rows", "k")
    expected = "A (M/w,K) or (M,K/w), B (K,N), out (M,N)"

    def sizes(self, form: str, shapes: Shapes) -> tuple[int, int, int] | None:
        A, (k, n), (rows, cols), part = shapes
        own = (part(rows), k) if form == "rows" else (rows, part(k))
        return (rows, n, k) if A == own and cols == n else None

    def single(self, M: int, N: int, K: int) -> bool:
        return M == 1 and K <= 1

    def sent(self, problem: Any) -> float:
        return problem.M * problem.K


class MatmulGather(Operation):
    name, scaled = MATMUL_GATHER, False
    expected = "A (M/w,K), B (K,N), out (M,N), or A (M,K), B (K,N/w), out (M,N)"

    def sizes(self, form: str, shapes: Shapes) -> tuple[int, int, int] | None:
        (m, k), B, (rows, cols), part = shapes
        own = (part(rows), (k, cols)) if form == "rows" else (rows, (k, part(cols)))
        return (rows, cols, k) if (m, B) == own else None

    def product(self, problem: Any) -> tuple[int, int, int]:
        return problem.part_rows, problem.part_cols, problem.K


class ReduceScatter(Operation):
    name, sums = REDUCE_SCATTER, True
    expected = "A (M,K), B (K,N), out (M/w,N) or (M,N/w)"

    def sizes(self, form: str, shapes: Shapes) -> tuple[int, int, int] | None:
        (m, k), (kb, n), out, part = shapes
        own = (part(m), n) if form == "rows" else (m, part(n))
        return (m, n, k) if kb == k and out == own else None

    def text(self, problem: Any) -> str:
        """Return the sizes of a problem in the words of a plan's first line."""
        return f"{problem.form} M={problem.M} N={problem.N} K={problem.K}"

    def expects(self, shapes: Shapes) -> str:
        if shapes.out != (shapes.A[0], shapes.B[1]):
            return self.expected
        return f"{self.expected}, or ctx.ccl.reduce_scatter(out, A @ B) for this rank's tiles in an out (M,N) ({PAGE}),"


class Norm(AllReduce):
    name, base, epilogue = NORM, ALL_REDUCE, NORM_EPILOGUE


class Gated(GatherMatmul):
    name, base, epilogue = GATED, GATHER_MATMUL, GATE
    forms = ("rows",)
    expected = "A (M/w,K), B (K,N), out (M,N/2)"

    def sizes(self, form: str, shapes: Shapes) -> tuple[int, int, int] | None:
        rows, n = shapes.out[0], shapes.B[1]
        joined = n == self.epilogue.matrices * shapes.out[1]
        return super().sizes(form, shapes._replace(out=(rows, n))) if joined else None

    def columns(self, mean: int) -> int:
        return mean + mean % 2

    def refuses(self, N: int) -> str | None:
        return "expected an even number, the columns of gate and up together" if N % 2 else None


class _Mixture(Operation):
    """An op of a mixture, whose rows are pairs of a token and an expert. `moe/checks.py` describes its tensors."""

    forms, mixes, widens, portable = ("",), True, True, False
    one_order, counted = "tiles of one instruction", "tokens"
    described, steps, values = "moe.checks:described", "moe.mixture:steps_of", "moe.checks:check_values"

    def product(self, problem: Any) -> tuple[int, int, int]:
        return problem.pairs, problem.N, problem.K

    def text(self, problem: Any) -> str:
        experts = problem.experts
        sizes = f"T={problem.M} k={experts.top_k} E={experts.count}"
        return f"{sizes} N={problem.out_cols} K={problem.K}"

    def facts(self, problem: Any, config: Any) -> dict[str, Any]:
        """Return what ranks compare: tiles may differ between ranks, for K may."""
        experts = problem.experts
        return dict(T=problem.M, k=experts.top_k, E=experts.count, H=problem.N, dtype=problem.dtype,
                    algorithm=config.algorithm, weights=problem.weights.name)  # fmt: skip


class GateUp(_Mixture):
    name, shared, epilogue, local = GATE_UP, "K", GATE, True

    def sent(self, problem: Any) -> float:
        return 0


class DownAllReduce(_Mixture):
    name, sums = DOWN_ALL_REDUCE, True

    def sent(self, problem: Any) -> float:
        return 2 * problem.M * problem.N


class DownReduceScatter(_Mixture):
    name, forms, sums = DOWN_REDUCE_SCATTER, ("rows",), True


TABLE = (AllReduce(), GatherMatmul(), MatmulGather(), ReduceScatter(), Norm(), Gated())
MIXTURES = (GateUp(), DownAllReduce(), DownReduceScatter())
BY_NAME: dict[str, Operation] = {operation.name: operation for operation in (*TABLE, *MIXTURES)}

OPS = tuple(operation.name for operation in TABLE if not operation.base)
SUMS = tuple(operation.name for operation in TABLE if operation.sums and not operation.base)
SCALED = tuple(operation.name for operation in TABLE if operation.scaled)
CALLED = {(operation.base, operation.epilogue): operation.name for operation in TABLE if operation.base}
