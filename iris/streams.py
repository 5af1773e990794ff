"""The stream beside the user's, for calls with `async_op=True`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import platform


class SideStream:
    """One for all ops of a context: two kernels that wait for peers never run side by side.

    Each may fill the chip while it waits, so two that ranks start in different order would deadlock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pending: torch.cuda.Event | None = None
        self._captured = False  # the pending event belongs to a graph

    def run(self, go: Callable[[], None]) -> torch.cuda.Event:
        """What `go` launches, after all that the current stream has so far. Returns the event of its end."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device.index))
        with torch.cuda.stream(self._stream):
            go()
            self._pending = torch.cuda.Event()
            self._pending.record(self._stream)
            self._captured = platform.is_capturing(self._device)
        return self._pending

    def join(self) -> None:
        """Makes the current stream wait for what `run` has launched."""
        if self._pending is None:
            return
        capturing = platform.is_capturing(self._device)
        if self._captured == capturing:
            torch.cuda.current_stream(self._device.index).wait_event(self._pending)
        # A capture begins on an idle device, and ends with everything joined: neither waits for the other's events.
        if self._captured or not capturing:
            self._pending = None
