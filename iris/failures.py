"""The text of a failure record: which op waited for which peer, and what it expected and saw.

A kernel leaves the record (`device/waits.py`), and the next call on the host raises with this text.
"""

from __future__ import annotations

from . import platform
from .device import waits
from .errors import PeerLostError
from .group import Ranks
from .heap import Heap, first_difference

_REASON_S = 0.2  # for the words of a peer that has left, sent before its waits ended
_SAID_S = 10.0  # for a peer that has found a difference, too, to say what it has allocated


def lost(kind: int, waiter: int, rank: int, peer: int, expected: int, seen: int) -> str:
    """Of a lost peer."""
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


def left(ranks: Ranks, waiter: int, peer: int) -> str:
    """Of a peer that left its context by an exception, with that exception, which it has sent; empty if it has not."""
    try:
        ranks.hear(peer, waits.WAITERS[waiter], _REASON_S)
    except PeerLostError as error:
        text = str(error)
        return text if "left by" in text else ""
    return ""


def bad_expert(waiter: int, experts: int, seen: int) -> str:
    """Of a routing index that a kernel found out of range."""
    return (
        f"{waits.WAITERS[waiter]}: experts has {seen}; expected indices from 0 below {experts}. Results since then are "
        f"void; end all ranks and start again, with IRIS_DEBUG=1 to have the call itself raise."
    )


def heaps_differ(ranks: Ranks, heap: Heap, refused: str, kind: int, waiter: int, peer: int, place: int) -> str:
    """Of heaps that differ, as a barrier found, or an op whose peers write `out`, which lies at `place` here.

    `peer` comes here too, for it has compared itself with this rank, and sends its allocations and the error of the
    last call that it `refused`: a rank that catches such an error lacks what the call allocated on the others.
    """
    rank = ranks.rank
    try:
        ranks.tell("allocations", (heap.allocations(), refused))
        theirs, refused_there = ranks.hear(peer, "allocations", min(_SAID_S, platform.timeout_s()))
        blame = first_difference({rank: heap.allocations(), peer: theirs})
        for refuser, error in sorted({rank: refused, peer: refused_there}.items()):
            if blame and error:
                blame += f"; rank {refuser} refused a call before: {error}"
    except PeerLostError as error:
        blame = f"rank {peer} differs from rank {rank}; which allocation does is not known: {error}"
    if kind == waits.OUT_DIFFERS.value:
        found = (
            f"{waits.WAITERS[waiter]}: out lies {place} bytes from the beginning of the heap on rank {rank} and "
            f"elsewhere on rank {peer}, and peers write it; expected the same allocation on all ranks"
        )
    else:
        found = "the ranks' heaps differ; expected the same allocations and frees on all ranks"
    remedy = "For parts whose sizes differ by rank use ctx.empty_ragged(...). End all ranks and start again."
    return f"{found}. {f'{blame[0].upper()}{blame[1:]}. ' if blame else ''}{remedy}"
