"""What ranks tell each other before one of them raises, so that all raise alike; and how a message shows a name.

Names come from files, which may hold anything. So a message escapes them, cuts them short, and shows some tens at
most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar
import zlib

from iris.errors import ArgumentError, CheckpointError, IrisError, PlatformError

if TYPE_CHECKING:
    from iris.context import Iris

Checked = TypeVar("Checked")
Result = TypeVar("Result")

_ABSENT = "not given"
_MOST_LINES, _MOST_IN_LINE, _LONGEST_LINE, _LONGEST_PART, _LONGEST_NAME = 40, 20, 4000, 600, 200


def agree(ctx: Iris, refusal: str | None, asked: dict[str, Any]) -> None:
    """Raises on every rank if one of them refuses its arguments, or if what they `asked` differs. Collective."""
    own = refusal, {name: "a function" if callable(value) else said(value) for name, value in asked.items()}
    told = [ctx.broadcast(own, src=src) for src in range(ctx.num_ranks)]
    refusals = _by_rank([[refused] if refused else [] for refused, _ in told])
    if refusals:
        raise ArgumentError(refusals[0])
    first = told[0][1]
    for rank, (_, others) in enumerate(told):
        for name in sorted(first.keys() | others.keys()):
            if first.get(name) != others.get(name):
                here, there = (shown(str(each.get(name)), _LONGEST_PART) for each in (first, others))
                raise ArgumentError(f"{name} is {here} on rank 0 and {there} on rank {rank}: expected the same")


def checked(
    ctx: Iris, call: str, check: Callable[[], Checked], facts: Callable[[Checked], dict[str, Any]] = lambda _: {}
) -> Checked:
    """Return `check()`, before a `call` that all ranks make. Collective, one exchange of the hosts.

    Where `check` raises on one rank, it raises on all. Raises `ArgumentError` on every rank where the ranks make
    different calls, or where one of the named `facts` of the result differs.
    """
    ctx.check()
    with ctx.exchanging():
        return run_together(ctx, check, lambda result: {"the call": call, **facts(result)}, call)


def raise_together(problems: list[str], what: str, ctx: Iris) -> None:
    """Raises on every rank if any rank has a problem. Collective."""
    own = [shown(line, _LONGEST_LINE) for line in problems]
    lines = _by_rank([ctx.broadcast(own, src=src) for src in range(ctx.num_ranks)])
    if lines:
        listed = lines[:_MOST_LINES] + ([f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else [])
        raise CheckpointError(f"{shown(what)}, {len(lines)} problem(s):\n  " + "\n  ".join(listed))


def _by_rank(told: list[list[str]]) -> list[str]:
    """What the ranks told, each line once; with the first rank that has it where not all have, unless it says so."""
    ranks: dict[str, list[int]] = {}
    for rank, lines in enumerate(told):
        for line in lines:
            ranks.setdefault(line, []).append(rank)
    everyone = len(told)
    return [
        line if len(those) == everyone or line.startswith("rank ") else f"rank {those[0]}: {line}"
        for line, those in ranks.items()
    ]


def digest(value: Any) -> str:
    """Eight digits that differ where `repr(value)` does."""
    return f"{zlib.crc32(repr(value).encode()):08x}"


def said(value: Any) -> str:
    """`repr(value)`, or what it is where that fails, as for integers of many digits."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def shown(text: str, longest: int = _LONGEST_NAME) -> str:
    """`text` as a message may hold it: on one line, with escapes for what cannot be printed, and cut short."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)


def listed(texts: Iterable[str]) -> str:
    """`texts` in one line, the first of them if there are many."""
    texts = list(texts)
    more = [f"and {len(texts) - _MOST_IN_LINE} more"] if len(texts) > _MOST_IN_LINE else []
    return "; ".join([shown(text, _LONGEST_PART) for text in texts[:_MOST_IN_LINE]] + more)


def words(error: BaseException) -> str:
    """What `error` says, on one line."""
    return " ".join(str(error).split())


def run_together(
    ctx: Iris, step: Callable[[], Result], said: Callable[[Result], dict[str, Any]] = lambda _: {}, call: str = ""
) -> Result:
    """What `step` gives. Raises on every rank if it raises on one of them, or if what is `said` of it differs.

    Collective. A rank that fails raises its own error, the others one of the same kind that names the rank. An error
    about a difference names the `call`.
    """
    error: Exception | None = None
    own: dict[str, Any] = {}
    try:
        result = step()
        own = said(result)
    except Exception as caught:  # whatever it is, the other ranks are waiting for a word
        error = caught
    told = ctx.hosts.all_gather((None if error is None else _described(error), own))
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(told):
        if failure:
            kind, text = failure
            raise kind(f"rank {rank}: {text}")
    first = told[0][1]
    for rank, (_, other) in enumerate(told):
        for name in [*first, *(name for name in other if name not in first)]:
            if other.get(name, _ABSENT) != first.get(name, _ABSENT):
                here, there = (shown(str(each.get(name, _ABSENT)), _LONGEST_PART) for each in (first, other))
                what = f"{call}: {name} differs between ranks: it" if call else name
                raise ArgumentError(
                    f"{what} is {here} on rank 0 and {there} on rank {rank}: expected the same on every rank"
                )
    return result


def _described(error: Exception) -> tuple[type[IrisError], str]:
    """As what kind of error, with which text, the other ranks raise it."""
    if isinstance(error, IrisError):
        return type(error), str(error)
    return PlatformError, f"{type(error).__name__}: {error}"
