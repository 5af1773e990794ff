"""The methods of `ctx.ccl` with a root or between two ranks; `rooted.py` has their steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..aliases import keywords
from ..errors import ArgumentError
from ..launch import relaunch
from ..launch.streams import check_async
from . import messages, rooted
from .config import KEYWORDS, Config, ReduceOp, check_options
from .messages import P2POp, P2PState, Work
from .rings import Rings
from .transfer import SLOT
from .workspace import Workspace

if TYPE_CHECKING:
    from ..group import Members
    from ..rank import Rank
    from .group import Group


class RootedCalls:
    """Run collectives with a root, messages, and the barrier. Tensors may lie anywhere; any dtype, except for sums.

    Each call is one launch; some calls with large tensors are several. A CUDA graph can capture a call after one call
    with a tensor at least as large. Calls run in the current stream; `async_op` and `config` are accepted and have no
    effect.

    All calls raise `ShapeError`, `DtypeError`, `DeviceError`, `ArgumentError` for bad arguments, and `PeerLostError` if
    a rank was lost in an earlier call.
    """

    _ctx: Rank
    _calls: relaunch.EarlierCalls

    def _group(self, group: Members) -> Group:
        raise NotImplementedError

    def _workspace_of(self, op: str, members: Group, workspace: Workspace | None, new: bool = False) -> Workspace:
        raise NotImplementedError

    def barrier(self, group: Members = None) -> None:
        """Wait for all ranks of the group on the device, in stream order: `ctx.device_barrier(group)`.

        Args:
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
        """
        self._ctx.device_barrier(group)

    def broadcast(
        self, tensor: torch.Tensor, src: int = 0, group: Members = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Workspace:  # fmt: skip
        """Copy `tensor` of rank `src` into `tensor` of every rank.

        Args:
            tensor: any shape, dtype and strides, on the context's device; the same sizes on all ranks.
            src: the rank that has the data, counted in the group, as in all calls of this class.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            async_op: no effect.
            config: no effect.

        Returns:
            The workspace of the call.
        """
        act = partial(rooted.broadcast, tensor=tensor, src=src)
        return self._rooted("broadcast", (tensor,), src, None, group, async_op, config, act)

    @KEYWORDS
    def gather(
        self, out: torch.Tensor | None, inp: torch.Tensor, dst: int = 0, group: Members = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Workspace:  # fmt: skip
        """Gather the `inp` of all ranks on rank `dst`.

        Args:
            out: [w * M, ...] on rank `dst`, in rank order; ignored on other ranks.
            inp: [M, ...], any dtype.
            dst: the rank that receives, counted in the group.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            async_op: no effect.
            config: no effect.

        Returns:
            The workspace of the call.
        """
        act = partial(rooted.gather, out=out, inp=inp, dst=dst)
        return self._rooted("gather", (out, inp), dst, None, group, async_op, config, act)

    @KEYWORDS
    def scatter(
        self, out: torch.Tensor, inp: torch.Tensor | None, src: int = 0, group: Members = None, async_op: bool = False,
        config: Config | None = None,
    ) -> Workspace:  # fmt: skip
        """Distribute the parts of rank `src`'s `inp`.

        Args:
            out: [M, ...]: this rank's part.
            inp: [w * M, ...] on rank `src`; ignored on other ranks.
            src: the rank that has the data, counted in the group.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            async_op: no effect.
            config: no effect.

        Returns:
            The workspace of the call.
        """
        act = partial(rooted.scatter, out=out, inp=inp, src=src)
        return self._rooted("scatter", (out, inp), src, None, group, async_op, config, act)

    @keywords(output_tensor="out", input_tensor="inp", tensor="out", root="dst")
    def reduce(
        self, out: torch.Tensor | None, inp: torch.Tensor | None = None, dst: int = 0, op: ReduceOp | None = None,
        group: Members = None, async_op: bool = False, config: Config | None = None,
    ) -> Workspace:  # fmt: skip
        """Sum `inp` over the ranks on rank `dst`, in float32, rounded once.

        Args:
            out: the shape of `inp` on rank `dst`; ignored on other ranks. Without `inp`, every rank's `out` is summed.
            inp: any shape; bfloat16, float16 or float32.
            dst: the rank that receives, counted in the group.
            op: `ReduceOp.SUM`, or None, which means the same.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            async_op: no effect.
            config: no effect.

        Returns:
            The workspace of the call.
        """
        inp = out if inp is None else inp
        act = partial(rooted.reduce, out=out, inp=inp, dst=dst, reduce_op=op)
        return self._rooted("reduce", (out, inp), dst, op, group, async_op, config, act)

    def tile_space(self, tiles: int, elements: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Allocate memory for collectives on tiles inside a kernel (`iris.tiles`). Collective over all ranks.

        Args:
            tiles: the number of tiles.
            elements: the largest number of elements of a tile.
            dtype: bfloat16, float16 or float32, in which tiles travel.

        Returns:
            An int32 tensor to pass to the kernel. Kernels that use one space must run one after the other in one
                stream.

        Raises:
            ArgumentError: for bad arguments.
            HeapExhausted: if it does not fit on the heap.
        """
        self._ctx.check()
        return rooted.tile_space(self._ctx, tiles, elements, dtype)

    def init_p2p(self, max_numel: int = 1 << 20, dtype: torch.dtype = torch.bfloat16) -> P2PState:
        """Allocate the buffers of messages. Collective; call it before the first `send`.

        Args:
            max_numel: the number of elements that one call may send to one rank, each message rounded up to 4 KiB; 64
                messages of 4 KiB always fit. The heap needs twice that memory for each rank.
            dtype: the dtype of these elements.

        Returns:
            An object that code for ROCm/iris passes on as `p2p_state`. Other code can ignore it.

        Raises:
            ArgumentError: for bad arguments; on every rank if buffers must grow while messages have not been received.
            HeapExhausted: if the buffers do not fit on the heap.
        """
        self._ctx.check()
        slots, rings = messages.slots_for(max_numel, dtype), self._message_rings()
        if not rings.slots:
            self._ctx.on_close.append(self._report_untaken)
        elif slots > rings.slots:
            self._ctx.barrier()  # what comes below moves the rings
            lost = rings.untaken()
            self._ctx.barrier()  # a rank that goes on may receive what another has not looked for yet
            if lost:
                pairs = ", ".join(f"rank {a} to rank {b} ({_at_most(n)})" for a, b, n in lost)
                raise ArgumentError(
                    f"init_p2p({max_numel}, {dtype}): messages have not been received, from {pairs}; "
                    f"expected none: receive them first, or reserve enough memory in one call"
                )
        rings.reserve(slots)
        return P2PState()

    def _report_untaken(self) -> None:
        """Warn of messages to this rank that it never received, because their senders have continued and no one else
        can report them."""
        for sender, receiver, slots in self._message_rings().untaken():
            if receiver == self._ctx.cur_rank:
                what = f"messages of {_at_most(slots)} that this rank never received"
                self._ctx.log.warning(f"close: rank {sender} sent {what}")

    def send(
        self, tensor: torch.Tensor, dst: int, group: Members = None, tag: int = 0, p2p_state: P2PState | None = None,
        config: Config | None = None,
    ) -> None:  # fmt: skip
        """Send `tensor` to rank `dst`, which calls `recv`. No other rank takes part.

        The call runs in the current stream, which continues when the data is in the buffer. NCCL's send waits for the
        receiver; this one waits only if the buffer is full. If the receiver never comes, a later send raises
        `PeerLostError` after `IRIS_TIMEOUT` seconds, or `close` warns. Messages to one rank arrive in order. `tag`,
        `p2p_state` and `config` are ignored.

        Args:
            tensor: any shape, dtype and strides, on the context's device.
            dst: the receiver.
            group: the ranks among which `dst` counts; None for all ranks of the context.
            tag: no effect.
            p2p_state: no effect.
            config: no effect.

        Raises:
            ArgumentError: for bad arguments, and if the buffer of `init_p2p` is too small. With IRIS_DEBUG=1 also on
                both ranks if sizes or dtypes differ.
        """
        self._exchange("send", group, [P2POp("send", tensor, dst)], [("tensor", "dst")])

    def recv(
        self, tensor: torch.Tensor, src: int, group: Members = None, tag: int = 0, p2p_state: P2PState | None = None,
        config: Config | None = None,
    ) -> None:  # fmt: skip
        """Receive into `tensor` from rank `src`, which calls `send` with as many elements of the same dtype.

        Args:
            tensor: any shape, dtype and strides, on the context's device.
            src: the sender.
            group: the ranks among which `src` counts; None for all ranks of the context.
            tag: no effect.
            p2p_state: no effect.
            config: no effect.

        Raises:
            ArgumentError: for bad arguments.
        """
        self._exchange("recv", group, [P2POp("recv", tensor, src)], [("tensor", "src")])

    def sendrecv(
        self, send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, src: int, group: Members = None,
        tag: int = 0, p2p_state: P2PState | None = None, config: Config | None = None,
    ) -> None:  # fmt: skip
        """Send `send_tensor` to rank `dst` and receive `recv_tensor` from rank `src`, both at once, as in a ring.

        Args:
            send_tensor: any shape, dtype and strides, on the context's device.
            recv_tensor: likewise; it may overlap `send_tensor`.
            dst: the rank that receives `send_tensor`.
            src: the rank that sends `recv_tensor`.
            group: the ranks among which `dst` and `src` count; None for all ranks of the context.
            tag: no effect.
            p2p_state: no effect.
            config: no effect.

        Raises:
            ArgumentError: as in `send`.
        """
        both = [P2POp("send", send_tensor, dst), P2POp("recv", recv_tensor, src)]
        self._exchange("sendrecv", group, both, [("send_tensor", "dst"), ("recv_tensor", "src")])

    def isend(
        self, tensor: torch.Tensor, dst: int, group: Members = None, tag: int = 0, p2p_state: P2PState | None = None
    ) -> Work:
        """Call `send`, and return a `Work` whose `wait` returns at once.

        Args:
            tensor: as in `send`.
            dst: as in `send`.
            group: as in `send`.
            tag: no effect.
            p2p_state: no effect.
        """
        self.send(tensor, dst, group, tag)
        return Work()

    def irecv(
        self, tensor: torch.Tensor, src: int, group: Members = None, tag: int = 0, p2p_state: P2PState | None = None
    ) -> Work:
        """Call `recv` in the current stream, and return a `Work` whose `wait` returns at once.

        Args:
            tensor: as in `recv`.
            src: as in `recv`.
            group: as in `recv`.
            tag: no effect.
            p2p_state: no effect.
        """
        self.recv(tensor, src, group, tag)
        return Work()

    def batch_isend_irecv(
        self, p2p_op_list: Sequence[P2POp], group: Members | P2PState = None, p2p_state: P2PState | None = None
    ) -> list[Work]:
        """Send and receive all messages of a list at once, as torch.distributed's function does.

        Each rank lists what it sends and receives, in any order. Messages between two ranks match in the order of the
        two lists. All tensors are read before any is written.

        Args:
            p2p_op_list: a `P2POp` for each message.
            group: the ranks among which each `peer` counts; None for all ranks of the context.
            p2p_state: no effect.

        Returns:
            One `Work` for each message, whose `wait` returns at once, because the current stream orders the messages.

        Raises:
            ArgumentError: as in `send`.
        """
        if not isinstance(p2p_op_list, (list, tuple)) or not all(isinstance(each, P2POp) for each in p2p_op_list):
            raise ArgumentError(f"batch_isend_irecv: p2p_op_list is {p2p_op_list!r}; expected a list of iris.ccl.P2POp")
        names = [(f"p2p_op_list[{i}].tensor", f"p2p_op_list[{i}].peer") for i in range(len(p2p_op_list))]
        members = None if isinstance(group, P2PState) else group  # in its place where ROCm/iris has it
        self._exchange("batch_isend_irecv", members, p2p_op_list, names)
        return [Work() for _ in p2p_op_list]

    def _rooted(
        self, op: str, tensors: tuple[Any, ...], root: int, reduce_op: Any, group: Members, async_op: bool,
        config: Config | None, act: Callable[[Rings, Group], None],
    ) -> Workspace:  # fmt: skip
        """Run a rooted collective in the current stream, or launch again what its last call did; return the group's
        workspace.

        `act` is called for a call that cannot be repeated.
        """
        self._ctx.check()
        key = relaunch.key_of(tensors, (op, root, reduce_op, group, async_op, config))
        if (workspace := self._calls.repeat(key, self._ctx)) is None:
            members = self._group(group)
            with self._ctx.reporting_refusals(op, members.ranks):
                check_async(op, async_op)
                check_options(op, None, config)
            workspace = self._workspace_of(op, members, None)
            rings = Rings(workspace, "rooted", self._calls.kernels)
            act(rings, workspace.group)
            self._keep(key, rings, workspace)
        return workspace

    def _message_rings(self) -> Rings:
        """Return the rings of messages, which are all ranks'."""
        return Rings(self._workspace_of("send", self._group(None), None), "messages", self._calls.kernels)

    def _exchange(self, op: str, group: Members, listed: Sequence[P2POp], names: Sequence[tuple[str, str]]) -> None:
        self._ctx.check()
        key = relaunch.key_of([each.tensor for each in listed], (op, *((each.op, each.peer) for each in listed), group))
        if self._calls.repeat(key, self._ctx) is None:
            self._ctx.side.join()
            rings = self._message_rings()
            messages.exchange(op, rings, self._group(group), listed, names)
            self._keep(key, rings, self._workspace_of(op, self._group(None), None))

    def _keep(self, key: relaunch.Key | None, rings: Rings, workspace: Workspace) -> None:
        if key and (again := rings.again):
            self._calls.keep(key, (again, None, workspace))


def _at_most(slots: int) -> str:
    return f"at most {slots * SLOT.value >> 10} KiB"
