"""Log lines `[Iris] [rank/world] message`, with one level for the whole process.

Records carry `iris_rank` and `iris_num_ranks`, for handlers and formatters of the user's own.
"""

from collections.abc import Mapping, MutableMapping
import logging
import sys
from typing import Any, TextIO

from .errors import ArgumentError

DEBUG, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

logger = logging.getLogger("iris")
if logger.level == logging.NOTSET:
    logger.setLevel(INFO)


def set_logger_level(level: int | str) -> None:
    """Sets the least severe level that is printed: `iris.DEBUG`, `INFO` (the default), `WARNING` or `ERROR`.

    Takes logging's names of them too, and its other levels. Raises `ArgumentError` for anything else.
    """
    try:
        logger.setLevel(level)
    except (TypeError, ValueError):
        raise ArgumentError(f"level is {level!r}; expected iris.DEBUG, INFO, WARNING or ERROR") from None


class _Handler(logging.StreamHandler):
    """Prints to the current sys.stderr, so that redirections made later are honoured."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)  # StreamHandler's own would keep the sys.stderr of now
        self.setFormatter(logging.Formatter("[Iris] %(message)s"))

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def rank_logger(rank: int, world_size: int) -> logging.LoggerAdapter:
    """A logger whose lines carry `[rank/world]`. Installs the handler on first use, never at import."""
    if not logger.handlers:
        logger.addHandler(_Handler())
        logger.propagate = False
    return _RankAdapter(logger, {"rank": rank, "world": world_size})


class _RankAdapter(logging.LoggerAdapter):
    extra: Mapping[str, object]

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        rank, world = self.extra["rank"], self.extra["world"]
        kwargs["extra"] = {**(kwargs.get("extra") or {}), "iris_rank": rank, "iris_num_ranks": world}
        return f"[{rank}/{world}] {msg}", kwargs
