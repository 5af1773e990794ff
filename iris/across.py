"""Exchanges between ranks of different hosts: torch.distributed's operations, each bounded by IRIS_TIMEOUT.

A context spans one host. Beyond it data travels by the user's process group, NCCL on GPUs and gloo on CPUs. `Across`
adds what those lack: waits that end in time on every backend, and an error that names the lost host. On GPUs the host
does not wait: as with a kernel of the context, a later call raises the error. Small values
(arguments to compare, failures) go through the group's store, so they need no device.

A rank that loses another leaves a note in the store. A rank that loses the writer of that note, which may have ended
only because of the first loss, reads it and names the same host. On CPUs a rank that waits looks for a note meanwhile,
because gloo tells it of a loss only where the lost rank is the one that it waits for: the others wait until the process
of a rank ends that gave up before them, and with it the store may end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
import functools
import json
import os
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from . import platform
from .errors import ArgumentError, PeerLostError
from .group import store_of
from .pending import Pending
from .rendezvous import Absent, gather, gloo_watch
from .same_host import identity

_NOTE_S = 1.5  # for the store to answer
_READ_S = 3.0  # for all members to read a note, before the process that may host the store ends
_CHAIN_S = 0.5  # in which all members that wait for each other give up
_LOOK_S = 0.1  # between looks for a note
_POLL_S = 0.01
_PROBE_BYTES, _PROBES = 4 << 20, 3
_group_counts: Counter[str] = Counter()


@dataclass(frozen=True)
class Rate:
    """The rate of an all-reduce across hosts: `gbs`, GB/s that one rank sends, and `hop_us`, the time of a message."""

    gbs: float
    hop_us: float


class Across:
    """The members of a process group, one on each of several hosts. Making it is collective.

    `rank`, `size`: in the group; `names`: the host of each member. `on_loss`: is called with the error of the first
    loss. `own_loss`: returns which rank of this host is lost and why, or "". A member of another host that ends only
    because of that rank is then not blamed. Raises `PeerLostError` where a member does not come.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        on_loss: Callable[[PeerLostError], None] = lambda _: None,
        own_loss: Callable[[], str] = lambda: "",
    ) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._limit_s = platform.timeout_s()
        self._limit = timedelta(seconds=self._limit_s)
        _group_counts[group.group_name] += 1
        self._name = f"iris/across/{group.group_name}/{_group_counts[group.group_name]}"
        self._store, self._count, self._on_loss, self._own_loss = store_of(group), 0, on_loss, own_loss
        self._late = f"it did not come within {self._limit_s:g} s (IRIS_TIMEOUT)"
        self.backend = dist.get_backend(group)
        self.capturable = "nccl" in self.backend
        """Whether a CUDA graph can capture operations; `watch` then bounds its replays."""
        self._pending = (
            Pending(self._limit_s, torch.device("cuda", torch.cuda.current_device())) if self.capturable else None
        )
        self._has_graphs = False
        self.names = ["a host that is not known yet"] * self.size
        self.lost: tuple[int | None, str] | None = None
        """The member that this one has given up on, None where it is one of several, and the reason. This member itself
        where a rank of its host is lost."""
        self.names = self.exchange("the hosts of a group", os.uname().nodename)

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Return each member's `value`, which JSON can hold, for the exchange named `what`, in their order. Collective.

        Raises `ArgumentError` where another member is at another exchange, `PeerLostError` where one does not come.
        """
        self.check()
        self._count += 1
        own = self._entry(what, value)
        watch = gloo_watch(self.group, 2 * self._limit_s)  # a member that is late has not ended
        look = _Look(self._has_note)
        try:
            with look:
                entries = gather(
                    self._store,
                    f"{self._name}/{self._count}",
                    self.rank,
                    self.size,
                    own,
                    self._limit_s,
                    broken=lambda: look.is_over or watch(),
                )
        except Absent as absent:
            raise self._loss(absent.rank if absent.is_sure else None, what, absent.reason) from None
        for member, each in enumerate(entries):
            if each["what"] != what:
                raise ArgumentError(
                    f"hosts make different calls: {self.names[self.rank]} is at {what!r}, {self.names[member]} at "
                    f"{each['what']!r}; expected the same calls in the same order on every host"
                )
        return [json.loads(each["value"]) for each in entries]

    def report(self, what: str, value: Any) -> None:
        """Give the other members this one's `value` for the next exchange, without waiting for theirs."""
        if self.lost is None:
            self._count += 1
            key, entry = f"{self._name}/{self._count}/{self.rank}", json.dumps(self._entry(what, value))
            _within(_NOTE_S, lambda: self._store.set(key, entry))

    def leave(self, error: BaseException) -> None:
        """Note that this member makes no further call because of `error`, which members that wait for it then raise."""
        if self.lost is None:
            self.lost = self.rank, _first_line(error)

            def note() -> None:
                self._note(self.rank, f"it left by {type(error).__name__}: {_first_line(error)}")
                self._mark("read")

            if _within(_NOTE_S, note) and self.rank == 0:
                self._await_readers(None)

    def send(self, tensor: torch.Tensor, to: int, what: str) -> None:
        """Send a contiguous `tensor` to member `to`, which receives one of its shape and dtype."""
        self._run(to, what, lambda: self.group.send([tensor], to, 0))

    def receive(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Fill a contiguous `tensor` with the one that member `source` sends."""
        self._run(source, what, lambda: self.group.recv([tensor], source, 0))

    def all_reduce(self, tensor: torch.Tensor, what: str) -> None:
        """Replace a contiguous `tensor` by its sum over the members."""
        options = dist.AllreduceOptions()
        options.timeout = self._limit
        self._run(None, what, lambda: self.group.allreduce([tensor], options))

    def reduce_scatter(self, out: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
        """Fill `out` [m, ...] with this member's block of the sum over the members of `tensor` [size * m, ...]."""
        options = dist.ReduceScatterOptions()
        options.timeout = self._limit
        self._run(None, what, lambda: self.group._reduce_scatter_base(out, tensor, options))

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor, what: str) -> None:
        """Fill `out` [size * m, ...] with the members' contiguous `tensor` [m, ...], in their order."""
        options = dist.distributed_c10d.AllgatherOptions()
        options.timeout = self._limit
        self._run(None, what, lambda: self.group._allgather_base(out, tensor, options))

    def measure(self, device: torch.device) -> Rate:
        """Time a small and a large all-reduce of tensors on `device`; return the rate of the slowest member."""

        def fastest(nbytes: int) -> float:
            memory, times = torch.zeros(nbytes // 4, dtype=torch.float32, device=device), []
            for _ in range(_PROBES + 1):  # the first one connects
                begin = time.perf_counter()
                self.all_reduce(memory, "measuring the rate between hosts")
                platform.synchronize(device)
                times.append(time.perf_counter() - begin)
                self.settle()
            return min(times[1:])

        short, long = fastest(4), fastest(_PROBE_BYTES)
        moved = 2 * (self.size - 1) / self.size * _PROBE_BYTES
        own = Rate(moved / max(long - short, 1e-6) / 1e9, short * 1e6 / max(1, 2 * (self.size - 1)))
        rates = self.exchange("the rate between hosts", (own.gbs, own.hop_us))
        return Rate(min(gbs for gbs, _ in rates), max(hop for _, hop in rates))

    def check(self) -> None:
        """Raise `PeerLostError` once a member has been lost."""
        if self.lost is not None:
            raise self._error("an earlier call")

    def watch(self) -> None:
        """Watch what was enqueued in the current stream, as the replay of a graph with operations.

        The call returns at once. A later call raises `PeerLostError` where the replay does not end in time.
        """
        if self._pending is not None and self._has_graphs and self.lost is None:
            event = torch.cuda.Event()
            event.record()
            missed = functools.partial(self._missed, self._only_other, "the replay of a CUDA graph")
            self._pending.add(None, event.query, missed)

    def settle(self) -> None:
        """Wait until all earlier operations have ended, replays of graphs in the current stream included.

        Raises `PeerLostError` where one of them has lost a member.
        """
        if self._pending is not None:
            self.watch()
            self._pending.join()
        self.check()

    def _run(self, peer: int | None, what: str, start: Callable[[], Any]) -> None:
        """Run an operation. `peer`: the only other member that takes part, if there is one.

        On GPUs the current stream waits for it, and a thread watches its end; the host goes on (`pending`).
        """
        self.check()
        is_for_two, peer = peer is not None, self._only_other if peer is None else peer
        begin = time.monotonic()
        try:
            work = start()
            if self._pending is None:
                self._await(work, self._has_note if is_for_two else self._has_news)
            elif torch.cuda.is_current_stream_capturing():
                work.wait()  # which joins the stream of the transfer; no event of a graph can be looked at
                self._has_graphs = True
            else:
                work.wait()
                event = torch.cuda.Event()
                event.record()
                self._pending.add(work, event.query, functools.partial(self._missed, peer, what))
        except RuntimeError as error:  # DistError and what backends raise
            late = time.monotonic() - begin >= 0.9 * self._limit_s
            raise self._loss(peer, what, self._late if late else _first_line(error)) from None

    def _await(self, work: Any, is_over: Callable[[], bool]) -> None:
        """Wait for `work` to end, and raise what it raises. Raises `RuntimeError` where `is_over` is true before.

        A thread waits, which is abandoned then: gloo has no other way to end a wait.
        """
        failures: list[RuntimeError] = []

        def wait() -> None:
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                failures.append(error)

        waiting = threading.Thread(target=wait, name="iris-across", daemon=True)
        waiting.start()
        waiting.join(_LOOK_S)
        if waiting.is_alive():
            with _Look(is_over) as look:
                while waiting.is_alive():
                    if look.is_over:
                        raise RuntimeError("another host has given up")
                    waiting.join(_POLL_S)
        if failures:
            raise failures[0]

    @property
    def _only_other(self) -> int | None:
        return 1 - self.rank if self.size == 2 else None

    def _missed(self, peer: int | None, what: str, reason: str | None) -> None:
        """End all work on the device after an operation that failed for `reason`, or did not end in time."""
        self._loss(peer, what, reason or self._late)

    def _loss(self, peer: int | None, what: str, reason: str) -> PeerLostError:
        if self.lost is not None:
            return self._error(what)
        self.lost, is_noted = self._agreed(peer, reason)
        if self._pending is not None:  # an endless wait on the device would block all later work there
            with suppress(AttributeError, RuntimeError):  # older torch has no such method
                self.group.abort()
        error = self._error(what)
        self._on_loss(error)
        if is_noted and self.rank == 0:
            self._await_readers(self.lost[0])
        return error

    def _await_readers(self, lost: int | None) -> None:
        """Wait until the members but `lost` have read the note: this process may host the store."""
        keys = [f"{self._name}/read/{each}" for each in range(1, self.size) if each != lost]
        _within(_READ_S, lambda: self._store.wait(keys, timedelta(seconds=_READ_S)))

    def _error(self, what: str) -> PeerLostError:
        assert self.lost is not None
        peer, reason = self.lost
        if peer == self.rank:
            return PeerLostError(
                f"host {self.names[peer]} lost a rank of its own in {what}: {reason}. End all ranks and start again."
            )
        other_hosts = ", ".join(name for member, name in enumerate(self.names) if member != self.rank)
        lost = f"one of the hosts {other_hosts}"
        if peer is not None:
            lost = f"host {self.names[peer]} (rank {peer} of the {self.size} across hosts)"
        return PeerLostError(
            f"host {self.names[self.rank]} lost {lost} in {what}: {reason}. End all ranks and start again."
        )

    def _agreed(self, peer: int | None, reason: str) -> tuple[tuple[int | None, str], bool]:
        """Return the member that was lost first and why, and whether the store has answered.

        The member is this one where it has lost a rank of its own host, else the one that a note names, else `peer`;
        where the store does not answer, the host that runs it.
        """
        verdicts: list[tuple[int | None, str]] = []
        own = self._own_loss()
        if own and self._pending is not None:  # which may have ended because of this loss
            own, reason = "", f"{reason}; on host {self.names[self.rank]} {own}"

        def agree() -> None:
            awaited = self.rank if own else peer
            if not own and not self._has_note():
                if peer is None:
                    awaited = self._missing()
                elif reason == self._late:
                    awaited = self._awaited(peer)
            verdicts.append(self._note(awaited, own or reason))
            self._mark("read")

        _within(_NOTE_S + _CHAIN_S, agree)
        if own:
            return (self.rank, own), bool(verdicts)
        if verdicts:
            return verdicts[0], True
        return (0, f"its store does not answer; {reason}") if self.rank else (peer, reason), False

    def _missing(self) -> int | None:
        """Return the only member that does not answer after a collective has failed; None where there are several."""
        self._mark("failed")
        self._store.set(f"{self._name}/failed", "")
        others = [each for each in range(self.size) if each != self.rank]
        end = time.monotonic() + 2 * _CHAIN_S
        time.sleep(_CHAIN_S)
        while True:
            missing = [each for each in others if not self._store.check([f"{self._name}/failed/{each}"])]
            if len(missing) < 2 or time.monotonic() > end:
                return missing[0] if len(missing) == 1 else None
            time.sleep(_LOOK_S)

    def _awaited(self, peer: int) -> int:
        """Return the member that `peer`, which is late, waits for, directly or through others; else `peer`."""
        self._store.set(f"{self._name}/late/{self.rank}", str(peer))
        time.sleep(_CHAIN_S)
        last, known = peer, {self.rank}
        while last not in known and self._store.check([key := f"{self._name}/late/{last}"]):
            known.add(last)
            last = int(self._store.get(key))
        return peer if last in known else last

    def _note(self, peer: int | None, reason: str) -> tuple[int | None, str]:
        """Return what an earlier note says, unless it is about this member; else leave one for the others."""
        key = f"{self._name}/lost"
        if self._store.check([key]):
            first, text = json.loads(self._store.get(key))
            if 0 <= int(first) < self.size and int(first) != self.rank:
                return int(first), str(text)
        elif peer is not None:
            self._store.set(key, json.dumps((peer, reason)))
        return peer, reason

    def _has_note(self) -> bool:
        """Return whether another member has noted a loss, but for one that blames this member."""
        key = f"{self._name}/lost"
        return self._store.check([key]) and json.loads(self._store.get(key))[0] != self.rank

    def _has_news(self) -> bool:
        """Return whether another member has noted a loss, or a collective has failed there."""
        return self._store.check([f"{self._name}/failed"]) or self._has_note()

    def _mark(self, what: str) -> None:
        self._store.set(f"{self._name}/{what}/{self.rank}", "")

    def _entry(self, what: str, value: Any) -> dict[str, Any]:
        return {"pid": os.getpid(), "failure": "", "host": identity(), "what": what, "value": json.dumps(value)}


class _Look(threading.Thread):
    """Calls `test`, which asks a store that may not answer, again and again inside its block, until `is_over`."""

    def __init__(self, test: Callable[[], bool]) -> None:
        super().__init__(name="iris-look", daemon=True)
        self._test, self._left = test, threading.Event()
        self.is_over = False

    def __enter__(self) -> _Look:
        self.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._left.set()

    def run(self) -> None:
        with suppress(RuntimeError, ValueError, TypeError, IndexError):
            while not self.is_over and not self._left.wait(_LOOK_S):
                self.is_over = self._test()


def _first_line(error: BaseException) -> str:
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line.partition(". This is typically")[0]  # gloo appends advice


def _within(seconds: float, action: Callable[[], Any]) -> bool:
    """Run `action`, a request to a store that may not answer, for at most so long; return whether it has answered."""
    answered = threading.Event()

    def run() -> None:
        with suppress(RuntimeError, ValueError, TypeError):
            action()
            answered.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()
