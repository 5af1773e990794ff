"""Repeat launches cheaply: a model calls its layers with the same tensors, or the same shapes, over and over.

Triton's own way to launch a compiled kernel takes every argument's address and encodes every tensor descriptor anew,
which takes the host longer than many a kernel runs. Here that is done once. A repeated call is Triton's C launcher with
a list of numbers. A call that differs from an earlier one in its addresses only, as another layer's does, puts its
addresses into a copy of that list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial, reduce
from itertools import chain
from operator import or_
from typing import Any, NamedTuple, overload

import torch
import triton

from .. import transforms
from ..heap import extent
from ..log import logger
from ..triton_private import (
    FUSED,
    DirectLaunch,
    GluonDescriptor,
    TensorDescriptor,
    compile_hooks,
    direct_launch,
    launch_listeners,
    launches_replaced,
)

# Bytes: alignment of an address for wide accesses in Triton, and of addresses and strides for tensor descriptors.
ALIGNMENT = 16
_DESCRIPTORS = (TensorDescriptor, GluonDescriptor)
_MOST = 4096  # calls and kernels that are remembered
# Dtypes whose views may be lazily negated or conjugated: parts of complex tensors, and complex tensors.
LAZY = {torch.float16, torch.float32, torch.float64, torch.complex32, torch.complex64, torch.complex128}


class Launch(NamedTuple):
    """A launch that can be repeated. `again()` does so at a tenth of the host's time, or returns False.

    `moved(addresses)` returns such a function for other addresses in place of the `moving` ones of `launch`.
    """

    again: Callable[[], bool]
    moved: Callable[[Sequence[int]], Callable[[], bool] | None] | None = None


class Key(NamedTuple):
    """The identity of a call: a call with the same key passes the same checks and launches the same."""

    addresses: tuple[int, ...]
    """Of its tensors, 0 for one that is not given."""
    kind: tuple
    """All else that checks and launches depend on, but the workspace."""
    workspace: object


class EarlierCalls:
    """Earlier calls by their keys. No tensor of a caller's is held. `kernels`: those that they launch, for `launch`."""

    def __init__(self) -> None:
        self.known: dict[Key | None, Any] = {}  # None is no key of a call
        self.kernels: dict[tuple, object] = {}
        self._prepared: dict[tuple, Any] = {}
        self._moves: dict[tuple, Callable] = {}

    def repeat(self, key: Key | None, rank: Any, out: torch.Tensor | None = None) -> Any:
        """Launch a known call again and return its workspace; return None for a call that must run in full.

        That is a call that is not known, any call while ranks compare their calls, and a call while a tool listens to
        launches. `rank`: the `Rank` that calls. `out`: the result of a call whose kernels may write elsewhere.
        """
        known = self.known.get(key)
        if known is None or rank.agreement is not None:
            return None
        again, target, workspace = known
        rank.side.join()
        if not again():
            return None
        if target is not None and out is not None:
            out.copy_(target)
        return workspace

    def prepared(self, key: Key | None, prepare: Callable[[], Any], *place: object) -> Any:
        """Return the result of `prepare`, which runs once for all calls that differ in addresses and workspace only.

        `place`: what else it depends on.
        """
        if key is None:
            return prepare()
        kind = key.kind, place  # a wrong workspace is refused later, and not remembered
        result = self._prepared.get(kind)
        if result is None:
            result = prepare()
            if len(self._prepared) >= _MOST:
                self._prepared.clear()
            self._prepared[kind] = result
        return result

    def launch(
        self, key: Key | None, workspace: object, out: torch.Tensor, staged: torch.Tensor | None,
        launch: Callable[[], Launch | None],
    ) -> None:  # fmt: skip
        """Launch a call and remember it: by the launch of a call that differs in its addresses only, else by `launch`.

        `staged`: where kernels write the result in place of `out`, to which it is copied.
        """
        direct = staged is None
        again, launched = self.moved(key, direct), None
        if again is None or not again():
            launched = launch()
            again = launched and launched.again
        if staged is not None:
            out.copy_(staged)
        if again:
            self.keep(key, (again, staged, workspace), launched, direct)

    def moved(self, key: Key | None, *place: object) -> Callable[[], bool] | None:
        """Return a remembered launch that differs in its addresses only, moved to the addresses of `key`; or None."""
        move = self._moves.get((*key[1:], place)) if key else None
        return move(key.addresses) if key and move else None

    def keep(self, key: Key | None, call: Any, launch: Launch | None = None, *place: object) -> None:
        """Remember what `repeat` needs of a call, and its launch. `place`: what the launch depends on besides the key.

        `call` has a function that launches the call again and returns whether it did, the memory from which the result
        is copied to the caller's `out`, or None, and the workspace.
        """
        if key is None or _record is not None:
            return
        if len(self.known) >= _MOST:
            self.forget()
        self.known.setdefault(key, call)  # what is known of a call holds until all calls are forgotten
        if launch is not None and launch.moved:
            self._moves[(*key[1:], place)] = launch.moved

    def forget(self) -> None:
        """Forget calls, but not what was prepared for them: kernels or memory that they use have changed."""
        self.known.clear()
        self._moves.clear()


def key_of(tensors: Sequence[Any], kind: tuple, workspace: object = None) -> Key | None:
    """Return the key of a call with `tensors` and `kind`, all else that decides it; None if it is never repeated."""
    try:
        if transforms.are_under_way() and transforms.any_hides(*tensors):
            return None
        differentiates = torch.is_grad_enabled()
        addresses: list[int] = []
        kinds: list[object] = [kind]
        for t in tensors:
            if t is None:
                addresses.append(0)
                kinds.append(None)
                continue
            dtype = t.dtype
            if differentiates and t.requires_grad or dtype in LAZY and (t.is_neg() or t.is_conj()):
                return None
            addresses.append(t.data_ptr())
            kinds += (t.shape, t.stride(), dtype, t.device)
        hash(kind)
        return Key(tuple(addresses), tuple(kinds), workspace)
    except (AttributeError, RuntimeError, TypeError):  # a tensor without memory, a wrong argument: the checks say so
        return None


@overload
def alias(t: torch.Tensor, distance: int = 0) -> torch.Tensor: ...
@overload
def alias(t: None, distance: int = 0) -> None: ...
def alias(t: torch.Tensor | None, distance: int = 0) -> torch.Tensor | None:
    """Return a view of `t`'s memory, or of that `distance` bytes from it, that does not keep it alive.

    For a call that is repeated only with a tensor at this address.
    """
    if t is None:
        return None
    begin, end = extent(t)
    storage = torch._C._construct_storage_from_data_pointer(begin + distance, t.device, end - begin)
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())


_record: Callable[..., None] | None = None  # is called in place of launches


@contextmanager
def recording(record: Callable[..., None]) -> Iterator[None]:
    """Call `record(kernel, grid=, **arguments)` in place of each launch, and remember no call, inside this block."""
    global _record
    _record = record
    try:
        with launches_replaced(record):
            yield
    finally:
        _record = None


def launch(
    kernels: dict,
    device: torch.device,
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    args: dict,
    moving: Sequence[int] = (),
    **options: int,
) -> Launch | None:
    """Launch `kernel` on `args`, its arguments by name, in the current stream. `options`: num_warps, num_stages.

    `kernels` caches compiled kernels by all that Triton specialises a kernel on, so that later calls skip Triton's own
    look-up, which costs several times the launch itself. `moving`: addresses at which memory of `args` begins that may
    differ when this is launched again. Returns None where it cannot be launched again.
    """
    if _record is not None:
        _record(kernel, grid=grid, **args, **(FUSED | options))
        return None
    alike = _unspecialized(kernel)
    key = (kernel, *options.values(), *(_kind(v) if k in alike else _specialization(v) for k, v in args.items()))
    known: Any = kernels.get(key)
    first = known is None
    if first:
        with compile_hooks(kernel):
            compiled = kernel[grid](**args, **(FUSED | options))
        if compiled is None:  # the interpreter compiles nothing
            return None
        if len(kernels) >= _MOST:
            kernels.clear()
        has_descriptors = any(isinstance(value, _DESCRIPTORS) for value in args.values())
        known = kernels[key] = compiled, _native(compiled, device, has_descriptors)
    compiled, native = known
    values = [args[name] for name in kernel.arg_names]
    launched = native.prepare(grid, values, moving) if native else None
    if not first and (launched is None or not launched.again()):
        compiled[grid](*values)
    return launched


def in_turn(first: Launch | None, second: Launch | None) -> Launch | None:
    """Return two launches, one after the other, as one; None where one cannot be repeated."""
    if first is None or second is None:
        return None
    move_first, move_second = first.moved, second.moved
    again = _both(first.again, second.again)
    if move_first is None or move_second is None:
        return Launch(again)

    def moved(addresses: Sequence[int]) -> Callable[[], bool] | None:
        again_first, again_second = move_first(addresses), move_second(addresses)
        return _both(again_first, again_second) if again_first and again_second else None

    return Launch(again, moved)


def _both(first: Callable[[], bool], second: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: first() and second()


def _native(compiled: Any, device: torch.device, has_descriptors: bool) -> _Native | None:
    """Return a launcher past triton's look-up, or None; that is logged once, as it costs some 50 us a launch."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    how = direct_launch(compiled, device, has_descriptors)
    if isinstance(how, DirectLaunch):
        return _Native(how)
    _warn_once(how)
    return None


@cache
def _warn_once(reason: str) -> None:
    logger.warning("kernels are launched through triton's own look-up, some 50 us slower each: %s", reason)


@cache
def _unspecialized(kernel: Any) -> frozenset[str]:
    """Return the arguments of which only the type matters to Triton."""
    return frozenset(p.name for p in getattr(kernel, "params", ()) if p.do_not_specialize)


def _kind(value: Any, inside: bool = False) -> object:
    """Return what Triton specialises on even so: an integer's width; inside a tuple also a 1 and multiples of 16."""
    if isinstance(value, tuple):
        return tuple(_kind(each, inside=True) for each in value)
    if value is None:
        return None
    narrow = -(2**31) <= value < 2**31
    return (narrow, value == 1, value % ALIGNMENT == 0) if inside else narrow


def _specialization(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_specialization, value))
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    if isinstance(value, _DESCRIPTORS):  # a kernel is compiled for tiles of one shape, which has two or three sizes
        return value.base.dtype, tuple(value.block_shape), getattr(value, "layout", None)
    return value


@dataclass(frozen=True)
class _Native:
    """A compiled kernel, launched past triton's look-up."""

    how: DirectLaunch

    def prepare(self, grid: tuple[int, int, int], values: list, moving: Sequence[int]) -> Launch:
        """Return a launch on `values`. It holds addresses, not tensors."""
        maps = iter(self.how.maps or [None] * len(values))
        which = {address: i for i, address in enumerate(moving) if address}
        arguments: list[Any] = []
        openings = []  # (index, function) of arguments that follow from moving addresses
        for value in values:
            resolved = self._arguments(value, which, maps)
            if callable(resolved):
                openings.append((len(arguments), resolved))
                resolved = resolved(moving)
            arguments += resolved
        alike, aligned = [moving.index(each) for each in moving], _aligned(moving)

        def moved(addresses: Sequence[int]) -> Callable[[], bool] | None:
            if not (aligned and _aligned(addresses)) or [addresses.index(each) for each in addresses] != alike:
                return None  # another kernel, or which address is whose would not be known
            fresh = arguments.copy()
            for place, arguments_at in openings:
                those = arguments_at(addresses)
                fresh[place : place + len(those)] = those
            return self._again(grid, fresh)

        return Launch(self._again(grid, arguments), moved)

    def _again(self, grid: tuple[int, int, int], arguments: list) -> Callable[[], bool]:
        call, current_stream, head = self.how.call, self.how.current_stream, self.how.head
        trailing = self.how.trailing(arguments)
        (enter, leave), (x, y, z) = launch_listeners(), grid
        last = x, y, z, None

        def again() -> bool:
            nonlocal last
            if enter or leave:
                return False
            stream, ready = current_stream(), last
            if ready[3] != stream:
                ready = last = (x, y, z, stream, *head, *trailing)
            call(*ready)
            return True

        return again

    def _arguments(
        self, value: Any, numbers: dict[int, int], maps: Iterator[Any]
    ) -> list | Callable[[Sequence[int]], list]:
        """Return what the C launcher takes for `value`; a function of the addresses in it where these may move.

        `numbers`: the index of each moving address; `maps`: how the next tensor descriptors become maps.
        """
        if isinstance(value, tuple):
            parts = [self._arguments(each, numbers, maps) for each in value]
            if any(map(callable, parts)):
                return lambda addresses: [
                    tuple(each for part in parts for each in (part(addresses) if callable(part) else part))
                ]
            return [tuple(chain.from_iterable(parts))]  # type: ignore[arg-type]
        if isinstance(value, torch.Tensor):
            address, make = value.data_ptr(), lambda address: [address]
        elif isinstance(value, _DESCRIPTORS):
            address = value.base.data_ptr()
            make = lru_cache(_MOST)(partial(self._described, next(maps), value.shape, value.strides, value.padding))
        else:
            return [value]
        number = numbers.get(address)
        return make(address) if number is None else lambda addresses: make(addresses[number])

    def _described(self, how: Any, shape: list[int], strides: list[int], padding: str, address: int) -> list:
        return self.how.arguments_of(_Described(address, shape, strides, padding), how)


class _Described(NamedTuple):
    """A tensor descriptor of memory, which a `TensorDescriptor` would keep alive."""

    address: int
    shape: list[int]
    strides: list[int]
    padding: str
    round_f32_to_tf32: bool = False

    @property
    def base(self) -> _Described:
        return self

    def data_ptr(self) -> int:
        return self.address


def _aligned(addresses: Sequence[int]) -> bool:
    return not reduce(or_, addresses, 0) % ALIGNMENT
