"""`all_gather_matmul` by rows with copy engines: they carry this rank's rows to the peers while others are multiplied.

    stream      enter | own rows ==== | next rank's ==== | the one's after ==== | ...
    copies            | >>>>>>>>>> 1  | >>>>>>>>>> 2 | >>>>>>>>>> 3

No multiprocessor moves data, so products run as they would alone, and each hides the copies for the next one. In step i
every rank sends its rows to the rank i before it, so all links of a step are different ones, and rank r multiplies in
the order r, r + 1, r + 2 ... in which rows arrive. After its rows a rank sends a flag, also by a copy: the number of
barriers that it has passed, which is the same on all ranks and never repeats.

With `warp_specialised` all rows are multiplied by one kernel, `kernels/hopper/gather_matmul.py`, which waits for the
flags itself. Else torch multiplies, after small kernels that wait, in a separate stream so that no copy waits for one.
If a rank has few rows, torch then multiplies them with the next rank's, because a product reads all of B however few
rows it has. The configuration may join more ranks (`ranks_together`): most multiprocessors are idle in the last wave of
a product, and if the product of a rank's own rows hides all copies, one further product is enough. All ranks make the
same copies, and each rank joins products by itself.

Counts and clock are the device's, so a captured call can be replayed. Why no row is overwritten too early: a rank
copies after the barrier only, which a peer reaches after its products of earlier calls, in stream order. Why none is
read too early: flags come after rows, in the order of the copies' stream. A rank whose barrier has failed sends an old
flag, so its copies, which came too early for a peer, cause an error in the peer's next call. A peer so late that it
still multiplies those rows in the previous call does not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from iris.device.context import own_context
from iris.device.sync import wait
from iris.device.waits import waiter_number
from iris.launch import relaunch, streams
import torch
import triton
import triton.language as tl

from ..kernels.hopper import gather_matmul
from ..operands import Operands
from ..planning.ways.copy_engines import rows_of, steps_of
from ..problem import Problem, part_of
from .products import multiplier

if TYPE_CHECKING:
    from ..config import FusedConfig
    from ..workspace import Workspace


@triton.jit(do_not_specialize=["begin", "end", "part_rows", "M"])
def arrived_kernel(
    ctx_ptr, flags, passed, begin, end, part_rows, M, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr
):  # fmt: skip
    """Wait for the rows of the ranks from `begin` to `end`, counted from this rank on, except ranks without rows."""
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    expected = tl.load(passed)
    for i in range(begin, end):
        source = (ctx.rank + i) % WORLD_SIZE
        if source * part_rows < M:
            wait(ctx, flags + source, expected, source, WAITER, exact=True)


# What multiplies: a function that begins with this rank's rows, and one for the others', given the current stream.
_Products = tuple[Callable[[], None], Callable[[torch.cuda.Stream | None], None]]


def _prepare(
    multiplying: Callable[..., _Products], workspace: Workspace, problem: Problem, config: FusedConfig,
    tensors: Operands,
) -> Callable[[], bool]:  # fmt: skip
    """Return a function that launches the call on tensors at these addresses, in the current stream and in lanes."""
    out, A, B, bias, scale = tensors
    ctx = workspace.ctx
    # as rows: where one row is at most one wide, parts along K fit, too, and those without rows are (1, 0)
    A = A.view(part_of(problem.M, ctx.num_ranks, ctx.cur_rank), problem.K)
    gathered, places = workspace.views.get(problem) or _views(workspace, problem)
    first, rest = multiplying(workspace, problem, config, Operands(out, A, B, bias, scale), gathered)
    (copies, _), (entered, sent, *_) = workspace.lanes, workspace.marks
    count = workspace.barrier.passed

    def again() -> bool:
        stream = streams.current(ctx.device)
        workspace.rendezvous()
        entered.set(stream)
        first()
        with copies.instead_of(stream) as lane:
            entered.wait(lane)
            for rows, flag in places if A.shape[0] else ():  # a peer waits for the flag, be there columns or not
                rows.copy_(A, non_blocking=True)
                flag.copy_(count, non_blocking=True)
            sent.set(lane)
        rest(stream)
        sent.wait(stream)
        return True

    return again


def _at_once(
    workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands, gathered: torch.Tensor
) -> _Products:
    rows = gather_matmul.Rows(gathered, workspace.arrivals, workspace.barrier.passed)
    launch = gather_matmul.product(workspace.ctx, workspace.products, problem, config, tensors, rows)
    return launch, lambda stream: None


def _in_steps(
    workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands, gathered: torch.Tensor
) -> _Products:
    out, A, B, bias, scale = tensors
    rank = workspace.ctx.cur_rank
    multiply = multiplier(workspace.ctx, problem, problem.epilogue)

    def product(begin: int, end: int, rows: torch.Tensor) -> Callable[[], None]:
        return partial(multiply, out[begin:end], rows, B, bias, scale)

    begin = min(problem.M, rank * problem.part_rows)
    own = product(begin, begin + A.shape[0], A) if A.shape[0] else None
    steps = steps_of(problem, config)
    products = [[product(*span, gathered[slice(*span)]) for span in rows_of(problem, rank, step)] for step in steps]
    arrivals, (entered, _, *marks) = workspace.lanes[1], workspace.marks
    waits = workspace.views.get((problem, *steps)) or _waits(workspace, problem, steps)

    def first() -> None:
        if own is not None:
            own()

    def rest(stream: torch.cuda.Stream | None) -> None:
        with arrivals.instead_of(stream) as lane:
            entered.wait(lane)
            for arrived, mark in zip(waits, marks, strict=False):
                arrived()
                mark.set(lane)
        for together, mark in zip(products, marks, strict=False):
            mark.wait(stream)
            for each in together:
                each()

    return first, rest


prepare_at_once = partial(_prepare, _at_once)  # one kernel multiplies all rows
prepare_in_steps = partial(_prepare, _in_steps)  # torch multiplies one rank's rows after the other's


def _waits(workspace: Workspace, problem: Problem, steps: list[range]) -> tuple[Callable[[], None], ...]:
    """Return, for each step, a function that launches the wait for its rows."""
    known = dict(ctx_ptr=workspace.ctx.get_device_context(), flags=workspace.arrivals, passed=workspace.barrier.passed,
                 part_rows=problem.part_rows, M=problem.M, WORLD_SIZE=problem.world_size,
                 WAITER=waiter_number(problem.called_op))  # fmt: skip
    waits = tuple(_wait(workspace, dict(known, begin=step.start, end=step.stop)) for step in steps)
    return workspace.remember((problem, *steps), waits)


def _wait(workspace: Workspace, args: dict) -> Callable[[], None]:
    again: Callable[[], bool] | None = None

    def arrived() -> None:
        nonlocal again
        if again is None or not again():
            device = workspace.ctx.device
            launched = relaunch.launch(workspace.products.kernels, device, arrived_kernel, (1, 1, 1), args, num_warps=1)
            again = launched and launched.again

    return arrived


def _views(workspace: Workspace, problem: Problem) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the gathered rows; on the rank 1, 2 ... before this one, where its own belong, and its flag."""
    ctx = workspace.ctx
    w, rank = ctx.num_ranks, ctx.cur_rank
    nbytes = problem.M * problem.K * problem.dtype.itemsize
    gathered = workspace.staging[:nbytes].view(problem.dtype).view(problem.M, problem.K)
    begin = rank * problem.part_rows
    mine = slice(begin, begin + part_of(problem.M, w, rank))
    peers = [(rank - i) % w for i in range(1, w)]
    rows = [ctx.view_at(gathered, peer)[mine] for peer in peers]
    flags = [ctx.view_at(workspace.arrivals, peer)[rank : rank + 1] for peer in peers]
    return workspace.remember(problem, (gathered, list(zip(rows, flags, strict=True))))
