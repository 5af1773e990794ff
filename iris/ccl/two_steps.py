"""Broadcast and reduce of large tensors among three ranks and more, in two steps: no link carries more than the tensor.

In one step the root sends the whole tensor to each of its peers, or takes one from each. Here each peer *owns* a share:

    broadcast   the root sends every owner its share; the owners send theirs to each other
    reduce      every rank sends every owner its share; an owner sums it and sends the sum to the root

So the root sends or takes the tensor once, and no other rank sends or takes more. A tensor goes in pieces: while owners
pass one on, the next is on its way to them. Sums have the same bits as in one step, for an owner adds in rank order,
and rounds once.

No wait is circular. A launch takes what its peers send in launches of the same piece or of earlier ones. A sender waits
only for room in a ring: until the receiver has taken the message that was in the same slots in the previous round,
which the receiver reports in its next launch. A tensor goes in one round if a ring may become large enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..machines import LinkRates
from .rings import Message, Rings, WordBuffer, cut, cut_of_sum
from .transfer import SLOT

if TYPE_CHECKING:
    from .group import Group

# What a piece costs besides the time on a link: its launches, and the hop of its last unit.
_STAGE_US = {"broadcast": 5.0, "reduce": 9.0}
_PIECES = (1, 2, 4, 8)

Span = tuple[int, int]  # where something begins, and how long it is
Shares = list[dict[int, Span]]  # of each piece, by owner


def pieces(op: str, nbytes: int, world: int) -> int:
    """Return in how many pieces a tensor goes in two steps, the same on all ranks; 0 where one step is faster."""
    if world < 3 or not nbytes:
        return 0
    once_us = nbytes / (LinkRates.link_gbs * 1e3)
    us, count = min(((1 + 1 / p) * once_us + (1 + p) * _STAGE_US[op], p) for p in _PIECES)
    return count if us < (world - 1) * once_us + _STAGE_US[op] else 0


def broadcast(rings: Rings, group: Group, buffer: WordBuffer, src: int, count: int) -> None:
    """Send the bytes at `buffer` of rank `src` to every rank's `buffer`, in `count` pieces."""
    owners = [rank for rank in range(group.size) if rank != src]
    peers = [rank for rank in owners if rank != group.rank]
    multiple = SLOT.value
    for shares in _rounds(rings, buffer.nbytes, owners, count, multiple, lambda n: cut(-(-n // 4)).slots):

        def message(piece: int, owner: int, peer: int, shares: Shares = shares) -> Message:
            begin, nbytes = shares[piece][owner]
            return Message(buffer.address + begin, nbytes, peer)

        if group.rank == src:
            rings.move("broadcast", [message(i, owner, owner) for i in range(count) for owner in owners], [])
            continue
        for i in range(count + 1):  # what came of the piece before goes on, beside this one
            sends = [message(i - 1, group.rank, other) for other in peers] if i else []
            receives = [message(i - 1, other, other) for other in peers] if i else []
            receives += [message(i, group.rank, src)] if i < count else []
            rings.move("broadcast", sends, receives)


def reduce(
    rings: Rings, group: Group, dtype: torch.dtype, own: int, n: int, out: int, dst: int, count: int
) -> None:  # fmt: skip
    """Store the sums over ranks of `n` elements, which begin at `own`, at `out` on rank `dst`."""
    size, device = dtype.itemsize, group.ctx.device
    owners = [rank for rank in range(group.size) if rank != dst]

    def slots(length: int) -> int:  # of elements on their way to their sum, or of sums
        return max(cut_of_sum(length, dtype).slots, cut(-(-length * size // 4)).slots)

    for shares in _rounds(rings, n, owners, count, SLOT.value // size, slots):

        def given(piece: int, shares: Shares = shares) -> list[Message]:
            pieces_of_peers = [(owner, *shares[piece][owner]) for owner in owners if owner != group.rank]
            return [Message(own + begin * size, length * size, owner) for owner, begin, length in pieces_of_peers]

        def summed(piece: int, owner: int, address: int, peer: int, shares: Shares = shares) -> Message:
            return Message(address, -(-shares[piece][owner][1] * size // 4) * 4, peer)

        for i in range(count + 1):
            if group.rank != dst and i < count:
                begin, length = shares[i][group.rank]
                sums = torch.empty(-(-length * size // 4) * 4, dtype=torch.uint8, device=device)
                rings.sum("reduce", dtype, given(i), own + begin * size, length, sums.data_ptr())
                rings.move("reduce", [summed(i, group.rank, sums.data_ptr(), dst)], [])
            elif group.rank == dst and i < count:
                rings.sum("reduce", dtype, given(i))
            if group.rank == dst and i:  # the sums of the piece before
                receives = [summed(i - 1, owner, out + shares[i - 1][owner][0] * size, owner) for owner in owners]
                rings.move("reduce", [], receives)


def _rounds(
    rings: Rings, length: int, owners: list[int], count: int, multiple: int, slots: Callable[[int], int]
) -> list[Shares]:
    """Return the shares of each round.

    `slots` returns how many slots of a message buffer a share takes; shares are multiples of `multiple`.
    """
    rounds, most = 1, rings.most_slots()
    while True:
        all_shares = [_shares(span, owners, count, multiple) for span in _equal((0, length), rounds, multiple)]
        needed = max(sum(slots(piece[owner][1]) for piece in round_) for round_ in all_shares for owner in owners)
        if needed <= most or rounds * multiple >= length:
            rings.reserve(min(2 * needed, max(needed, most)))
            return all_shares
        rounds *= 2


def _shares(span: Span, owners: list[int], count: int, multiple: int) -> Shares:
    pieces = _equal(span, count, multiple * len(owners))
    return [dict(zip(owners, _equal(piece, len(owners), multiple), strict=True)) for piece in pieces]


def _equal(span: Span, count: int, multiple: int) -> list[Span]:
    """Divide a span into `count` parts, multiples of `multiple` except for the last one that is not empty."""
    begin, length = span
    step = -(-length // (count * multiple)) * multiple
    return [(begin + min(i * step, length), max(0, min(step, length - i * step))) for i in range(count)]
