"""`all_gather_matmul` by rows with copy engines: they carry this rank's rows to the peers while torch multiplies them.

    stream        enter | A @ B: own rows ........... | the rows before, the rows behind
    side stream         | copy to each peer | arrived |

No multiprocessor moves data, so the product, a library's, runs as it would alone; only its first part must last as long
as the copies. Two barriers stand around the copies: before them every rank has left the gathered rows of earlier calls,
after them all rows are there. They use the device's clock and counts, so a captured call can be replayed. A rank whose
first barrier has failed signals no second one, so its copies, which came too soon for a peer, are an error there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import torch_product
from .problem import GATHER_MATMUL, Problem, part_of

if TYPE_CHECKING:
    from .plan import Machine
    from .workspace import Workspace

# Microseconds: a barrier of the ranks in a stream, and the start of a copy.
_BARRIER_US = 4.0
_COPY_US = 2.0


def objection(problem: Problem) -> str | None:
    """Why this problem cannot be served so."""
    if problem.op != GATHER_MATMUL or problem.form != "rows":
        return "copy engines serve all_gather_matmul by rows"
    return None


def predict(problem: Problem, machine: Machine) -> tuple[float, float, float]:
    """Microseconds of the products, of the copies, and of all."""
    w, rows = problem.world_size, problem.part_rows
    own = _part_us(rows, problem, machine)
    around = [rows * (w // 2), rows * ((w - 1) // 2)]  # of a rank in the middle
    others = sum(_part_us(m, problem, machine) for m in around if m)
    gemm = max(own + others, torch_product.expected_us(*problem.gemm, machine))  # one is as hot as the other
    copies = problem.link_bytes / (machine.link_gbs * 1e3) + _COPY_US * (w - 1)
    return gemm, copies, 2 * _BARRIER_US + gemm + max(0.0, copies + _BARRIER_US - own)


def _part_us(rows: int, problem: Problem, machine: Machine) -> float:
    # a product of so few tiles that they are split along K takes longer than the model says, and here there are two
    return torch_product.expected_us(rows, problem.N, problem.K, machine, most_splits=1)


def staged_elements(problem: Problem) -> int:
    """Elements of the gathered rows."""
    return problem.M * problem.K


def run(workspace: Workspace, problem: Problem, out, A, B, bias) -> bool:
    """Launches all of it in the current stream and the side stream. True, as a repeated launch says."""
    ctx = workspace.ctx
    begin = ctx.cur_rank * problem.part_rows
    end = begin + part_of(problem.M, ctx.num_ranks, ctx.cur_rank)
    places, before, behind = workspace.views.get(problem) or _views(workspace, problem, begin, end)

    def send() -> None:
        for place in places:
            place.copy_(A, non_blocking=True)
        ctx.device_barrier()

    ctx.device_barrier()
    beside = ctx.device.type == "cuda" and ctx.num_ranks > 1
    if beside:
        ctx._side.run(send)
    else:
        send()
    _multiply(out, begin, end, A, B, bias)
    if beside:
        ctx._side.join()
    _multiply(out, 0, begin, before, B, bias)
    _multiply(out, end, problem.M, behind, B, bias)
    return True


def _views(workspace: Workspace, problem: Problem, begin: int, end: int) -> tuple:
    """Where this rank's rows go on each peer, the next one first, and here the rows before and behind them."""
    ctx = workspace.ctx
    nbytes = problem.M * problem.K * problem.dtype.itemsize
    gathered = workspace.staging[:nbytes].view(problem.dtype).view(problem.M, problem.K)
    peers = [(ctx.cur_rank + step) % ctx.num_ranks for step in range(1, ctx.num_ranks)]
    places = [ctx.peer_view(gathered, peer)[begin:end] for peer in peers]
    workspace.views[problem] = found = places, gathered[:begin], gathered[end:]
    return found


def _multiply(out, begin: int, end: int, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None) -> None:
    if begin < end:
        torch_product.multiply(out[begin:end], A, B, bias)
