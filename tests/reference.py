"""The ops in plain torch: all ranks' inputs from one seed, and each rank's result in float64 or in torch's way.

`Case` names everything that a call can vary in. Every rank has its own A and B, and its own bias where the op adds it
before nothing is summed, so a result that mixes up two ranks is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from iris_ops import FusedConfig
from iris_ops.activation import Activation, activation_of
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


# --- mixtures of experts ----------------------------------------------------------------------------------------------


def activated(both: torch.Tensor, activation: Activation, gated: bool, interleaved: bool) -> torch.Tensor:
    """`Activation` of [rows, 2 I], gates first or in turn with the others, or of [rows, I] without a gate."""
    if not gated:
        gate, up = both, None
    elif interleaved:
        gate, up = both[:, 0::2], both[:, 1::2]
    else:
        gate, up = both.chunk(2, dim=1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = None if up is None else up.clamp(-activation.limit, activation.limit)
    if activation.kind == "silu":
        found = gate * torch.sigmoid(activation.alpha * gate)
    elif activation.kind == "relu2":
        found = torch.relu(gate) ** 2
    else:
        found = torch.nn.functional.gelu(gate, approximate="tanh" if activation.kind == "gelu_tanh" else "none")
    return found if up is None else found * (up + activation.shift)


def moe_gate_up(
    A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor, bias: torch.Tensor | None = None,
    activation: Activation | str = "silu", interleaved: bool = False, gated: bool = True, exact: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`ctx.ops.moe_gate_up`: A [T,H], B [E,H,2I] (or [E,H,I], not `gated`), experts [T,k], bias [E,2I] -> [T*k,I].

    Row t*k+j is token t's by its expert number j. `exact`: in float64; else products as torch makes them in A's dtype.
    """
    tokens, k = experts.shape
    wide = torch.float64 if exact else torch.float32
    inputs = A.to(wide) if exact else A
    both = torch.zeros(tokens * k, B.shape[2], dtype=wide, device=A.device)
    for row, expert in enumerate(experts.flatten().tolist()):
        both[row] = (inputs[row // k] @ (B[expert].to(wide) if exact else B[expert])).to(wide)
        if bias is not None:
            both[row] += bias[expert].to(wide)
    found = activated(both, activation_of(activation), gated, interleaved)
    return found if exact else found.to(A.dtype)


def moe_down(
    A: list[torch.Tensor], B: list[torch.Tensor], experts: torch.Tensor, weights: torch.Tensor,
    bias: torch.Tensor | None = None, shared: list[torch.Tensor] | None = None, exact: bool = True,
) -> torch.Tensor:  # fmt: skip
    """`ctx.ops.moe_down_all_reduce`, of all ranks' A [T*k,I], B [E,I,H] and shared [T,H] -> [T,H].

    out[t] = sum over ranks r of (sum over j of weights[t,j] * (A_r[t*k+j] @ B_r[experts[t,j]]) + shared_r[t])
    + sum over j of weights[t,j] * bias[experts[t,j]]. Not `exact`: products and each rank's sums in A's dtype.
    """
    tokens, k = experts.shape
    wide = torch.float64 if exact else torch.float32
    total = torch.zeros(tokens, B[0].shape[2], dtype=wide, device=B[0].device)
    factors = weights.to(wide)
    for rank, (a, b) in enumerate(zip(A, B, strict=True)):
        own = torch.zeros_like(total)
        for row, expert in enumerate(experts.flatten().tolist()):
            product = a[row].to(wide) @ b[expert].to(wide) if exact else (a[row] @ b[expert]).to(wide)
            if bias is not None and rank == 0:
                product = product + bias[expert].to(wide)
            own[row // k] += factors[row // k, row % k] * product
        if shared is not None:
            own += shared[rank].to(wide)
        total += own if exact else own.to(A[0].dtype).to(wide)  # what ranks send each other is rounded
    return total if exact else total.to(A[0].dtype)
