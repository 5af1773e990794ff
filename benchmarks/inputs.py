"""One row's tensors on one rank, the result that is expected, and the check.

Random, and several copies of A and W: a call after the other reads another copy, so that no weights are left in the
L2 cache from the call before. W is (N, K) as `nn.Linear` stores it; `B` is its transpose.

`check` compares every element of a contender's output with the product in a higher precision, collective included:
float64, or on GPUs float32 (without TF32) where the inputs are bf16 or fp16. The output is NaN before the call, so an
element that nobody writes cannot pass.
"""

from collections.abc import Callable
import math

import torch
import torch.distributed as dist

from benchmarks.launch import Team
from benchmarks.shapes import Row

Call = Callable[[int], torch.Tensor]  # runs the op on copy i, gives its output


class Inputs:
    def __init__(self, row: Row, team: Team, dtype: torch.dtype) -> None:
        self.row, self.team, self.dtype = row, team, dtype
        self.copies = self._copies()
        generator = torch.Generator(team.device).manual_seed(hash((row.M, row.N, row.K, team.rank)) % 2**31)
        random = {"generator": generator, "device": team.device, "dtype": dtype}
        self.A = [torch.randn(row.a_shape(team.world), **random) for _ in range(self.copies)]
        self.W = [torch.randn(row.N, row.K, **random).mul_(row.K**-0.5) for _ in range(self.copies)]
        self.B = [weight.t() for weight in self.W]
        self._expected: dict[int, torch.Tensor] = {}

    def _copies(self) -> int:
        """Enough for their weights to exceed the L2 cache twice; two at least, so that a stale result is seen."""
        cache = torch.cuda.get_device_properties(self.team.device).L2_cache_size if self.team.cuda else 0
        return max(2, math.ceil(2 * cache / (self.row.N * self.row.K * self.dtype.itemsize)))

    def new_out(self) -> torch.Tensor:
        return torch.empty(self.row.out_shape(self.team.world), device=self.team.device, dtype=self.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Every rank's part, along rows."""
        full = torch.empty(part.shape[0] * self.team.world, *part.shape[1:], device=part.device, dtype=part.dtype)
        dist.all_gather_into_tensor(full, part)
        return full

    def expected(self, copy: int) -> torch.Tensor:
        """What this rank's output has to be; collective on first use."""
        if copy not in self._expected:
            wide = torch.float32 if self.team.cuda and self.dtype != torch.float32 else torch.float64
            A, B = self.A[copy].to(wide), self.W[copy].to(wide).t()
            if self.row.op == "ag":
                A = self.gather(A)
            result = A @ B
            if self.row.op == "ga":
                result = self.gather(result)
            if self.row.op in ("ar", "rs"):
                dist.all_reduce(result)
            if self.row.op == "rs":
                result = result.chunk(self.team.world)[self.team.rank].clone()
            self._expected[copy] = result
        return self._expected[copy]

    def check(self, call: Call) -> float:
        """Runs the first and the last copy into poisoned output; this rank's larger error, 1 being the limit."""
        worst = 0.0
        for copy in (0, self.copies - 1):
            self.poison(call(copy))  # the first call also compiles and allocates
            worst = max(worst, self.error(call(copy), copy))
        return worst

    def poison(self, out: torch.Tensor) -> None:
        """NaN everywhere, and no rank goes on before all have done so: peers may write into `out`."""
        self.team.synchronize()
        self.team.barrier()
        out.fill_(float("nan"))
        self.team.synchronize()
        self.team.barrier()
        self.team.synchronize()

    def error(self, out: torch.Tensor, copy: int) -> float:
        """The error of `out` over what is allowed: 1 is the limit.

        Allowed is one eps of the dtype in the norm and sixteen at any element, both relative to the expected
        values' norm; for float32, where the sum's own rounding counts, sqrt(K) times that. An output that is rounded
        once has a fifth of the first; NCCL, which rounds at every hop, at most half. A tile that lacks one block of
        K breaks the second.
        """
        expected = self.expected(copy)
        difference = (out.to(expected.dtype) - expected).abs()
        if not difference.numel():
            return 0.0
        scale = expected.square().mean().sqrt()
        eps = torch.finfo(self.dtype).eps * (self.row.K**0.5 if self.dtype == torch.float32 else 1)
        in_norm = difference.square().mean().sqrt() / scale / eps
        at_most = difference.max() / scale / (16 * eps)
        worst = torch.maximum(in_norm, at_most).item()
        return worst if math.isfinite(worst) else math.inf
