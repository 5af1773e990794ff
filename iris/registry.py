"""Find contexts by name: a compiled graph, or the schema of a torch operator, can hold a string but not an object.

Contexts are made collectively, so a name (`group.name_of`) means the same context on every rank. No name is given
twice: a graph that outlives its context finds none, where a reused name would give it another context's heap. The table
does not keep contexts alive, and `close()` takes them out.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from .errors import ClosedError

_contexts: WeakValueDictionary[str, Any] = WeakValueDictionary()


def add(name: str, ctx: Any) -> None:
    """Enter a context under the name that was reserved for it."""
    _contexts[name] = ctx


def find(name: str) -> Any:
    """Return the context of that name, an `iris.Iris`. Raise `ClosedError` when there is none (any more)."""
    ctx = _contexts.get(name)
    if ctx is None:
        raise ClosedError(f"group is {name!r}; expected the group_name of an open context, one of {sorted(_contexts)}")
    return ctx


def opened() -> list[Any]:
    """Return the open contexts of this process."""
    return list(_contexts.values())


def remove(name: str) -> None:
    _contexts.pop(name, None)
