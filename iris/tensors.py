"""Tensor constructors with torch's semantics and storage on the symmetric heap.

All share one mechanism: torch itself builds the result on the meta device, which checks the arguments and gives sizes,
strides and dtype; the heap gives the memory; torch's `out=` form fills it. So a call means what torch means by it, and
a bad call raises before anything is taken from the heap, which would shift the offsets of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
import gc
import math
import re
from typing import Any

import numpy as np
import torch

from . import aliases, platform
from .errors import (
    ArgumentError,
    CaptureError,
    ConstructorError,
    DeviceError,
    DtypeError,
    HeapExhausted,
    IrisError,
    NotSymmetricError,
    ShapeError,
)
from .rank import Rank

_TORCH_ERRORS = (TypeError, ValueError, RuntimeError, IndexError, OverflowError)


class TensorMethods(Rank):
    """Make tensors on the symmetric heap. These are methods of the context.

    Every rank makes the same calls in the same order, so a tensor has the same offset on every rank. Sizes may be
    arguments, one tuple, nested, or absent for a single element. All methods take torch's keywords: `dtype`, `layout`
    (strided), `device` (the context's), `requires_grad`, and `generator` or `memory_format` where torch has them. `out`
    lies on this heap and has the sizes of the result; or it is contiguous with as many elements, and the method returns
    a view of it.

    All methods raise `ArgumentError` or a subclass for bad arguments, and `HeapExhausted` if the heap is full; then
    they allocate nothing. If an allocation finds no room, it reuses memory of tensors that every rank has dropped with
    all views. The ranks then wait for their devices and for each other.
    """

    def zeros(self, *size: Any, **options: Any) -> torch.Tensor:
        """Return a tensor of zeros on the heap, as `torch.zeros` does. Collective.

        Args:
            *size: the shape, as separate integers or as one tuple.
            **options: as in `empty`.

        Raises:
            ArgumentError, HeapExhausted, CaptureError: as `empty`.
        """
        return self._construct(torch.zeros, _sizes(size, options), options)

    def ones(self, *size: Any, **options: Any) -> torch.Tensor:
        """Return a tensor of ones on the heap, as `torch.ones` does. Collective.

        Args:
            *size: the shape, as separate integers or as one tuple.
            **options: as in `empty`.

        Raises:
            ArgumentError, HeapExhausted, CaptureError: as `empty`.
        """
        return self._construct(torch.ones, _sizes(size, options), options)

    def empty(self, *size: Any, **options: Any) -> torch.Tensor:
        """Return an uninitialized tensor on the heap, as `torch.empty` does. Collective.

        Args:
            *size: the shape, as separate integers or as one tuple.
            **options: torch's keywords: `dtype`, `out`, `layout`, `device`, `requires_grad` and, where torch has them,
                `generator` and `memory_format`.

        Raises:
            ArgumentError: or a subclass, for bad arguments.
            HeapExhausted: if the heap is full; then nothing is allocated.
            CaptureError: while a CUDA graph is captured.
        """
        return self._construct(torch.empty, _sizes(size, options), options, fill=lambda tensor: None)

    def empty_ragged(self, *size: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor whose sizes may differ between ranks. Collective.

        Every rank allocates as many bytes as the largest tensor has, so later allocations have equal offsets.

        Args:
            dtype: the dtype, the same on all ranks; by default torch's.
            *size: this rank's shape.

        Raises:
            CaptureError: while a CUDA graph is captured.
            DtypeError: if the dtype differs between ranks.
            ArgumentError, HeapExhausted: as `empty`, on every rank.
        """
        self.check()
        call = f"empty({', '.join(map(described, size))}, dtype={dtype})"
        if platform.is_capturing(self.device):
            raise CaptureError("empty_ragged() is collective and cannot be called while a graph is captured")
        plan: torch.Tensor | None = None
        refusal: IrisError | None = None
        try:
            plan = _call_torch(torch.empty, size, {"device": "meta", "dtype": _checked_dtype(dtype)}, call)
        except IrisError as error:
            refusal = error
        replies = self.hosts.all_gather((refusal, plan is not None and plan.nbytes, plan is not None and plan.dtype))
        for rank, (error, _, _) in enumerate(replies):
            if error is not None:
                raise type(error)(f"rank {rank}: {error}")
        if len({kind for _, _, kind in replies}) > 1:
            raise DtypeError(f"dtype differs between ranks: {[r[2] for r in replies]}; expected the same on all")
        assert plan is not None  # for no rank refused
        return self._room(tuple(plan.shape), plan.dtype, max(nbytes for _, nbytes, _ in replies))

    def full(self, *size_and_value: Any, **options: Any) -> torch.Tensor:
        """Return a tensor on the heap filled with one value, as `torch.full(size, fill_value)` does. Collective.

        Args:
            *size_and_value: the shape, then the value.
            **options: as in `empty`.

        Raises:
            ArgumentError, HeapExhausted, CaptureError: as `empty`.
        """
        return self._construct(torch.full, tuple(map(_flat, size_and_value)), options)

    def zeros_like(self, *like: Any, **options: Any) -> torch.Tensor:
        """Return zeros on the heap with the sizes and dtype of any tensor, as `torch.zeros_like` does. Collective.

        Args:
            *like: the tensor.
            **options: as in `empty`.

        Raises:
            ArgumentError, HeapExhausted, CaptureError: as `empty`.
        """
        return self._construct(torch.zeros_like, like, options, fill=torch.Tensor.zero_)

    def rand(self, *size: Any, **options: Any) -> torch.Tensor:
        """Return uniform random numbers from [0, 1) on the heap, as `torch.rand` does. Ranks with equal seeds get equal
        numbers. Collective.

        Args:
            *size: the shape, as separate integers or as one tuple.
            **options: as in `empty`.

        Raises:
            ArgumentError, HeapExhausted, CaptureError: as `empty`.
        """
        return self._construct(torch.rand, _sizes(size, options), options)

    def randn(self, *size: Any, **options: Any) -> torch.Tensor:
        """Return normal random numbers on the heap, as `torch.randn` does. Ranks with equal seeds get equal numbers.
        Collective.

        Args:
            *size: the shape, as separate integers or as one tuple.
            **options: as in `empty`.

        Raises:
            ArgumentError, HeapExhausted, CaptureError: as `empty`.
        """
        return self._construct(torch.randn, _sizes(size, options), options)

    def randint(self, *bounds_and_size: Any, **options: Any) -> torch.Tensor:
        """Return random integers on the heap, as `torch.randint([low,] high, size)` does. Collective.

        Args:
            *bounds_and_size: the lower bound (0 if absent), the upper bound, which is excluded, and the shape.
            **options: as in `empty`.

        Raises:
            ArgumentError, HeapExhausted, CaptureError: as `empty`.
        """
        return self._construct(torch.randint, tuple(map(_flat, bounds_and_size)), options)

    def arange(self, *bounds: Any, **options: Any) -> torch.Tensor:
        """Return evenly spaced numbers on the heap, as `torch.arange([start,] end[, step])` does. Collective.

        Args:
            *bounds: the start (0 if absent), the end, which is excluded, and the step (1 if absent).
            **options: as in `empty`.

        Raises:
            ArgumentError, HeapExhausted, CaptureError: as `empty`.
        """
        return self._construct(torch.arange, bounds, options)

    def linspace(
        self, start: Any, end: Any, steps: Any = None, out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None, **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Return `steps` numbers from `start` to `end` on the heap, as `torch.linspace` does. Collective.

        Args:
            start: the first number.
            end: the last number.
            steps: how many numbers, an integer or a size of one dimension.
            out: a tensor on the heap that receives the numbers.
            dtype: the dtype; by default torch's.
            **options: as in `empty`.

        Raises:
            ArgumentError, DtypeError, HeapExhausted: as `empty`.
        """
        if steps is None:
            raise ArgumentError(f"linspace({start!r}, {end!r}): steps is missing; expected the number of elements")
        bounds = tuple(map(_single, (start, end, steps)))
        return self._construct(torch.linspace, bounds, {"out": out, "dtype": dtype, **options})

    def uniform(
        self, size: Any, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return uniform random numbers from `low` to `high` on the heap. Collective.

        Args:
            size: the shape.
            low: the lower bound, included.
            high: the upper bound, excluded.
            dtype: a floating-point dtype.

        Raises:
            ArgumentError, DtypeError, HeapExhausted: as `empty`.
        """
        sound = all(isinstance(bound, (int, float)) for bound in (low, high)) and low <= high
        if not sound or not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ArgumentError(
                f"uniform(low={low!r}, high={high!r}, dtype={dtype!r}); expected numbers, the lower first, and a "
                f"floating-point dtype"
            )
        return self._construct(torch.empty, _sizes((size,), {}), {"dtype": dtype}, fill=lambda t: t.uniform_(low, high))

    @aliases.keywords(external_tensor="tensor")
    def as_symmetric(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on this heap that shares memory with `tensor`. Collective.

        A tensor that lies on the heap is returned unchanged. The allocator "vmem" imports outside memory without a
        copy: on GPUs memory of the driver's virtual-memory calls (torch's expandable segments), on CPUs shared memory
        (`tensor.share_memory_()`). The result keeps the memory alive until `free` on every rank and `trim`.

        Args:
            tensor: of the same sizes, strides and dtype on all ranks.

        Raises:
            NotSymmetricError: if the memory cannot be imported; the message names the remedy.
        """
        self.check()
        _check_tensor(tensor)
        return self.heap.adopt(tensor, self.is_symmetric(tensor))

    def free(self, *tensors: torch.Tensor) -> None:
        """Return the memory of tensors to the heap. Every rank makes the same calls.

        No rank may use the tensors any more. If peers read or wrote them, call `barrier()` first.

        Args:
            *tensors: tensors as this context returned them, the same ones on every rank.

        Raises:
            ArgumentError: for a tensor that this context did not return, or that was freed before; then none is freed.
        """
        self.check()
        for tensor in tensors:
            _check_tensor(tensor)
        if self.agreement is not None:
            outside = "outside the heap"
            self.compare("free", offsets=[self.heap.offset(t) if self.is_symmetric(t) else outside for t in tensors])
        self.heap.free(*tensors)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Return whether all of the tensor's storage lies on this heap, at the same offset on every rank.

        Outputs of layers lie on the heap at different offsets, so for them the answer is False.

        Args:
            tensor: any tensor.
        """
        self.check()
        _check_tensor(tensor)
        if tensor.device != self.device or tensor.layout is not torch.strided or not self.heap.contains(tensor):
            return False
        return not self.hands_out(self.heap.offset(tensor))

    def _construct(
        self,
        function: Callable[..., torch.Tensor],
        args: tuple[Any, ...],
        options: dict[str, Any],
        fill: Callable[[torch.Tensor], Any] | None = None,
    ) -> torch.Tensor:
        """Return torch's `function(*args, **options)` on the heap; `fill(tensor)` replaces its `out=`."""
        self.check()
        out, requires_grad, dtype, generator = (
            options.pop(name, None) for name in ("out", "requires_grad", "dtype", "generator")
        )
        self._check_place(options.pop("device", None), options.pop("layout", None), options.pop("pin_memory", None))
        _checked_dtype(dtype)
        given = options | ({} if dtype is None else {"dtype": dtype})
        call = f"{function.__name__}({', '.join([*map(described, args), *(f'{k}={v}' for k, v in given.items())])})"

        def call_torch(**more: Any) -> torch.Tensor:
            return _call_torch(function, args, options | more, call)

        for tensor in (each for each in args if isinstance(each, torch.Tensor)):
            _check_tensor(tensor)
        plan = call_torch(device="meta", dtype=dtype, requires_grad=bool(requires_grad))
        if out is not None:
            out = self._check_out(out, plan, dtype, call)
        tensor = out if out is not None else self._allocate(plan)
        try:
            if fill is None:
                call_torch(out=tensor, device=self.device, **({} if generator is None else {"generator": generator}))
            else:
                fill(tensor)
            return tensor.requires_grad_() if requires_grad else tensor
        except Exception:
            if out is None:
                self.heap.free(tensor)
            raise

    def _allocate(self, plan: torch.Tensor) -> torch.Tensor:
        dense, facts = plan.is_contiguous(), {"sizes": tuple(plan.shape), "dtype": plan.dtype}
        try:
            tensor = self._room(tuple(plan.shape) if dense else (plan.numel(),), plan.dtype)
        except HeapExhausted:
            self.compare("an allocation", None, **facts, offset="no room")
            raise
        try:
            self.compare("an allocation", None, **facts, offset=self.heap.offset(tensor))
        except IrisError:
            self.heap.free(tensor)
            raise
        return tensor if dense else tensor.as_strided(plan.shape, plan.stride())

    def _room(self, sizes: tuple[int, ...], dtype: torch.dtype, nbytes: int | None = None) -> torch.Tensor:
        """Return a tensor on the heap; where it is full, in the memory of tensors that every rank has dropped."""
        for collect in (False, True):
            try:
                return self.heap.allocate(sizes, dtype, nbytes)
            except HeapExhausted:
                if not self.heap.can_reuse(math.prod(sizes) * dtype.itemsize if nbytes is None else nbytes):
                    raise
                self._reuse_dropped(collect)
        return self.heap.allocate(sizes, dtype, nbytes)

    def _reuse_dropped(self, collect: bool) -> None:
        """Free the allocations that every rank has dropped; `collect`: cycles of Python too. Collective.

        Each rank waits for its device before it answers, so no kernel of any rank uses the memory any more.
        """
        if collect:
            gc.collect()
        platform.synchronize(self.device)
        with self.exchanging():
            dropped = self.hosts.all_gather(self.heap.dropped(), "the reuse of tensors that were dropped")
        for offset in sorted(set(dropped[0]).intersection(*dropped[1:])):
            self.heap.give(offset)

    def _check_place(self, device: Any, layout: Any, pin_memory: Any) -> None:
        if device is not None:
            try:
                requested = torch.device(device)
            except _TORCH_ERRORS:
                raise DeviceError(f"device is {device!r}; expected {str(self.device)!r}") from None
            if requested.type != self.device.type or requested.index not in (None, self.device.index):
                raise DeviceError(f"device is {str(requested)!r}; expected the context's, {str(self.device)!r}")
        if pin_memory:
            raise ArgumentError("pin_memory is True; the heap's memory cannot be pinned")
        if layout not in (None, torch.strided):
            raise ArgumentError(f"layout is {layout}; expected torch.strided, the only one on the heap")

    def _check_out(self, out: Any, plan: torch.Tensor, dtype: Any, call: str) -> torch.Tensor:
        """Return `out` in the sizes of `plan`."""
        if not isinstance(out, torch.Tensor):
            raise ArgumentError(f"out is {described(out)}; expected a torch.Tensor")
        if out.device != self.device:
            raise DeviceError(f"out lies on {out.device}; expected the context's device, {self.device}")
        if not self.is_symmetric(out):
            raise NotSymmetricError(f"out {described(out)} lies outside this heap; make it with ctx.empty(...)")
        reshaped = out.shape != plan.shape and out.numel() == plan.numel() and out.is_contiguous()
        if out.shape != plan.shape and not reshaped:
            raise ShapeError(f"out has sizes {tuple(out.shape)}; expected {tuple(plan.shape)} for {call}")
        if dtype is not None and out.dtype != plan.dtype:
            raise DtypeError(f"out is {out.dtype}; expected {plan.dtype}, the dtype requested")
        return out.view(plan.shape) if reshaped else out


def _call_torch(function: Callable[..., torch.Tensor], args: tuple, options: dict[str, Any], call: str) -> torch.Tensor:
    """Return the result of torch for `call`; raise its errors as ours."""
    try:
        return function(*args, **options)
    except _TORCH_ERRORS as error:
        raise _translated(error, call) from None


def _sizes(given: tuple, options: dict[str, Any]) -> tuple:
    """Return sizes in torch's form: from arguments, from one tuple or list, or from one in another."""
    if not given and "size" in options:
        return ()
    return _flat(given) or ((),)


def _flat(size: Any) -> Any:
    """Return a size that may be nested as one tuple of integers; anything else unchanged."""
    if not isinstance(size, (tuple, list)):
        return size
    while len(size) == 1 and isinstance(size[0], (tuple, list)):
        size = size[0]
    return tuple(int(one) if isinstance(one, np.integer) else one for one in size)


def _single(value: Any) -> Any:
    """Return the value of a tensor, a size or an array of one element; anything else unchanged."""
    while isinstance(value, (tuple, list)) and len(value) == 1:
        value = value[0]
    one = isinstance(value, torch.Tensor) and value.ndim == 0 and value.device.type != "meta"
    return value.item() if one or isinstance(value, np.generic) else value


def _checked_dtype(dtype: Any) -> Any:
    if dtype is not None and not isinstance(dtype, torch.dtype) and dtype not in (bool, int, float, complex):
        raise DtypeError(f"dtype is {dtype!r}; expected a torch.dtype such as torch.float32")
    return dtype


def _check_tensor(tensor: Any) -> None:
    """Raise for anything but a tensor, or for a nested one."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested:
        raise ArgumentError(f"tensor is {described(tensor)}; expected a torch.Tensor")


def described(value: Any) -> str:
    """Return a value in the form of error messages, a tensor without its elements."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        return "a nested tensor"
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} of {value.dtype} on {value.device}"
    return repr(value)


def _translated(error: Exception, call: str) -> IrisError:
    """Return torch's error as one of ours, with the call that caused it."""
    text = re.sub(r" - got \(.*|\.$", "", str(error).splitlines()[0])  # without the arguments that we added
    kind = (
        DtypeError if "not implemented for" in text else HeapExhausted if "Storage size" in text else ConstructorError
    )
    return kind(f"ctx.{call}: {text}. Expected what torch.{call.partition('(')[0]} takes.")
