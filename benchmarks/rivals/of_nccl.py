"""NCCL's kernels on symmetric memory: `torch.matmul` and a collective between buffers that NCCL has registered.

Torch's process group hands out NCCL's allocator as a memory pool; `register_mem_pool(pool, symm=True)` makes a window
of what was allocated from it, the same on every rank. A collective whose input and output lie in such windows takes
NCCL's kernels for symmetric memory. They use plain loads and stores here: multicast is off (`NCCL_NVLS_ENABLE=0`).
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import os

from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.rivals.contender import RIVAL, Contender

NAME = "NCCL symmetric"
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


@functools.cache
def _pools() -> list[torch.cuda.MemPool]:
    """Return pools that must live as long as what was allocated from them."""
    return []


@functools.cache
def window(part: str, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory that NCCL has registered as symmetric, one for each `part` and size. Collective."""
    backend = dist.group.WORLD._get_backend(device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool, device):
        memory = torch.empty(elements, dtype=dtype, device=device)
    backend.register_mem_pool(pool, symm=True)
    _pools().append(pool)
    return memory


def contenders(team: Team, rows: list[Row], dtype: torch.dtype) -> list[Contender]:
    if not team.cuda:
        return []
    windows = Windows(team, rows, dtype)
    prepare = {
        "ar": windows.all_reduce,
        "rs": windows.reduce_scatter,
        "ag": windows.all_gather_first,
        "ga": windows.all_gather_last,
    }
    return [Contender(f"cuBLAS + {NAME}", RIVAL, prepare, _even_rows)]


def _even_rows(row: Row, world: int, dtype: torch.dtype) -> bool:
    return row.even(world) and row.form == "rows"


class Windows:
    """Two windows that all rows share, as large as the largest row needs; made at first use."""

    def __init__(self, team: Team, rows: list[Row], dtype: torch.dtype) -> None:
        self.team, self.dtype = team, dtype
        served = [row for row in rows if _even_rows(row, team.world, dtype)]
        partials = [row.M * row.N for row in served if row.op in ("ar", "rs")]
        parts = [row.part_rows(team.world) * row.N for row in served if row.op == "ga"]
        # of a gather that comes first, every copy of the input has a separate place
        inputs = [8 * row.part_rows(team.world) * row.K for row in served if row.op == "ag"]
        scattered = [row.part_rows(team.world) * row.N for row in served if row.op == "rs"]
        gathered = [row.M * (row.K if row.op == "ag" else row.N) for row in served if row.op in ("ag", "ga")]
        self.sent, self.received = max([*partials, *parts, *inputs, 1]), max([*scattered, *gathered, 1])

    def place(self, part: str, *shape: int) -> torch.Tensor:
        elements = self.sent if part == "sent" else self.received
        return window(part, elements, self.dtype, self.team.device)[: shape[0] * shape[1]].view(shape)

    def all_reduce(self, inputs: Inputs) -> Call:
        out = self.place("sent", *inputs.out_shape)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=out)
            dist.all_reduce(out)
            return out

        return call

    def reduce_scatter(self, inputs: Inputs) -> Call:
        return self._multiplied(inputs, dist.reduce_scatter_tensor)

    def all_gather_first(self, inputs: Inputs) -> Call:
        rows, columns = inputs.A[0].shape
        copies = self.place("sent", inputs.copies * rows, columns).view(inputs.copies, rows, columns)
        for own, given in zip(copies, inputs.A, strict=True):
            own.copy_(given)
        gathered, out = self.place("received", inputs.row.M, columns), inputs.new(*inputs.out_shape)

        def call(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(gathered, copies[i])
            return torch.matmul(gathered, inputs.B[i], out=out)

        return call

    def all_gather_last(self, inputs: Inputs) -> Call:
        return self._multiplied(inputs, dist.all_gather_into_tensor)

    def _multiplied(self, inputs: Inputs, exchange: Callable[[torch.Tensor, torch.Tensor], object]) -> Call:
        """Return a call of the product of this rank's operands, followed by `exchange(out, product)`."""
        product = self.place("sent", inputs.A[0].shape[0], inputs.row.N)
        out = self.place("received", *inputs.out_shape)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=product)
            exchange(out, product)
            return out

        return call
