"""Steps that succeed on all ranks or raise alike on all of them, and text that is safe to put into a message.

Names come from files, which may hold anything. So a message escapes them, cuts them short, and lists few of them.
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


def agree(ctx: Iris, refusal: str | None, requested: dict[str, Any]) -> None:
    """Raise `ArgumentError` on every rank if one refuses its arguments, or if the `requested` differ. Collective."""
    own = refusal, {name: "a function" if callable(value) else safe_repr(value) for name, value in requested.items()}
    calls = [ctx.broadcast(own, src=src) for src in range(ctx.num_ranks)]
    refusals = _by_rank([[refused] if refused else [] for refused, _ in calls])
    if refusals:
        raise ArgumentError(refusals[0])
    first = calls[0][1]
    for rank, (_, other) in enumerate(calls):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                here, there = (shown(str(each.get(name)), _LONGEST_PART) for each in (first, other))
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
    """Raise `CheckpointError` on every rank if any rank has a problem. Collective."""
    own = [shown(line, _LONGEST_LINE) for line in problems]
    lines = _by_rank([ctx.broadcast(own, src=src) for src in range(ctx.num_ranks)])
    if lines:
        listed = lines[:_MOST_LINES] + ([f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else [])
        raise CheckpointError(f"{shown(what)}, {len(lines)} problem(s):\n  " + "\n  ".join(listed))


def _by_rank(lines_of_ranks: list[list[str]]) -> list[str]:
    """Return each line once. A line that some ranks lack begins with the first rank that has it."""
    ranks: dict[str, list[int]] = {}
    for rank, lines in enumerate(lines_of_ranks):
        for line in lines:
            ranks.setdefault(line, []).append(rank)
    everyone = len(lines_of_ranks)
    return [
        line if len(holders) == everyone or line.startswith("rank ") else f"rank {holders[0]}: {line}"
        for line, holders in ranks.items()
    ]


def digest(value: Any) -> str:
    """Return the CRC-32 of `repr(value)` as eight hexadecimal digits."""
    return f"{zlib.crc32(repr(value).encode()):08x}"


def safe_repr(value: Any) -> str:
    """Return `repr(value)`, or the name of its type where `repr` raises, as it does for integers of many digits."""
    try:
        return repr(value)
    except Exception:
        return f"a {type(value).__name__}"


def shown(text: str, longest: int = _LONGEST_NAME) -> str:
    """Return `text` on one line, with unprintable characters escaped, cut after `longest` characters."""
    cut = text if len(text) <= longest else f"{text[:longest]}..."
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut)


def listed(texts: Iterable[str]) -> str:
    """Return the first 20 of `texts` on one line, and the number of the others."""
    texts = list(texts)
    more = [f"and {len(texts) - _MOST_IN_LINE} more"] if len(texts) > _MOST_IN_LINE else []
    return "; ".join([shown(text, _LONGEST_PART) for text in texts[:_MOST_IN_LINE]] + more)


def one_line(error: BaseException) -> str:
    """Return the message of `error` on one line."""
    return " ".join(str(error).split())


def run_together(
    ctx: Iris, step: Callable[[], Result], facts: Callable[[Result], dict[str, Any]] = lambda _: {}, call: str = ""
) -> Result:
    """Return `step()`. Raise on every rank if it raises on one, or if the `facts` of its result differ. Collective.

    A rank that fails raises its own error, the others one of the same type that names the rank. An error about a
    difference names the `call`.
    """
    error: Exception | None = None
    own: dict[str, Any] = {}
    try:
        result = step()
        own = facts(result)
    except Exception as caught:  # any error: the other ranks wait in `all_gather`
        error = caught
    outcomes = ctx.hosts.all_gather((None if error is None else _described(error), own))
    if error is not None:
        raise error
    for rank, (failure, _) in enumerate(outcomes):
        if failure:
            kind, text = failure
            raise kind(f"rank {rank}: {text}")
    first = outcomes[0][1]
    for rank, (_, other) in enumerate(outcomes):
        for name in [*first, *(name for name in other if name not in first)]:
            if other.get(name, _ABSENT) != first.get(name, _ABSENT):
                here, there = (shown(str(each.get(name, _ABSENT)), _LONGEST_PART) for each in (first, other))
                what = f"{call}: {name} differs between ranks: it" if call else name
                raise ArgumentError(
                    f"{what} is {here} on rank 0 and {there} on rank {rank}: expected the same on every rank"
                )
    return result


def _described(error: Exception) -> tuple[type[IrisError], str]:
    """Return the type and the message of the error that the other ranks raise."""
    if isinstance(error, IrisError):
        return type(error), str(error)
    return PlatformError, f"{type(error).__name__}: {error}"
