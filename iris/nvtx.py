"""Ranges for a profiler: with `IRIS_NVTX=1` each call of `ctx.ops` and `ctx.ccl` is a range with its op and shapes.

`with_ranges` replaces the methods of an object when the context makes it. Without the variable, or without CUDA, it
returns the object unchanged, so a call costs nothing more. A range covers what the host does: the launch of a kernel,
not the kernel. Nsight Systems draws the kernels that were launched inside a range below it.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
import os
from typing import Any, TypeVar

import torch

from .errors import PlatformError

T = TypeVar("T")

ENV = "IRIS_NVTX"
PREFIXES = {"Ops": "ctx.ops", "Collectives": "ctx.ccl"}
"""How a user reaches the calls, by the name of their class."""


def enabled() -> bool:
    """Return whether calls become ranges. Raises `PlatformError` if `IRIS_NVTX` is neither 0 nor 1."""
    text = os.environ.get(ENV) or "0"
    if text not in ("0", "1"):
        raise PlatformError(f"{ENV} is {text!r}; expected 0, 1 or nothing")
    return text == "1" and torch.cuda.is_available()


def with_ranges(calls: T) -> T:
    """Return `calls` with a range around each public method that is given a tensor, if its class is in `PREFIXES`.

    A range is named by the call and its tensors: `ctx.ops.matmul_all_reduce out[64, 128] A[64, 96] B[96, 128] float32`.
    Raises `PlatformError` if `IRIS_NVTX` is neither 0 nor 1.
    """
    prefix = PREFIXES.get(type(calls).__name__)
    if prefix is not None and enabled():
        for name in dir(type(calls)):
            method = getattr(type(calls), name)
            if not name.startswith("_") and inspect.isfunction(method):
                setattr(calls, name, _with_range(getattr(calls, name), f"{prefix}.{name}"))
    return calls


def _with_range(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    parameters = list(inspect.signature(method).parameters)

    @functools.wraps(method)
    def call(*args: Any, **options: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | options
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        if not tensors:
            return method(*args, **options)
        torch.cuda.nvtx.range_push(f"{name} {shapes(tensors)}")
        try:
            return method(*args, **options)
        finally:
            torch.cuda.nvtx.range_pop()

    return call


def shapes(tensors: dict[str, torch.Tensor]) -> str:
    """Return the shapes of `tensors` by name, and their dtypes: `out[64, 128] A[64, 96] B[96, 128] bfloat16`."""
    sizes = [f"{name}{list(tensor.shape)}" for name, tensor in tensors.items()]
    dtypes = dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())
    return " ".join([*sizes, *dtypes])
