"""Who is measured: a list of contenders.

A contender says for each op that it serves how to get ready: `prepare[op](inputs)` allocates what it wants and gives
the call that is checked and timed, `call(i) -> out` on copy i of the inputs. All read the same A and B, and B is the
transpose of an (N, K) weight for all of them.

    ours        ctx.ops, output on the symmetric heap
    NCCL        torch.matmul, then the collective of torch.distributed (gloo on CPUs)
    one-shot    torch.matmul into symmetric memory, then torch's one_shot_all_reduce; two-shot alike
    async-TP    torch.ops.symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter
    GEMM        the product alone, no collective: the floor is made of it

No multicast: the ops named above use plain peer memory, and async-TP is asked in the form that never takes it.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
import functools

import torch
import torch.distributed as dist

from benchmarks.inputs import Call, Inputs
from benchmarks.launch import Team
from benchmarks.shapes import CALLS, Row

OURS, RIVAL, GEMM = "ours", "rival", "gemm"


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str
    prepare: dict[str, Callable[[Inputs], Call]] = field(repr=False)
    plan: Callable[[Row], dict] | None = field(default=None, repr=False)  # what it chose for a row, for the record

    @property
    def checked(self) -> bool:
        """The product alone leaves out the collective: it has no result to compare."""
        return self.kind != GEMM


class Heap:
    """Our context and one output buffer on its symmetric heap, which all rows share; made at first use."""

    def __init__(self, team: Team, rows: list[Row], dtype: torch.dtype, heap_bytes: int) -> None:
        self.dtype, self.heap_bytes = dtype, heap_bytes
        self.largest = max(row.out_shape(team.world)[0] * row.N for row in rows)

    @functools.cached_property
    def ctx(self):
        import iris  # here, so that the rivals can be measured where the library cannot start

        return iris.iris(self.heap_bytes)

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        return self.ctx.empty(self.largest, dtype=self.dtype)

    def out(self, rows: int, columns: int) -> torch.Tensor:
        return self.buffer[: rows * columns].view(rows, columns)

    def plan(self, row: Row) -> dict:
        config = asdict(self.ctx.ops.plan(CALLS[row.op], row.M, row.N, row.K, self.dtype))
        return {name: value for name, value in config.items() if name != "reasons"}

    def close(self) -> None:
        if "ctx" in vars(self):
            self.ctx.close()


def contenders(team: Team, rows: list[Row], dtype: torch.dtype, heap: Heap) -> list[Contender]:
    """All that can run on this team's device; `rows` says how large the shared buffers have to be."""
    blas, collectives = ("cuBLAS", "NCCL") if team.cuda else ("torch", "gloo")
    nccl = {
        "ar": _nccl_all_reduce,
        "rs": _nccl_reduce_scatter,
        "ag": _nccl_all_gather_first,
        "ga": _nccl_all_gather_last,
    }
    found = [
        Contender("ours", OURS, _ours(heap), heap.plan),
        Contender(f"{blas} + {collectives}", RIVAL, nccl),
    ]
    if team.cuda:
        full = [row.M * row.N for row in rows if row.op == "ar"]
        found += _symmetric_all_reduces(team, max(full, default=0), dtype)
        found.append(Contender("torch async-TP", RIVAL, {"ag": _async_all_gather, "rs": _async_reduce_scatter}))
    found.append(Contender(f"{blas} alone", GEMM, dict.fromkeys(CALLS, _gemm)))
    return found


def _ours(heap: Heap) -> dict[str, Callable[[Inputs], Call]]:
    def prepare(inputs: Inputs) -> Call:
        out = heap.out(*inputs.row.out_shape(inputs.team.world))
        op = getattr(heap.ctx.ops, CALLS[inputs.row.op])

        def call(i: int) -> torch.Tensor:
            op(out, inputs.A[i], inputs.B[i])
            return out

        return call

    return dict.fromkeys(CALLS, prepare)


def _gemm(inputs: Inputs) -> Call:
    A = [inputs.gather(part) for part in inputs.A] if inputs.row.op == "ag" else inputs.A
    out = torch.empty(A[0].shape[0], inputs.row.N, device=A[0].device, dtype=A[0].dtype)
    return lambda i: torch.matmul(A[i], inputs.B[i], out=out)


def _nccl_all_reduce(inputs: Inputs) -> Call:
    out = inputs.new_out()

    def call(i: int) -> torch.Tensor:
        torch.matmul(inputs.A[i], inputs.B[i], out=out)
        dist.all_reduce(out)
        return out

    return call


def _nccl_reduce_scatter(inputs: Inputs) -> Call:
    out = inputs.new_out()
    partial = out.new_empty(inputs.row.M, inputs.row.N)

    def call(i: int) -> torch.Tensor:
        torch.matmul(inputs.A[i], inputs.B[i], out=partial)
        dist.reduce_scatter_tensor(out, partial)
        return out

    return call


def _nccl_all_gather_first(inputs: Inputs) -> Call:
    out = inputs.new_out()
    gathered = out.new_empty(inputs.row.M, inputs.row.K)

    def call(i: int) -> torch.Tensor:
        dist.all_gather_into_tensor(gathered, inputs.A[i])
        return torch.matmul(gathered, inputs.B[i], out=out)

    return call


def _nccl_all_gather_last(inputs: Inputs) -> Call:
    out = inputs.new_out()
    part = out.new_empty(inputs.A[0].shape[0], inputs.row.N)

    def call(i: int) -> torch.Tensor:
        torch.matmul(inputs.A[i], inputs.B[i], out=part)
        dist.all_gather_into_tensor(out, part)
        return out

    return call


def _symmetric_all_reduces(team: Team, largest: int, dtype: torch.dtype) -> list[Contender]:
    group = dist.group.WORLD.group_name

    @functools.cache
    def buffer() -> torch.Tensor:
        import torch.distributed._symmetric_memory as symm_mem

        shared = symm_mem.empty(largest, dtype=dtype, device=team.device)
        symm_mem.rendezvous(shared, group)
        return shared

    def partial(inputs: Inputs) -> torch.Tensor:
        return buffer()[: inputs.row.M * inputs.row.N].view(inputs.row.M, inputs.row.N)

    def one_shot(inputs: Inputs) -> Call:
        shared, out = partial(inputs), inputs.new_out()

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=shared)
            return torch.ops.symm_mem.one_shot_all_reduce_out(shared, "sum", group, out)

        return call

    def two_shot(inputs: Inputs) -> Call:
        shared = partial(inputs)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=shared)
            return torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group)

        return call

    return [
        Contender("cuBLAS + torch one-shot", RIVAL, {"ar": one_shot}),
        Contender("cuBLAS + torch two-shot", RIVAL, {"ar": two_shot}),
    ]


def _async_all_gather(inputs: Inputs) -> Call:
    import torch.distributed._symmetric_memory as symm_mem

    group = dist.group.WORLD.group_name
    # Where there is multicast, returning A keeps torch from taking it; elsewhere not returning it saves a copy.
    kind = torch._C._autograd.DeviceType.CUDA
    return_A = symm_mem._SymmetricMemory.has_multicast_support(kind, inputs.team.device.index)

    def call(i: int) -> torch.Tensor:
        fused = torch.ops.symm_mem.fused_all_gather_matmul
        return fused(inputs.A[i], [inputs.B[i]], 0, group, return_A=return_A)[1][0]

    return call


def _async_reduce_scatter(inputs: Inputs) -> Call:
    import torch.distributed._symmetric_memory  # noqa: F401  registers the op

    group = dist.group.WORLD.group_name
    return lambda i: torch.ops.symm_mem.fused_matmul_reduce_scatter(inputs.A[i], inputs.B[i], "sum", 0, group)
