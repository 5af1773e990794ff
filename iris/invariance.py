"""The guarantees for a row's bits: see `docs/concepts/determinism.md`."""

from __future__ import annotations

from typing import Any

from .errors import ArgumentError

# None: only the same bits in each run. "batch": also the same for any number of rows. "ranks": also the same for any
# number of ranks.
RANKS = "ranks"
INVARIANTS = (None, "batch", RANKS)


def refusal(invariant: Any) -> ArgumentError | None:
    """Return the error in a user's choice; None if it is valid."""
    if invariant is None or (isinstance(invariant, str) and invariant in INVARIANTS):
        return None
    return ArgumentError(f"invariant is {invariant!r}; expected one of {', '.join(map(repr, INVARIANTS))}")
