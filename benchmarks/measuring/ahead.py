"""Compile a benchmark's kernels before it runs: on all cores at once, and once for all ranks.

A kernel takes seconds to compile, and its ranks wait for each other. Here calls launch nothing. Their kernels go to
processes that see no GPU, which put them into Triton's cache on disk. Threads would not do, because Triton holds
Python's lock while it reads a kernel: threads of one rank keep two cores busy.

Two launches share a kernel where Triton does not distinguish their arguments: it tests whether a size is 1, and whether
it is a multiple of 16. Each form is compiled once, by the rank that the hash of its name selects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
import copy
import copyreg
from dataclasses import dataclass
from functools import cache
import importlib
from multiprocessing import get_context
import os
from typing import Any
from unittest import mock
import zlib

import iris
from iris.launch import relaunch
from iris.triton_private import (
    FUSED,
    GluonDescriptor,
    GluonFunction,
    TensorDescriptor,
    compile_target,
    compile_without_gpu,
)
from iris_tp.bench.team import Team
import torch
from torch import distributed
import triton


@dataclass(frozen=True)
class _Tensor:
    """The properties of a tensor for which a kernel is compiled."""

    dtype: torch.dtype
    aligned: bool

    def tensor(self) -> torch.Tensor:
        return torch.empty(32, dtype=self.dtype)[0 if self.aligned else 1 :]


class _Forms:
    """The forms of kernels that calls need, and those of them that this rank has compiled."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self.known: dict[str, tuple] = {}
        self.compiled: dict[str, Future] = {}
        processes = max(1, (os.cpu_count() or 1) // team.world - 1)  # one core runs this rank
        self.pool = ProcessPoolExecutor(processes, get_context("spawn"), compile_without_gpu, (compile_target(),))

    def add(self, kernel: triton.JITFunction, *args: object, grid: object, warmup: bool = False, **given: Any) -> None:
        """Record a form, in place of `JITFunction.run`."""
        given |= dict(zip(kernel.arg_names, args, strict=False))
        described = {name: _described(value) for name, value in given.items()}
        kinds = _kinds(kernel)
        names = {name: kinds[name](value) if name in kinds else value for name, value in described.items()}
        form = f"{kernel.fn.__module__}:{kernel.fn.__qualname__} {sorted(names.items(), key=lambda item: item[0])}"
        if form not in self.known:
            self.known[form] = kernel.fn.__module__, kernel.fn.__qualname__, described
            if zlib.crc32(form.encode()) % self.team.world == self.team.rank:
                self.compile(form)

    def compile(self, form: str) -> None:
        self.compiled[form] = self.pool.submit(_compile, *self.known[form])

    def share(self) -> int:
        """Compile forms that nobody has, each on the first rank that knows it; return how many forms all ranks know."""
        shared: list[tuple[list[str], list[str]] | None] = [None] * self.team.world
        distributed.all_gather_object(shared, (list(self.known), list(self.compiled)))
        done = {form for _, compiled in shared for form in compiled}  # type: ignore[misc]
        earlier = {form for rank in range(self.team.rank) for form in shared[rank][0]}  # type: ignore[index]
        for form in self.known:
            if form not in done and form not in earlier:
                self.compile(form)
        return len({form for known, _ in shared for form in known})  # type: ignore[misc]

    def wait(self) -> None:
        """Wait for all compilations. Raises the error of one that failed."""
        for future in self.compiled.values():
            future.result()


def compile_ahead(team: Team, contexts: Iterable[iris.Iris], calls: Callable[[], None]) -> int:
    """Compile the kernels of `calls` of the `contexts` without launching them, and return their number.

    Other work of the calls, torch's products or copy engines, runs. Raises where a kernel cannot be compiled.
    """
    forms = _Forms(team)
    try:
        _collect(forms, contexts, calls)
        count = forms.share()
        _, reason = team.attempt(forms.wait)
    finally:  # else this process would wait at its end for idle workers
        forms.pool.shutdown(cancel_futures=True)
    if reason:
        raise RuntimeError(reason)
    return count


def _function(module: str, name: str) -> Any:
    """Return a function of kernels by its name, under which it is pickled: as an argument, and within one."""
    return getattr(importlib.import_module(module), name)


for _kind in triton.JITFunction, GluonFunction:
    copyreg.pickle(_kind, lambda function: (_function, (function.fn.__module__, function.fn.__qualname__)))  # type: ignore[arg-type]


def _collect(forms: _Forms, contexts: Iterable[iris.Iris], calls: Callable[[], None]) -> None:
    """Make `calls`, which launch nothing."""

    def launch(kernels, device, kernel, grid, args, moving=(), **options):
        forms.add(kernel, grid=grid, **args, **(FUSED | options))

    for ctx in contexts:
        ctx.forget_launches()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(relaunch, "launch", launch))
        patches.enter_context(mock.patch.object(relaunch.Calls, "keep", lambda *call: None))
        patches.enter_context(mock.patch.object(triton.JITFunction, "run", lambda *a, **given: forms.add(*a, **given)))
        calls()
    for ctx in contexts:
        ctx.forget_launches()


@cache
def _kinds(kernel: triton.JITFunction) -> dict[str, Callable[[object], object]]:
    """Return how Triton classifies each argument that is no constant."""
    return {each.name: _width if each.do_not_specialize else _size for each in kernel.params if not each.is_constexpr}


def _size(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_size, value))
    return (_width(value), value == 1, value % relaunch.ALIGNMENT == 0) if isinstance(value, int) else _width(value)


def _width(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_size, value))
    if isinstance(value, (TensorDescriptor, GluonDescriptor)):
        return value.base, value.block_shape, getattr(value, "layout", None)
    if isinstance(value, int) and not isinstance(value, bool):
        return "int32" if -(2**31) <= value < 2**31 else "int64"
    return "float" if isinstance(value, float) else value


def _described(value: object) -> object:
    """Return an argument as another process can rebuild it."""
    if isinstance(value, torch.Tensor):
        return _Tensor(value.dtype, value.data_ptr() % relaunch.ALIGNMENT == 0)
    if isinstance(value, (TensorDescriptor, GluonDescriptor)):
        same: Any = copy.copy(value)  # which checks nothing, as Triton would words of 64 bits
        object.__setattr__(same, "base", _Base(value.base.dtype))
        return same
    return _each(_described, value)


def _rebuilt(value: object) -> Any:
    """Return what `_described` was given, without memory."""
    return value.tensor() if isinstance(value, _Tensor) else _each(_rebuilt, value)


def _each(change: Callable[[object], object], value: object) -> object:
    """Return `value`, if it is a tuple of any type with its entries changed."""
    if not isinstance(value, tuple):
        return value
    changed = map(change, value)
    return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)


@dataclass(frozen=True)
class _Base:
    """The tensor of a descriptor, without its memory."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


def _compile(module: str, name: str, described: dict[str, object]) -> None:
    _function(module, name).warmup(grid=(1, 1, 1), **{key: _rebuilt(value) for key, value in described.items()})
