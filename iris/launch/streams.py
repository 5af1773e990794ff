"""Run work next to the user's stream: a stream for calls with `async_op=True`, and lanes for overlapping parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from .. import platform
from ..errors import ArgumentError


def check_async(call: str, async_op: object) -> None:
    """Refuse anything but a bool: a `config` passed by position would be taken for True."""
    if type(async_op) is not bool:
        raise ArgumentError(f"{call}: async_op is {type(async_op).__name__}; expected True or False")


class SideStream:
    """One stream for all ops of a context, so that two kernels that wait for peers never run at the same time.

    Each may fill the chip while it waits, so two that ranks start in different order would deadlock. Barriers of one
    program, which an op has in its lanes, may overlap.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self._pending: torch.cuda.Event | None = None
        self._captured = False  # the pending event belongs to a graph

    def run(self, go: Callable[[], None], async_op: bool, *tensors: torch.Tensor | None) -> torch.cuda.Event | None:
        """Run `go` in the current stream, after what runs here; or here, after the current stream's work so far.

        Returns the event of its end if it runs here: on GPUs, with `async_op`. Torch's allocator does not reuse the
        memory of `tensors` before that event.
        """
        if not async_op or self._device.type != "cuda":
            self.join()
            go()
            return None
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device.index))
        with torch.cuda.stream(self._stream):
            go()
            for t in tensors:
                if t is not None and t.numel():
                    t.record_stream(self._stream)
            self._pending = torch.cuda.Event()
            self._pending.record(self._stream)
            self._captured = platform.is_capturing(self._device)
        return self._pending

    def join(self) -> None:
        """Make the current stream wait for what `run` has launched."""
        if self._pending is None:
            return
        capturing = platform.is_capturing(self._device)
        if self._captured == capturing:
            torch.cuda.current_stream(self._device.index).wait_event(self._pending)
        # A capture begins on an idle device, and ends with everything joined: neither waits for the other's events.
        if self._captured or not capturing:
            self._pending = None


def current(device: torch.device) -> torch.cuda.Stream | None:
    """Return the current stream; None on CPUs."""
    return torch.cuda.current_stream(device.index) if device.type == "cuda" else None


class Lane:
    """A stream in which part of an op overlaps the current one. On CPUs, which have none, all parts run in order.

    It has high priority: its short kernels start before the remaining programs of a long kernel.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    @contextmanager
    def instead_of(self, stream: torch.cuda.Stream | None) -> Iterator[torch.cuda.Stream | None]:
        """Launch the work of the block in this lane. After the block, `stream` is the current one again."""
        if self.stream is None or stream is None:
            yield None
            return
        torch.cuda.set_stream(self.stream)
        try:
            yield self.stream
        finally:
            torch.cuda.set_stream(stream)


class Mark:
    """A point in a stream that other streams wait for.

    It may be reused by later calls, captured ones among them, as long as each call sets it before it waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def set(self, stream: torch.cuda.Stream | None) -> None:
        if self._event is not None:
            self._event.record(stream)

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """Make `stream` wait for the work that the other stream held when the mark was last set."""
        if self._event is not None:
            self._event.wait(stream)
