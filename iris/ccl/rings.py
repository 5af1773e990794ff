"""The host's side of `transfer.py`: what a rank sends and takes, as tables of messages, and the launches.

A message is a number of bytes at an address. Both of its ranks cut it the same way, because its size alone decides
that. What the kernel cannot move, because its elements do not lie one after the other or are not whole words of 4
bytes, is copied first, or afterwards, by torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import platform
from ..device.waits import waiter_number
from ..heap import extent
from ..launch import relaunch
from .transfer import SENT, SLOT, TAKEN, in_table, transfer_kernel
from .workspace import Workspace

# Bytes up to which a message travels as Lamport values, which take twice the bytes but never a signal.
BORDER = 64 << 10
_LEAST_SLOTS = 64  # of a ring
MESSAGE_BYTES = SLOT.value // 2  # what a slot holds of a message whose Lamport values take twice the bytes
_MESSAGES = 16  # of a launch, each way
_WARPS = 8
# Slots that the rings of collectives with a root take together at most: larger tensors go in several launches.
MOST_SLOTS = (128 << 20) // SLOT.value


@dataclass(frozen=True)
class Message:
    """`nbytes` at `address`, to or from rank `peer`, counted in the workspace's group. `to`: where to copy it here."""

    address: int
    nbytes: int
    peer: int
    to: int = 0


@dataclass(frozen=True)
class Cut:
    """The layout of a message in a message buffer: `slots` slots, a unit in each, as Lamport values if `few`."""

    slots: int
    few: bool


def cut(n: int, size: int = 4, word: int = 8) -> Cut:
    """Return the `Cut` of `n` elements of `size` bytes, which occupy `word` bytes each as Lamport values."""
    few = word == size or (n * size <= BORDER and word <= 8)
    return Cut(-(-n * (word if few else size) // SLOT.value), few)


def cut_of_sum(n: int, dtype: torch.dtype) -> Cut:
    """Return the same of elements that are summed."""
    return cut(n, dtype.itemsize, dtype.itemsize * (1 if dtype.is_floating_point else 2))


class WordBuffer:
    """`tensor` as whole words that lie one after the other: where it is, or else in separate memory.

    `fill` copies it there, before it is sent; `empty` copies it back, once it was taken. Made by `Rings.buffer`.
    """

    def __init__(self, rings: Rings, tensor: torch.Tensor) -> None:
        self._rings, self._tensor, nbytes = rings, tensor, tensor.numel() * tensor.itemsize
        self.nbytes = -(-nbytes // 4) * 4
        lies = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        self._memory: torch.Tensor | None = None
        self.address = tensor.data_ptr()
        if not lies or (self.address | nbytes) % 4:
            self._move()

    def fill(self, aside: bool = False) -> WordBuffer:
        """Return the buffer to fill.

        With `aside`, it is always separate memory, because what is stored in it may overlap the source.
        """
        if aside and self._memory is None:
            self._move()
        if self._memory is not None:
            self._own(self._memory).copy_(self._tensor)
        return self

    def empty(self) -> None:
        if self._memory is not None:
            self._tensor.copy_(self._own(self._memory))

    def _move(self) -> None:
        self._memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self._tensor.device)
        self.address, self._rings.copied = self._memory.data_ptr(), True

    def _own(self, memory: torch.Tensor) -> torch.Tensor:
        t = self._tensor
        return memory[: t.numel() * t.itemsize].view(t.dtype).view(t.shape)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors may have memory in common."""
    (a, b), (c, d) = extent(one), extent(other)
    return a < d and c < b


class Rings:
    """The rings of one group, in the areas of a workspace called `name`, for one call."""

    def __init__(self, workspace: Workspace, name: str, kernels: dict) -> None:
        self._workspace, self._name, self._kernels = workspace, name, kernels
        self._ctx, self.world = workspace.group.ctx, workspace.group.size
        self.copied = False  # whether torch copies something for this call
        self._launched: list[relaunch.Launch | None] = []

    @property
    def again(self) -> Callable[[], bool] | None:
        """Return a function that repeats this call, if it was a single launch that can be repeated, else None."""
        if self.copied or len(self._launched) != 1 or self._launched[0] is None:
            return None
        return self._launched[0].again

    def buffer(self, tensor: torch.Tensor) -> WordBuffer:
        return WordBuffer(self, tensor)

    @property
    def slots(self) -> int:
        """Return the slots of each message buffer, a power of two; 0 before the buffers exist."""
        area = self._workspace.areas.get(self._name)
        slots = area.staging.nbytes // (self.world * SLOT.value) if area else 0
        return 1 << (slots.bit_length() - 1) if slots else 0

    def most_slots(self) -> int:
        """Return the number of slots to which the message buffers of rooted collectives may grow."""
        return MOST_SLOTS // self.world

    def reserve(self, slots: int) -> None:
        """Make room for so many slots in each ring, the same on all ranks, which may wait for each other."""
        slots = 1 << (max(slots, _LEAST_SLOTS) - 1).bit_length()
        if slots <= self.slots:
            return
        counts = self._workspace.reserve(f"counts of {self._name}", 4 * self.world, 0)
        rings = self._workspace.reserve(self._name, self.world * slots, self.world * slots * SLOT.value, fill=255)
        if counts or rings:
            self._ctx.forget_launches()

    def untaken(self) -> list[tuple[int, int, int]]:
        """Return (sender, receiver, slots) of messages that no rank has received; call it after a barrier."""
        area = self._workspace.areas.get(f"counts of {self._name}")
        if area is None:
            return []
        counts = [self._ctx.view_at(area.flags, rank).cpu() for rank in self._workspace.group.ranks]
        used = [entry[: 4 * self.world].view(4, self.world) for entry in counts]
        pairs = [(a, b) for a in range(self.world) for b in range(self.world)]
        pending = [(a, b, int(used[a][SENT.value, b] - used[b][TAKEN.value, a])) for a, b in pairs]  # int32, they wrap
        return [entry for entry in pending if entry[2]]

    def move(self, waiter: str, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive messages in one launch; very many take several launches, the sends first."""
        sends, receives = (list(filter(lambda m: m.nbytes, messages)) for messages in (sends, receives))
        if max(len(sends), len(receives)) <= _MESSAGES:
            parts: list[tuple[list[Message], list[Message]]] = [(sends, receives)] if sends or receives else []
        else:  # no sender waits for takers of its own rank
            parts = [(part, []) for part in _parts(sends)] + [([], part) for part in _parts(receives)]
        for sent, taken in parts:
            self._launch(waiter, _table(sent), _table(taken))

    def sum(
        self, waiter: str, dtype: torch.dtype, sends: Sequence[Message], own: int = 0, n: int = 0, out: int = 0
    ) -> None:
        """Send elements of `dtype` to ranks that sum them, at most one message to each, in one launch.

        If `n`, also receive `n` elements from each rank, add this rank's own at address `own`, and store the sums at
        address `out`.
        """
        group = self._workspace.group
        sent: list[tuple] = []
        taken: list[tuple] = []
        for message in sends:
            if message.nbytes:
                count = message.nbytes // dtype.itemsize
                how = cut_of_sum(count, dtype)
                sent.append((message.address, count, message.peer, 0, how.slots, how.few, how.slots, 0))
        if n:
            how = cut_of_sum(n, dtype)
            first, *rest = [rank for rank in range(group.size) if rank != group.rank]
            taken = [(out, n, first, 0, how.slots, how.few, how.slots, 0)]
            taken += [(0, 0, rank, 0, how.slots, 0, 0, 0) for rank in rest]  # for the kernel to count
        if sent or taken:
            self._launch(waiter, sent, taken, dtype, own)

    def _launch(self, waiter: str, sent: list, taken: list, dtype: torch.dtype | None = None, own: int = 0) -> None:
        ctx, group = self._ctx, self._workspace.group
        programs = platform.num_programs(ctx.device) * (1 if sent and taken else 2)  # two share a multiprocessor
        senders, takers = (min(programs, sum(message[6] for message in table)) for table in (sent, taken))
        size = dtype.itemsize if dtype else 4
        places = [own, *(place for message in (*sent, *taken) for place in (message[0], message[7], message[1] * size))]
        length = 1 << (max(len(sent), len(taken), 1) - 1).bit_length()
        area, counts = self._workspace.areas[self._name], self._workspace.areas[f"counts of {self._name}"]
        args = dict(
            staging=area.staging.view(dtype or torch.int32),
            flags=area.flags,
            counts=counts.flags,
            sync=area.sync,
            ctx_ptr=group.context_tensor,
            slots=self.slots,
            senders=senders,
            own=own,
            sends=_filled(sent, length),
            takes=_filled(taken, length),
            ALIGNED=not any(place % relaunch.ALIGNMENT for place in places),
            REDUCE=dtype is not None,
            WORLD_SIZE=group.size,
            WAITER=waiter_number(waiter),
        )
        grid = (senders + takers + 2, 1, 1)
        launched = relaunch.launch(self._kernels, ctx.device, transfer_kernel, grid, args, num_warps=_WARPS)
        self._launched.append(launched)


def _parts(messages: list[Message]) -> list[list[Message]]:
    return [messages[begin : begin + _MESSAGES] for begin in range(0, len(messages), _MESSAGES)]


def _table(messages: list[Message]) -> list[tuple]:
    """Return messages as the kernel reads them: those to one rank, or from one, follow each other in its buffer."""
    used: dict[int, int] = defaultdict(int)
    rows = []
    for message in messages:
        n = message.nbytes // 4
        if message.to:
            rows.append((message.address, n, message.peer, 0, 0, False, -(-message.nbytes // SLOT.value), message.to))
            continue
        how = cut(n)
        rows.append((message.address, n, message.peer, used[message.peer], how.slots, how.few, how.slots, 0))
        used[message.peer] += how.slots
    return rows


def _filled(table: list, length: int) -> tuple:
    """Return a table of `length` messages, for the kernel; what is added has no items."""
    padded = [*table, *[(0, 0, 0, 0, 0, 0, 0, 0)] * (length - len(table))]
    return tuple(tuple(map(in_table, message)) for message in padded)
