"""The four ops in plain torch: all ranks' inputs from one seed, and each rank's result in float64 or in torch's way.

`Case` names everything that a call can vary in. Every rank has its own A and B, and its own bias where the op adds it
before nothing is summed, so a result that mixes up two ranks is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from iris_ops import FusedConfig
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, part_of, part_size
import torch

# Every op with each of its forms.
FORMS = [
    (ALL_REDUCE, ""),
    (GATHER_MATMUL, "rows"),
    (GATHER_MATMUL, "k"),
    (MATMUL_GATHER, "rows"),
    (MATMUL_GATHER, "cols"),
    (REDUCE_SCATTER, "rows"),
    (REDUCE_SCATTER, "cols"),
]


@dataclass(frozen=True)
class Case:
    """One call. `M`, `N`, `K` are of the whole; what each rank has for itself, K of a reduction and N of
    `all_gather_matmul`, is as large on every rank, or with `uneven` its part of that size.
    """

    op: str
    form: str
    M: int
    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = True
    transposed: bool = True
    """B is the transpose of a contiguous tensor."""
    on_heap: bool = True
    """`out` lies on the symmetric heap."""
    pad: int = 0
    """Elements between the rows of A, of B and of out."""
    config: FusedConfig | None = None
    uneven: bool = False
    seed: int = 0

    @property
    def reduces(self) -> bool:
        return self.op in (ALL_REDUCE, REDUCE_SCATTER)

    def shapes(self, world_size: int, rank: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """Of A, B and out on `rank`."""

        def part(size: int) -> int:
            return part_of(size, world_size, rank)

        m, n, k = self.M, self.N, self.K
        if self.reduces:
            k = part(k) if self.uneven else k
            return (m, k), (k, n), self.part((m, n), part) if self.op == REDUCE_SCATTER else (m, n)
        if self.op == GATHER_MATMUL:
            n = part(n) if self.uneven else n
            return self.part((m, k), part), (k, n), (m, n)
        return (part(m) if self.form == "rows" else m, k), (k, part(n) if self.form == "cols" else n), (m, n)

    def part(self, shape: tuple[int, int], part) -> tuple[int, int]:
        rows, cols = shape
        return (part(rows), cols) if self.form == "rows" else (rows, part(cols))

    def largest_out(self, world_size: int) -> tuple[int, int]:
        """Of any rank's `out`."""
        if self.op == GATHER_MATMUL and self.uneven:
            return self.M, part_size(self.N, world_size)
        if self.op != REDUCE_SCATTER:
            return self.M, self.N
        return self.part((self.M, self.N), lambda size: part_size(size, world_size))


@dataclass
class Inputs:
    """A, B and bias of every rank."""

    A: list[torch.Tensor]
    B: list[torch.Tensor]
    bias: list[torch.Tensor]

    @staticmethod
    def random(case: Case, world_size: int, device: torch.device) -> Inputs:
        generator = torch.Generator().manual_seed(case.seed)

        def draw(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=generator).to(device, case.dtype)

        shapes = [case.shapes(world_size, rank) for rank in range(world_size)]
        A, B = [draw(*a) for a, _, _ in shapes], [draw(*b) for _, b, _ in shapes]
        bias = [draw(n) for _, (_, n), _ in shapes]
        return Inputs(A, B, bias[:1] * world_size if case.reduces else bias)

    def magnitude(self, case: Case, rank: int) -> float:
        """The largest sum of absolute values that an element of the result is summed from."""
        sizes = Inputs(*([t.abs() for t in tensors] for tensors in (self.A, self.B, self.bias)))
        result = sizes.result(case, rank, exact=True)
        return float(result.max()) if result.numel() else 0.0

    def result(self, case: Case, rank: int, exact: bool) -> torch.Tensor:
        """`out` of `rank`: in float64, or with torch's own products in the case's dtype, rounded once more."""
        wide = torch.float64 if exact else torch.float32
        dim = 0 if case.form == "rows" else 1

        def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            found = (a.to(wide) @ b.to(wide)) if exact else (a @ b).to(wide)
            return found if bias is None else found + bias.to(wide)

        biases = self.bias if case.bias else [None] * len(self.A)
        if case.reduces:
            total = sum(product(a, b) for a, b in zip(self.A, self.B, strict=True))
            total = total + biases[0].to(wide) if case.bias else total
            size = part_size(total.shape[dim], len(self.A))
            start = min(total.shape[dim], rank * size)
            stop = min(total.shape[dim], start + size)
            found = total.narrow(dim, start, stop - start) if case.op == REDUCE_SCATTER else total
        elif case.op == GATHER_MATMUL:
            found = product(torch.cat(self.A, dim), self.B[rank], biases[rank])
        else:
            found = torch.cat([product(*operands) for operands in zip(self.A, self.B, biases, strict=True)], dim)
        return found if exact else found.to(case.dtype)
