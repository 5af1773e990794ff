"""Make one row's tensors on one rank, with the expected result and the check.

Random, and several copies of A and W: successive calls read different copies, so that no weights are left in the
L2 cache from the previous call. W is (N, K) as `nn.Linear` stores it; `B` is its transpose.

`check` compares every element of a contender's output with the product in a higher precision, collective included:
float64, or on GPUs float32 (without TF32) where the inputs are bf16 or fp16. The output is NaN before the call, so an
element that nobody writes cannot pass.
"""

from collections.abc import Callable
import math
from typing import Any

import torch
import torch.distributed as dist

from .rows import Row
from .team import Team

Call = Callable[[int], torch.Tensor]  # runs the op on copy i, returns its output


class Inputs:
    """`copies`: by default as many as exceed the L2 cache."""

    def __init__(self, row: Row, team: Team, dtype: torch.dtype, copies: int | None = None) -> None:
        self.row, self.team, self.dtype = row, team, dtype
        self.copies = copies or self._copies()
        generator = torch.Generator(team.device).manual_seed(hash((row.M, row.N, row.K, team.rank)) % 2**31)
        random: dict[str, Any] = {"generator": generator, "device": team.device, "dtype": dtype}
        rows, columns = row.a_shape(team.rank, team.world)
        # The missing rows of a short part exist in memory: collectives with equal parts send them too.
        self.padded = [torch.randn(row.a_shape(0, team.world), **random) for _ in range(self.copies)]
        self.A = [padded[:rows] for padded in self.padded]
        self.W = [torch.randn(row.w_shape(team.world), **random).mul_(row.K**-0.5) for _ in range(self.copies)]
        self.B = [weight.t() for weight in self.W]
        self._expected: dict[tuple[int, bool], torch.Tensor] = {}

    def _copies(self) -> int:
        """Return as many as make the weights exceed the L2 cache twice; at least two, which shows a stale result."""
        cache = torch.cuda.get_device_properties(self.team.device).L2_cache_size if self.team.cuda else 0
        return max(2, math.ceil(2 * cache / (math.prod(self.row.w_shape(self.team.world)) * self.dtype.itemsize)))

    @property
    def reference(self) -> torch.dtype:
        """Return the dtype of the expected result; float64 takes long on some GPUs."""
        return torch.float32 if self.team.cuda and self.dtype != torch.float32 else torch.float64

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.row.out_shape(self.team.rank, self.team.world)

    def new(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.team.device, dtype=self.dtype)

    def whole_A(self, copy: int) -> torch.Tensor:
        """Return A as the product reads it: in `all_gather_matmul`, of all ranks."""
        row = self.row
        if row.op != "ag":
            return self.A[copy]
        return self.gather_columns(self.A[copy]) if row.form == "k" else self.gather(self.padded[copy])[: row.M]

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Gather every rank's part, of the same size, along rows."""
        full = torch.empty(part.shape[0] * self.team.world, *part.shape[1:], device=part.device, dtype=part.dtype)
        dist.all_gather_into_tensor(full, part.contiguous())
        return full

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        return side_by_side(self.gather(part), self.team.world)

    def expected(self, copy: int, alone: bool = False) -> torch.Tensor:
        """Return the exact output of this rank; `alone`: without the collective after it. Collective on first use."""
        if (copy, alone) not in self._expected:
            wide = self.reference
            B = self.W[copy].to(wide).t()
            if self.row.op == "ga" and self.row.form == "rows" and not alone:
                result = self.gather(self.padded[copy].to(wide) @ B)[: self.row.M]
            else:
                result = self.whole_A(copy).to(wide) @ B
                result = result if alone else self._exchanged(result)
            self._expected[copy, alone] = result
        return self._expected[copy, alone]

    def _exchanged(self, result: torch.Tensor) -> torch.Tensor:
        row, world, rank = self.row, self.team.world, self.team.rank
        if row.op == "ga":
            return self.gather_columns(result)
        if row.op in ("ar", "rs"):
            dist.all_reduce(result)
        if row.op != "rs":
            return result
        dim = 1 if row.form == "cols" else 0
        start = rank * (row.N // world if dim else row.part_rows(world))
        return result.narrow(dim, min(start, result.shape[dim]), self.out_shape[dim]).clone()

    def check(self, call: Call, alone: bool = False) -> float:
        """Run the first and the last copy into poisoned output; return this rank's larger error, 1 being the limit."""
        worst = 0.0
        for copy in (0, self.copies - 1):
            self.poison(call(copy))  # the first call also compiles and allocates
            worst = max(worst, self.error(call(copy), copy, alone))
        return worst

    def poison(self, out: torch.Tensor) -> None:
        """Fill `out` with NaN; no rank continues before all have done so, as peers may write into it."""
        self.team.synchronize()
        self.team.barrier()
        out.fill_(float("nan"))
        self.team.synchronize()
        self.team.barrier()
        self.team.synchronize()

    def error(self, out: torch.Tensor, copy: int, alone: bool = False) -> float:
        """Return the error of `out` relative to the allowed one: 1 is the limit.

        Allowed is one eps of the dtype in the norm and sixteen at any element, both relative to the expected values'
        norm; for float32, where the sum's own rounding counts, sqrt(K) times that. An output that is rounded once has a
        fifth of the first; NCCL, which rounds at every hop, at most half. A tile that lacks one block of K breaks the
        second.
        """
        expected = self.expected(copy, alone)
        difference = (out.to(expected.dtype) - expected).abs()
        if not difference.numel():
            return 0.0
        scale = expected.square().mean().sqrt()
        eps = torch.finfo(self.dtype).eps * (self.row.K**0.5 if self.dtype == torch.float32 else 1)
        in_norm = difference.square().mean().sqrt() / scale / eps
        at_most = difference.max() / scale / (16 * eps)
        worst = torch.maximum(in_norm, at_most).item()
        return worst if math.isfinite(worst) else math.inf


def side_by_side(stacked: torch.Tensor, world: int) -> torch.Tensor:
    """Return the ranks' parts, stacked along rows, as columns: (w * M, n) to (M, w * n). Copies if M > 1."""
    return stacked.view(world, -1, stacked.shape[1]).movedim(0, 1).reshape(stacked.shape[0] // world, -1)


def stacked(columns: torch.Tensor, world: int) -> torch.Tensor:
    """Undo `side_by_side`: (M, w * n) to (w * M, n)."""
    rows = columns.shape[0]
    return columns.view(rows, world, -1).transpose(0, 1).reshape(world * rows, -1)
