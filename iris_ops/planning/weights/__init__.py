"""The formats in which a weight may be stored. To add one: a module here with its numbers, one line in `FORMATS`,
and a package below `iris_ops` with its kernels."""

from __future__ import annotations

import torch

from ..needs import PLAIN, WeightFormat
from .fp8 import EIGHT_BITS

FORMATS: tuple[WeightFormat, ...] = (EIGHT_BITS,)
# Those of which rows of A are rounded, too, and whose scales are the same along K: they end a tile.
SCALED_AT_END = tuple(each for each in FORMATS if each.rounds_rows and not each.group)
# What `ctx.ops.plan(fp8=...)` and `iris-tp plan --fp8` ask for.
BY_FLAG = {False: PLAIN, True: EIGHT_BITS}


def format_of(dtype: torch.dtype) -> WeightFormat:
    """Return the format of a weight whose elements have `dtype`."""
    return next((each for each in FORMATS if each.dtype == dtype), PLAIN)


def dtypes() -> str:
    """Return the dtypes of weights with scales, as messages list them."""
    return " or ".join(str(each.dtype) for each in FORMATS)
