"""With IRIS_DEBUG=1, compare the ranks' collective calls on the host before they launch or allocate anything.

Ranks whose calls differ wait for signals that nobody sends. After the time-out, each names a peer that has done nothing
wrong. Ranks that allocate in different orders have their tensors at different offsets, and write to wrong addresses.
Compared, such a call is an error on every rank, and the error names the difference.

A comparison costs a round trip through the sockets of the context (`channel.py`), and repeated calls take no shortcut.
While a CUDA graph is captured nothing is compared. A replay is not a call, so it is not compared either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
import os
from typing import Any

from .errors import ArgumentError, PlatformError
from .group import Ranks, by_rank

ENV_DEBUG = "IRIS_DEBUG"
REFUSAL = "refusal"  # the fact under which a rank reports that it refuses a call


def enabled() -> bool:
    """Return whether the environment enables the comparison. Raise `PlatformError` for a value other than 0 or 1."""
    text = os.environ.get(ENV_DEBUG) or "0"
    if text not in ("0", "1"):
        raise PlatformError(f"{ENV_DEBUG} is {text!r}; expected 1, or 0 or nothing")
    return text == "1"


class Agreement:
    """The comparison of calls between the `ranks` of a context."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._calls: Counter[tuple[int, ...]] = Counter()

    def compare(self, members: Sequence[int], call: str, **facts: Any) -> None:
        """Exchange this rank's `call`, and the facts that it depends on, with the `members`, in any order.

        Raises `ArgumentError` on all of them alike where calls or facts differ, `PeerLostError` where one is silent.
        """
        members = tuple(sorted(map(int, members)))
        self._calls[members] += 1
        number, own = self._calls[members], (call, {name: str(value) for name, value in facts.items()})
        sent = self._ranks.exchange("a comparison of calls", own, members=members, what=f"call number {number}, {call}")
        calls = {peer: message.value for peer, message in zip(members, sent, strict=True)}
        if difference := _difference(call, number, calls):
            raise ArgumentError(difference)


def _difference(call: str, number: int, calls: dict[int, tuple[str, dict[str, str]]]) -> str | None:
    """Return how the ranks' calls differ, in the same text on all of them; None if they agree."""
    names = {peer: name for peer, (name, _) in calls.items()}
    if len(set(names.values())) > 1:
        return f"ranks differ in their call number {number}: {by_rank(names)}; {_EXPECTED}"
    refusals = {peer: facts[REFUSAL] for peer, (_, facts) in calls.items() if REFUSAL in facts}
    if refusals:  # where all refuse, each has an error of its own
        first = min(refusals)
        some = len(refusals) < len(calls)
        return f"rank {first} refused a call that others did not refuse: {refusals[first]}" if some else None
    for name in dict.fromkeys(name for _, facts in calls.values() for name in facts):
        values = {peer: facts.get(name) for peer, (_, facts) in calls.items()}
        if len(set(values.values())) > 1:
            return f"{call}: {name} differs between ranks: {by_rank(_where_they_differ(values))}; {_EXPECTED}"
    return None


def _where_they_differ(values: dict[int, str | None]) -> dict[int, str | None]:
    """Return each rank's item, of values that are long lists of items, at the first place where two ranks differ."""
    if all(len(value or "") <= _LONGEST for value in values.values()):
        return values
    items = {rank: (value or "none").split(_BETWEEN) for rank, value in values.items()}
    columns = zip_longest(*items.values(), fillvalue="nothing more")
    first = next(column for column in columns if len(set(column)) > 1)
    if any(len(item) > _LONGEST for item in first):  # one long text on some rank: it is cut where it begins to differ
        same = len(os.path.commonprefix([value or "" for value in values.values()]))
        begin = max(0, same - _LONGEST // 2)
        return {rank: f"...{(value or '')[begin : begin + _LONGEST]}..." for rank, value in values.items()}
    return dict(zip(items, first, strict=True))


_LONGEST = 80  # characters of a value that a message shows in full
_BETWEEN = ", "  # the items of a value, as `repr` writes them
_EXPECTED = "expected the same calls in the same order on all of them"
