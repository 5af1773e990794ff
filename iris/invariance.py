"""What may be promised of the bits of a row: see `docs/concepts/determinism.md`."""

from __future__ import annotations

from typing import Any

from .errors import ArgumentError

# None: nothing but the same bits in each run. "batch": also the same for any number of rows. "ranks": also the same for
# any number of ranks.
RANKS = "ranks"
INVARIANTS = (None, "batch", RANKS)


def refusal(invariant: Any) -> ArgumentError | None:
    """What is wrong with a user's choice."""
    if invariant is None or (isinstance(invariant, str) and invariant in INVARIANTS):
        return None
    return ArgumentError(f"invariant is {invariant!r}; expected one of {', '.join(map(repr, INVARIANTS))}")
