"""Operations of a process group that run on a GPU, each watched by a thread until it ends.

NCCL's kernels wait without a limit, and torch's own watchdog ends the process. So a thread looks at each operation in
the order of their start. One that fails, or does not end in time, is reported, and those after it are not watched.

torch also calls an operation completed if it has failed. Only the GPU shows the difference: an event recorded after
the operation occurs at once if the operation has ended, and does not occur if it has failed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
import threading
import time
from typing import Any

import torch

_POLL_S = 1e-3
_GRACE_S = 0.2  # from an operation's completion to its event
_REPORT_S = 5.0  # for a report, besides


class Pending:
    """Operations on `device` that have not ended yet. Each must end within `limit_s` seconds of the one before."""

    def __init__(self, limit_s: float, device: torch.device) -> None:
        self._limit_s, self._device = limit_s, device
        self._works: deque[tuple[Any, Callable[[], bool], Callable[[str | None], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, work: Any, has_ended: Callable[[], bool], missed: Callable[[str | None], None]) -> None:
        """Watch `work`, an operation of torch.distributed, or None for a graph of them. `has_ended`: whether the GPU is
        past it.

        `missed` is called in the thread: with the reason why the work failed, or None where it is late.
        """
        with self._changed:
            self._works.append((work, has_ended, missed))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="iris-pending", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until all operations have ended, or one of them was reported.

        Returns in bounded time even if a report does not return: the device may still run other work, which waits.
        """
        with self._changed:
            while self._works:
                first, deadline = self._works[0], time.monotonic() + 2 * self._limit_s + _REPORT_S
                while self._works and self._works[0] is first:
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        return

    def _watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                while not self._works:
                    self._changed.wait()
                work, has_ended, missed = self._works[0]
            is_missed, reason = self._await(work, has_ended)
            try:
                if is_missed:
                    missed(reason)
            finally:
                with self._changed:
                    if is_missed:
                        self._works.clear()
                    else:
                        self._works.popleft()
                    self._changed.notify_all()

    def _await(self, work: Any, has_ended: Callable[[], bool]) -> tuple[bool, str | None]:
        """Wait for the end of `work`; return whether it is missed, and the reason, None where it is late."""
        begin, completed = time.monotonic(), None
        try:
            while not has_ended():
                now = time.monotonic()
                if completed is None and work is not None and work.is_completed():
                    completed = now
                if completed is not None and now > completed + _GRACE_S:
                    return True, "its process ended, or the network failed"
                if now > begin + self._limit_s:
                    return True, None
                time.sleep(_POLL_S)
        except RuntimeError as error:
            return True, next(iter(str(error).strip().splitlines()), type(error).__name__)
        return False, None
