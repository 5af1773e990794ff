"""Objects and file descriptors between the ranks of a context, over private Unix sockets.

Every pair of ranks keeps one connection. A rank listens in a folder that only its user may enter, for as long as the
context is being made. It accepts a connection only from the process that the peer's entry in the store names, run by
the same user, with the right nonce. So messages come from ranks and may be unpickled. Ranks find each other through the
process group's store, which holds plain JSON: a process that can write there can stop a context's creation, no more.

`exchange` is collective: each rank sends the number of its call, so ranks that make different calls raise here. A wait
ends at the context's time-out or with the process of the awaited rank, and its error names that rank. A rank that gives
up on another, or leaves, notifies the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
import hmac
import os
from pathlib import Path
import pickle
import secrets
import selectors
import shutil
import socket
import stat
import struct
import tempfile
import time
from typing import Any

from .descriptors import is_lacking, lacking, remedy
from .device.arch import has_ended
from .errors import ArgumentError, PeerLostError, PlatformError, VersionError
from .packets import close_all, packets_of, receive, send
from .rendezvous import Absent, gather
from .requirements import versions
from .same_host import check_one_host, check_process, identity, pid_here, unreachable

_HELLO = struct.Struct("!32sI")  # nonce, rank
_MAX_STRANGERS = 64  # that have connected and not sent a greeting
_STORE_S = 0.5  # by which an answer of the store may be late
_DESCRIPTORS = 8  # besides one for each rank's connection: a listener, a heap, what is passed and closed
_ENDS_S = 0.3  # for a killed process to end, after its connections
_LOOK_S = 0.1  # between two checks that awaited processes live
_LOST, _DEPARTED = "lost", "left"


@dataclass
class Message:
    """The value that a rank sent. The receiver closes `fds`."""

    value: Any
    fds: list[int] = field(default_factory=list)


class Channel:
    """Connections to every other rank of a process group. Making one is collective.

    `what`: the key of the rendezvous in `store`; `timeout_s`: how long one waits for another; `broken`:
    whether one of them is known to have ended.
    """

    def __init__(
        self, store: Any, what: str, rank: int, size: int, timeout_s: float, broken: Callable[[], bool]
    ) -> None:
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._peers: dict[int, socket.socket] = {}
        self.pids = [os.getpid()] * size
        self.lost: int | None = None
        """A rank that this one has given up on."""
        deadline = time.monotonic() + timeout_s
        listener: socket.socket | None = None
        entries: list[dict] = []
        nonce = secrets.token_hex(16)
        # All ranks read its name before it is made, so that they can remove the folder of a killed rank.
        failure = lacking(size + _DESCRIPTORS)  # before the search for a folder, which needs a descriptor, too
        folder = os.path.join("" if failure else tempfile.gettempdir(), f"iris-{secrets.token_hex(8)}")
        try:
            own = dict(pid=os.getpid(), path=os.path.join(folder, "socket"), nonce=nonce)
            own["failure"] = failure
            own["versions"], own["host"] = versions(), (here := identity())
            entries = self._gather(store, what, own, timeout_s, (), broken)
            self.pids = [pid_here(each, here) or 0 for each in entries]  # 0: a process of another host
            _raise_failures([each.get("failure", "") for each in entries])
            try:
                self._gather(store, f"{what}/read", dict(failure=""), timeout_s, self.pids)
            finally:  # the others have read this rank's entry, too
                _check_versions(entries)
                check_one_host(entries)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                os.mkdir(folder, 0o700)
                listener.bind(os.path.join(folder, "socket"))
                listener.listen(128)
            except OSError as error:
                failure = f"no Unix socket in {folder}: {error}; set TMPDIR to a short path"
            listening = self._gather(store, f"{what}/listening", dict(failure=failure), timeout_s, self.pids)
            _raise_failures([each["failure"] for each in listening])
            views = self._gather(store, f"{what}/seen", dict(failure=unreachable(entries, rank)), timeout_s, self.pids)
            if reason := next((each["failure"] for each in views if each["failure"]), ""):
                raise PlatformError(reason)
            try:
                for peer in range(rank):
                    self._peers[peer] = self._dial(peer, entries[peer], deadline)
                self._accept(listener, nonce, deadline)
            except (OSError, PlatformError) as error:
                failure = str(error)
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)  # before the others go on
            connected = self._gather(store, f"{what}/connected", dict(failure=failure), timeout_s + 1.0, self.pids)
            _raise_failures([each["failure"] for each in connected])
            for peer in self._peers.values():
                peer.setblocking(False)
        except BaseException:
            self.close()
            _remove_sockets_of_ended(entries)
            raise
        finally:
            if listener is not None:
                listener.close()
            shutil.rmtree(folder, ignore_errors=True)

    # --- making the connections --------------------------------------------------------------------------------------

    def _gather(self, store: Any, what: str, own: dict, limit_s: float, *known: Any) -> list[dict]:
        """Return the entries of all ranks in the store, this one's `own`."""
        try:
            return gather(store, what, self.rank, self.size, own, limit_s, *known)
        except Absent as absent:
            raise self._loss(absent.rank, "the creation of a context", absent.reason) from None

    def _dial(self, rank: int, entry: dict, deadline: float) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            path = str(entry["path"])
            if Path(path).parent.stat().st_mode & 0o077:
                raise PlatformError(f"the folder of rank {rank}'s socket {path} is open to other users")
            peer.settimeout(max(0.001, deadline - time.monotonic()))
            while True:
                try:
                    peer.connect(path)
                    break
                except BlockingIOError:  # others wait to be accepted
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            check_process(peer, rank, int(entry["pid"]))
            peer.send(_HELLO.pack(str(entry["nonce"]).encode()[:32], self.rank))
            return peer
        except BaseException as error:
            peer.close()
            if isinstance(error, ValueError) and not isinstance(error, PlatformError):  # in an entry that no rank wrote
                raise PlatformError(f"what rank {rank} wrote about its socket is invalid: {error}") from None
            raise

    def _accept(self, listener: socket.socket, nonce: str, deadline: float) -> None:
        """Wait for connections of the ranks above this one. Other callers are ignored, however many there are."""
        missing = set(range(self.rank + 1, self.size))
        strangers: list[socket.socket] = []
        listener.setblocking(False)
        with selectors.PollSelector() as ready:
            ready.register(listener, selectors.EVENT_READ)
            try:
                while missing:
                    gone = [peer for peer in missing if has_ended(self.pids[peer])]
                    if gone or time.monotonic() > deadline:
                        reason = "its process ended" if gone else ""
                        raise self._loss((gone or sorted(missing))[0], "the creation of a context", reason)
                    for key, _ in ready.select(_LOOK_S):
                        if key.fileobj is listener:
                            try:
                                caller, _ = listener.accept()
                                caller.setblocking(False)
                                strangers.append(caller)
                                ready.register(caller, selectors.EVENT_READ, caller)
                            except OSError as error:
                                if is_lacking(error):
                                    raise
                            if len(strangers) > _MAX_STRANGERS:
                                ready.unregister(strangers[0])
                                strangers.pop(0).close()
                            continue
                        caller = key.data
                        ready.unregister(caller)
                        strangers.remove(caller)
                        rank = self._introduced(caller, nonce, missing)
                        if rank is None:
                            caller.close()  # not a rank: keep waiting for those
                        else:
                            self._peers[rank] = caller
                            missing.remove(rank)
            finally:
                for caller in strangers:
                    caller.close()

    def _introduced(self, caller: socket.socket, nonce: str, missing: set[int]) -> int | None:
        try:
            shown, rank = _HELLO.unpack(caller.recv(_HELLO.size))
            if not hmac.compare_digest(shown, nonce.encode()) or rank not in missing:
                return None
            check_process(caller, rank, self.pids[rank])
            return rank
        except (OSError, PlatformError, struct.error):
            return None

    # --- using them --------------------------------------------------------------------------------------------------

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

    def post(self, topic: str, value: Any) -> None:
        """Send `value` to every other rank, which may `wait_for` it. Never waits, and skips ranks that are gone."""
        data = pickle.dumps(((None, None, topic), value))
        for peer in self._peers.values():
            for packet in packets_of(data, 0):
                with suppress(OSError):
                    peer.send(packet)

    def wait_for(self, peer: int, topic: str, timeout_s: float) -> Any:
        """Return the value that `peer` posts on `topic`. Raises `PeerLostError` where none comes in time."""
        with self._reading([peer], {}, topic, timeout_s) as incoming:
            for _, ((_, _, there), value, received) in incoming:
                close_all(received)
                if there == topic:
                    return value
        raise self._loss(peer, topic)

    def leave(self, reason: str) -> None:
        """Notify the others that this rank leaves them, for `reason`."""
        self.post(_DEPARTED, reason)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _swap(self, members: Sequence[int], data: bytes, fds: Sequence[int], what: str) -> dict[int, tuple]:
        peers = [peer for peer in members if peer != self.rank]
        outgoing = {peer: packets_of(data, len(fds)) for peer in peers}
        messages: dict[int, tuple] = {}
        with self._reading(peers, outgoing, what, self._timeout_s, fds) as incoming:
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
            look = time.monotonic() + _LOOK_S
            while missing or sending:
                ended: dict[int, str] = {}  # raised after the others' notice of the rank that was lost first
                for key, ready in selector.select(_LOOK_S):
                    peer, before = key.data, events(key.data)
                    if ready & selectors.EVENT_WRITE and not send(self._peers[peer], sending, peer):
                        ready |= selectors.EVENT_READ  # it is gone; its earlier messages still count
                    try:
                        message = receive(self._peers[peer], buffers, peer) if ready & selectors.EVENT_READ else None
                    except OSError as error:
                        if is_lacking(error):
                            raise self._own_failure(what, f"{error.strerror}; {remedy()}") from None
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
                    raise self._loss(peer, what, reason)
                now = time.monotonic()
                if now > look or now > deadline:
                    look = now + _LOOK_S
                    waited = sorted(missing | sending.keys())
                    gone = [peer for peer in waited if has_ended(self.pids[peer])]
                    if gone and not selector.select(0):  # all its messages have been read
                        raise self._loss(gone[0], what, "its process ended")
                    if now > deadline and waited:
                        raise self._loss(waited[0], what)

        try:
            for peer in {*missing, *sending}:
                if peer not in self._peers:
                    raise self._loss(peer, what, "it is known to be lost")
                selector.register(self._peers[peer], events(peer), peer)
            yield messages()
        finally:
            close_all(fd for _, _, received in buffers.values() for fd in received)
            selector.close()

    def _refuse_if_lost(self, peer: int, message: tuple, what: str) -> None:
        (_, _, topic), value, _ = message
        if topic == _DEPARTED:
            raise self._loss(peer, what, f"it left by {value}")
        if topic == _LOST:
            lost, reason = value
            if lost == self.rank:
                self.lost = peer
                raise PeerLostError(
                    f"rank {self.rank} comes too late to {what}: rank {peer} has given up on it. {_REMEDY}"
                )
            raise self._loss(lost, what, reason if "as rank" in reason else f"{reason}, as rank {peer} found")

    def _own_failure(self, what: str, reason: str) -> PlatformError:
        """Return the error of this rank, after notifying the others, which wait for it."""
        error = PlatformError(f"rank {self.rank} cannot go on in {what}: {reason}")
        self.leave(f"PlatformError: {error}")
        return error

    def _loss(self, peer: int, what: str, reason: str = "") -> PeerLostError:
        """Return the error of a lost peer, after notifying the others, for this rank may end by it, too."""
        self.lost = peer
        reason = reason or f"it did not come within {self._timeout_s:g} s (IRIS_TIMEOUT)"
        self.post(_LOST, (peer, reason))
        return PeerLostError(f"rank {self.rank} lost rank {peer} before {what}: {reason}. {_REMEDY}")


_REMEDY = "Expected the same calls in the same order on all ranks; end all ranks and start again."


def _remove_sockets_of_ended(entries: Sequence[dict]) -> None:
    """Remove the sockets of killed ranks. Any process may have written a path, so the folder must have our prefix."""
    end, here = time.monotonic() + _ENDS_S, identity()
    for entry in entries:
        path = Path(str(entry["path"]))
        with suppress(OSError, ValueError):
            if path.name != "socket" or not path.parent.name.startswith("iris-"):
                continue
            pid = pid_here(entry, here)
            while pid and path.parent.exists() and not has_ended(pid) and time.monotonic() < end:
                time.sleep(0.01)
            if pid and has_ended(pid):
                if path.exists() and stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()
                path.parent.rmdir()


def _check_versions(entries: list[dict]) -> None:
    """Raise `VersionError` before anything is pickled, which another version may read differently."""
    given = [str(entry.get("versions", "another version of iris")) for entry in entries]
    other = next((rank for rank, version in enumerate(given) if version != given[0]), None)
    if other is not None:
        raise VersionError(
            f"rank 0 has {given[0]}; rank {other} has {given[other]}; expected the same on all ranks: run them in one "
            f"environment, or install the same versions in each"
        )


def _raise_failures(failures: Sequence[str]) -> None:
    by_rank = {rank: text for rank, text in enumerate(failures) if text}
    if by_rank:
        raise PlatformError(f"the ranks could not be connected; by rank: {by_rank}")
