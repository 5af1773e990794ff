"""The formats in which a weight may be stored. To add one: a module here with its numbers, one line in `FORMATS`,
and a package below `iris_ops` with its kernels."""

from __future__ import annotations

import torch

from ..needs import PLAIN, WeightFormat
from .fp8 import FP8_FORMAT

FORMATS: tuple[WeightFormat, ...] = (FP8_FORMAT,)
# Those of which rows of A are rounded, too, and whose scales are the same along K: they end a tile.
SCALED_AT_END = tuple(w for w in FORMATS if w.rounds_rows and not w.group)
# What `ctx.ops.plan(fp8=...)` and `iris-tp plan --fp8` ask for.
BY_FLAG = {False: PLAIN, True: FP8_FORMAT}


def format_of(dtype: torch.dtype) -> WeightFormat:
    """Return the format of a weight whose elements have `dtype`."""
    return next((w for w in FORMATS if w.dtype == dtype), PLAIN)


def dtypes() -> str:
    """Return the dtypes of weights with scales, as messages list them."""
    return " or ".join(str(w.dtype) for w in FORMATS)
