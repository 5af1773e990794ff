"""Objects and file descriptors between the ranks of a context.

`exchange` is collective: each rank sends the number of its call, so ranks that make different calls raise here. A wait
ends at the context's time-out or with the process of the awaited rank, and its error names that rank. A rank that gives
up on another, or leaves, notifies the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
import pickle
import selectors
import time
from typing import Any

from .connections import DEPARTED, LOOK_S, LOST, REMEDY, Connections
from .descriptors import is_lacking, remedy
from .device.arch import has_ended
from .errors import ArgumentError, PeerLostError
from .packets import close_all, packets_of, receive, send


@dataclass
class Message:
    """The value that a rank sent. The receiver closes `fds`."""

    value: Any
    fds: list[int] = field(default_factory=list)


class Channel(Connections):
    """Messages between every two ranks of a process group, over `Connections`, whose arguments it takes."""

    def __init__(
        self, store: Any, what: str, rank: int, size: int, timeout_s: float, broken: Callable[[], bool]
    ) -> None:
        super().__init__(store, what, rank, size, timeout_s, broken)
        self._counts: Counter[tuple[int, ...]] = Counter()

    def exchange(
        self,
        topic: str,
        value: Any = None,
        fds: Sequence[int] = (),
        members: Sequence[int] | None = None,
        what: str | None = None,
    ) -> list[Message]:
        """Return the messages of the `members`, by default all ranks, on `topic`, in their order. Collective.

        The rank's own message has no descriptors. `what`: its name in errors. Raises `ArgumentError` when a rank is
        at another topic, `PeerLostError` when one ended, left or does not come.
        """
        members = tuple(range(self.size)) if members is None else tuple(members)
        self._counts[members] += 1
        at = members, self._counts[members], topic
        data = pickle.dumps((at, value))
        messages = {self.rank: Message(value)}
        try:
            elsewhere = {}
            for peer, (there, sent, received) in self._swap(members, data, fds, what or topic).items():
                messages[peer] = Message(sent, received)
                if there != at:
                    elsewhere[peer] = there[2]
            if elsewhere:
                raise ArgumentError(
                    f"ranks make different calls: rank {self.rank} is at {topic!r}, "
                    + ", ".join(f"rank {peer} at {there!r}" for peer, there in elsewhere.items())
                    + "; expected the same calls in the same order on every rank"
                )
        except BaseException:
            close_all(fd for message in messages.values() for fd in message.fds)
            raise
        return [messages[peer] for peer in members]

    def wait_for(self, peer: int, topic: str, timeout_s: float) -> Any:
        """Return the value that `peer` posts on `topic`. Raises `PeerLostError` where none comes in time."""
        with self._reading([peer], {}, topic, timeout_s) as incoming:
            for _, ((_, _, there), value, received) in incoming:
                close_all(received)
                if there == topic:
                    return value
        raise self.loss(peer, topic)

    def _swap(self, members: Sequence[int], data: bytes, fds: Sequence[int], what: str) -> dict[int, tuple]:
        peers = [peer for peer in members if peer != self.rank]
        outgoing = {peer: packets_of(data, len(fds)) for peer in peers}
        messages: dict[int, tuple] = {}
        with self._reading(peers, outgoing, what, self.timeout_s, fds) as incoming:
            try:
                for peer, message in incoming:
                    messages[peer] = message
            except BaseException:
                close_all(fd for _, _, received in messages.values() for fd in received)
                raise
        return messages

    @contextmanager
    def _reading(
        self, peers: Sequence[int], outgoing: dict[int, Iterator[bytes | memoryview]], what: str, timeout_s: float,
        fds: Sequence[int] = (),
    ) -> Iterator[Iterator[tuple[int, tuple]]]:  # fmt: skip
        """Yield an iterator over one message of each of `peers`, as they come, while it sends `outgoing` packets."""
        deadline = time.monotonic() + timeout_s
        sending = {peer: [next(packets, None), packets, list(fds)] for peer, packets in outgoing.items()}
        buffers: dict[int, tuple[int, bytearray, list[int]]] = {}
        missing = set(peers)
        selector = selectors.PollSelector()  # needs no descriptor, so a rank can report its lack

        def events(peer: int) -> int:
            read = selectors.EVENT_READ if peer in missing else 0
            return read | (selectors.EVENT_WRITE if peer in sending else 0)

        def messages() -> Iterator[tuple[int, tuple]]:
            look = time.monotonic() + LOOK_S
            while missing or sending:
                ended: dict[int, str] = {}  # raised after the others' notice of the rank that was lost first
                for key, ready in selector.select(LOOK_S):
                    peer, before = key.data, events(key.data)
                    if ready & selectors.EVENT_WRITE and not send(self.peers[peer], sending, peer):
                        ready |= selectors.EVENT_READ  # it is gone; its earlier messages still count
                    try:
                        message = receive(self.peers[peer], buffers, peer) if ready & selectors.EVENT_READ else None
                    except OSError as error:
                        if is_lacking(error):
                            raise self.own_failure(what, f"{error.strerror}; {remedy()}") from None
                        closed = isinstance(error, (BrokenPipeError, ConnectionResetError))
                        ended[peer] = "its process ended, or it closed the context" if closed else str(error)
                        continue
                    if message is not None:
                        self._refuse_if_lost(peer, message, what)
                        missing.discard(peer)
                    if (now := events(peer)) != before:
                        selector.modify(key.fileobj, now, peer) if now else selector.unregister(key.fileobj)
                    if message is not None:
                        yield peer, message
                for peer, reason in ended.items():
                    raise self.loss(peer, what, reason)
                now = time.monotonic()
                if now > look or now > deadline:
                    look = now + LOOK_S
                    waited = sorted(missing | sending.keys())
                    gone = [peer for peer in waited if has_ended(self.pids[peer])]
                    if gone and not selector.select(0):  # all its messages have been read
                        raise self.loss(gone[0], what, "its process ended")
                    if now > deadline and waited:
                        raise self.loss(waited[0], what)

        try:
            for peer in {*missing, *sending}:
                if peer not in self.peers:
                    raise self.loss(peer, what, "it is known to be lost")
                selector.register(self.peers[peer], events(peer), peer)
            yield messages()
        finally:
            close_all(fd for _, _, received in buffers.values() for fd in received)
            selector.close()

    def _refuse_if_lost(self, peer: int, message: tuple, what: str) -> None:
        (_, _, topic), value, _ = message
        if topic == DEPARTED:
            raise self.loss(peer, what, f"it left by {value}")
        if topic == LOST:
            lost, reason = value
            if lost == self.rank:
                self.lost = peer
                raise PeerLostError(
                    f"rank {self.rank} reached {what} too late: rank {peer} had stopped waiting for it. {REMEDY}"
                )
            raise self.loss(lost, what, reason if "as rank" in reason else f"{reason}, as rank {peer} found")
