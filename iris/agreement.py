"""With IRIS_DEBUG=1, ranks compare their collective calls on the host before anything is launched or kept.

Ranks whose calls differ wait for signals that nobody sends, until a kernel's time-out names a peer that has done
nothing wrong; memory that is taken in different orders lies at different places, and is written where nobody looks.
Compared, such a call is an error on every rank that says what differs. It costs about a millisecond, a round through a
store on the context's first rank, and repeated calls take no shortcut. Where a CUDA graph is captured nothing is
compared, and replays are not calls.
"""

from __future__ import annotations

from datetime import timedelta
import json
import os
from typing import Any

import torch.distributed as dist

from .errors import ArgumentError, PeerLostError, PlatformError
from .group import Ranks

ENV_DEBUG = "IRIS_DEBUG"


def wanted() -> bool:
    """Whether the environment asks for it. Raises `PlatformError` for what says neither."""
    text = os.environ.get(ENV_DEBUG, "0")
    if text not in ("", "0", "1"):
        raise PlatformError(f"{ENV_DEBUG} is {text!r}; expected 1, or 0 or nothing")
    return text == "1"


class Agreement:
    """What the `ranks` of a context say of their calls. Making one is collective. `timeout_s`: how long one waits."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._rank, self._timeout_s = ranks.rank, timeout_s
        first = ranks.rank == 0
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit) if first else None
        port = ranks.broadcast(store.port if first else None, 0)
        self._store = store or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
        self._calls: dict[tuple[int, ...], int] = {}

    def compare(self, members: tuple[int, ...], call: str, **facts: Any) -> None:
        """Tells the `members` of this rank's `call`, and what it depends on, and waits for theirs.

        Raises `ArgumentError` on all of them alike where calls or facts differ, `PeerLostError` where one says nothing.
        """
        number = self._calls[members] = self._calls.get(members, 0) + 1
        own = {name: str(value) for name, value in facts.items()}
        try:
            self._store.set(self._key(members, number, self._rank), json.dumps([call, own]))
            self._store.delete_key(
                self._key(members, number - 2, self._rank)
            )  # all have read it: they came to the next
        except RuntimeError:
            gone = "its store, in which ranks compare their calls, does not answer"
            raise PeerLostError(f"rank {self._rank} lost rank 0 before {call}: {gone}") from None
        said = {peer: self._said(members, number, peer, call) for peer in members}
        calls = {peer: name for peer, (name, _) in said.items()}
        if len(set(calls.values())) > 1:
            raise ArgumentError(f"ranks differ in their call number {number}: {_listed(calls)}; {_EXPECTED}")
        for name in own:
            values = {peer: theirs.get(name) for peer, (_, theirs) in said.items()}
            if len(set(values.values())) > 1:
                raise ArgumentError(f"{call}: {name} differs between ranks: {_listed(values)}; {_EXPECTED}")

    def _said(self, members: tuple[int, ...], number: int, peer: int, call: str) -> tuple[str, dict[str, str]]:
        key = self._key(members, number, peer)
        try:
            self._store.wait([key], timedelta(seconds=self._timeout_s))
            return json.loads(self._store.get(key))
        except RuntimeError:  # a time-out, or the store is gone with its rank
            last = self._last(members, number - 1, peer)
            raise PeerLostError(
                f"rank {self._rank} lost rank {peer}: it made no call number {number} within {self._timeout_s:g} s"
                f" (IRIS_TIMEOUT), {call} here; {last}. {_EXPECTED.capitalize()}; end all ranks and start again."
            ) from None

    def _last(self, members: tuple[int, ...], number: int, peer: int) -> str:
        try:
            key = self._key(members, number, peer)
            return f"its last was {json.loads(self._store.get(key))[0]}" if self._store.check([key]) else "it made none"
        except RuntimeError:
            return "what it did last is not known"

    def _key(self, members: tuple[int, ...], number: int, rank: int) -> str:
        return f"{members}/{number}/{rank}"


_EXPECTED = "expected the same calls in the same order on all of them"


def _listed(values: dict[int, Any]) -> str:
    """By rank; ranks with the same value together."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{value} on rank{'s' * (len(those) > 1)} {', '.join(map(str, those))}" for value, those in ranks.items()
    )
