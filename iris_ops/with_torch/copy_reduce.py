"""`matmul_reduce_scatter` by rows, shard by shard: torch multiplies, copy engines carry.

    stream        the next rank's rows | those of the one after | ... | own rows | sum
    copies        entered ............ | copy to the next rank  | ... | arrived  |

Each rank multiplies the rows that others own first, and while it multiplies on, the copy engines carry each partial
result into its owner's memory. The owner adds what arrived to its own, rounded like the others, in fp32 and in rank
order from its own on. No multiprocessor moves data during the products, so they run as a library's do alone; exposed is
the sum at the end.

Among the copies stand two barriers of the ranks: after the first all have left the memory that is written, after the
second all parts are there. They use the device's clock and counts, so a captured call can be replayed. A rank of which
one has failed signals no other, so what it copied too soon for a peer is an error in the peer's next call; a peer that
came so late that it still sums the call before is not told what that sum was made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from iris.launch import relaunch, streams

from ..planning.torch_ways import copy_reduce_elements
from ..problem import Problem, part_of
from . import torch_matmul
from .sum_parts import sum_parts_kernel

if TYPE_CHECKING:
    import torch

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace

# Rows and columns that a program sums: 16 bytes a thread; the interpreter is quicker with large blocks.
_SUM_BLOCK = {"cuda": (2, 1024), "cpu": (64, 256)}


def prepare(workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Callable[[], bool]:
    """A function that launches all of it on tensors at these addresses, in the current stream and beside it."""
    out, A, B, bias, scale = tensors
    ctx = workspace.ctx
    arriving, shards = workspace.views.get(problem) or _views(workspace, problem)
    copies, (begun, arrived, *marks) = workspace.lanes[0], workspace.marks
    others = [(A[rows], leaving, place, mark) for (rows, leaving, place), mark in zip(shards, marks, strict=False)]
    own = A[_rows(problem, ctx.cur_rank)]
    add = _sum(workspace, problem, out, arriving, bias) if out.numel() else None

    def again() -> bool:
        stream = streams.current(ctx.device)
        begun.set(stream)
        with copies.instead_of(stream) as lane:
            begun.wait(lane)
            workspace.meet()
        for rows, leaving, _, multiplied in others:
            if leaving.numel():
                torch_matmul.multiply(leaving, rows, B, None, scale)
            multiplied.set(stream)
        with copies.instead_of(stream) as lane:
            for _, leaving, place, multiplied in others:
                multiplied.wait(lane)
                if leaving.numel():
                    place.copy_(leaving, non_blocking=True)
            workspace.meet()
            arrived.set(lane)
        if add is not None:
            torch_matmul.multiply(out, own, B, None, scale)
        arrived.wait(stream)
        if add is not None:
            add()
        return True

    return again


def _sum(
    workspace: Workspace, problem: Problem, out: torch.Tensor, arriving: torch.Tensor, bias: torch.Tensor | None
) -> Callable[[], None]:
    """A function that launches the sum of the parts."""
    device, (rows, columns) = workspace.ctx.device, out.shape
    key = out.data_ptr(), 0 if bias is None else bias.data_ptr(), problem, out.stride(), bias is None
    again = workspace.sums.moved(key)

    def add() -> None:
        nonlocal again
        if again is not None and again():
            return
        block_m, block_n = _SUM_BLOCK[device.type]
        grid = -(-rows // block_m) * -(-columns // block_n), 1, 1
        args = dict(out=out, staging=arriving, bias=bias, rows=rows, N=columns, stride_om=out.stride(0),
                    stride_on=out.stride(1), BLOCK_M=block_m, BLOCK_N=block_n, WORLD_SIZE=problem.world_size,
                    HAS_BIAS=bias is not None)  # fmt: skip
        found = relaunch.launch(workspace.kernels, device, sum_parts_kernel, grid, args, key[:2], num_warps=8)
        workspace.sums.keep(key, None, found)
        again = found and found.again

    return add


def _views(workspace: Workspace, problem: Problem) -> tuple:
    """Where parts arrive, and for each owner behind this rank: its rows of A, their product here, its place there."""
    ctx, n, w = workspace.ctx, problem.N, problem.world_size
    nbytes = copy_reduce_elements(problem) * problem.dtype.itemsize
    arriving, leaving = workspace.staging[:nbytes].view(problem.dtype).view(2, (w - 1) * problem.part_rows * n)
    shards = []
    for step in range(1, w):
        rows = _rows(problem, (ctx.cur_rank + step) % w)
        size = (rows.stop - rows.start) * n
        here = leaving[(step - 1) * problem.part_rows * n :][:size].view(-1, n)
        there = arriving[(w - step - 1) * size :][:size].view(-1, n)  # this rank is the owner's next but w - step - 1
        shards.append((rows, here, ctx.view_at(there, (ctx.cur_rank + step) % w)))
    return workspace.remember(problem, (arriving, shards))


def _rows(problem: Problem, owner: int) -> slice:
    begin = min(problem.M, owner * problem.part_rows)
    return slice(begin, begin + part_of(problem.M, problem.world_size, owner))
