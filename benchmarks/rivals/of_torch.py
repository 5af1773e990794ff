"""Rivals that come with torch.

NCCL             torch.matmul, then the collective of torch.distributed (`iris_tp/bench/separate.py`)
one-shot         torch.matmul into symmetric memory, then torch's one_shot_all_reduce; two-shot alike
reduce-scatter   torch.matmul into symmetric memory, then torch's reduce_scatter_out
async-TP         torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter
copy engines     torch.matmul and torch's _low_contention_all_gather or _low_contention_reduce_scatter
"""

import functools

from iris_tp.bench import separate
from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.rivals.contender import RIVAL, Contender


def contenders(team: Team, rows: list[Row], dtype: torch.dtype) -> list[Contender]:
    entries = [Contender(separate.name(team), RIVAL, separate.PREPARE)]
    if team.cuda:
        shared = SharedBuffer(team, rows, dtype)
        entries += [
            Contender("cuBLAS + torch one-shot", RIVAL, {"ar": shared.one_shot}, _all_reduced),
            Contender("cuBLAS + torch two-shot", RIVAL, {"ar": shared.two_shot}, _all_reduced),
            Contender("cuBLAS + torch reduce-scatter", RIVAL, {"rs": shared.reduce_scatter}, _scattered),
            Contender("torch async-TP", RIVAL, {"ag": _async_all_gather, "rs": _async_reduce_scatter}, _even),
            Contender(
                "cuBLAS + copy engines",
                RIVAL,
                {"ag": _engines_first, "ga": shared.engines_last, "rs": shared.engines_reduce_scatter},
                _even_rows,
            ),
        ]
    return entries


def _group() -> str:
    return dist.group.WORLD.group_name


@functools.cache
def symmetric_memory(elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return torch's symmetric memory of all ranks; one of each size. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    memory = symm_mem.empty(elements, dtype=dtype, device=device)
    symm_mem.rendezvous(memory, _group())
    return memory


def _even(row: Row, world: int, dtype: torch.dtype) -> bool:
    return row.even(world)


def _even_rows(row: Row, world: int, dtype: torch.dtype) -> bool:
    return row.even(world) and row.form == "rows"


def _all_reduced(row: Row, world: int, dtype: torch.dtype) -> bool:
    """Return whether torch's kernels, which know two dtypes and move 16 bytes at a time, support the row."""
    return dtype in (torch.bfloat16, torch.float32) and row.M * row.N * dtype.itemsize % 16 == 0


def _scattered(row: Row, world: int, dtype: torch.dtype) -> bool:
    columns = row.N // world if row.form == "cols" else row.N
    return dtype in (torch.bfloat16, torch.float32) and row.even(world) and columns * dtype.itemsize % 16 == 0


class SharedBuffer:
    """Symmetric memory for partial results, which all rows share; made at first use."""

    def __init__(self, team: Team, rows: list[Row], dtype: torch.dtype) -> None:
        self.device, self.dtype = team.device, dtype
        reduced = [row.M * row.N for row in rows if row.op in ("ar", "rs")]
        gathered = [row.part_rows(team.world) * row.N for row in rows if row.op == "ga" and row.form == "rows"]
        self.largest = max(reduced + gathered, default=0)

    def partial(self, rows: int, columns: int) -> torch.Tensor:
        return symmetric_memory(self.largest, self.dtype, self.device)[: rows * columns].view(rows, columns)

    def one_shot(self, inputs: Inputs) -> Call:
        shared, out = self.partial(*inputs.out_shape), inputs.new(*inputs.out_shape)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=shared)
            return torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", _group(), out)

        return call

    def two_shot(self, inputs: Inputs) -> Call:
        shared = self.partial(*inputs.out_shape)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=shared)
            return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", _group())

        return call

    def reduce_scatter(self, inputs: Inputs) -> Call:
        row = inputs.row
        shared, out = self.partial(row.M, row.N), inputs.new(*inputs.out_shape)
        by_columns = row.form == "cols"
        source, target = (shared, out) if by_columns else (shared.view(-1), out.view(-1))

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=shared)
            torch.ops.symm_mem.reduce_scatter_out(source, _group(), by_columns, target)
            return out

        return call

    # The copy engines read the peers' memory: it must be symmetric memory of its own, the handle being that of its
    # beginning.

    def engines_last(self, inputs: Inputs) -> Call:
        shared = self.partial(inputs.A[0].shape[0], inputs.row.N)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=shared)
            return _arrived(torch.ops.symm_mem._low_contention_all_gather(shared, _group()))

        return call

    def engines_reduce_scatter(self, inputs: Inputs) -> Call:
        shared = self.partial(inputs.row.M, inputs.row.N)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=shared)
            return _arrived(torch.ops.symm_mem._low_contention_reduce_scatter(shared, "sum", _group()))

        return call


def _engines_first(inputs: Inputs) -> Call:
    import torch.distributed._symmetric_memory  # noqa: F401  registers the op

    out = inputs.new(*inputs.out_shape)

    def call(i: int) -> torch.Tensor:
        gathered = _arrived(torch.ops.symm_mem._low_contention_all_gather(inputs.A[i], _group()))
        return torch.matmul(gathered, inputs.B[i], out=out)

    return call


def _arrived(result: torch.Tensor) -> torch.Tensor:
    """Make the current stream wait for the copies."""
    return torch.ops._c10d_functional.wait_tensor(result)


def _async_all_gather(inputs: Inputs) -> Call:
    import torch.distributed._symmetric_memory as symm_mem

    # Where there is multicast, returning A keeps torch from taking it; elsewhere not returning it saves a copy.
    kind = torch._C._autograd.DeviceType.CUDA
    return_A = symm_mem._SymmetricMemory.has_multicast_support(kind, inputs.team.device.index)
    dim = 1 if inputs.row.form == "k" else 0

    def call(i: int) -> torch.Tensor:
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return fused(inputs.A[i], [inputs.B[i]], dim, _group(), return_A=return_A)[1][0]

    return call


def _async_reduce_scatter(inputs: Inputs) -> Call:
    import torch.distributed._symmetric_memory  # noqa: F401  registers the op

    dim = 1 if inputs.row.form == "cols" else 0
    return lambda i: torch.ops.symm_mem.fused_matmul_reduce_scatter(inputs.A[i], inputs.B[i], "sum", dim, _group())
