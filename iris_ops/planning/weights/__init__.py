"""The formats in which a weight may be stored. To add one: a module here with its numbers, one line in `BY_NAME`,
and what `iris_ops/quantised/` needs for it: a packing, and a policy by which kernels widen it."""

from __future__ import annotations

from collections.abc import Iterable

from iris.errors import ArgumentError
import torch

from ..needs import PLAIN, WeightFormat
from .fp8 import FP8_FORMAT
from .grouped import GROUPED

# By the names that `weights` of `ctx.ops.plan` takes.
BY_NAME: dict[str, WeightFormat] = {"fp8": FP8_FORMAT, **GROUPED}
FORMATS: tuple[WeightFormat, ...] = tuple(BY_NAME.values())
# Those of which rows of A are rounded, too, and whose scales are the same along K: they end a tile.
SCALED_AT_END = tuple(w for w in FORMATS if w.rounds_rows and not w.group)
# Those whose scales multiply the products of a block along K.
SCALED_INSIDE = tuple(w for w in FORMATS if w.scales_blocks)
# Those whose codes are widened a tile at a time.
WIDENED = tuple(w for w in FORMATS if w.widened_in_tiles)
# The formats that `ctx.ops.plan(fp8=...)` and `iris-tp plan --fp8` select.
BY_FLAG = {False: PLAIN, True: FP8_FORMAT}


def format_of(B: torch.Tensor, scale: torch.Tensor | None = None) -> WeightFormat:
    """Return the format of B [K, N], the transpose of a stored weight, with its scale; `PLAIN` if none fits."""
    return next((w for w in FORMATS if w.matches(B, scale)), PLAIN)


def named_format(name: str | None, fp8: bool = False) -> WeightFormat:
    """Return the format that `weights=name` requests, or `fp8`. Raises `ArgumentError` where there is none."""
    if name is None:
        return BY_FLAG[bool(fp8)]
    if name not in BY_NAME:
        raise ArgumentError(f"weights is {name!r}; expected None or one of {', '.join(BY_NAME)}")
    if fp8 and name != "fp8":
        raise ArgumentError(f"fp8 is True and weights is {name!r}; expected one of them")
    return BY_NAME[name]


def dtypes(formats: Iterable[WeightFormat] | None = None) -> str:
    """Return the dtypes of weights with scales, of `formats` or all, as messages list them."""
    return " or ".join(dict.fromkeys(str(w.dtype) for w in (FORMATS if formats is None else formats)))
