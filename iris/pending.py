"""Operations of a process group that run on a GPU, each watched by a thread until it ends.

NCCL's kernels wait without a limit, and torch's own watchdog ends the process. So a thread looks at each operation in
the order of their start: one that does not end in time is reported, and the thread stops watching.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
import threading
import time
from typing import Any

import torch

_POLL_S = 1e-3


class Pending:
    """Operations on `device` that have not ended yet. Each must end within `limit_s` seconds of the one before."""

    def __init__(self, limit_s: float, device: torch.device) -> None:
        self._limit_s, self._device = limit_s, device
        self._works: deque[tuple[Any, Callable[[RuntimeError | None], None]]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, work: Any, missed: Callable[[RuntimeError | None], None]) -> None:
        """Watch `work`. `missed` is called in the thread: with the error of the work, or None where it is late."""
        with self._changed:
            self._works.append((work, missed))
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="iris-pending", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until all operations have ended, or one of them was reported."""
        with self._changed:
            while self._works:
                self._changed.wait()

    def _watch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while True:
            with self._changed:
                while not self._works:
                    self._changed.wait()
                work, missed = self._works[0]
            begin, failure = time.monotonic(), None
            try:
                while (late := not work.is_completed()) and time.monotonic() < begin + self._limit_s:
                    time.sleep(_POLL_S)
            except RuntimeError as error:
                late, failure = True, error
            try:
                if late:
                    missed(failure)
            finally:
                with self._changed:
                    if late:
                        self._works.clear()
                    else:
                        self._works.popleft()
                    self._changed.notify_all()
