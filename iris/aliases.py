"""Accept names of code written for ROCm/iris as ours: keywords of calls, and fields of configurations.

`docs/guides/coming-from-iris.md` lists all of them. A name without a meaning here causes one warning, which names that
page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar
import warnings

from .errors import ArgumentError

PAGE = "docs/guides/coming-from-iris.md"

P = ParamSpec("P")
T = TypeVar("T")


def keywords(**ours: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator: the function also takes each of these keywords, whose value names one of its parameters."""

    def taking(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def called(*args: P.args, **given: P.kwargs) -> T:
            for name in given:  # at most a few: building a set of names takes longer
                if name in ours:
                    return call(*args, **_renamed(call.__name__, given, ours))  # type: ignore[arg-type]
            return call(*args, **given)

        called.aliases = ours  # type: ignore[attr-defined]
        return called

    return taking


def fields(ours: dict[str, str], unused: dict[str, str], assignable: bool = False) -> Callable[[type[T]], type[T]]:
    """Return a decorator of dataclasses, which then take the fields `ours` under either name, and `unused` fields.

    `unused` has the reason why each of these fields has no effect. The first one that a class is given is named in a
    `UserWarning`. An unused field keeps its value, for kernels of the user's own, and is None if it was not given. It
    has no part in comparisons. `assignable`: fields of a frozen class may be set all the same, to any value that its
    constructor would take.
    """

    def taking(cls: type[T]) -> type[T]:
        original_init, warned = cls.__init__, False

        @wraps(original_init)
        def init(self: T, *args: Any, **given: Any) -> None:
            nonlocal warned
            if given and not ours.keys().isdisjoint(given):
                given = _renamed(cls.__name__, given, ours)
            values = {name: given.pop(name) for name in sorted(unused.keys() & given.keys())}
            for name, value in values.items():
                if value is not None and not warned:
                    warned = True
                    warnings.warn(f"{cls.__name__}.{name} has no use here: {unused[name]} ({PAGE})", stacklevel=2)
            original_init(self, *args, **given)
            self.__dict__.update(values)

        def absent(self: T, name: str) -> None:
            if name not in unused:
                raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

        cls.__init__ = init  # type: ignore[assignment, method-assign]
        cls.__getattr__ = absent  # type: ignore[attr-defined]
        for alias, name in ours.items():
            setattr(cls, alias, property(attrgetter(name)))
        cls.aliases, cls.unused = ours, unused  # type: ignore[attr-defined]
        if assignable:
            cls.__setattr__ = _set_field  # type: ignore[assignment]
        return cls

    return taking


def _set_field(config: Any, name: str, value: Any) -> None:
    """Give a field of `config` another value; its hash changes, so lookups by it start anew."""
    changed = replace(config, **{config.aliases.get(name, name): value})
    config.__dict__.update(changed.__dict__)


def _renamed(call: str, given: dict[str, Any], ours: dict[str, str]) -> dict[str, Any]:
    renamed: dict[str, Any] = {}
    for name, value in given.items():
        own = ours.get(name, name)
        if own != name and value is None:  # the same as not given
            continue
        if own in renamed or (own != name and own in given):
            raise ArgumentError(f"{call}: {name} and {own} are two names of one argument; expected one of them")
        renamed[own] = value
    return renamed
