"""`all_gather_matmul` by rows with copy engines: they carry this rank's rows to the peers while torch multiplies.

    stream      enter | own rows ==== | next rank's ==== | the one's after ==== | ...
    copies            | >>>>>>>>>> 1  | >>>>>>>>>> 2 | >>>>>>>>>> 3
    arrivals                     | 1 |          | 2 |         | 3 |

No multiprocessor moves data, so the products, a library's, run as they would alone, and each hides the copies for the
next one. In step i every rank sends its rows to the rank i before it, so all links of a step are different ones, and
rank r multiplies in the order r, r + 1, r + 2 ... in which rows arrive. A rank's rows that are few go with the next
one's: a product reads all of B however few rows it has. So do as many ranks' as the configuration says: a step has a
barrier, a product a last round that most multiprocessors sit out, and where the own rows' product hides all copies one
step is enough. The steps are the same on all ranks, for they have M, K and the configuration in common; the products
are each rank's own affair.

A step ends with a barrier of the ranks, in a stream of its own, so that no copy waits for one. Barriers use the
device's clock and counts, so a captured call can be replayed. Why no row is overwritten too early: a rank copies after
the first barrier only, to which a peer comes behind its products of earlier calls, in stream order. Why none is read
too early: a rank comes to the barrier of a step behind its copies of that step, and multiplies behind that barrier. A
rank whose first barrier has failed signals no further one, so its copies, which came too soon for a peer, are an error
in the peer's next call; a peer so late that it still multiplies those rows in the call before is not told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from iris import streams
import torch

from . import torch_product
from .problem import GATHER_MATMUL, Problem, part_of

if TYPE_CHECKING:
    from .config import FusedConfig
    from .machine import Machine
    from .workspace import Workspace

# Microseconds, by fit: of a barrier and the wait for room to run it, for each rank; what a copy takes beside its bytes.
_BARRIER_US = 1.5
_COPY_US = 8.0
# Rows from which on a product is worth reading B for.
_LEAST_ROWS = 512


def objection(problem: Problem) -> str | None:
    """Why this problem cannot be served so."""
    if problem.op != GATHER_MATMUL or problem.form != "rows":
        return "copy engines serve all_gather_matmul by rows"
    return None


def _steps(problem: Problem, config: FusedConfig) -> list[range]:
    """Whose rows are multiplied together, counted from the rank itself on; the same on all ranks."""
    others = problem.world_size - 1
    together = min(others, max(config.ranks_together, -(-_LEAST_ROWS // max(1, problem.part_rows))))
    if others == 0:
        return []
    first = others % together or together  # the smallest group, which the fewest rows hide
    begins = [1, *range(1 + first, others + 1, together)]
    return [range(begin, end) for begin, end in zip(begins, [*begins[1:], others + 1], strict=True)]


def _rows_of(problem: Problem, rank: int, step: range) -> list[tuple[int, int]]:
    """The rows [begin, end) that arrive at `rank` in a step: neighbours but where they begin anew at 0."""
    w, part, M = problem.world_size, problem.part_rows, problem.M
    first, last = (rank + step[0]) % w, (rank + step[-1]) % w
    ranks = [(first, last)] if first <= last else [(first, w - 1), (0, last)]
    spans = [(min(M, low * part), min(M, (high + 1) * part)) for low, high in ranks]
    return [(begin, end) for begin, end in spans if begin < end]


def predict(problem: Problem, config: FusedConfig, machine: Machine) -> tuple[float, float, float]:
    """Microseconds of the products, of the copies, and of all, on the rank that takes longest."""
    w = problem.world_size
    copy = problem.part_rows * problem.K * problem.dtype.itemsize / (machine.link_gbs * 1e3) + _COPY_US
    barrier = _BARRIER_US * w
    found = []
    for rank in range(w):
        steps = [_rows_of(problem, rank, step) for step in _steps(problem, config)]
        rows = [part_of(problem.M, w, rank), *(end - begin for step in steps for begin, end in step)]
        products = torch_product.expected_in_turn(rows, problem.N, problem.K, machine)
        us, sent, done = barrier + products[0], barrier, 1
        for step, there in zip(_steps(problem, config), steps, strict=True):
            sent += len(step) * copy
            # a barrier beside a product that fills the chip waits for its end
            us = max(us, sent) + barrier + sum(products[done : done + len(there)])
            done += len(there)
        found.append((us, sum(products)))
    total, gemm = max(found)
    return gemm, copy * (w - 1), total


def staged_elements(problem: Problem) -> int:
    """Elements of the gathered rows."""
    return problem.M * problem.K


def prepare(workspace: Workspace, problem: Problem, config: FusedConfig, out, A, B, bias) -> Callable[[], bool]:
    """A function that launches all of it on tensors at these addresses, in the current stream and beside it."""
    ctx = workspace.ctx
    rank, copies, arrivals = ctx.cur_rank, *workspace.lanes
    gathered, places = workspace.views.get(problem) or _views(workspace, problem)

    def product(begin: int, end: int, rows: torch.Tensor) -> Callable[[], None]:
        return partial(torch_product.multiply, out[begin:end], rows, B, bias)

    begin = min(problem.M, rank * problem.part_rows)
    own = product(begin, begin + A.shape[0], A) if A.shape[0] else None
    steps = [
        (
            [places[i - 1] for i in step] if A.numel() else [],
            [product(begin, end, gathered[begin:end]) for begin, end in _rows_of(problem, rank, step)],
        )
        for step in _steps(problem, config)
    ]
    entered, *marks = workspace.marks
    sent, arrived = marks[: len(steps)], marks[len(steps) : 2 * len(steps)]

    def again() -> bool:
        stream = streams.current(ctx.device)
        workspace.meet()
        entered.set(stream)
        if own is not None:
            own()
        with copies.instead_of(stream) as lane:
            entered.wait(lane)
            for (there, _), mark in zip(steps, sent, strict=True):
                for place in there:
                    place.copy_(A, non_blocking=True)
                mark.set(lane)
        with arrivals.instead_of(stream) as lane:
            for mark, barred in zip(sent, arrived, strict=True):
                mark.wait(lane)
                workspace.meet()
                barred.set(lane)
        for (_, products), mark in zip(steps, arrived, strict=True):
            mark.wait(stream)
            for multiply in products:
                multiply()
        return True

    return again


def _views(workspace: Workspace, problem: Problem) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The gathered rows, and where this rank's belong on the rank 1, 2 ... before it."""
    ctx = workspace.ctx
    w, rank = ctx.num_ranks, ctx.cur_rank
    nbytes = staged_elements(problem) * problem.dtype.itemsize
    gathered = workspace.staging[:nbytes].view(problem.dtype).view(problem.M, problem.K)
    begin = rank * problem.part_rows
    mine = slice(begin, begin + part_of(problem.M, w, rank))
    places = [ctx.peer_view(gathered, (rank - i) % w)[mine] for i in range(1, w)]
    return workspace.remember(problem, (gathered, places))
