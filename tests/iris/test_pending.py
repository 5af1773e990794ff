"""Operations that a thread watches: they end, they are late, or they fail."""

from __future__ import annotations

import threading
import time

from iris.pending import Pending
import torch

_LIMIT_S = 0.6


class _Work:
    """An operation that the GPU is past when `done` is set. A failed one is completed, and never done, as NCCL's is."""

    def __init__(self, fails: bool = False, error: RuntimeError | None = None) -> None:
        self.done, self.fails, self.error = threading.Event(), fails, error

    def is_completed(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.fails or self.done.is_set()


def _watched(*works: _Work, limit_s: float = _LIMIT_S) -> tuple[list[str | None], float]:
    """Return what was reported of the works, and the seconds until all of them had ended, or one was reported."""
    missed: list[str | None] = []
    pending = Pending(limit_s, torch.device("cpu"))
    pending.join()
    begin = time.monotonic()
    for work in works:
        pending.add(work, work.done.is_set, missed.append)
    pending.join()
    seconds = time.monotonic() - begin
    good = _Work()
    good.done.set()
    pending.add(good, good.done.is_set, missed.append)  # the thread goes on
    pending.join()
    return missed, seconds


def test_join_waits_for_all_and_a_late_one_is_reported_once() -> None:
    works = [_Work() for _ in range(4)]
    threading.Timer(0.1, works[0].done.set).start()
    threading.Timer(0.2, works[1].done.set).start()
    missed, seconds = _watched(*works)
    assert missed == [None] and _LIMIT_S < seconds < 20 * _LIMIT_S


def test_all_end() -> None:
    work = _Work()
    threading.Timer(0.1, work.done.set).start()
    missed, seconds = _watched(work, limit_s=60.0)
    assert missed == [] and 0.05 < seconds < 30


def test_a_failed_operation_is_reported_before_the_limit() -> None:
    missed, seconds = _watched(_Work(fails=True), _Work(), limit_s=60.0)
    assert missed == ["its process ended, or the network failed"] and seconds < 30


def test_the_error_of_an_operation_is_its_reason() -> None:
    error = RuntimeError("connection closed by the peer\nmore")
    missed, _ = _watched(_Work(error=error), limit_s=60.0)
    assert missed == ["connection closed by the peer"]


def test_the_replay_of_a_graph_has_no_operation_and_is_reported_where_it_is_late() -> None:
    missed: list[str | None] = []
    pending = Pending(_LIMIT_S, torch.device("cpu"))
    pending.add(None, lambda: True, missed.append)
    pending.join()
    assert missed == []
    begin = time.monotonic()
    pending.add(None, lambda: False, missed.append)
    pending.join()
    assert missed == [None] and time.monotonic() - begin >= _LIMIT_S
