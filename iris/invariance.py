"""Guarantees for a row's bits, by their names: see `docs/concepts/determinism.md`."""

from __future__ import annotations

from functools import lru_cache
from pkgutil import resolve_name
from typing import Any

from .errors import ArgumentError

# The same bits in each run are kept without a level. "batch": also the same for any number of rows. "ranks": also the
# same for any number of ranks. Each by the object of `iris_ops` that keeps it.
NO_LEVEL = "iris_ops.planning.sums:FREE"
LEVELS: dict[str, str] = {"batch": "iris_ops.planning.sums:BATCH", "ranks": "iris_ops.planning.sums:RANKS"}


@lru_cache
def level_of(name: str | None) -> Any:
    """Return the object that keeps the level `name`; for None one that promises nothing more."""
    return resolve_name(NO_LEVEL if name is None else LEVELS[name])


class Promising:
    """A context that promises bits: whatever depends on the promise asks `level`."""

    invariant: str | None = None

    @property
    def level(self) -> Any:
        """Return the `iris_ops.planning.sums.Level` that the context keeps."""
        return level_of(self.invariant)


def refusal(invariant: Any) -> ArgumentError | None:
    """Return the error in a user's choice; None if it is valid."""
    if invariant is None or (isinstance(invariant, str) and invariant in LEVELS):
        return None
    return ArgumentError(f"invariant is {invariant!r}; expected one of {', '.join(map(repr, (None, *LEVELS)))}")
