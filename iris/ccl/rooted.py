"""Collectives with a root: `broadcast`, `gather`, `scatter`, `reduce`. `messages.py` has those between two ranks.

All are the same three steps, in the order of the current stream: whoever gives copies its tensor into its own staging
memory on the heap; the ranks meet (`device_barrier`); whoever takes copies it from there, out of the giver's heap. A
second meeting keeps the giver from staging its next tensor before this one was taken. A stage of its own costs a local
copy, a tenth of the transfer's time. In return tensors may lie anywhere and have any strides, on each rank others.

Copies are torch's: any dtype, no kernel of ours, captured like any launch. Meetings are bounded by `IRIS_TIMEOUT`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..device.tiles import HEADER
from ..errors import ArgumentError, DtypeError, ShapeError
from ..heap import check_tensor
from .config import ReduceOp
from .problem import SUMMED
from .workspace import Workspace

if TYPE_CHECKING:
    from ..rank import Rank
    from .group import Group


def broadcast(workspace: Workspace, tensor: torch.Tensor, src: int) -> None:
    op, group = "broadcast", workspace.group
    check(op, "tensor", tensor, group.ctx)
    check_rank(op, "src", src, group)
    room = _stage(workspace, tensor.shape, tensor.dtype, tensor if group.rank == src else None)
    with Met(group, group.ranks):
        if group.rank != src:
            tensor.copy_(at_rank(room, group, src))


def gather(workspace: Workspace, out: torch.Tensor | None, inp: torch.Tensor, dst: int) -> None:
    op, group = "gather", workspace.group
    check(op, "inp", inp, group.ctx)
    check_rank(op, "dst", dst, group)
    if group.rank == dst:
        _check_whole(op, "out", out, "inp", inp, group)
    room = _stage(workspace, inp.shape, inp.dtype, inp)
    with Met(group, group.ranks):
        if group.rank == dst and out is not None:
            for rank, part in enumerate(out.split(inp.shape[0]) if inp.shape[0] else ()):
                part.copy_(at_rank(room, group, rank))


def scatter(workspace: Workspace, out: torch.Tensor, inp: torch.Tensor | None, src: int) -> None:
    op, group = "scatter", workspace.group
    check(op, "out", out, group.ctx)
    check_rank(op, "src", src, group)
    if group.rank == src:
        _check_whole(op, "inp", inp, "out", out, group)
    whole = (group.size, *out.shape)
    given = inp.reshape(whole) if group.rank == src and inp is not None else None
    room = _stage(workspace, whole, out.dtype, given)
    with Met(group, group.ranks):
        out.copy_(at_rank(room, group, src)[group.rank])


def reduce(workspace: Workspace, out: torch.Tensor | None, inp: torch.Tensor, dst: int, reduce_op: Any) -> None:
    op, group = "reduce", workspace.group
    check(op, "inp", inp, group.ctx)
    check_rank(op, "dst", dst, group)
    if reduce_op is not None and reduce_op is not ReduceOp.SUM:
        raise ArgumentError(f"{op}: op is {reduce_op!r}; expected None or iris.ccl.ReduceOp.SUM")
    if inp.dtype not in SUMMED:
        raise DtypeError(f"{op}: inp has dtype {inp.dtype}; expected one of {', '.join(map(str, SUMMED))}")
    if group.rank == dst:
        check(op, "out", out, group.ctx)
        assert out is not None
        if (out.shape, out.dtype) != (inp.shape, inp.dtype):
            raise ShapeError(
                f"{op}: out is {tuple(out.shape)} of {out.dtype}; expected {tuple(inp.shape)} of {inp.dtype}, as inp"
            )
    room = _stage(workspace, inp.shape, inp.dtype, inp)
    with Met(group, group.ranks):
        if group.rank == dst and out is not None:
            wide = torch.float32 if inp.dtype.is_floating_point else inp.dtype
            total = at_rank(room, group, 0).to(wide, copy=True)
            for rank in range(1, group.size):  # in rank order, so each run gives the same bits
                total += at_rank(room, group, rank)
            out.copy_(total)


def tile_space(ctx: Rank, tiles: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """The memory that `iris/device/tiles.py` lays out, empty."""
    sound = all(type(count) is int and 0 < count < 1 << 31 for count in (tiles, elements))
    if not sound or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(
            f"tile_space({tiles!r}, {elements!r}, {dtype!r}); expected counts from 1, and bfloat16, float16 or float32"
        )
    whole = 256 * ctx.num_ranks  # each rank's share of a half is whole 256 bytes
    half = -(-ctx.num_ranks * tiles * elements * dtype.itemsize // whole) * whole
    space = ctx.heap.reserve((HEADER.value + half // 2,), torch.int32).fill_(-1)  # the sentinel
    space[: HEADER.value] = 0
    space[2] = half // 256
    ctx.barrier()  # no peer sends before this rank's space is empty
    return space


class Met:
    """Between two meetings of `ranks`, counted in the context, of which each makes this call."""

    def __init__(self, group: Group, ranks: Iterable[int]) -> None:
        self._ctx, self._ranks = group.ctx, tuple(ranks)

    def __enter__(self) -> None:
        self._ctx.meet(self._ranks)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._ctx.meet(self._ranks)


def _stage(workspace: Workspace, shape: Sequence[int], dtype: torch.dtype, given: torch.Tensor | None) -> torch.Tensor:
    """This rank's stage for a tensor of this shape, with what it gives."""
    ctx, nbytes = workspace.group.ctx, torch.Size(shape).numel() * dtype.itemsize
    ctx.side.join()
    ctx.compare("a collective with a root", workspace.group.ranks, shape=tuple(shape), dtype=dtype)
    if workspace.reserve("rooted", 0, max(1, nbytes)):
        ctx.forget_launches()
    room = room_for(workspace.areas["rooted"].staging, shape, dtype)
    if given is not None:
        room.copy_(given)
    return room


def room_for(memory: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return memory[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(tuple(shape))


def at_rank(room: torch.Tensor, group: Group, rank: int) -> torch.Tensor:
    """The stage of the group's rank `rank`."""
    return group.ctx.view_at(room, group.ranks[rank])


def check(op: str, name: str, tensor: Any, ctx: Rank) -> None:
    check_tensor(op, name, tensor, ctx.device)
    if tensor.layout is not torch.strided:
        raise ArgumentError(f"{op}: {name} has layout {tensor.layout}; expected a strided tensor")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{op}: {name} requires grad, and there is no backward; call it under torch.no_grad()")


def check_rank(op: str, name: str, rank: Any, group: Group) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < group.size:
        raise ArgumentError(f"{op}: {name} is {rank!r}; expected a rank of the group, from 0 to {group.size - 1}")


def _check_whole(op: str, name: str, whole: Any, part_name: str, part: torch.Tensor, group: Group) -> None:
    """`whole` has the parts of all ranks, one after the other."""
    check(op, name, whole, group.ctx)
    wanted = (group.size * part.shape[0], *part.shape[1:]) if part.ndim else None
    if tuple(whole.shape) != wanted or whole.dtype != part.dtype:
        raise ShapeError(
            f"{op}: {part_name} is {tuple(part.shape)} of {part.dtype}, {name} is {tuple(whole.shape)} of "
            f"{whole.dtype}; expected {part_name} (M, ...) and {name} (w * M, ...) of one dtype, with w = {group.size}"
        )
