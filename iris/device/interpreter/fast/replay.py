"""Replay a kernel without its Python: the interpreter repeats the numpy operations that it recorded.

On small tensors the interpreter spends most of its time in Python: in the kernel's lines, and in the language's checks
and conversions. What the kernel computes, loads and stores is a few hundred operations on numpy arrays. The interpreter
records them in one run with arguments of given types and constants, and repeats only them in later runs.

A kernel's Python also decides by values (`if`, `while`, the end of a loop). So a recording is a tree. A node is a
`Trace` of operations, and ends with a choice: which array is read, and which trace follows for each value seen. If
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

from ....triton_private import TensorHandle, core
from . import operations
from .operations import ARRAYS

_PLAIN_RUNS = 8  # programs of a kernel that run before one is recorded: recording costs half a run more
_MOST_TRACES = 500  # traces in a recording; past that the interpreter runs Python
_MOST_OPERATIONS = 5000  # a kernel whose run has more is not recorded
_MOST_BYTES = 128 << 20  # nor is one whose arrays take more, for they stay until the run ends
_MOST_CONSTANT_BYTES = 1 << 16  # of a constant; larger ones are computed in each replay
# A replay always does these operations, although they take no array: their results or effects differ by run.
_EFFECTS = {"create_get_program_id", "create_get_num_programs", "create_print", "create_assert", "create_assume"}


class Tape:
    """Passes each operation to its `recorder`; None while nothing is recorded."""

    recorder: Recorder | None = None

    def called(self, function: Callable, args: tuple, named: dict, effect: bool = False) -> Any:
        """Return `function(*args, **named)` of values of the language."""
        if self.recorder is None:
            return function(*args, **named)
        return self.recorder.call(function, args, named, effect)

    def computed(self, function: Callable, *operands: Any) -> Any:
        """Return `function(*operands)` of numpy arrays."""
        return function(*operands) if self.recorder is None else self.recorder.numpy(function, *operands)

    def apart(self, function: Callable, *args: Any) -> Any:
        """Call `function` while nothing is recorded, to learn something that is the same in each run."""
        recorder, self.recorder = self.recorder, None
        try:
            return function(*args)
        finally:
            self.recorder = recorder

    def read(self, array: np.ndarray, how: Callable[[np.ndarray], Any]) -> Any:
        """Return `how(array)`, by which Python decides, and record the choice."""
        return how(array) if self.recorder is None else self.recorder.read(array, how)


class Trace:
    """A list of operations, and the choice that ends it: the slot that is read, how, and the trace for each value."""

    __slots__ = "choice", "constants", "end", "runs", "steps", "ways"

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.runs: list[Callable[[list], None]] = []
        self.constants: list[tuple[int, Any]] = []
        self.end = 0  # the number of slots that are filled when it has run
        self.choice: tuple[int, Callable] | None = None
        self.ways: dict[Any, Trace] = {}


class Step:
    """A recorded operation: its function, its results' slots and types, and whether they are constants."""

    __slots__ = "constant", "function", "described", "outs"

    def __init__(self, function: Callable, outs: range, described: Any, constant: bool) -> None:
        self.function, self.outs, self.described, self.constant = function, outs, described, constant


class Recording:
    """The tree of traces of one kernel, for arguments of given types and for given constants."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.plain_runs, self.traces = 0, 0
        self.root: Trace | None = None
        self.refused = False

    def run(self, fn: Callable, given: dict[str, Any], arrays: list) -> None:
        """Replay a program, or run its Python where nothing is recorded; `arrays` are the arguments' arrays."""
        if self.refused or self.plain_runs < _PLAIN_RUNS:
            self.plain_runs += 1
            fn(**given)
            return
        values = arrays.copy()
        if self.root is None:
            self.root = Trace()
            self._record(fn, given, Recorder(self, values, [], self.root))
            return
        trace, followed = self.root, []
        while True:
            values += [None] * (trace.end - len(values))
            for slot, array in trace.constants:
                values[slot] = array
            for run in trace.runs:
                run(values)
            if trace.choice is None:
                return
            slot, read = trace.choice
            value = read(values[slot])
            followed.append((trace, value))
            if value not in trace.ways:
                self._record(fn, given, Recorder(self, values, followed, self.root))
                return
            trace = trace.ways[value]

    def _record(self, fn: Callable, given: dict[str, Any], recorder: Recorder) -> None:
        self.tape.recorder = recorder
        try:
            fn(**given)
        except BaseException:
            self.refuse()  # the rest of this run is unknown
            raise
        finally:
            self.tape.recorder = None

    def refuse(self) -> None:
        self.refused, self.root = True, None


class Recorder:
    """Records one run of a kernel's Python, which begins with the operations that a replay has already done."""

    def __init__(self, recording: Recording, values: list, followed: list[tuple[Trace, Any]], root: Trace) -> None:
        self.recording, self.followed, self.trace = recording, followed, root
        self.values, self.slots = values, {id(array): slot for slot, array in reversed(list(enumerate(values)))}
        self.replayed = [step for trace, _ in followed for step in trace.steps]
        self.replayed.reverse()
        self.choices = 0
        self.constant: set[int] = set()
        self.read_before: dict[tuple[int, Callable], Any] = {}
        self.operations = self.bytes = 0
        root.end = root.end or len(values)

    def numpy(self, function: Callable, *operands: Any) -> Any:
        """Compute and record `function(*operands)`; an operand is an array, or the same value in each run."""
        if self.replayed:
            return self._known(function)
        slots: list[Any] = [self.slots.get(id(each)) if isinstance(each, ARRAYS) else -1 for each in operands]
        result = self.recording.tape.apart(function, *operands)
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
        """Call and record `function` with values of the language; with `effect` a replay never skips it."""
        if self.replayed:
            return self._known(function)
        holders: list[tuple[TensorHandle, int]] = []
        held = operations.held(args, self.slots, holders), operations.held(named, self.slots, holders)
        result = self.recording.tape.apart(partial(function, **named) if named else function, *args)
        if any(slot is None for _, slot in holders) or not operations.is_recordable(result):
            return self._stop(result)
        run = operations.run_of(function, *held, holders, len(self.values), result)
        return self._done(function, result, [-1] * effect + [slot for _, slot in holders], run)

    def read(self, array: np.ndarray, how: Callable[[np.ndarray], Any]) -> Any:
        """Return `how(array)` and record it as a choice: the kernel's Python decides by it."""
        slot = self.slots.get(id(array))
        if slot is None:
            return self._stop(how(array))
        if slot in self.constant:
            return how(array)
        if (slot, how) in self.read_before:
            return self.read_before[slot, how]
        if self.choices < len(self.followed):
            self.trace, value = self.followed[self.choices]
            self.choices += 1
            if self.choices == len(self.followed):
                self._go_on(value)
        else:
            value = how(array)
            self.trace.choice = slot, how
            self._go_on(value)
        self.read_before[slot, how] = value
        return value

    def _go_on(self, value: Any) -> None:
        """Begin the trace that follows `value`, which no run has read at this choice before."""
        if self.recording.traces >= _MOST_TRACES:
            self.recording.tape.recorder = None
            return
        self.recording.traces += 1
        self.trace.ways[value] = self.trace = Trace()
        self.trace.end = len(self.values)

    def _known(self, function: Callable) -> Any:
        """Return what the replay has computed for the next operation."""
        step = self.replayed.pop()
        assert step.function is function, f"{function} is not {step.function}: the kernel does not repeat itself"
        arrays = [self._own(self.values[out], out) for out in step.outs]
        if step.constant:
            self.constant.update(step.outs)
        return operations.rebuilt(step.described, iter(arrays))

    def _done(self, function: Callable, result: Any, taken: list[int], run: Callable[[list], None]) -> Any:
        """Record an operation, and return its result with arrays that no other slot has."""
        arrays: list = []
        described, first = operations.described(result, arrays), len(self.values)
        outs = range(first, first + len(arrays))
        for out, array in zip(outs, arrays, strict=True):
            self.values.append(array)
            self._own(array, out)
            self.bytes += array.nbytes if array.base is None else 0
        assert self.choices == len(self.followed), f"{function}: the kernel does not repeat itself"
        constant = self.constant.issuperset(taken) and all(each.nbytes <= _MOST_CONSTANT_BYTES for each in arrays)
        self.operations += 1
        if self.operations > _MOST_OPERATIONS or self.bytes > _MOST_BYTES:
            return self._stop(result)
        if constant:
            self.constant.update(outs)
            self.trace.constants += [(out, self.values[out]) for out in outs]
        else:
            self.trace.runs.append(run)
        self.trace.steps.append(Step(function, outs, described, constant))
        self.trace.end = len(self.values)
        return operations.rebuilt(described, iter(self.values[first:]))

    def _own(self, array: np.ndarray, slot: int) -> np.ndarray:
        """Put an array into a slot, as a view if another slot has it: a recorder knows arrays by their identity."""
        if id(array) in self.slots:
            array = array.view()
        self.values[slot] = array
        self.slots[id(array)] = slot
        return array

    def _stop(self, result: Any) -> Any:
        """Give the recording up; the kernel's Python runs on."""
        self.recording.tape.recorder = None
        self.recording.refuse()
        return result


def recorded(builder: type, tape: Tape) -> type:
    """Return a subclass of Triton's `builder` whose operations go through `tape`."""
    names = [name for name in dir(builder) if name.startswith(("create_", "get_")) and not name.endswith("_ty")]
    names = [name for name in names if name != "get_cache_policy"]
    return type(builder.__name__, (builder,), {name: _through(getattr(builder, name), name, tape) for name in names})


def _through(method: Callable, name: str, tape: Tape) -> Callable:
    effect = name in _EFFECTS

    def operation(self, *args, **named):
        return tape.called(method, (self, *args), named, effect)

    return operation


def kind_of(value: Any, arrays: list) -> Any:
    """Append an argument's arrays to `arrays`, and return all else that a recording depends on."""
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
        return tuple([kind_of(each, arrays) for each in value])
    return kind, value
