"""The options of `parallelize` and `from_pretrained`, as one value for the functions that pass them on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypedDict

from iris.errors import ArgumentError
from torch import nn

from ..sharded import flags
from .stored import WEIGHTS
from .styles import check_plan


class Keywords(TypedDict, total=False):
    """The options as keyword arguments, for type checkers."""

    plan: str | dict[str, str]
    filter_fn: Callable[[str, nn.Module], bool] | None
    fuse: bool
    weights: str | None
    sequence_parallel: bool | int | str
    partial: bool


@dataclass(frozen=True)
class Options:
    """The options of a split; `parallelize` documents each of them."""

    plan: str | dict[str, str] = "auto"
    filter_fn: Callable[[str, nn.Module], bool] | None = None
    fuse: bool = True
    weights: str | None = None
    sequence_parallel: bool | int | str = "auto"
    partial: bool = False

    def check(self) -> None:
        """Raise `ArgumentError` for options that no model could be split by."""
        check_plan(self.plan)
        flags(fuse=self.fuse, partial=self.partial)
        if self.weights not in WEIGHTS:
            raise ArgumentError(
                f"weights is {self.weights!r}: expected {', '.join(map(repr, WEIGHTS[:-1]))} or {WEIGHTS[-1]!r}"
            )
        if self.filter_fn is not None and not callable(self.filter_fn):
            raise ArgumentError(f"filter_fn is {self.filter_fn!r}: expected None or a function of a name and a module")
        shares = self.sequence_parallel
        counts = isinstance(shares, int) and (isinstance(shares, bool) or shares > 0)
        if not counts and shares != "auto":
            raise ArgumentError(f"sequence_parallel is {shares!r}: expected 'auto', a bool or a positive integer")

    def with_whole_rows(self, case: str) -> Options:
        """Return the options for a `case` in which every rank holds all tokens. Raises `ArgumentError` if they exclude
        it."""
        shares = self.sequence_parallel
        if shares and shares != "auto":
            raise ArgumentError(f"sequence_parallel is {shares!r}: expected 'auto' or False {case}")
        return replace(self, sequence_parallel=False)
