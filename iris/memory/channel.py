"""Numbers and file descriptors between the ranks of a context, over private Unix sockets.

Every pair of ranks keeps one connection. A rank listens in a folder that only its user may enter, for as long as the
context is being made; a connection is accepted from the process that the rank was told of, running as the same user
and knowing the nonce. Messages are fixed fields, never pickled objects. `exchange` is collective: each rank says at
which call it is, so ranks that have gone different ways learn it here, and no wait is longer than IRIS_TIMEOUT.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
import hmac
import os
from pathlib import Path
import secrets
import shutil
import socket
import struct
import tempfile
import time

from ..errors import ArgumentError, PeerLostError, PlatformError
from ..group import Ranks

_HELLO = struct.Struct("!32sI")  # nonce, rank
_HEAD = struct.Struct("!16sQHHH")  # topic, count of exchanges, numbers, descriptors, bytes of text
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_HELLO_S = 5.0  # a rank says who it is at once
_MAX_FDS, _MAX_TEXT, _MAX_MESSAGE = 64, 2000, 1 << 16


@dataclass
class Message:
    """What a rank said. The receiver closes `fds`."""

    numbers: tuple[int, ...]
    failure: str = ""
    fds: list[int] = field(default_factory=list)


class Channel:
    """Connections to every other rank. Making one is collective."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self._rank, self._timeout_s, self._count = ranks.rank, timeout_s, 0
        self._peers: dict[int, socket.socket] = {}
        if ranks.size == 1:
            return
        folder, failure = None, ""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        nonce = secrets.token_bytes(32)
        try:
            try:
                folder = tempfile.mkdtemp(prefix="iris-")  # mode 0700
                listener.bind(os.path.join(folder, "socket"))
                listener.listen(128)
            except OSError as error:
                failure = f"no Unix socket in {folder or tempfile.gettempdir()}: {error}; set TMPDIR to a short path"
            told = ranks.all_gather((os.getpid(), os.path.join(folder or "", "socket"), nonce, failure))
            failures = {rank: text for rank, (_, _, _, text) in enumerate(told) if text}
            if failures:
                raise PlatformError(f"memory cannot be passed between ranks; rank: {failures}")
            try:
                for rank in range(ranks.rank):
                    self._peers[rank] = self._dial(rank, *told[rank][:3])
                self._accept(listener, nonce, [pid for pid, _, _, _ in told])
            except (OSError, PlatformError) as error:
                failure = str(error)
            failures = {rank: text for rank, text in enumerate(ranks.all_gather(failure)) if text}
            if failures:
                self.close()
                raise PlatformError(f"memory cannot be passed between ranks; rank: {failures}")
        finally:
            listener.close()
            if folder:
                shutil.rmtree(folder, ignore_errors=True)

    def _dial(self, rank: int, pid: int, path: str, nonce: bytes) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(self._timeout_s)
        try:
            if Path(path).parent.stat().st_mode & 0o077:
                raise PlatformError(f"the folder of rank {rank}'s socket {path} is open to other users")
            deadline = time.monotonic() + self._timeout_s
            while True:
                try:
                    peer.connect(path)
                    break
                except BlockingIOError:  # others wait to be accepted
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)
            _check_process(peer, rank, pid)
            peer.send(_HELLO.pack(nonce, self._rank))
            return peer
        except BaseException:
            peer.close()
            raise

    def _accept(self, listener: socket.socket, nonce: bytes, pids: list[int]) -> None:
        missing = set(range(self._rank + 1, len(pids)))
        deadline = time.monotonic() + self._timeout_s
        while missing:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                raise PlatformError(f"ranks {sorted(missing)} did not connect in {self._timeout_s:g} s") from None
            try:
                caller.settimeout(_HELLO_S)
                shown, rank = _HELLO.unpack(caller.recv(_HELLO.size))
                if not hmac.compare_digest(shown, nonce) or rank not in missing:
                    raise PlatformError("a stranger called")
                _check_process(caller, rank, pids[rank])
            except (OSError, PlatformError, struct.error):
                caller.close()  # whoever it was: the ranks are still awaited
                continue
            caller.settimeout(self._timeout_s)
            self._peers[rank] = caller
            missing.remove(rank)

    def exchange(
        self, topic: str, numbers: tuple[int, ...] = (), failure: str = "", fds: tuple[int, ...] | list[int] = ()
    ) -> list[Message]:
        """What every rank says about `topic`, in rank order. Of its own message a rank gets no descriptors.

        Raises `ArgumentError` when a rank is at another topic, `PeerLostError` when one ended or does not come.
        """
        self._count += 1
        text = failure.encode()[:_MAX_TEXT]
        head = _HEAD.pack(topic.encode(), self._count, len(numbers), len(fds), len(text))
        data = head + struct.pack(f"!{len(numbers)}q", *numbers) + text
        messages = {self._rank: Message(tuple(numbers), failure)}
        elsewhere = {}
        try:
            for rank, peer in self._peers.items():
                with self._answers(rank, topic):
                    socket.send_fds(peer, [data], fds) if fds else peer.send(data)
            for rank, peer in self._peers.items():
                with self._answers(rank, topic):
                    there, count, messages[rank] = _received(peer)
                if (there, count) != (topic, self._count):
                    elsewhere[rank] = there
            if elsewhere:
                raise ArgumentError(
                    f"ranks make different calls that move memory: rank {self._rank} is at {topic!r}, "
                    + ", ".join(f"rank {rank} at {there!r}" for rank, there in elsewhere.items())
                    + "; expected the same allocations, in the same order, on every rank"
                )
        except BaseException:
            close_all(fd for message in messages.values() for fd in message.fds)
            raise
        return [messages[rank] for rank in sorted(messages)]

    @contextlib.contextmanager
    def _answers(self, rank: int, topic: str):
        try:
            yield
        except TimeoutError:
            raise PeerLostError(
                f"rank {self._rank} lost rank {rank}: it did not come to {topic!r} within {self._timeout_s:g} s "
                f"(IRIS_TIMEOUT). Every rank must make the same allocations in the same order."
            ) from None
        except OSError as error:
            raise PeerLostError(f"rank {self._rank} lost rank {rank} at {topic!r}: {error}") from None

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()


def close_all(fds) -> None:
    for fd in fds:
        os.close(fd)


def _check_process(peer: socket.socket, rank: int, pid: int) -> None:
    there, uid, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if (there, uid) != (pid, os.geteuid()):
        raise PlatformError(
            f"the process behind rank {rank}'s socket is {there} of user {uid}; expected {pid} of user {os.geteuid()}. "
            f"All ranks must run on one host, as one user and in one process namespace."
        )


def _received(peer: socket.socket) -> tuple[str, int, Message]:
    data, fds, flags, _ = socket.recv_fds(peer, _MAX_MESSAGE, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
    if not data:
        raise ConnectionResetError("its process ended or closed the context")
    topic, count, numbers, descriptors, length = _HEAD.unpack_from(data)
    if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) or len(fds) != descriptors:
        close_all(fds)
        raise ConnectionError(f"{descriptors} file descriptors were sent, {len(fds)} came; raise `ulimit -n`")
    values = struct.unpack_from(f"!{numbers}q", data, _HEAD.size)
    begin = _HEAD.size + 8 * numbers
    text = data[begin : begin + length].decode(errors="replace")
    return topic.rstrip(b"\0").decode(), count, Message(values, text, list(fds))
