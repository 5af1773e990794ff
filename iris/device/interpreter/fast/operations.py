"""Split the operands and results of operations into arrays and the rest, so that `replay.py` repeats them on other
arrays.
"""

from __future__ import annotations

from collections.abc import Callable
import copy
from typing import Any

import numpy as np

from ....triton_private import TensorDescHandle, TensorHandle, core

ARRAYS = np.ndarray, np.generic


def held(value: Any, slots: dict[int, int], holders: list) -> Any:
    """Copy `value` with handles of its own, and list each handle in `holders` with the slot of its array."""
    kind = type(value)
    if kind is TensorHandle:
        own = TensorHandle(None, value.dtype, value.attr)
        holders.append((own, slots.get(id(value.data))))
        return own
    if kind is core.tensor:
        return core.tensor(held(value.handle, slots, holders), value.type)
    if kind is TensorDescHandle:
        own = copy.copy(value)
        own.base, own.shape, own.strides = (
            held(each, slots, holders) for each in (value.base, value.shape, value.strides)
        )
        return own
    if kind is list or kind is tuple:
        return kind([held(each, slots, holders) for each in value])
    if kind is dict:
        return {name: held(each, slots, holders) for name, each in value.items()}
    if isinstance(value, ARRAYS):
        holders.append((TensorHandle(None, None), None))
    return value


def run_of(function: Callable, args: tuple, named: dict, holders: list, out: int, result: Any) -> Callable:
    """Return a call that repeats an operation on the arrays of given slots.

    The call takes arrays from the slots that `holders` names, and puts its results into the slots from `out` on. `held`
    has made `args` and `named`; `result` is what the operation returned when it was recorded.
    """
    if type(result) is TensorHandle and not named:

        def run(values: list) -> None:
            for holder, slot in holders:
                holder.data = values[slot]
            values[out] = function(*args).data
            for holder, _ in holders:
                holder.data = None

        return run

    def run_any(values: list) -> None:
        for holder, slot in holders:
            holder.data = values[slot]
        arrays: list = []
        described(function(*args, **named), arrays)
        values[out : out + len(arrays)] = arrays
        for holder, _ in holders:
            holder.data = None

    return run_any


def is_recordable(result: Any) -> bool:
    """Return whether a result consists of types that `described` knows."""
    if type(result) is tuple or type(result) is list:
        return all(map(is_recordable, result))
    return result is None or type(result) is TensorHandle or type(result) is core.tensor


def described(result: Any, arrays: list) -> Any:
    """Append a result's arrays to `arrays`, and return what else `made_of` needs."""
    kind = type(result)
    if isinstance(result, ARRAYS):
        arrays.append(result)
        return np.ndarray
    if kind is TensorHandle:
        arrays.append(result.data)
        return TensorHandle, result.dtype
    if kind is core.tensor:
        arrays.append(result.handle.data)
        return core.tensor, result.handle.dtype, result.type
    if kind is tuple or kind is list:
        return kind, [described(each, arrays) for each in result]
    return None


def rebuilt(description: Any, arrays: Any) -> Any:
    """Build a result from what `described` returned and from an iterator over arrays."""
    if description is None or description is np.ndarray:
        return None if description is None else next(arrays)
    kind, what, *types = description
    if kind is TensorHandle:
        return TensorHandle(next(arrays), what)
    if kind is core.tensor:
        return core.tensor(TensorHandle(next(arrays), what), *types)
    return kind([rebuilt(each, arrays) for each in what])
