"""The contenders that a benchmark measures: ours, the rivals, and the product alone.

A contender says for each op that it serves how to get ready. `prepare[op](inputs)` allocates what it needs and gives
the call that is checked and timed: `call(i) -> out` on copy i of the inputs. All contenders read the same A and B, and
B is the transpose of an (N, K) weight for all of them. A row that a contender does not serve is left blank.

    ours        ctx.ops, output on the symmetric heap; on request with other configurations, too
    rivals      rivals_torch.py: NCCL, and torch's own ops on symmetric memory; rivals_nccl.py: NCCL's kernels for
                symmetric memory; where they are installed, rivals_vllm.py, rivals_flashinfer.py and rivals_kraken.py
    alone       the product without the collective: torch's, and our kernel in a world of one; the faster one makes the
                floor

Nobody uses multicast: the rivals' ops use plain peer memory, and async-TP is asked in the form that never takes it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
import functools
import importlib.util
import math
import os

from iris_tp.bench import separate
from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import CALLS, Row
from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

OURS, RIVAL, GEMM = "ours", "rival", "gemm"


def everything(row: Row, world: int, dtype: torch.dtype) -> bool:
    return True


@dataclass(frozen=True)
class Contender:
    name: str
    kind: str
    prepare: dict[str, Callable[[Inputs], Call]] = field(repr=False)
    serves: Callable[[Row, int, torch.dtype], bool] = field(default=everything, repr=False)
    plan: Callable[[Row], dict] | None = field(default=None, repr=False)  # what it chose for a row, for the record
    note: str | None = None  # what its result lacks, for the table
    capture: Callable[[], AbstractContextManager] = field(default=nullcontext, repr=False)  # in which a graph is made

    @property
    def alone(self) -> bool:
        """Whether it is the product without the collective."""
        return self.kind == GEMM

    def takes(self, row: Row, world: int, dtype: torch.dtype) -> bool:
        return row.op in self.prepare and self.serves(row, world, dtype)


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
        """What is planned for a row, with `changes` to its fields; where those are impossible, the error says why.

        Of another algorithm it is the best of that one.
        """
        form, algorithm = None if row.op == "ar" else row.form, changes.get("algorithm")
        planned = self.ctx.ops.plan(CALLS[row.op], row.M, row.N, row.K, self.dtype, form, algorithm=algorithm)
        return replace(planned, **changes)

    def plan(self, row: Row, **changes) -> dict:
        """For the record; a prediction is for what is planned, not for what is changed."""
        dropped = {"reasons", "prediction"} if changes else {"reasons"}
        return {name: value for name, value in asdict(self.config(row, **changes)).items() if name not in dropped}

    def close(self) -> None:
        if "ctx" in vars(self):
            self.ctx.close()


def installed(team: Team, module: str, name: str) -> bool:
    """Whether a rival can be imported, and IRIS_WITHOUT does not name it; says so where it cannot."""
    if module in os.environ.get("IRIS_WITHOUT", "").split(","):
        team.say(f"without {name}: IRIS_WITHOUT names it")
    elif importlib.util.find_spec(module) is None:
        team.say(f"without {name}: it is not installed")
    else:
        return True
    return False


def heaps(team: Team, rows: list[Row], dtype: torch.dtype, gib: float) -> tuple[Heap, Heap]:
    """With all ranks, and with this one alone."""
    nbytes = int(gib * 2**30)
    return Heap(team, rows, dtype, nbytes), Heap(team, rows, dtype, nbytes, alone=True)


def contenders(team: Team, rows: list[Row], dtype: torch.dtype, heap: Heap, alone: Heap) -> list[Contender]:
    """All that can run on this team's device; `rows` says how large the shared buffers have to be."""
    from benchmarks import rivals_flashinfer, rivals_kraken, rivals_nccl, rivals_torch, rivals_vllm  # they import this

    blas = "cuBLAS" if team.cuda else "torch"
    found = [Contender("ours", OURS, _ours(heap), plan=heap.plan), *rivals_torch.contenders(team, rows, dtype)]
    if team.cuda:
        for others in (rivals_nccl, rivals_vllm, rivals_flashinfer, rivals_kraken):
            found += others.contenders(team, rows, dtype)
    found.append(Contender(f"{blas} alone", GEMM, dict.fromkeys(CALLS, separate.product)))
    found.append(Contender("ours alone", GEMM, dict.fromkeys(CALLS, _our_gemm(alone))))
    return found


def varied(heap: Heap, changes: dict[str, int | bool | str]) -> Contender:
    """Ours, with another configuration than the plan's."""
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
    """An all-reduce among one: of our kernels the one with most choices for the product."""

    def prepare(inputs: Inputs) -> Call:
        A = [inputs.whole_A(i) for i in range(inputs.copies)]
        out = heap.out(A[0].shape[0], inputs.B[0].shape[1])
        op = heap.ctx.ops.matmul_all_reduce

        def call(i: int) -> torch.Tensor:
            op(out, A[i], inputs.B[i])
            return out

        return call

    return prepare
