"""A connection between every two ranks of a context, over private Unix sockets.

A rank listens in a folder that only its user may enter, for as long as the context is being made. It accepts a
connection only from the process that the peer's entry in the store names, run by the same user, with the right nonce.
So messages come from ranks and may be unpickled. Ranks find each other through the process group's store, which holds
plain JSON: a process that can write there can stop a context's creation, no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
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

from .descriptors import is_lacking, lacking
from .device.arch import has_ended
from .errors import PeerLostError, PlatformError, VersionError
from .packets import packets_of
from .rendezvous import Absent, gather
from .requirements import versions
from .same_host import check_one_host, check_process, identity, pid_here, unreachable

_HELLO = struct.Struct("!32sI")  # nonce, rank
_MAX_STRANGERS = 64  # that have connected and not sent a greeting
_DESCRIPTORS = 8  # besides one for each rank's connection: a listener, a heap, what is passed and closed
_ENDS_S = 0.3  # for a killed process to end, after its connections
LOOK_S = 0.1  # between two checks that awaited processes live
LOST, DEPARTED = "lost", "left"  # topics of notices


class Connections:
    """Connections to every other rank of a process group. Making them is collective.

    `what`: the key of the rendezvous in `store`; `timeout_s`: how long one waits for another; `broken`:
    whether one of them is known to have ended.
    """

    def __init__(
        self, store: Any, what: str, rank: int, size: int, timeout_s: float, broken: Callable[[], bool]
    ) -> None:
        self.rank, self.size, self.timeout_s = rank, size, timeout_s
        self.peers: dict[int, socket.socket] = {}
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
                    self.peers[peer] = self._dial(peer, entries[peer], deadline)
                self._accept(listener, nonce, deadline)
            except (OSError, PlatformError) as error:
                failure = str(error)
            listener.close()
            shutil.rmtree(folder, ignore_errors=True)  # before the others go on
            connected = self._gather(store, f"{what}/connected", dict(failure=failure), timeout_s + 1.0, self.pids)
            _raise_failures([each["failure"] for each in connected])
            for peer in self.peers.values():
                peer.setblocking(False)
        except BaseException:
            self.close()
            _remove_sockets_of_ended(entries)
            raise
        finally:
            if listener is not None:
                listener.close()
            shutil.rmtree(folder, ignore_errors=True)

    def _gather(self, store: Any, what: str, own: dict, limit_s: float, *known: Any) -> list[dict]:
        """Return the entries of all ranks in the store, this one's `own`."""
        try:
            return gather(store, what, self.rank, self.size, own, limit_s, *known)
        except Absent as absent:
            raise self.loss(absent.rank, "the creation of a context", absent.reason) from None

    def _dial(self, rank: int, entry: dict, deadline: float) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            path = str(entry["path"])
            if Path(path).parent.stat().st_mode & 0o077:
                raise PlatformError(
                    f"the folder of rank {rank}'s socket {path} is open to other users; expected mode 0700"
                )
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
                raise PlatformError(f"rank {rank}'s entry about its socket is invalid: {error}") from None
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
                        raise self.loss((gone or sorted(missing))[0], "the creation of a context", reason)
                    for key, _ in ready.select(LOOK_S):
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
                            self.peers[rank] = caller
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

    def post(self, topic: str, value: Any) -> None:
        """Send `value` to every other rank, which may `wait_for` it. Never waits, and skips ranks that are gone."""
        data = pickle.dumps(((None, None, topic), value))
        for peer in self.peers.values():
            for packet in packets_of(data, 0):
                with suppress(OSError):
                    peer.send(packet)

    def leave(self, reason: str) -> None:
        """Notify the others that this rank leaves them, for `reason`."""
        self.post(DEPARTED, reason)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()

    def own_failure(self, what: str, reason: str) -> PlatformError:
        """Return the error of this rank, after notifying the others, which wait for it."""
        error = PlatformError(f"rank {self.rank} cannot go on in {what}: {reason}")
        self.leave(f"PlatformError: {error}")
        return error

    def loss(self, peer: int, what: str, reason: str = "") -> PeerLostError:
        """Return the error of a lost peer, after notifying the others, because this rank may end by that error, too."""
        self.lost = peer
        reason = reason or f"it did not come within {self.timeout_s:g} s (IRIS_TIMEOUT)"
        self.post(LOST, (peer, reason))
        return PeerLostError(f"rank {self.rank} lost rank {peer} before {what}: {reason}. {REMEDY}")


REMEDY = "Expected the same calls in the same order on all ranks; end all ranks and start again."


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
