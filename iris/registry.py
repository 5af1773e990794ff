"""Contexts by name: a compiled graph, or the schema of a torch operator, can hold a string but not an object.

A context is named after its process group, and the second one that a process makes on a group after that with a count:
"0", "0.1", ... Contexts are made collectively, so a name means the same context on every rank. No name is given twice:
a graph that outlives its context finds none, where a reused name would hand it somebody else's heap. Contexts stay
reachable by others only: the table does not keep them alive, and `close()` takes them out.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from .errors import ClosedError

if TYPE_CHECKING:
    from .context import Iris

_contexts: WeakValueDictionary[str, Iris] = WeakValueDictionary()
_made: Counter[str] = Counter()


def reserve(group_name: str) -> str:
    """The name of the context that is about to be made on a group."""
    count = _made[group_name]
    _made[group_name] += 1
    return f"{group_name}.{count}" if count else group_name


def add(name: str, ctx: Iris) -> None:
    """Enters a context under the name that was reserved for it."""
    _contexts[name] = ctx


def find(name: str) -> Iris:
    """The context of that name. Raises `ClosedError` when there is none (any more)."""
    ctx = _contexts.get(name)
    if ctx is None:
        raise ClosedError(f"group is {name!r}; expected the group_name of an open context, one of {sorted(_contexts)}")
    return ctx


def remove(name: str) -> None:
    _contexts.pop(name, None)
