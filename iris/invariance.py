"""The guarantees for a row's bits: see `docs/concepts/determinism.md`."""

from __future__ import annotations

from typing import Any

from .errors import ArgumentError

# The same bits in each run are kept without a level. "batch": also the same for any number of rows. "ranks": also the
# same for any number of ranks. Each by the object of `iris_ops` that keeps it.
RANKS = "ranks"
LEVELS: dict[str, str] = {"batch": "iris_ops.planning.sums:BATCH", RANKS: "iris_ops.planning.sums:RANKS"}


def refusal(invariant: Any) -> ArgumentError | None:
    """Return the error in a user's choice; None if it is valid."""
    if invariant is None or (isinstance(invariant, str) and invariant in LEVELS):
        return None
    return ArgumentError(f"invariant is {invariant!r}; expected one of {', '.join(map(repr, (None, *LEVELS)))}")
