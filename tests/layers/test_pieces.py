"""Graphs with calls of the host between them: captured and replayed in order, and closed where a capture fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from layers.serving.pieces import Pieces, between_graphs
import pytest


class _Log:
    """Graphs that list what is captured and replayed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def begin(self) -> tuple:
        self.count += 1
        number = self.count
        return self._capture(number), lambda: self.lines.append(f"graph {number}")

    @contextmanager
    def _capture(self, number: int) -> Iterator[None]:
        self.lines.append(f"begin {number}")
        try:
            yield
        finally:
            self.lines.append(f"end {number}")

    def taken(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def test_actions_run_at_replays_between_the_graphs() -> None:
    log = _Log()
    pieces = Pieces(log.begin)
    with pieces:
        between_graphs(lambda: log.lines.append("send"))
        between_graphs(lambda: log.lines.append("receive"))
    assert log.taken() == ["begin 1", "end 1", "begin 2", "end 2", "begin 3", "end 3"]
    for _ in range(2):
        pieces.replay()
        assert log.taken() == ["graph 1", "send", "graph 2", "receive", "graph 3"]
    between_graphs(lambda: log.lines.append("at once"))
    assert log.taken() == ["at once"]


def test_a_capture_that_fails_is_ended_once() -> None:
    log = _Log()
    with pytest.raises(RuntimeError, match="no capture"), Pieces(log.begin):
        between_graphs(lambda: None)
        raise RuntimeError("no capture")
    assert log.taken() == ["begin 1", "end 1", "begin 2", "end 2"]

    def begin() -> tuple:
        if log.count:
            raise RuntimeError("no second graph")
        return log.begin()

    log.count = 0
    with pytest.raises(RuntimeError, match="no second graph"), Pieces(begin):
        between_graphs(lambda: None)
    assert log.taken() == ["begin 1", "end 1"]
    between_graphs(lambda: log.lines.append("at once"))
    assert log.taken() == ["at once"]
