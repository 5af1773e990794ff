"""Rendezvous of ranks without connections, in bounded time, through the store of their process group.

A read from a store whose process is stopped never returns, and the creation of a process group waits half an hour for a
missing rank. So a daemon thread reads, and is abandoned if it hangs, while this one watches the clock and the processes
that are known.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
import json
import os
from pathlib import Path
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from .descriptors import lacking
from .device.arch import has_ended
from .errors import PeerLostError, PlatformError
from .same_host import identity, pid_here

_PAUSE_S = 2e-3
_NOTE_S = 0.1  # for a rank to report whom it has lost, before others see that it ends by that
_READ_S = 2.0  # for all ranks to read why one has failed
_DESCRIPTORS = 16  # of a store and its server
_STALE_S = 1.0  # a read takes this long only where the store's process is stopped


class Absent(Exception):
    """A rank does not come, for `reason`. `is_sure`: whether it is the one that ended, not another one that is late."""

    def __init__(self, rank: int, reason: str, is_sure: bool = True) -> None:
        super().__init__(rank, reason)
        self.rank, self.reason, self.is_sure = rank, reason, is_sure


def gather(
    store: Any,
    name: str,
    rank: int,
    size: int,
    own: dict,
    limit_s: float,
    pids: Sequence[int] = (),
    broken: Callable[[], bool] = lambda: False,
) -> list[dict]:
    """Return the entries of all ranks in the `store` under `name`, this one's `own`. Collective. Raises `Absent`.

    `pids`: the ranks' process ids, if they are known; by default the entries hold them. `broken`: whether a rank has
    ended.
    """
    look, here = _Look(store, name, rank, size, own), identity()
    end = time.monotonic() + limit_s
    look.start()
    while look.is_alive():
        look.join(_PAUSE_S)
        missing = look.missing()
        if not missing:
            continue
        if look.blamed is not None:
            raise look.absent(look.blamed, "another rank has reported it lost")
        known: dict[int, int | None] = dict(enumerate(pids))
        known = known or {peer: pid_here(entry, here) for peer, entry in list(look.entries.items())}
        for peer, pid in known.items():
            if peer != rank and pid and has_ended(pid):
                raise look.absent(peer, "its process ended")
        if broken():
            time.sleep(_NOTE_S)  # for living ranks to come
            if missing := look.missing():
                raise look.absent(missing[0], "its process ended", len(missing) == 1)
        if time.monotonic() > end:
            late = f"it did not come within {limit_s:g} s (IRIS_TIMEOUT)"
            stopped = [peer for peer, pid in known.items() if pid and is_stopped(pid)]
            if stopped:
                raise look.absent(stopped[0], f"its process is stopped; {late}")
            if time.monotonic() > look.since + _STALE_S and 0 in missing:
                raise look.absent(0, f"the store does not answer; {late}")
            raise look.absent(missing[0], late)
    if look.failure is None:
        if any(entry.get("failure") for entry in look.entries.values()):
            _await_readers(store, name, rank, size)
        return [look.entries[peer] for peer in range(size)]
    if isinstance(look.failure, dist.DistError):
        text = str(look.failure).splitlines()[0]
        raise Absent(look.blamed or min(look.missing(), default=0), f"its store does not answer: {text}")
    raise look.failure


def _await_readers(store: Any, name: str, rank: int, size: int) -> None:
    """Wait until every rank has read a failure, after which this process may end, and the store with it."""

    def wait() -> None:
        with suppress(dist.DistError):  # the store ended with its rank, which had seen all others read
            store.set(f"{name}/{rank}/read", "")
            store.wait([f"{name}/{peer}/read" for peer in range(size)], timedelta(seconds=_READ_S))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(_READ_S)


class _Look(threading.Thread):
    def __init__(self, store: Any, name: str, rank: int, size: int, own: dict) -> None:
        super().__init__(name="iris-rendezvous", daemon=True)
        self._store, self._name, self._rank, self._size = store, name, rank, size
        self.entries: dict[int, dict] = {rank: own}
        self.blamed: int | None = None
        self.failure: Exception | None = None
        self.since = time.monotonic()
        self._given_up = False

    def missing(self) -> list[int]:
        return [peer for peer in range(self._size) if peer not in self.entries]

    def run(self) -> None:
        try:
            self._store.set(f"{self._name}/{self._rank}", json.dumps(self.entries[self._rank]))
            while (missing := self.missing()) and not self._given_up:
                self.since = time.monotonic()
                if self._store.check([f"{self._name}/lost"]):
                    self.blamed = _lost_rank(self._store.get(f"{self._name}/lost"), missing)
                for peer in missing:
                    if self._store.check([key := f"{self._name}/{peer}"]):
                        self.entries[peer] = _plain(self._store.get(key), peer, self.entries[self._rank])
                time.sleep(_PAUSE_S)
        except Exception as error:  # `gather` raises it
            self.failure = error

    def absent(self, rank: int, reason: str, is_sure: bool = True) -> Absent:
        """Return the error for `rank`, after a note for the others, which may blame this rank next."""
        if self.blamed is None and is_sure:
            note = threading.Thread(target=self._note, args=(rank,), daemon=True)
            note.start()
            note.join(_NOTE_S)
            time.sleep(_NOTE_S)
        self._given_up = True
        return Absent(rank, reason, is_sure)

    def _note(self, rank: int) -> None:
        with suppress(dist.DistError):
            self._store.set(f"{self._name}/lost", str(rank))


def _plain(text: bytes, rank: int, like: dict) -> dict:
    """Return a rank's entry, of the same form as `like`. Raises `PlatformError` otherwise: any process may write it."""
    try:
        value = json.loads(text)
        # another version may lack these keys; versions are compared before their use
        alike = all(type(value.get(key)) is type(own) for key, own in like.items() if key not in ("versions", "host"))
        if alike and value.get("pid", 1) > 0:
            return value
    except (ValueError, AttributeError):
        pass
    raise PlatformError(f"the entry of rank {rank} in the store of the process group is invalid: {text[:200]!r}")


def _lost_rank(text: bytes, missing: Sequence[int]) -> int | None:
    """Return the rank that another one has found lost, if this rank still waits for it."""
    if not text.isdigit():
        raise PlatformError(f"the entry of a lost rank in the store of the process group is invalid: {text[:200]!r}")
    return next((rank for rank in missing if text == str(rank).encode()), None)


def is_stopped(pid: int) -> bool:
    """Return whether the process is stopped, by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def gloo_watch(group: Any, limit_s: float) -> Callable[[], bool]:
    """Return a function that tests whether a rank of a gloo `group` has ended, by its connections, not its process."""
    if group is None or dist.get_backend(group) != "gloo":
        return lambda: False
    options = dist.BarrierOptions()
    options.timeout = timedelta(seconds=limit_s)
    work = group.barrier(options)

    def broken() -> bool:
        if work.is_completed():
            try:
                work.wait()
            except RuntimeError:
                return True
        return False

    return broken


def join_world(backend: str, limit_s: float) -> None:
    """Call `init_process_group` by torchrun's variables, once all ranks are there. Raises `PeerLostError`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, here = _store_of_environment(rank, limit_s), identity()
    try:
        entries = gather(store, "iris/world", rank, size, dict(pid=os.getpid(), failure="", host=here), limit_s)
        pids = {peer: pid for peer, entry in enumerate(entries) if peer != rank and (pid := pid_here(entry, here))}
        maker = threading.Thread(
            target=dist.init_process_group, args=(backend,), kwargs=dict(store=store, rank=rank, world_size=size)
        )
        maker.daemon = True
        maker.start()
        end = time.monotonic() + limit_s
        while maker.is_alive():
            maker.join(10 * _PAUSE_S)
            gone = [peer for peer, pid in pids.items() if has_ended(pid)]
            if gone and maker.is_alive():
                raise Absent(gone[0], "its process ended")
            if time.monotonic() > end:
                stopped = [peer for peer, pid in pids.items() if is_stopped(pid)]
                raise Absent(
                    (stopped or [rank])[0], f"a process group was not made within {limit_s:g} s (IRIS_TIMEOUT)"
                )
    except Absent as absent:
        raise PeerLostError(
            f"rank {rank} lost rank {absent.rank} before the creation of a context: {absent.reason}. End all ranks and "
            f"start again."
        ) from None
    atexit.register(_leave_world)


def _leave_world() -> None:
    """Destroy the process group that `join_world` made, as torch requires of a process that ends.

    A context that closes leaves the group, for the next context and the user may use it. An exception that ends the
    process leaves it too: a peer may be lost then, and the group's communicators could wait for that peer.
    """
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def _store_of_environment(rank: int, limit_s: float) -> Any:
    """Return the store of the variables, as `init_process_group` would make it, but without waiting for ranks."""
    limit = timedelta(seconds=limit_s)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return next(iter(dist.rendezvous("env://", timeout=limit)))[0]
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal():
        raise PlatformError(
            f"MASTER_ADDR is {address!r} and MASTER_PORT {port!r}; expected rank 0's address, as torchrun sets them"
        )
    try:
        return dist.TCPStore(address, int(port), is_master=rank == 0, wait_for_workers=False, timeout=limit)
    except dist.DistError as error:
        if reason := lacking(_DESCRIPTORS):
            raise PlatformError(f"rank {rank} cannot reach the store at {address}:{port}: {reason}") from None
        if rank == 0:
            raise PlatformError(f"no store can listen at {address}:{port}: {str(error).splitlines()[0]}") from None
        raise PeerLostError(
            f"rank {rank} lost rank 0 before the creation of a context: its store at {address}:{port} did not answer "
            f"within {limit_s:g} s (IRIS_TIMEOUT)"
        ) from None
