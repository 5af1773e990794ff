"""Compile kernels in other processes, before a launch needs them.

A kernel takes seconds to compile, and Triton compiles it at its first launch, one after the other. `recorded` makes
calls that launch nothing, and returns the forms of their kernels. `Compilers` hands forms to processes that see no GPU,
which put the kernels into Triton's cache on disk. Threads would not do, because Triton holds Python's lock while it
reads a kernel. The processes are started as programs, not by `multiprocessing`: that would import the application's
main module once more, and refuses children of daemonic processes.

Two launches share a form where Triton does not distinguish their arguments: it tests whether a size is 1, and whether
it is a multiple of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import copy
import copyreg
from dataclasses import dataclass
from functools import cache
import importlib
import io
import os
import pickle
import queue
import subprocess
import sys
import threading
from typing import Any, BinaryIO, NamedTuple, cast
import zlib

import torch
import triton

from ..triton_private import (
    GluonDescriptor,
    GluonFunction,
    TensorDescriptor,
    cache_folder,
    compile_hooks,
    compile_target,
    compile_without_gpu,
    use_cache_folder,
)
from . import relaunch

_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from iris.launch.ahead import serve; serve()"
)


class Form(NamedTuple):
    """A kernel, by the module and the name of its function, and its arguments as Triton tells them apart."""

    module: str
    name: str
    arguments: dict[str, object]


def recorded(contexts: Iterable[Any], calls: Callable[[], None]) -> dict[str, Form]:
    """Return the forms of the kernels of `calls`, by name. The calls launch none of them.

    Other work of the calls, torch's products or copy engines, runs, and they reserve the memory that they need.

    Args:
        contexts: all contexts that `calls` use; what they remember of launches is forgotten.
    """
    forms: dict[str, Form] = {}

    def record(kernel: Any, *args: object, grid: object, warmup: bool = False, **given: Any) -> None:
        given |= dict(zip(kernel.arg_names, args, strict=False))
        described = {name: _described(value) for name, value in given.items()}
        kinds = _kinds(kernel)
        names = {name: kinds[name](value) if name in kinds else value for name, value in described.items()}
        place = kernel.fn.__module__, kernel.fn.__qualname__
        forms[f"{place[0]}:{place[1]} {sorted(names.items(), key=lambda item: item[0])}"] = Form(*place, described)

    for ctx in contexts:
        ctx.forget_launches()
    with relaunch.recording(record):
        calls()
    for ctx in contexts:
        ctx.forget_launches()
    return forms


def share_of(rank: int, names: Sequence[Sequence[str]]) -> list[str]:
    """Return the forms that `rank` compiles, of those that each rank needs: `names` by rank.

    A form that several need is compiled by the one that its hash selects.
    """
    needing: dict[str, list[int]] = {}
    for each, known in enumerate(names):
        for name in known:
            needing.setdefault(name, []).append(each)
    return [name for name in names[rank] if _selected(name, needing[name]) == rank]


def _selected(name: str, ranks: list[int]) -> int:
    return ranks[zlib.crc32(name.encode()) % len(ranks)]


class Compilers:
    """Processes that compile forms for the current GPU, into the cache on disk that Triton uses now."""

    def __init__(self, processes: int) -> None:
        self.folder = cache_folder()
        self.errors: list[str] = []
        self._target = compile_target()
        self._most = max(1, processes)
        self._waiting: queue.SimpleQueue[tuple[int, Form] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._added, self._open, self._changed = 0, set[int](), threading.Condition()

    def add(self, forms: Iterable[Form]) -> None:
        """Compile `forms` in the background."""
        for form in forms:
            with self._changed:
                self._open.add(self._added)
            self._waiting.put((self._added, form))
            self._added += 1
            if len(self._threads) < self._most:
                thread = threading.Thread(target=self._work, name="iris compiler", daemon=True)
                self._threads.append(thread)
                thread.start()

    def wait(self) -> None:
        """Wait until all forms are compiled, and end the processes. `errors` has a line for each that failed."""
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def wait_for(self, count: int, seconds: float | None = None) -> bool:
        """Wait until the first `count` forms that were added are compiled; return False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: all(number >= count for number in self._open), seconds)

    def _work(self) -> None:
        environment = os.environ | {"TRITON_CACHE_DIR": self.folder, "TRITON_INTERPRET": "0"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([sys.executable, "-c", _PROGRAM], env=environment, **pipes) as child:  # type: ignore[call-overload]
            try:
                pickle.dump(sys.path, child.stdin)
                _dump(self._target, child.stdin)
                while (next_form := self._waiting.get()) is not None:
                    number, form = next_form
                    try:
                        _dump(form, child.stdin)
                        if error := pickle.load(child.stdout):
                            self.errors.append(f"{form.module}.{form.name}: {error}")
                    finally:
                        with self._changed:
                            self._open.discard(number)
                            self._changed.notify_all()
            except (EOFError, OSError) as error:  # the process ended: what is left compiles at its first launch
                self.errors.append(f"a compiler ended: {error!r}")


def load(forms: Iterable[Form], folder: str) -> None:
    """Load `forms` for this process's GPU from the cache in `folder`; compile one that is not there.

    A launch finds them afterwards wherever Triton's cache on disk has moved meanwhile: Inductor moves it.
    """
    with use_cache_folder(folder):
        for form in forms:
            _compile(form)


def serve() -> None:
    """Compile the forms that standard input has, until it ends; the program of a compiling process."""
    source, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what is printed is no reply
    compile_without_gpu(pickle.load(source))
    while (form := _loaded(source)) is not None:
        try:
            _compile(form)
            error = ""
        except Exception as raised:
            error = repr(raised)
        pickle.dump(error, replies)
        replies.flush()


def _loaded(source: BinaryIO) -> Form | None:
    try:
        return pickle.load(source)
    except EOFError:
        return None


def _compile(form: Form) -> None:
    arguments = {key: _rebuilt(value) for key, value in form.arguments.items()}
    kernel = _function(form.module, form.name)
    with compile_hooks(kernel):
        kernel.warmup(grid=(1, 1, 1), **arguments)


def _function(module: str, name: str) -> Any:
    """Return a function of kernels by its name, under which it is pickled: as an argument, and within one."""
    return getattr(importlib.import_module(module), name)


def _by_name(function: Any) -> tuple:
    return _function, (function.fn.__module__, function.fn.__qualname__)


def _dump(value: object, target: BinaryIO) -> None:
    text = io.BytesIO()
    pickler = pickle.Pickler(text)
    by_name: dict[type, Callable[[Any], Any]] = dict.fromkeys(_FUNCTIONS, _by_name)
    pickler.dispatch_table = {**copyreg.dispatch_table, **by_name}
    pickler.dump(value)
    target.write(text.getvalue())
    target.flush()


_FUNCTIONS = (triton.JITFunction, GluonFunction)


@dataclass(frozen=True)
class _Tensor:
    """The properties of a tensor for which a kernel is compiled."""

    dtype: torch.dtype
    aligned: bool

    def tensor(self) -> torch.Tensor:
        return torch.empty(32, dtype=self.dtype, device="cpu")[0 if self.aligned else 1 :]


@dataclass(frozen=True)
class _Base:
    """The tensor of a descriptor, without its memory."""

    dtype: torch.dtype

    def data_ptr(self) -> int:
        return 0


@cache
def _kinds(kernel: Any) -> dict[str, Callable[[object], object]]:
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
    changed, kind = map(change, value), cast(Any, type(value))
    return kind(*changed) if hasattr(value, "_fields") else tuple(changed)
