"""Collectives with a root: `broadcast`, `gather`, `scatter`, `reduce`. `messages.py` has those between two ranks.

They are messages of a group (`transfer.py`), in separate rings that grow to the largest call: from the root to
every other rank, or to the root from every other rank, which sums them for a reduce. Each is one launch, but for
tensors that are larger than a ring may become, and for those that go in two steps (`two_steps.py`). A rank waits only
for what it receives: a root that sends continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..device.tiles import SPACE_HEADER
from ..errors import ArgumentError, DtypeError, ShapeError
from ..heap import check_memory, check_tensor, check_written, span
from ..transforms import check_undifferentiated
from . import two_steps
from .config import ReduceOp
from .problem import SUMMED, bits
from .rings import Message, Rings, WordBuffer, cut, cut_of_sum, overlap
from .transfer import SLOT

if TYPE_CHECKING:
    from ..rank import Rank
    from .group import Group


def broadcast(rings: Rings, group: Group, tensor: torch.Tensor, src: int) -> None:
    op = "broadcast"
    with group.ctx.reporting_refusals(op, group.ranks):
        check(op, "tensor", tensor, group.ctx, written=True)  # on the root, too: ranks that have one raise alike
        check_rank(op, "src", src, group)
    _agree(op, group, tensor, src=src)
    buffer = rings.buffer(tensor)
    if count := two_steps.pieces(op, buffer.nbytes, group.size):
        two_steps.broadcast(rings, group, buffer.fill() if group.rank == src else buffer, src, count)
        if group.rank != src:
            buffer.empty()
    elif group.rank == src:
        _move(rings, op, buffer.nbytes, [(buffer.fill(), rank) for rank in _peers(group)], [])
    else:
        _move(rings, op, buffer.nbytes, [], [(buffer, src)])
        buffer.empty()


def gather(rings: Rings, group: Group, out: torch.Tensor | None, inp: torch.Tensor, dst: int) -> None:
    op = "gather"
    with group.ctx.reporting_refusals(op, group.ranks):
        check(op, "inp", inp, group.ctx)
        check_rank(op, "dst", dst, group)
        if group.rank == dst:
            _check_joined(op, "out", out, "inp", inp, group)
    _agree(op, group, inp, dst=dst)
    own = rings.buffer(inp)
    if group.rank != dst:
        _move(rings, op, own.nbytes, [(own.fill(), dst)], [])
    elif inp.numel() and out is not None:
        parts = [rings.buffer(part) for part in out.split(inp.shape[0])]
        own.fill(aside=overlap(inp, out) and own.address != parts[dst].address)
        receives = [(parts[rank], rank) for rank in _peers(group)]
        _move(rings, op, own.nbytes, [], receives, copy=(own, parts[dst]))
        for part in parts:
            part.empty()


def scatter(rings: Rings, group: Group, out: torch.Tensor, inp: torch.Tensor | None, src: int) -> None:
    op = "scatter"
    with group.ctx.reporting_refusals(op, group.ranks):
        check(op, "out", out, group.ctx, written=True)
        check_rank(op, "src", src, group)
        if group.rank == src:
            _check_joined(op, "inp", inp, "out", out, group)
    _agree(op, group, out, src=src)
    own = rings.buffer(out)
    if group.rank != src:
        _move(rings, op, own.nbytes, [], [(own, src)])
    elif out.numel() and inp is not None:
        aside = overlap(inp, out)
        parts = [rings.buffer(part).fill(aside) for part in inp.split(out.shape[0])]
        _move(rings, op, own.nbytes, [(parts[rank], rank) for rank in _peers(group)], [], copy=(parts[src], own))
    own.empty()


def reduce(
    rings: Rings, group: Group, out: torch.Tensor | None, inp: torch.Tensor | None, dst: int, reduce_op: Any
) -> None:  # fmt: skip
    op = "reduce"
    with group.ctx.reporting_refusals(op, group.ranks):
        _check_reduce(op, group, out, inp, dst, reduce_op)
    assert inp is not None
    _agree(op, group, inp, dst=dst)
    dtype, n, size = bits(inp, summed=True).dtype, inp.numel(), inp.itemsize
    own = rings.buffer(inp).fill(aside=group.rank == dst and out is not None and out is not inp and overlap(inp, out))
    total = rings.buffer(out) if group.rank == dst and out is not None else own
    if not n or group.size == 1:
        if out is not None:
            out.copy_(inp)
        return
    if count := two_steps.pieces(op, n * size, group.size):
        two_steps.reduce(rings, group, dtype, own.address, n, total.address, dst, count)
    else:
        step = _reserved(rings, cut_of_sum(n, dtype).slots) // size
        for begin in range(0, n, step):
            first, length = own.address + begin * size, min(step, n - begin)
            if group.rank == dst:
                rings.sum(op, dtype, [], first, length, total.address + begin * size)
            else:
                rings.sum(op, dtype, [Message(first, length * size, dst)])
    if total is not own:
        total.empty()


def _check_reduce(op: str, group: Group, out: Any, inp: Any, dst: int, reduce_op: Any) -> None:
    check(op, "inp", inp, group.ctx)
    check_rank(op, "dst", dst, group)
    if reduce_op is not None and reduce_op is not ReduceOp.SUM:
        raise ArgumentError(f"{op}: op is {reduce_op!r}; expected None or iris.ccl.ReduceOp.SUM")
    if inp.dtype not in SUMMED:
        raise DtypeError(f"{op}: inp has dtype {inp.dtype}; expected one of {', '.join(map(str, SUMMED))}")
    if group.rank == dst:
        check(op, "out", out, group.ctx, written=True)
        if (out.shape, out.dtype) != (inp.shape, inp.dtype):
            raise ShapeError(
                f"{op}: out is {tuple(out.shape)} of {out.dtype}; expected {tuple(inp.shape)} of {inp.dtype}, as inp"
            )


def tile_space(ctx: Rank, tiles: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the memory that `iris/device/tiles.py` lays out, empty."""
    sound = all(type(count) is int and 0 < count < 1 << 31 for count in (tiles, elements))
    if not sound or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ArgumentError(
            f"tile_space({tiles!r}, {elements!r}, {dtype!r}); expected counts from 1, and bfloat16, float16 or float32"
        )
    granule = 256 * ctx.num_ranks  # each rank's share of a half is whole 256 bytes
    half = -(-ctx.num_ranks * tiles * elements * dtype.itemsize // granule) * granule
    space = ctx.heap.reserve((SPACE_HEADER.value + half // 2,), torch.int32).fill_(-1)  # the sentinel
    space[: SPACE_HEADER.value] = 0
    space[2] = half // 256
    ctx.barrier()  # no peer sends before this rank's space is empty
    return space


def _agree(op: str, group: Group, tensor: torch.Tensor, **root: int) -> None:
    group.ctx.side.join()
    group.ctx.compare(op, group.ranks, **root, shape=tuple(tensor.shape), dtype=tensor.dtype)


def _peers(group: Group) -> Iterator[int]:
    """Yield the other ranks, the next one first."""
    return ((group.rank + i) % group.size for i in range(1, group.size))


def _reserved(rings: Rings, slots: int) -> int:
    """Reserve message buffers of `slots` slots, as far as they may grow; return the bytes that one launch may send."""
    rings.reserve(min(slots, rings.most_slots()))
    return (rings.slots if slots <= rings.slots else rings.slots // 2) * SLOT.value


def _move(
    rings: Rings, op: str, nbytes: int, sends: list[tuple[WordBuffer, int]], receives: list[tuple[WordBuffer, int]],
    copy: tuple[WordBuffer, WordBuffer] | None = None,
) -> None:  # fmt: skip
    """Move messages of `nbytes` each to or from the given ranks. `copy` is (source, target) of a local copy."""
    if not nbytes:
        return
    step = _reserved(rings, cut(nbytes // 4).slots)
    for begin in range(0, nbytes, step):
        length = min(step, nbytes - begin)

        def listed(
            buffers: list[tuple[WordBuffer, int]], begin: int = begin, length: int = length
        ) -> list[Message]:  # fmt: skip
            return [Message(buffer.address + begin, length, rank) for buffer, rank in buffers]

        here = []
        if copy is not None and copy[0].address != copy[1].address:
            here = [Message(copy[0].address + begin, length, 0, copy[1].address + begin)]
        rings.move(op, listed(sends) + here, listed(receives))


def check(op: str, name: str, tensor: Any, ctx: Rank, written: bool = False) -> None:
    """Raise a typed error for anything but a strided tensor in the device's memory; `written`: that may be written."""
    check_tensor(op, name, tensor, ctx.device)
    check_undifferentiated(op, name, tensor)
    check_memory(op, (name,), (tensor.data_ptr(),), (span(tensor),))
    if written:
        check_written(op, name, tensor)


def check_rank(op: str, name: str, rank: Any, group: Group) -> None:
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < group.size:
        raise ArgumentError(f"{op}: {name} is {rank!r}; expected a rank of the group, from 0 to {group.size - 1}")


def _check_joined(op: str, name: str, joined: Any, part_name: str, part: torch.Tensor, group: Group) -> None:
    """Raise unless `joined` has room for the parts of all ranks, one after the other."""
    check(op, name, joined, group.ctx, written=name == "out")
    expected = (group.size * part.shape[0], *part.shape[1:]) if part.ndim else None
    if tuple(joined.shape) != expected or joined.dtype != part.dtype:
        raise ShapeError(
            f"{op}: {part_name} is {tuple(part.shape)} of {part.dtype}, {name} is {tuple(joined.shape)} of "
            f"{joined.dtype}; expected {part_name} (M, ...) and {name} (w * M, ...) of one dtype, with w = {group.size}"
        )
