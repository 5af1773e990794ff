"""Error messages for failure records: which op waited for which peer, and which values it expected and saw.

A kernel writes the record (`device/waits.py`), and the next call on the host raises with this message.
"""

from __future__ import annotations

from . import platform
from .device import waits
from .errors import PeerLostError
from .group import Ranks
from .heap import Heap, first_difference

_REASON_S = 0.2  # for the reason of a peer that has left, sent before its waits ended
_ALLOCATIONS_S = 10.0  # for a peer that has found a difference, too, to send its allocations


def lost_message(kind: int, waiter: int, rank: int, peer: int, expected: int, seen: int) -> str:
    """Return the message for a lost peer."""
    whom = f"rank {peer}" if peer != rank else "a rank that another of its own programs waits for"
    call, void = waits.WAITERS[waiter], "Results since then are void; end all ranks and start again."
    if kind == waits.LEFT.value:
        return f"rank {rank} lost {whom}, which left its context by an exception while {call} waited for it. {void}"
    if not expected:
        return f"rank {rank} lost {whom} in {call}. {void}"
    return (
        f"rank {rank} lost {whom}: {call} waited for its signal {expected} and saw {seen} until the process ended or "
        f"{platform.timeout_s():g} s (IRIS_TIMEOUT) had passed{platform.serialised()}. {void}"
    )


def left_message(ranks: Ranks, waiter: int, peer: int) -> str:
    """Return the message for a peer that left its context by an exception, with that; empty if the peer sent none."""
    try:
        ranks.wait_for(peer, waits.WAITERS[waiter], _REASON_S)
    except PeerLostError as error:
        text = str(error)
        return text if "left by" in text else ""
    return ""


def bad_expert_message(waiter: int, experts: int, seen: int) -> str:
    """Return the message for a routing index that a kernel found out of range."""
    return (
        f"{waits.WAITERS[waiter]}: experts has {seen}; expected indices from 0 below {experts}. Results since then are "
        f"void; end all ranks and start again, with IRIS_DEBUG=1 to have the call itself raise."
    )


def outside_heap_message(waiter: int, rank: int, address: int, named: int) -> str:
    """Return the message for an access of `rank` at an `address` outside the heaps; `named`: its two ranks."""
    own, other = (part - (part >> 31 << 32) for part in (named & 0xFFFFFFFF, named >> 32 & 0xFFFFFFFF))
    return (
        f"{waits.WAITERS[waiter]}: a kernel on rank {rank} named rank {own} as the caller and rank {other} as peer; "
        f"address {address:#x} lies outside the heap of that caller. Expected addresses of the caller's own heap, and "
        f"its own rank. Nothing was accessed there. Results since then are void; end all ranks and start again."
    )


def heaps_differ_message(ranks: Ranks, heap: Heap, refused: str, kind: int, waiter: int, peer: int, place: int) -> str:
    """Return the message for heaps that a barrier, or an op whose peers write `out` at `place` here, found to differ.

    `peer` calls this, too, for it has found the same difference. Both send their allocations and the error of the last
    call that they `refused`: a rank that catches such an error lacks what the call allocated on the others.
    """
    rank = ranks.rank
    try:
        ranks.post("allocations", (heap.allocations(), refused))
        peer_allocations, refused_there = ranks.wait_for(peer, "allocations", min(_ALLOCATIONS_S, platform.timeout_s()))
        blame = first_difference({rank: heap.allocations(), peer: peer_allocations})
        for refuser, error in sorted({rank: refused, peer: refused_there}.items()):
            if blame and error:
                blame += f"; rank {refuser} refused a call before: {error}"
    except PeerLostError as error:
        blame = f"rank {peer} differs from rank {rank}; which allocation does is not known: {error}"
    if kind == waits.OUT_DIFFERS.value:
        difference = (
            f"{waits.WAITERS[waiter]}: out lies {place} bytes from the beginning of the heap on rank {rank} and "
            f"elsewhere on rank {peer}, and peers write it; expected the same allocation on all ranks"
        )
    else:
        difference = "the ranks' heaps differ; expected the same allocations and frees on all ranks"
    remedy = "For parts whose sizes differ by rank use ctx.empty_ragged(...). End all ranks and start again."
    return f"{difference}. {f'{blame[0].upper()}{blame[1:]}. ' if blame else ''}{remedy}"
