"""Operations that a thread watches: they end, they are late, or they fail."""

from __future__ import annotations

import threading
import time

from iris.pending import Pending
import torch

_LIMIT_S = 0.3


class _Work:
    """An operation that ends when `done` is set, and raises `error` where it has one."""

    def __init__(self, error: RuntimeError | None = None) -> None:
        self.done, self.error = threading.Event(), error

    def is_completed(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.done.is_set()


def test_join_waits_for_all_and_a_late_one_is_reported_once() -> None:
    missed: list[RuntimeError | None] = []
    pending = Pending(_LIMIT_S, torch.device("cpu"))
    pending.join()
    works = [_Work() for _ in range(3)]
    for work in works:
        pending.add(work, missed.append)
    threading.Timer(0.1, works[0].done.set).start()
    threading.Timer(0.2, works[1].done.set).start()
    begin = time.monotonic()
    pending.join()
    assert _LIMIT_S < time.monotonic() - begin < 20 * _LIMIT_S
    assert missed == [None]
    good = _Work()
    good.done.set()
    pending.add(good, missed.append)
    pending.join()
    assert missed == [None]


def test_the_error_of_an_operation_is_reported() -> None:
    missed: list[RuntimeError | None] = []
    pending = Pending(60.0, torch.device("cpu"))
    error = RuntimeError("connection closed by the peer")
    pending.add(_Work(error), missed.append)
    pending.add(_Work(), missed.append)  # after a failure none is watched
    pending.join()
    assert missed == [error]
