"""With IRIS_DEBUG=1, ranks compare their collective calls on the host before anything is launched or kept.

Ranks whose calls differ wait for signals that nobody sends, until a kernel's time-out names a peer that has done
nothing wrong; memory that is taken in different orders lies at different places, and is written where nobody looks.
Compared, such a call is an error on every rank that says what differs. It costs about a millisecond, a round through a
store on the context's first rank, and repeated calls take no shortcut. Where a CUDA graph is captured nothing is
compared, and replays are not calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
import json
import os
import time
from typing import Any

import torch.distributed as dist

from .device.arch import has_ended
from .errors import ArgumentError, PeerLostError, PlatformError
from .group import Ranks

ENV_DEBUG = "IRIS_DEBUG"
# How long rank 0 lets others hear of a lost rank before it raises.
_GRACE_S = 1.0


def wanted() -> bool:
    """Whether the environment asks for it. Raises `PlatformError` for what says neither."""
    text = os.environ.get(ENV_DEBUG) or "0"
    if text not in ("0", "1"):
        raise PlatformError(f"{ENV_DEBUG} is {text!r}; expected 1, or 0 or nothing")
    return text == "1"


class Agreement:
    """What the `ranks` of a context say of their calls. Making one is collective. `timeout_s`: how long one waits.

    `pids`: of the ranks, where one that has ended shall be seen from its process, as interpreted kernels see it.
    """

    def __init__(self, ranks: Ranks, timeout_s: float, pids: Sequence[int] = ()) -> None:
        self._rank, self._timeout_s, self._pids = ranks.rank, timeout_s, pids
        first = ranks.rank == 0
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit) if first else None
        port = ranks.broadcast(store.port if first else None, 0)
        self._store = store or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        self._calls: dict[tuple[int, ...], int] = {}
        self.lost: tuple[int, int] | None = None
        """After a `PeerLostError` the rank, and the number of the call that it did not make."""

    def compare(self, members: Sequence[int], call: str, **facts: Any) -> None:
        """Tells the `members`, in any order, of this rank's `call`, and what it depends on, and waits for theirs.

        Raises `ArgumentError` on all of them alike where calls or facts differ, `PeerLostError` where one says nothing.
        """
        members = tuple(sorted(map(int, members)))
        number = self._calls[members] = self._calls.get(members, 0) + 1
        end = time.monotonic() + self._timeout_s
        own = call, {name: str(value) for name, value in facts.items()}
        try:
            self._store.set(self._key(members, number, self._rank), json.dumps(own))
            self._store.delete_key(self._key(members, number - 2, self._rank))  # all read it: they came to the next
            said = {
                peer: own if peer == self._rank else self._said(members, number, peer, call, end) for peer in members
            }
            difference = _difference(call, number, said)
            if difference:
                self._part(members, members, number, end)
        except dist.DistError:
            self.lost = 0, number
            gone = "its store, in which ranks compare their calls, does not answer"
            raise PeerLostError(f"rank {self._rank} lost rank 0 before {call}: {gone}") from None
        if difference:
            raise ArgumentError(difference)

    def _said(self, members: tuple[int, ...], number: int, peer: int, call: str, end: float) -> Any:
        key, note = (self._key(members, number, whose) for whose in (peer, "lost"))
        if self._comes(key, peer, end, note):
            return json.loads(self._store.get(key))
        peer = int(self._store.compare_set(note, "", str(peer)))  # who was first to give up says whom all have lost
        self.lost, before = (peer, number), self._key(members, number - 1, peer)
        made = self._store.check([before])
        last = f"its last was {json.loads(self._store.get(before))[0]}" if made else "it made none"
        others = [each for each in members if each != peer]  # who are not here yet are about to be, or have ended
        self._part(others, members, number, time.monotonic() + _GRACE_S)
        raise PeerLostError(
            f"rank {self._rank} lost rank {peer}: it made no call number {number} until it ended or"
            f" {self._timeout_s:g} s (IRIS_TIMEOUT) had passed, {call} here; {last}. "
            f"{_EXPECTED.capitalize()}; end all ranks and start again."
        )

    def _comes(self, key: str, peer: int, end: float, note: str | None = None) -> bool:
        """Whether `peer` sets `key` before `end`, before it ends, and before another rank leaves a `note`."""
        pause = 50e-6
        while not self._store.check([key]):
            ended = bool(self._pids) and has_ended(self._pids[peer])
            if ended or time.monotonic() > end or note and self._store.check([note]):
                return self._store.check([key])  # what came just before the end still counts
            time.sleep(pause)
            pause = min(2 * pause, 10e-3)
        return True

    def _part(self, others: Sequence[int], members: tuple[int, ...], number: int, end: float) -> None:
        """Before an error: rank 0, which may end by it, and the store with it, waits until `others` have read."""
        self._store.set(self._key(members, number, self._rank) + "/read", "")
        for peer in others if self._rank == 0 else ():
            self._comes(self._key(members, number, peer) + "/read", peer, end)

    def _key(self, members: tuple[int, ...], number: int, whose: int | str) -> str:
        return f"{members}/{number}/{whose}"


def _difference(call: str, number: int, said: dict[int, tuple[str, dict[str, str]]]) -> str | None:
    """In what the ranks' calls differ, in the same words on all of them."""
    calls = {peer: name for peer, (name, _) in said.items()}
    if len(set(calls.values())) > 1:
        return f"ranks differ in their call number {number}: {_listed(calls)}; {_EXPECTED}"
    for name in dict.fromkeys(name for _, facts in said.values() for name in facts):
        values = {peer: facts.get(name) for peer, (_, facts) in said.items()}
        if len(set(values.values())) > 1:
            return f"{call}: {name} differs between ranks: {_listed(values)}; {_EXPECTED}"
    return None


_EXPECTED = "expected the same calls in the same order on all of them"


def _listed(values: dict[int, Any]) -> str:
    """By rank; ranks with the same value together."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}" for value, those in ranks.items()
    )
