"""The contenders that a benchmark measures: ours, the rivals, and the product alone.

A contender defines how to prepare each op that it supports. `prepare[op](inputs)` allocates what it needs and gives
the call that is checked and timed: `call(i) -> out` on copy i of the inputs. All contenders read the same A and B, and
B is the transpose of an (N, K) weight for all of them. A row that a contender does not support stays blank.

    ours        ctx.ops, output on the symmetric heap; on request with other configurations, too
    rivals      of_torch.py: NCCL, and torch's own ops on symmetric memory; of_nccl.py: NCCL's kernels for
                symmetric memory; where they are installed, of_vllm.py, of_flashinfer.py and of_kraken.py
    alone       the product without the collective: torch's, and our kernel in a world of one; the faster one makes the
                floor

Nobody uses multicast: the rivals' ops use plain peer memory, and async-TP is called in the form that never takes it.
"""

from collections.abc import Callable
from dataclasses import asdict, replace
import functools
import math

from iris_tp.bench import separate
from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import CALLS, Row
from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.rivals import of_flashinfer, of_kraken, of_nccl, of_torch, of_vllm
from benchmarks.rivals.contender import GEMM, OURS, RIVAL, Contender


class Heap:
    """A context of ours and one output buffer on its symmetric heap, which all rows share; made at first use.

    `alone`: the ranks of the context are this one only, and its outputs those of the product alone.
    """

    def __init__(self, team: Team, rows: list[Row], dtype: torch.dtype, nbytes: int, alone: bool = False) -> None:
        self.team, self.dtype, self.nbytes, self.alone = team, dtype, nbytes, alone
        shapes = [row.gemm(team.world)[:2] if alone else row.out_shape(0, team.world) for row in rows]
        self.largest = max(map(math.prod, shapes))

    @functools.cached_property
    def ctx(self):
        import iris  # here, so that the rivals can be measured where the library cannot start

        if not self.alone:
            return iris.iris(self.nbytes)
        # Every rank takes part in making every group. Gloo: the group only serves for setting up.
        groups = [dist.new_group([rank], backend="gloo") for rank in range(self.team.world)]
        return iris.iris(self.nbytes, group=groups[self.team.rank])

    @functools.cached_property
    def buffer(self) -> torch.Tensor:
        return self.ctx.empty(self.largest, dtype=self.dtype)

    def out(self, rows: int, columns: int) -> torch.Tensor:
        return self.buffer[: rows * columns].view(rows, columns)

    def config(self, row: Row, **changes):
        """Return the plan of a row, with `changes` to its fields; where those are impossible, the error says why.

        Of another algorithm it is the best of that one.
        """
        form, algorithm = None if row.op == "ar" else row.form, changes.get("algorithm")
        planned = self.ctx.ops.plan(CALLS[row.op], row.M, row.N, row.K, self.dtype, form, algorithm=algorithm)
        return replace(planned, **changes)

    def plan(self, row: Row, **changes) -> dict:
        """Return the plan for the record; a prediction is for what is planned, not for what is changed."""
        dropped = {"reasons", "prediction"} if changes else {"reasons"}
        return {name: value for name, value in asdict(self.config(row, **changes)).items() if name not in dropped}

    def close(self) -> None:
        if "ctx" in vars(self):
            self.ctx.close()


def heaps(team: Team, rows: list[Row], dtype: torch.dtype, gib: float) -> tuple[Heap, Heap]:
    """Return contexts of all ranks, and of this one alone."""
    nbytes = int(gib * 2**30)
    return Heap(team, rows, dtype, nbytes), Heap(team, rows, dtype, nbytes, alone=True)


def contenders(team: Team, rows: list[Row], dtype: torch.dtype, heap: Heap, alone: Heap) -> list[Contender]:
    """Return all that can run on this team's device; `rows` says how large the shared buffers must be."""
    blas = "cuBLAS" if team.cuda else "torch"
    entries = [Contender("ours", OURS, _ours(heap), plan=heap.plan), *of_torch.contenders(team, rows, dtype)]
    if team.cuda:
        for library in (of_nccl, of_vllm, of_flashinfer, of_kraken):
            entries += library.contenders(team, rows, dtype)
    entries.append(Contender(f"{blas} alone", GEMM, dict.fromkeys(CALLS, separate.product)))
    entries.append(Contender("ours alone", GEMM, dict.fromkeys(CALLS, _our_gemm(alone))))
    return entries


def varied(heap: Heap, changes: dict[str, int | bool | str]) -> Contender:
    """Return ours, with another configuration than the plan's."""
    name = "ours, " + ", ".join(f"{field} {value}" for field, value in changes.items())
    return Contender(name, RIVAL, _ours(heap, **changes), plan=functools.partial(heap.plan, **changes))


def _ours(heap: Heap, **changes) -> dict[str, Callable[[Inputs], Call]]:
    def prepare(inputs: Inputs) -> Call:
        out = heap.out(*inputs.out_shape)
        op = getattr(heap.ctx.ops, CALLS[inputs.row.op])
        config = heap.config(inputs.row, **changes) if changes else None

        def call(i: int) -> torch.Tensor:
            op(out, inputs.A[i], inputs.B[i], config=config)
            return out

        return call

    return dict.fromkeys(CALLS, prepare)


def _our_gemm(heap: Heap) -> Callable[[Inputs], Call]:
    """Return an all-reduce among one: of our kernels the one with most choices for the product."""

    def prepare(inputs: Inputs) -> Call:
        A = [inputs.whole_A(i) for i in range(inputs.copies)]
        out = heap.out(A[0].shape[0], inputs.B[0].shape[1])
        op = heap.ctx.ops.matmul_all_reduce

        def call(i: int) -> torch.Tensor:
            op(out, A[i], inputs.B[i])
            return out

        return call

    return prepare
