"""Messages between two ranks, alone or many at once: `send`, `recv`, `sendrecv`, `batch_isend_irecv`.

All messages of a call go in one launch (`transfer.py`), into rings that `init_p2p` has made large enough for them. A
sender does not wait for the receiver's call; only for that of an earlier message whose room it needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from ..errors import ArgumentError
from .group import Group
from .rings import MESSAGE_BYTES, Message, Rings, cut, overlap
from .rooted import check, check_rank


@dataclass(frozen=True)
class P2POp:
    """Describe one message of `ctx.ccl.batch_isend_irecv`.

    Args:
        op: "send" or "recv". "isend", "irecv", and functions of these names such as torch.distributed's, are accepted.
        tensor: any shape, dtype and strides, on the context's device.
        peer: the other rank, counted in the call's group.

    Raises:
        ArgumentError: when the message is sent, for another `op`.
    """

    op: str | Callable
    tensor: torch.Tensor
    peer: int

    @property
    def kind(self) -> str:
        """Return "send" or "recv"."""
        name = str(getattr(self.op, "__name__", self.op)).removeprefix("i")
        if name in ("send", "recv"):
            return name
        raise ArgumentError(f'P2POp: op is {self.op!r}; expected "send" or "recv"')


class P2PState:
    """Represent the buffers of `init_p2p`. Code for ROCm/iris passes it on as `p2p_state`; calls ignore it."""


class Work:
    """Represent a message in the current stream, with the interface of torch.distributed's work objects."""

    def wait(self, timeout: object = None) -> bool:
        """Return True at once: later work in the stream runs after the message.

        Args:
            timeout: no effect.
        """
        return True


def isend(ctx: Any, tensor: torch.Tensor, dst: int, **given: Any) -> Work:
    """Call `ctx.ccl.isend`. In a `P2POp` this function means "send".

    Args:
        ctx: the context.
        tensor: as in `ctx.ccl.send`.
        dst: as in `ctx.ccl.send`.
    """
    return ctx.ccl.isend(tensor, dst, **given)


def irecv(ctx: Any, tensor: torch.Tensor, src: int, **given: Any) -> Work:
    """Call `ctx.ccl.irecv`. In a `P2POp` this function means "recv".

    Args:
        ctx: the context.
        tensor: as in `ctx.ccl.recv`.
        src: as in `ctx.ccl.recv`.
    """
    return ctx.ccl.irecv(tensor, src, **given)


def slots_for(max_numel: Any, dtype: Any) -> int:
    """Return the slots of a buffer for messages of `max_numel` elements, each rounded up to whole
    `MESSAGE_BYTES`."""
    if type(max_numel) is not int or not 0 < max_numel < 1 << 40 or not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"init_p2p({max_numel!r}, {dtype!r}); expected a number of elements from 1, and a dtype")
    return -(-max_numel * dtype.itemsize // MESSAGE_BYTES)


def exchange(op: str, rings: Rings, group: Group, messages: Sequence[P2POp], names: Sequence[tuple[str, str]]) -> None:
    """Send and receive all of `messages`, whose peers count in `group`; `names`: how errors call tensor and peer."""
    for message, (name, peer_name) in zip(messages, names, strict=True):
        check(op, name, message.tensor, group.ctx, written=message.kind == "recv")
        check_rank(op, peer_name, message.peer, group)
    kinds = [message.kind for message in messages]
    _check_room(op, rings, kinds, messages)
    _compare(group, kinds, messages)
    destinations = [message.tensor for kind, message in zip(kinds, messages, strict=True) if kind == "recv"]
    sent: list[Message] = []
    taken: list[Message] = []
    buffers = []
    for kind, message in zip(kinds, messages, strict=True):
        buffer = rings.buffer(message.tensor)
        if kind == "send":
            buffer.fill(aside=any(overlap(message.tensor, destination) for destination in destinations))
        buffers.append(buffer)
        (sent if kind == "send" else taken).append(Message(buffer.address, buffer.nbytes, group.ranks[message.peer]))
    rings.move("a message", sent, taken)
    for kind, buffer in zip(kinds, buffers, strict=True):
        if kind == "recv":
            buffer.empty()


def _check_room(op: str, rings: Rings, kinds: Sequence[str], messages: Sequence[P2POp]) -> None:
    used: dict[tuple[str, int], int] = defaultdict(int)
    for kind, message in zip(kinds, messages, strict=True):
        nbytes, before = message.tensor.numel() * message.tensor.itemsize, used[kind, message.peer]
        used[kind, message.peer] += cut(-(-nbytes // 4)).slots
        if used[kind, message.peer] > rings.slots:
            raise ArgumentError(
                f"{op}: tensor has {nbytes} bytes, and earlier messages of the call between the same ranks take "
                f"{before * MESSAGE_BYTES}; expected at most {rings.slots * MESSAGE_BYTES} together, the room for "
                f"messages: call ctx.ccl.init_p2p(max_numel, dtype) on every rank"
            )


def _compare(group: Group, kinds: Sequence[str], messages: Sequence[P2POp]) -> None:
    """Raise, with IRIS_DEBUG=1, on both ranks of a pair whose messages differ.

    All ranks take pairs in one order. Messages are compared one by one, because one rank may list in one call what its
    peer lists in several.
    """
    if group.ctx.agreement is None:
        return
    described: dict[tuple[int, int], list[str]] = defaultdict(list)
    for kind, message in zip(kinds, messages, strict=True):
        pair = (group.rank, message.peer) if kind == "send" else (message.peer, group.rank)
        described[pair].append(f"{message.tensor.numel()} of {message.tensor.dtype}")
    for a, b in sorted({(min(pair), max(pair)) for pair in described if pair[0] != pair[1]}):
        for there, back in zip_longest(described[a, b], described[b, a]):
            for one, other, what in ((a, b, there), (b, a, back)):
                if what is not None:
                    facts = {f"what rank {one} sends to rank {other}": what}
                    group.ctx.compare("a message between two ranks", (group.ranks[a], group.ranks[b]), **facts)
