"""Messages between two ranks, alone or many at once: `send`, `recv`, `sendrecv`, `batch_isend_irecv`.

The steps are those of `rooted.py`: a sender stages its tensors, it meets the ranks that it has to do with, receivers
copy, and they meet again. The stage is divided by receivers, and messages to one of them stand in the order in which
they are sent. So the receiver, which takes them in that order, finds each by the sizes of those before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ArgumentError
from .group import Group
from .rooted import Met, at_rank, check, check_rank, room_for
from .workspace import Workspace

_ALIGNED = 16  # bytes: of every dtype's elements


@dataclass(frozen=True)
class P2POp:
    """A message of `ctx.ccl.batch_isend_irecv`: to or from rank `peer`, counted in the call's group.

    `op`: "send" or "recv"; "isend", "irecv" and functions of these names, such as torch.distributed's, mean the same.
    """

    op: str | Callable
    tensor: torch.Tensor
    peer: int

    @property
    def kind(self) -> str:
        """ "send" or "recv"."""
        name = str(getattr(self.op, "__name__", self.op)).removeprefix("i")
        if name in ("send", "recv"):
            return name
        raise ArgumentError(f'P2POp: op is {self.op!r}; expected "send" or "recv"')


def bytes_of_message(max_numel: Any, dtype: Any) -> int:
    if type(max_numel) is not int or not 0 < max_numel < 1 << 40 or not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"init_p2p({max_numel!r}, {dtype!r}); expected a number of elements from 1, and a dtype")
    return _aligned(max_numel * dtype.itemsize)


def exchange(op: str, workspace: Workspace, messages: Sequence[P2POp], names: Sequence[tuple[str, str]]) -> None:
    """Sends and takes all of `messages`; `names`: how errors call the tensor and the peer of each."""
    group = workspace.group
    for message, (name, peer_name) in zip(messages, names, strict=True):
        check(op, name, message.tensor, group.ctx)
        check_rank(op, peer_name, message.peer, group)
    kinds = [message.kind for message in messages]
    reserved = workspace.areas["messages"].staging if "messages" in workspace.areas else torch.empty(0)
    share = reserved.nbytes // group.ctx.num_ranks // _ALIGNED * _ALIGNED
    used: dict[tuple[str, int], int] = defaultdict(int)
    places = []
    for kind, message in zip(kinds, messages, strict=True):
        begin = used[kind, message.peer]
        end = begin + message.tensor.numel() * message.tensor.itemsize
        if end > share or not share:
            raise ArgumentError(
                f"{op}: tensor has {end - begin} bytes, {begin} come before it between the same ranks, and there is "
                f"room for {share}; call ctx.ccl.init_p2p(max_numel, dtype) on every rank"
            )
        used[kind, message.peer] = _aligned(end)
        receiver = message.peer if kind == "send" else group.rank
        places.append(group.ranks[receiver] * share + begin)
    _compare(group, kinds, messages)
    staged = [
        room_for(reserved[place:], message.tensor.shape, message.tensor.dtype)
        for place, message in zip(places, messages, strict=True)
    ]
    for kind, message, room in zip(kinds, messages, staged, strict=True):
        if kind == "send":
            room.copy_(message.tensor)
    with Met(group, sorted({group.ranks[peer] for peer in (group.rank, *(message.peer for message in messages))})):
        for kind, message, room in zip(kinds, messages, staged, strict=True):
            if kind == "recv":
                message.tensor.copy_(at_rank(room, group, message.peer))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _compare(group: Group, kinds: Sequence[str], messages: Sequence[P2POp]) -> None:
    """With IRIS_DEBUG=1: raises on both ranks of a pair whose messages differ. All ranks take pairs in one order."""
    if group.ctx.agreement is None:
        return
    said: dict[tuple[int, int], list[str]] = defaultdict(list)
    for kind, message in zip(kinds, messages, strict=True):
        pair = (group.rank, message.peer) if kind == "send" else (message.peer, group.rank)
        said[pair].append(f"{message.tensor.numel()} of {message.tensor.dtype}")
    for a, b in sorted({(min(pair), max(pair)) for pair in said if pair[0] != pair[1]}):
        facts = {f"what rank {i} sends to rank {j}": ", ".join(said[i, j]) for i, j in ((a, b), (b, a))}
        group.ctx.compare("messages between two ranks", (group.ranks[a], group.ranks[b]), **facts)
