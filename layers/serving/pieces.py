"""Work in several CUDA graphs, with calls of the host between them, such as a transfer to another host.

`between_graphs(action)` runs the action at once. While a `Pieces` captures, it ends the graph, records the action
without running it, and begins the next graph. A replay runs graphs and actions in that order. What they hand over lies
in the graphs' memory, so each action finds it at the address that it was recorded with.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_capturing: list[Pieces] = []

Begin = Callable[[], tuple[AbstractContextManager, Callable[[], Any]]]


class Pieces:
    """Graphs of the work inside `with pieces:`, and what runs between them.

    `begin` returns the context manager that captures a graph, and the function that replays it.
    """

    def __init__(self, begin: Begin) -> None:
        self._begin, self._steps = begin, list[Callable[[], Any]]()
        self._capture: AbstractContextManager | None = None

    def __enter__(self) -> Pieces:
        _capturing.append(self)
        try:
            self._next()
        except BaseException:
            _capturing.pop()
            raise
        return self

    def __exit__(self, *error: Any) -> None:
        _capturing.pop()
        capture, self._capture = self._capture, None
        if capture is not None:
            capture.__exit__(*error)

    def split(self, action: Callable[[], None]) -> None:
        """End this graph, record `action`, and begin the next graph."""
        capture, self._capture = self._capture, None
        assert capture is not None, "the capture has ended"
        capture.__exit__(None, None, None)
        self._steps.append(action)
        self._next()

    def replay(self) -> None:
        """Run the graphs and the actions in order."""
        for step in self._steps:
            step()

    def _next(self) -> None:
        capture, replay = self._begin()
        capture.__enter__()
        self._capture = capture
        self._steps.append(replay)


def between_graphs(action: Callable[[], None]) -> None:
    """Run `action`, a call of the host; while a graph is captured, at each replay instead."""
    if _capturing:
        _capturing[-1].split(action)
    else:
        action()
