"""`ctx.ccl`: checks, a plan, memory, one kernel.

A call that repeats an earlier one at the same addresses skips all of these steps and launches the kernel. A call that
differs from an earlier one in its addresses only skips most of them (`iris/launch/relaunch.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import platform
from ..errors import ArgumentError, IrisError
from ..heap import check_memory, span
from ..launch import relaunch
from ..launch.streams import check_async
from ..machines import machine_of
from . import launch, norm
from .config import KEYWORDS, Config, ReduceOp, check_options
from .group import Group, group_of
from .plan import Plan, plan
from .problem import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    OPS,
    REDUCE_SCATTER,
    Problem,
    bits,
    check_overlap,
    check_tensors,
    describe,
)
from .rooted_calls import RootedCalls
from .workspace import Workspace

if TYPE_CHECKING:
    from ..group import Members
    from ..rank import Rank


class _Call(NamedTuple):
    """The arguments of a call."""

    op: str
    out: torch.Tensor
    inp: torch.Tensor
    reduce_op: ReduceOp | None = None
    group: Members = None
    async_op: bool = False
    config: Config | None = None
    workspace: Workspace | None = None


@dataclass(frozen=True)
class _Prepared:
    """A call that was checked and planned: the state that later calls of the same shape use again."""

    members: Group
    spans: tuple[int, int]
    problem: Problem
    plan: Plan | None  # None, as the room, where there are no elements
    room: launch.Room | None


class Collectives(RootedCalls):
    """Run the collectives of one context. Every rank of the group makes the same calls in the same order.

    `out` and `inp` are device tensors of one dtype, whose rows have one stride. An `out` on the symmetric heap must be
    the same allocation on all ranks. Any other `out` works too, but large calls then make one more copy. The ranks
    outside a `group` must make the same calls in their own groups, because all heaps must have the same allocations.

    All calls raise `ShapeError`, `DtypeError`, `DeviceError`, `ArgumentError` for bad arguments, `HeapExhausted` if the
    workspace does not fit on the heap, `PeerLostError` if a rank was lost in an earlier call.
    """

    def __init__(self, ctx: Rank) -> None:
        self._ctx = ctx
        self._machine = replace(machine_of(ctx.device).links, num_programs=platform.num_programs(ctx.device))
        self._groups: dict[Any, Group] = {}
        self._workspaces: dict[Any, Workspace] = {}
        self._calls = relaunch.EarlierCalls()
        ctx.on_change.append(self._calls.forget)

    @KEYWORDS
    def all_to_all(
        self, out: torch.Tensor, inp: torch.Tensor, group: Members = None, async_op: bool = False,
        config: Config | None = None, workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """Send columns of `inp` to every rank, and receive columns from every rank.

        Args:
            out: [M, N * w]. Columns i * N to (i + 1) * N come from rank i.
            inp: [M, N * w], any dtype of up to 8 bytes. Columns j * N to (j + 1) * N go to rank j.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
            config: a `Config`, the same on all ranks; None chooses the fastest for the size.
            workspace: the result of an earlier call of the group; None for the group's own.

        Returns:
            The workspace of the call.
        """
        return self._call(ALL_TO_ALL, out, inp, None, group, async_op, config, workspace)

    @KEYWORDS
    def all_gather(
        self, out: torch.Tensor, inp: torch.Tensor, group: Members = None, async_op: bool = False,
        config: Config | None = None, workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """Gather the `inp` of all ranks along the rows.

        Args:
            out: [w * M, N], in rank order.
            inp: [M, N], any dtype of up to 8 bytes. It may be this rank's part of `out`.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
            config: a `Config`, the same on all ranks; None chooses the fastest for the size.
            workspace: the result of an earlier call of the group; None for the group's own.

        Returns:
            The workspace of the call.
        """
        return self._call(ALL_GATHER, out, inp, None, group, async_op, config, workspace)

    @KEYWORDS
    def all_reduce(
        self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp | None = None, group: Members = None,
        async_op: bool = False, config: Config | None = None, workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """Sum `inp` over the ranks. All ranks get the same bits, in each run, except with "atomic" and "spinlock".

        Args:
            out: the shape and dtype of `inp`; it may be `inp`.
            inp: any shape; bfloat16, float16, float32 (accumulated in float32, rounded once) or integers.
            op: `ReduceOp.SUM`, or None, which means the same.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
            config: a `Config`, the same on all ranks; None chooses the fastest for the size.
            workspace: the result of an earlier call of the group; None for the group's own.

        Returns:
            The workspace of the call.
        """
        return self._call(ALL_REDUCE, out, inp, op, group, async_op, config, workspace)

    @KEYWORDS
    def reduce_scatter(
        self, out: torch.Tensor, inp: torch.Tensor, op: ReduceOp | None = None, group: Members = None,
        async_op: bool = False, config: Config | None = None, workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """Sum `inp` over the ranks and keep this rank's part.

        Args:
            out: [M / w, N] for this rank's rows, as `torch.chunk` splits them; or [M, N] for this rank's tiles, at
                their places. Tiles have `block_size_m` x `block_size_n` elements (32 x 64). `swizzle_size` (4) row
                blocks are numbered together; a rank has one range of tiles, or every w-th with
                `all_reduce_distribution=0`.
            inp: [M, N], as for `all_reduce`.
            op: `ReduceOp.SUM`, or None, which means the same.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
            config: a `Config`, the same on all ranks; None chooses the fastest for the size.
            workspace: the result of an earlier call of the group; None for the group's own.

        Returns:
            The workspace of the call.
        """
        return self._call(REDUCE_SCATTER, out, inp, op, group, async_op, config, workspace)

    @KEYWORDS
    def all_reduce_preamble(
        self, out: torch.Tensor, inp: torch.Tensor, config: Config | None = None, workspace: Workspace | None = None,
        group: Members = None,
    ) -> Workspace:  # fmt: skip
        """Return a workspace for `all_reduce` calls with these tensors, which a CUDA graph can then capture.

        It allocates memory and launches no sum. Calls of other groups may use the workspace too; the first call of
        each group then allocates.

        Args:
            out: as in `all_reduce`.
            inp: as in `all_reduce`.
            config: a `Config`, the same on all ranks; None chooses the fastest for the size.
            workspace: an earlier result, which grows if needed; None for a new one.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
        """
        ctx = self._ctx
        ctx.check()
        check_tensors(ALL_REDUCE, out, inp, ctx.device)
        check_options(ALL_REDUCE, None, config)
        members = self._group(group)
        workspace = self._workspace_of(ALL_REDUCE, members, workspace, new=True)
        if inp.numel():
            self._reserve(workspace, self._prepare(ALL_REDUCE, out, inp, config or Config(), members), out)
        return workspace

    def all_reduce_norm(
        self, out: torch.Tensor, residual: torch.Tensor, inp: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6,
        scale: torch.Tensor | None = None, group: Members = None, workspace: Workspace | None = None,
        total: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Add the sum over ranks of `inp` to `residual`, in place or to `total`, and store its RMSNorm to `out`.

        One kernel with one or two hops (`iris/ccl/norm.py`). It sums in fp32, and all ranks get the same bits.


        Raises: `ShapeError`, `DtypeError`, `DeviceError`, `ArgumentError` for bad arguments, `HeapExhausted` where the
            workspace does not fit, `PeerLostError` where a rank was lost.

        Args:
            out: [..., N], `inp`'s dtype; float8_e4m3fn with `scale`.
            residual: [..., N], `inp`'s dtype; the same values on all ranks.
            inp: [..., N] of bfloat16, float16 or float32; N is at most 32,768.
            weight: [N], `inp`'s dtype: the norm's weight.
            eps: is added to the mean of squares.
            scale: float32, one element: `out` is the norm divided by it, clamped to +-448.
            group, workspace: as in `all_reduce`.
            total: [..., N], `inp`'s dtype: receives the sum in place of `residual`, which then stays unchanged.

        Returns:
            The workspace of the call.
        """
        ctx = self._ctx
        ctx.check()
        tensors = norm.Tensors(out, residual, inp, weight, residual if total is None else total, scale)
        try:
            norm.check(ctx.device, tensors, eps)
            members = self._group(group)
            workspace = self._workspace_of(norm.OP, members, workspace)
        except IrisError as error:
            ctx.report_refusal(norm.OP, self._group(group).ranks, error)
            raise
        if ctx.agreement is not None:
            ctx.compare(
                norm.OP, members.ranks, inp=(tuple(inp.shape), str(inp.dtype)), eps=eps, scaled=scale is not None
            )
        ctx.side.join()
        N = inp.shape[-1]
        most = norm.rows_at_once(inp.numel() // N, N, inp.dtype, members.size)
        if inp.numel():
            self._reserve_norm(workspace, most, inp)
        for piece in tensors.pieces(most) if inp.numel() else ():
            area, context = workspace.areas[norm.AREA], members.context_tensor
            args = norm.arguments(area, context, members.size, self._machine, piece, eps)
            grid = norm.grid(args["M"], self._machine)
            warps = norm.num_warps(N)
            relaunch.launch(self._calls.kernels, ctx.device, norm.all_reduce_norm_kernel, grid, args, num_warps=warps)
        return workspace

    def reserve_norm(self, rows: int, columns: int, dtype: torch.dtype, group: Members = None) -> Workspace:
        """Reserve memory for `all_reduce_norm` calls of up to `rows` rows, which then allocate none. Collective.

        Args:
            rows: the largest number of rows of a call.
            columns: N, the columns of `inp`.
            dtype: the dtype of `inp`.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.

        Returns:
            The workspace of the group.

        Raises:
            HeapExhausted: if the memory does not fit on the heap.
        """
        self._ctx.check()
        members = self._group(group)
        workspace = self._workspace_of(norm.OP, members, None)
        self._reserve_norm(workspace, rows, torch.empty(0, columns, dtype=dtype, device="meta"))
        return workspace

    def _reserve_norm(self, workspace: Workspace, rows: int, like: torch.Tensor) -> None:
        nbytes = norm.staged_bytes(rows, like.shape[-1], like.dtype, workspace.group.size)
        if workspace.reserve(norm.AREA, 0, nbytes, 255):
            self._ctx.forget_launches()

    def new_workspace(self, group: Members = None) -> Workspace:
        """Return an empty workspace, for calls that may run at the same time as others of the group.

        Args:
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
        """
        self._ctx.check()
        return Workspace(self._group(group))

    def plan(
        self, op: str, out: torch.Tensor, inp: torch.Tensor, config: Config | None = None, group: Members = None,
        explained: bool = True,
    ) -> Plan | None:  # fmt: skip
        """Return the plan of a call with its predicted time in µs, or None if `inp` is empty. Launches nothing.

        Args:
            op: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
            out: as in the call.
            inp: as in the call.
            config: a `Config`, the same on all ranks; None chooses the fastest for the size.
            group: a process group or one dimension of a `DeviceMesh`; None for all ranks of the context.
            explained: whether the plan includes its reasons, which `Plan.explain` returns.

        Raises:
            ShapeError, DtypeError, DeviceError, ArgumentError: for bad arguments.
        """
        self._ctx.check()
        if op not in OPS:
            raise ArgumentError(f"op is {op!r}; expected one of {', '.join(OPS)}")
        prepared = self._checked(_Call(op, out, inp, None, group, False, config))
        if prepared.plan is None or not explained:
            return prepared.plan
        return plan(prepared.problem, config or Config(), self._machine, explained=True)

    def ready(self, op: str, out: torch.Tensor, inp: torch.Tensor, workspace: Workspace) -> Callable[[], Workspace]:
        """Return a function that repeats the call `op`; it examines the arguments only once, here.

        Args:
            op: as in `plan`.
            out: as in the call.
            inp: as in the call.
            workspace: the result of an earlier call of all ranks.
        """
        key = relaunch.key_of((out, inp), (op, None, None, None), workspace)
        calls, ctx = self._calls, self._ctx
        return lambda: calls.repeat(key, ctx, out) or self._call(op, out, inp, None, None, False, None, workspace)

    def _call(
        self, op: str, out: torch.Tensor, inp: torch.Tensor, reduce_op: ReduceOp | None, group: Members,
        async_op: bool, config: Config | None, workspace: Workspace | None,
    ) -> Workspace:  # fmt: skip
        self._ctx.check()
        key = relaunch.key_of((out, inp), (op, reduce_op, group, config), workspace)
        if async_op is False and (done := self._calls.repeat(key, self._ctx, out)):
            return done
        return self._first(_Call(op, out, inp, reduce_op, group, async_op, config, workspace), key)

    def _first(self, call: _Call, key: relaunch.Key | None) -> Workspace:
        """Run a call that `relaunch` cannot repeat."""
        ctx, calls = self._ctx, self._calls
        op, out, inp, _, group, async_op, _, workspace = call
        try:
            check_async(op, async_op)
            prepared = calls.prepared(key, lambda: self._checked(call))
            if workspace is not None:
                workspace = self._workspace_of(op, prepared.members, workspace)
            (to, at), (out_bytes, inp_bytes) = key.addresses if key else (0, 0), prepared.spans
            check_memory(op, ("out", "inp"), (to, at), (out_bytes, inp_bytes))
            if at < to + out_bytes and to < at + inp_bytes:
                check_overlap(op, out, inp, prepared.members.rank)
        except IrisError as error:
            ctx.report_refusal(op, self._group(group).ranks, error)
            raise
        problem, chosen = prepared.problem, prepared.plan
        if ctx.agreement is not None:
            facts: dict[str, Any] = {"shapes": problem, "plan": chosen, "async_op": async_op}
            own = workspace is None or workspace is self._workspaces.get(prepared.members)
            facts["workspace"] = "the group's own" if own else "another"
            if chosen is not None and chosen.launcher.writes_to_peers(problem):
                facts["out"] = ctx.place_of(out)
            ctx.compare(op, prepared.members.ranks, **facts)
        workspace = workspace or self._workspace_of(op, prepared.members, None)
        if chosen is None:
            return workspace
        staged = self._reserve(workspace, prepared, out)

        first = partial(self._launch, workspace, problem, chosen, out if staged is None else staged, inp, key)
        go = partial(calls.launch, key, workspace, out, staged, first)
        workspace._done = ctx.side.run(go, async_op, out, inp) or workspace._done
        ctx.check()
        return workspace

    def _launch(
        self, workspace: Workspace, problem: Problem, chosen: Plan, out: torch.Tensor, inp: torch.Tensor,
        key: relaunch.Key | None,
    ) -> relaunch.Launch | None:  # fmt: skip
        args = launch.arguments(workspace, problem, chosen, bits(out, problem.reduces), bits(inp, problem.reduces))
        kernel, grid = chosen.launcher.kernel, (chosen.programs, 1, 1)
        options = launch.options(chosen, self._machine)
        moving = key.addresses if key else ()
        return relaunch.launch(self._calls.kernels, self._ctx.device, kernel, grid, args, moving, **options)

    def _checked(self, call: _Call) -> _Prepared:
        op, out, inp, reduce_op, group, _, config, _ = call
        check_tensors(op, out, inp, self._ctx.device)
        check_options(op, reduce_op, config)
        return self._prepare(op, out, inp, config or Config(), self._group(group))

    def _prepare(self, op: str, out: torch.Tensor, inp: torch.Tensor, config: Config, members: Group) -> _Prepared:
        problem, spans = describe(op, out, inp, members.rank, members.size), (span(out), span(inp))
        if not inp.numel():
            return _Prepared(members, spans, problem, None, None)
        chosen = plan(problem, config, self._machine)
        return _Prepared(members, spans, problem, chosen, chosen.launcher.room(problem, chosen))

    def _reserve(self, workspace: Workspace, prepared: _Prepared, out: torch.Tensor) -> torch.Tensor | None:
        """Make room for a call; the tensor on the heap that replaces an `out` elsewhere, if one must."""
        room, chosen, staged, begin, grown = prepared.room, prepared.plan, None, out.data_ptr(), True
        assert room is not None and chosen is not None  # for there are elements
        heap = self._ctx.heap
        # what a layer returned may lie elsewhere at each rank
        on_heap = heap.holds(begin, begin + prepared.spans[0]) and not self._ctx.hands_out(begin - heap.base)
        try:
            grown = workspace.reserve(room.area, room.flags, room.nbytes, room.fill)
            if chosen.launcher.writes_to_peers(prepared.problem) and not on_heap:
                nbytes = out.numel() * out.element_size()
                # kernels compare where results lie before they write them
                grown |= workspace.reserve("results", 0, nbytes, rendezvous=False)
                staged = workspace.areas["results"].staging[:nbytes].view(out.dtype).view(out.shape)
        finally:  # where there was no room for all of it, some has grown all the same
            if grown:
                # they go to memory that graphs may use still, but calls no longer, nor ops that such a call is part of
                self._ctx.forget_launches()
        return staged

    def _group(self, group: Any) -> Group:
        try:
            known = self._groups.get(group)
        except TypeError:  # a list, which is refused below
            known = None
        if known is None:
            known = self._groups[group] = group_of(self._ctx, group)
        return known

    def _workspace_of(self, op: str, members: Group, workspace: Workspace | None, new: bool = False) -> Workspace:
        if workspace is None:
            if new:
                return Workspace(members, for_groups=members.size == self._ctx.num_ranks)
            if members not in self._workspaces:
                self._workspaces[members] = Workspace(members)
            return self._workspaces[members]
        if not isinstance(workspace, Workspace):
            raise ArgumentError(f"{op}: workspace is {workspace!r}; expected one that a call of this group returned")
        own = workspace.of(members)
        if own is None:
            raise ArgumentError(
                f"{op}: workspace is one of ranks {workspace.group.ranks}, the call is one of {members.ranks}; "
                f"expected the same group: pass group= to all_reduce_preamble, and to new_workspace, as to the call"
            )
        return own
