"""The interpreter runs a kernel again without the kernel's Python: it repeats the numpy operations that it recorded.

On small tensors the interpreter spends most of its time in Python: in the kernel's lines, and in the language's checks
and conversions. What the kernel computes, loads and stores is a few hundred operations on numpy arrays. The interpreter
records them in one run with arguments of given types and constants, and repeats only them in later runs.

A kernel's Python also decides by values (`if`, `while`, the end of a loop). So a recording is a tree. A node is a
`Stretch` of operations, and ends with a choice: which array is read, and which stretch follows for each value seen. If
a replay reads a new value, the interpreter starts the kernel's Python once more. Up to that choice each operation is
given the result that the replay has computed, so nothing is done twice. After it the operations are done and recorded
as a new branch. (Source: trace trees, Gal and Franz, "Incremental dynamic code generation with trace trees", 2006.)

This is right under two conditions. Between two choices a kernel does the same operations whatever its arrays hold: true
of the library's kernels, so no other kernels are recorded. And each array that an operation takes comes from an
argument, an earlier operation or a constant: the recorder checks this, and a kernel that fails is never replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ... import platform
from ...triton_private import TensorHandle, core
from . import operations
from .operations import ARRAYS

_PLAIN_RUNS = 8  # of a kernel's programs, before one is recorded: to record costs half a run more
_MOST_STRETCHES = 500  # of a recording; what is not in it then runs as ever
_MOST_OPERATIONS = 5000  # of a run
_MOST_BYTES = 128 << 20  # of a run's arrays, which stay until it ends
_MOST_KEPT_BYTES = 1 << 16  # of a constant that is not made anew
_MOST_RECORDINGS = 256  # the oldest goes first
_PACKAGES = ("iris", "iris_ops", "layers")
# Operations without an operand whose result is not the same in each run, and those whose result does not matter.
_EFFECTS = {"create_get_program_id", "create_get_num_programs", "create_print", "create_assert", "create_assume"}

current: Recorder | None = None
"""Who is told of each operation that is done; None where none is recorded."""


class Stretch:
    """Operations one after the other, and the choice behind them: of which slot, how it is read, what follows."""

    __slots__ = "choice", "constants", "end", "runs", "steps", "ways"

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.runs: list[Callable[[list], None]] = []
        self.constants: list[tuple[int, Any]] = []
        self.end = 0  # slots that are filled behind it
        self.choice: tuple[int, Callable] | None = None
        self.ways: dict[Any, Stretch] = {}


class Step:
    """An operation: which, the slots of its results, what these are beside arrays, whether they are constants."""

    __slots__ = "constant", "function", "made", "outs"

    def __init__(self, function: Callable, outs: range, made: Any, constant: bool) -> None:
        self.function, self.outs, self.made, self.constant = function, outs, made, constant


class Recording:
    """The stretches of a kernel for arguments of some types and for some constants."""

    def __init__(self) -> None:
        self.plain_runs, self.stretches = 0, 0
        self.root: Stretch | None = None
        self.refused = False

    def run(self, fn: Callable, given: dict[str, Any], arrays: list) -> None:
        """Runs a program, by what is recorded if there is something; `arrays` are those of its arguments."""
        if self.refused or self.plain_runs < _PLAIN_RUNS:
            self.plain_runs += 1
            fn(**given)
            return
        values = arrays.copy()
        if self.root is None:
            self.root = Stretch()
            self._record(fn, given, Recorder(self, values, [], self.root))
            return
        stretch, followed = self.root, []
        while True:
            values += [None] * (stretch.end - len(values))
            for slot, array in stretch.constants:
                values[slot] = array
            for run in stretch.runs:
                run(values)
            if stretch.choice is None:
                return
            slot, read = stretch.choice
            found = read(values[slot])
            followed.append((stretch, found))
            if found not in stretch.ways:
                self._record(fn, given, Recorder(self, values, followed, self.root))
                return
            stretch = stretch.ways[found]

    def _record(self, fn: Callable, given: dict[str, Any], recorder: Recorder) -> None:
        global current
        current = recorder
        try:
            fn(**given)
        except BaseException:
            self.refuse()  # of what came after, nothing is known
            raise
        finally:
            current = None

    def refuse(self) -> None:
        self.refused, self.root = True, None


class Recorder:
    """One run of a kernel's Python: first behind a replay, then as the first to go this way."""

    def __init__(self, recording: Recording, values: list, followed: list[tuple[Stretch, Any]], root: Stretch) -> None:
        self.recording, self.followed, self.stretch = recording, followed, root
        self.values, self.slots = values, {id(array): slot for slot, array in reversed(list(enumerate(values)))}
        self.ahead = [step for stretch, _ in followed for step in stretch.steps]
        self.ahead.reverse()
        self.choices = 0
        self.constant: set[int] = set()
        self.read_before: dict[tuple[int, Callable], Any] = {}
        self.operations = self.bytes = 0
        root.end = root.end or len(values)

    def numpy(self, function: Callable, *operands: Any) -> Any:
        """`function` of arrays and of what is the same in each run."""
        if self.ahead:
            return self._known(function)
        slots: list[Any] = [self.slots.get(id(each)) if isinstance(each, ARRAYS) else -1 for each in operands]
        result = apart(function, *operands)
        if None in slots:
            return self._stop(result)
        arrays = [slot for slot in slots if slot != -1]
        out = len(self.values)
        if len(operands) == 2 and len(arrays) == 2:
            a, b = arrays

            def run(values: list) -> None:
                values[out] = function(values[a], values[b])

        elif slots[0] != -1 and len(arrays) == 1:
            (a,), rest = arrays, operands[1:]

            def run(values: list) -> None:
                values[out] = function(values[a], *rest)

        else:

            def run(values: list) -> None:
                taken = (values[slot] if slot != -1 else each for slot, each in zip(slots, operands, strict=True))
                values[out] = function(*taken)

        return self._done(function, result, arrays, run)

    def call(self, function: Callable, args: tuple, named: dict, effect: bool = False) -> Any:
        """`function` of values of the language, which may do something beside its result (`effect`)."""
        if self.ahead:
            return self._known(function)
        holders: list[tuple[TensorHandle, int]] = []
        held = operations.held(args, self.slots, holders), operations.held(named, self.slots, holders)
        result = apart(partial(function, **named) if named else function, *args)
        if any(slot is None for _, slot in holders) or not operations.can_be_kept(result):
            return self._stop(result)
        run = operations.run_of(function, *held, holders, len(self.values), result)
        return self._done(function, result, [-1] * effect + [slot for _, slot in holders], run)

    def read(self, array: np.ndarray, how: Callable[[np.ndarray], Any]) -> Any:
        """`how(array)`, by which Python decides what comes next."""
        slot = self.slots.get(id(array))
        if slot is None:
            return self._stop(how(array))
        if slot in self.constant:
            return how(array)
        if (slot, how) in self.read_before:
            return self.read_before[slot, how]
        if self.choices < len(self.followed):
            self.stretch, found = self.followed[self.choices]
            self.choices += 1
            if self.choices == len(self.followed):
                self._go_on(found)
        else:
            found = how(array)
            self.stretch.choice = slot, how
            self._go_on(found)
        self.read_before[slot, how] = found
        return found

    def _go_on(self, found: Any) -> None:
        """Behind a choice that nobody has made so."""
        global current
        if self.recording.stretches >= _MOST_STRETCHES:
            current = None
            return
        self.recording.stretches += 1
        self.stretch.ways[found] = self.stretch = Stretch()
        self.stretch.end = len(self.values)

    def _known(self, function: Callable) -> Any:
        """What the replay has computed."""
        step = self.ahead.pop()
        assert step.function is function, f"{function} is not {step.function}: the kernel does not repeat itself"
        arrays = [self._own(self.values[out], out) for out in step.outs]
        if step.constant:
            self.constant.update(step.outs)
        return operations.made_of(step.made, iter(arrays))

    def _done(self, function: Callable, result: Any, taken: list[int], run: Callable[[list], None]) -> Any:
        """Keeps an operation, and gives its result with arrays that are nobody else's."""
        arrays: list = []
        made, first = operations.described(result, arrays), len(self.values)
        outs = range(first, first + len(arrays))
        for out, array in zip(outs, arrays, strict=True):
            self.values.append(array)
            self._own(array, out)
            self.bytes += array.nbytes if array.base is None else 0
        assert self.choices == len(self.followed), f"{function}: the kernel does not repeat itself"
        constant = self.constant.issuperset(taken) and all(each.nbytes <= _MOST_KEPT_BYTES for each in arrays)
        self.operations += 1
        if self.operations > _MOST_OPERATIONS or self.bytes > _MOST_BYTES:
            return self._stop(result)
        if constant:
            self.constant.update(outs)
            self.stretch.constants += [(out, self.values[out]) for out in outs]
        else:
            self.stretch.runs.append(run)
        self.stretch.steps.append(Step(function, outs, made, constant))
        self.stretch.end = len(self.values)
        return operations.made_of(made, iter(self.values[first:]))

    def _own(self, array: np.ndarray, slot: int) -> np.ndarray:
        """The array of a slot: a view where it is another slot's, too, so that each is known by its identity."""
        if id(array) in self.slots:
            array = array.view()
        self.values[slot] = array
        self.slots[id(array)] = slot
        return array

    def _stop(self, result: Any) -> Any:
        """The kernel cannot be replayed; it runs on."""
        global current
        current = None
        self.recording.refuse()
        return result


def told(builder: type) -> type:
    """A builder of `builder`'s kind whose operations are told to who records them."""
    names = [name for name in dir(builder) if name.startswith(("create_", "get_")) and not name.endswith("_ty")]
    names = [name for name in names if name != "get_cache_policy"]
    return type(builder.__name__, (builder,), {name: _telling(getattr(builder, name), name) for name in names})


def _telling(method: Callable, name: str) -> Callable:
    effect = name in _EFFECTS

    def tell(self, *args, **named):
        return called(method, (self, *args), named, effect)

    return tell


def called(function: Callable, args: tuple, named: dict, effect: bool = False) -> Any:
    return function(*args, **named) if current is None else current.call(function, args, named, effect)


def computed(function: Callable, *operands: Any) -> Any:
    """`function` of numpy arrays, which is told to who records it."""
    return function(*operands) if current is None else current.numpy(function, *operands)


def apart(function: Callable, *args: Any) -> Any:
    """Calls `function` without record of what it does, to learn something that is the same in each run."""
    global current
    recorder, current = current, None
    try:
        return function(*args)
    finally:
        current = recorder


def read(array: np.ndarray, how: Callable[[np.ndarray], Any]) -> Any:
    """What Python decides by, likewise."""
    return how(array) if current is None else current.read(array, how)


recordings: dict[Any, Recording] = {}


def serves(fn: Callable) -> bool:
    """Whether this is a kernel, or a function of kernels, of the library."""
    return fn.__module__.partition(".")[0] in _PACKAGES


def runner(fn: Callable, given: dict[str, Any]) -> Callable[[], None]:
    """What runs a program of a kernel with these arguments."""
    if not serves(fn) or not platform.replaying():
        return partial(fn, **given)
    arrays: list = []
    key = fn, *[_kind_of(value, arrays) for value in given.values()]
    try:
        found = recordings.get(key)
    except TypeError:  # a constant that cannot be hashed
        return partial(fn, **given)
    if found is None:
        if len(recordings) >= _MOST_RECORDINGS:
            del recordings[next(iter(recordings))]
        found = recordings[key] = Recording()
    return partial(found.run, fn, given, arrays)


def _kind_of(value: Any, arrays: list) -> Any:
    """What an argument is beside its arrays, which are listed."""
    kind = type(value)
    if kind is core.tensor:
        arrays.append(value.handle.data)
        return value.type.name
    if kind is core.tensor_descriptor:
        handle = value.handle
        arrays.append(handle.base.data)
        arrays += [each.data for each in (*handle.shape, *handle.strides)]
        arrays += [each.handle.data for each in (*value.shape, *value.strides)]
        return (
            handle.base.dtype.name,
            tuple(handle.block_shape),
            handle.padding,
            getattr(handle, "round_f32_to_tf32", False),
        )
    if isinstance(value, (tuple, list, core.tuple)):
        return tuple([_kind_of(each, arrays) for each in value])
    return kind, value
