"""`named`: look up functions and objects that planning names, as `module:name` below `iris_ops`."""

from __future__ import annotations

from functools import partial

from iris.named import named_in

named = partial(named_in, "iris_ops")
