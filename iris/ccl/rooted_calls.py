"""The methods of `ctx.ccl` with a root or between two ranks; their steps stand in `rooted.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..errors import ArgumentError
from ..launch.streams import check_async
from . import messages, rooted
from .config import KEYWORDS, Config, ReduceOp, check_options
from .messages import P2POp
from .rings import Rings
from .workspace import Workspace

if TYPE_CHECKING:
    from ..group import Members
    from ..rank import Rank
    from .group import Group


class RootedCalls:
    """Collectives with a root, messages, and the barrier. Tensors may lie anywhere; any dtype but where sums are asked.

    Each is one launch, and can be captured once it was called with as large a tensor. They run in the current stream,
    with `async_op`, which is accepted, too; a `config` decides nothing.
    """

    _ctx: Rank
    _kernels: dict

    def _group(self, group: Members) -> Group:
        raise NotImplementedError

    def _workspace_of(self, op: str, members: Group, workspace: Workspace | None, new: bool = False) -> Workspace:
        raise NotImplementedError

    def barrier(self, group: Members = None) -> None:
        """`ctx.device_barrier(group)`."""
        self._ctx.device_barrier(group)

    def broadcast(
        self, tensor: torch.Tensor, src: int = 0, group: Members = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Workspace:  # fmt: skip
        """`tensor`, of any shape and dtype, becomes what rank `src` has. Here and below: ranks count in the group."""
        workspace = self._rooted("broadcast", group, async_op, config)
        rooted.broadcast(self._rings(workspace), workspace.group, tensor, src)
        return workspace

    @KEYWORDS
    def gather(
        self, out: torch.Tensor | None, inp: torch.Tensor, dst: int = 0, group: Members = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Workspace:  # fmt: skip
        """Rank `dst`'s `out` (w * M, ...): every rank's `inp` (M, ...), in rank order. The others' `out` is left."""
        workspace = self._rooted("gather", group, async_op, config)
        rooted.gather(self._rings(workspace), workspace.group, out, inp, dst)
        return workspace

    @KEYWORDS
    def scatter(
        self, out: torch.Tensor, inp: torch.Tensor | None, src: int = 0, group: Members = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Workspace:  # fmt: skip
        """`out` (M, ...): this rank's part of rank `src`'s `inp` (w * M, ...). The others' `inp` is not looked at."""
        workspace = self._rooted("scatter", group, async_op, config)
        rooted.scatter(self._rings(workspace), workspace.group, out, inp, src)
        return workspace

    @KEYWORDS
    def reduce(
        self, out: torch.Tensor | None, inp: torch.Tensor, dst: int = 0, op: ReduceOp | None = None,
        group: Members = None, async_op: bool = False, config: Config | None = None,
    ) -> Workspace:  # fmt: skip
        """Rank `dst`'s `out`: the sum over ranks of `inp`, kept in fp32 and rounded once. The others' `out` is left."""
        workspace = self._rooted("reduce", group, async_op, config)
        rooted.reduce(self._rings(workspace), workspace.group, out, inp, dst, op)
        return workspace

    def tile_space(self, tiles: int, elements: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory for the collectives on tiles of one's own kernel (`iris.tiles`); collective over all ranks.

        int32, for `tiles` tiles of `elements` elements of `dtype`, a floating-point one of 16 or 32 bits, each. Kernels
        that use one space follow each other in one stream. Raises `ArgumentError` for bad arguments, `HeapExhausted`
        where it does not fit.
        """
        self._ctx.check()
        return rooted.tile_space(self._ctx, tiles, elements, dtype)

    def init_p2p(self, max_numel: int = 1 << 20, dtype: torch.dtype = torch.bfloat16) -> None:
        """Makes room for messages of so many elements in all to each rank. Collective; `send` and its kin need it.

        `max_numel`: of all messages that one call sends to one rank together, each rounded up to whole 4 KiB; 64 of
        these fit always. No message may be under way. Takes twice as much of the heap, times the ranks. Raises
        `ArgumentError` for what is no size and dtype, `HeapExhausted` where it does not fit.
        """
        self._ctx.check()
        self._message_rings().reserve(messages.slots_for(max_numel, dtype))

    def send(self, tensor: torch.Tensor, dst: int, group: Members = None, tag: int = 0) -> None:
        """Gives `tensor` to rank `dst`, which calls `recv`. Nobody else takes part.

        In the current stream, which goes on when the message is on its way; it waits there for the receiver while that
        has not taken earlier messages, of which there is room for as much as two calls may send. So two ranks that both
        send first may wait in vain; `sendrecv` and `batch_isend_irecv` are for them. Several sends to one rank arrive
        in their order, whatever their `tag`. Here and below: any shape, dtype and strides, anywhere on the device.
        Raises `ArgumentError` for bad arguments, and where `init_p2p` made too little room; with IRIS_DEBUG=1 also on
        both ranks where what they send and take differs.
        """
        self._exchange("send", group, [P2POp("send", tensor, dst)], [("tensor", "dst")])

    def recv(self, tensor: torch.Tensor, src: int, group: Members = None, tag: int = 0) -> None:
        """Takes `tensor` from rank `src`, which calls `send` with as many elements of the same dtype."""
        self._exchange("recv", group, [P2POp("recv", tensor, src)], [("tensor", "src")])

    def sendrecv(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, src: int, group: Members = None,
        tag: int = 0,
    ) -> None:  # fmt: skip
        """`send` to `dst` and `recv` from `src` at once: a ring's step, say, in which every rank calls this."""
        both = [P2POp("send", send_tensor, dst), P2POp("recv", recv_tensor, src)]
        self._exchange("sendrecv", group, both, [("send_tensor", "dst"), ("recv_tensor", "src")])

    def batch_isend_irecv(self, p2p_op_list: Sequence[P2POp], group: Members = None) -> None:
        """All messages of the list at once, as of torch's call: each rank lists what it sends and takes, in any order.

        Messages from one rank to another match in the order in which the two ranks list them, in as many calls as each
        likes. What is sent is read before anything is stored. In the current stream: there is nothing to wait for.
        Raises as `send` does.
        """
        if not isinstance(p2p_op_list, (list, tuple)) or not all(isinstance(each, P2POp) for each in p2p_op_list):
            raise ArgumentError(f"batch_isend_irecv: p2p_op_list is {p2p_op_list!r}; expected a list of iris.ccl.P2POp")
        names = [(f"p2p_op_list[{i}].tensor", f"p2p_op_list[{i}].peer") for i in range(len(p2p_op_list))]
        self._exchange("batch_isend_irecv", group, p2p_op_list, names)

    def _rooted(self, op: str, group: Members, async_op: bool, config: Config | None) -> Workspace:
        """The group's workspace, for a call that always runs in the current stream."""
        self._ctx.check()
        check_async(op, async_op)
        check_options(op, None, config)
        return self._workspace_of(op, self._group(group), None)

    def _rings(self, workspace: Workspace, name: str = "rooted") -> Rings:
        return Rings(workspace, name, self._kernels)

    def _message_rings(self) -> Rings:
        """The rings of messages, which are all ranks'."""
        return self._rings(self._workspace_of("send", self._group(None), None), "messages")

    def _exchange(self, op: str, group: Members, listed: Sequence[P2POp], names: Sequence[tuple[str, str]]) -> None:
        self._ctx.check()
        self._ctx.side.join()
        messages.exchange(op, self._message_rings(), self._group(group), listed, names)
