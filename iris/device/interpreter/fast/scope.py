"""`Scope`: attributes that replace Triton's while one of the library's kernels runs.

Triton's interpreter patches the language in the same way: at each launch it sets its functions, and restores the
language's own when the kernel has run. `Scope` finds out once what is set, and sets and restores it at each launch.
"""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Scope:
    """A context manager. Inside of it, `set` adds an attribute."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute now, and whenever the scope is entered."""
        if (id(owner), name) not in self._values:
            self._before.append((owner, name, vars(owner).get(name, _MISSING)))
        self._values[id(owner), name] = owner, name, value
        setattr(owner, name, value)

    def __enter__(self) -> Scope:
        for owner, name, value in self._values.values():
            self._before.append((owner, name, vars(owner).get(name, _MISSING)))
            setattr(owner, name, value)
        return self

    def __exit__(self, *error: Any) -> None:
        while self._before:
            owner, name, before = self._before.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
