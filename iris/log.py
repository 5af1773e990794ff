"""Log lines `[Iris] [rank/world] message`, with one level for the whole process.

All lines go to the logger `iris`. An application that configures logging gets them by its own handlers, on `iris` or on
the root logger, before or after a context is made. Only where it has none does the library print them to stderr.
Records carry `iris_rank` and `iris_num_ranks`, for formatters of the application.
"""

from collections.abc import Mapping, MutableMapping
import logging
import sys
from typing import Any, TextIO

from .errors import ArgumentError

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

logger = logging.getLogger("iris")
logger.addHandler(logging.NullHandler())
if logger.level == logging.NOTSET:
    logger.setLevel(INFO)


def set_logger_level(level: int | str) -> None:
    """Set the lowest level of the log lines that are printed.

    Args:
        level: `iris.DEBUG`, `INFO` (the default), `WARNING` or `ERROR`, or any level of `logging`, also by name.

    Raises:
        ArgumentError: for anything else.
    """
    try:
        logger.setLevel(level)
    except (TypeError, ValueError):
        raise ArgumentError(f"level is {level!r}; expected iris.DEBUG, INFO, WARNING or ERROR") from None


class _Handler(logging.StreamHandler):
    """A handler that prints to the current sys.stderr, unless the application has a handler for the same lines."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's own would keep the sys.stderr of now
        self.setFormatter(logging.Formatter("[Iris] %(message)s"))

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if not _application_handles():
            super().emit(record)


def _application_handles() -> bool:
    """Return whether a line reaches a handler that the application has added to `iris` or to the root logger."""
    handlers = [*logger.handlers, *(logging.getLogger().handlers if logger.propagate else ())]
    return not all(isinstance(handler, (_Handler, logging.NullHandler)) for handler in handlers)


def rank_logger(rank: int, world_size: int) -> logging.LoggerAdapter:
    """Return a logger whose lines carry `[rank/world]`. The first call adds the handler; `import iris` adds none."""
    if not any(isinstance(handler, _Handler) for handler in logger.handlers):
        logger.addHandler(_Handler())
    return _RankAdapter(logger, {"rank": rank, "world": world_size})


class _RankAdapter(logging.LoggerAdapter):
    extra: Mapping[str, object]

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        rank, world = self.extra["rank"], self.extra["world"]
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "iris_rank": rank, "iris_num_ranks": world}
        return f"[{rank}/{world}] {msg}", kwargs
