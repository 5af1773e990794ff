"""`ctx.ops`: problem -> plan -> workspace -> launch.

A call checks its tensors, looks up what was prepared for their shapes, and launches one kernel, or what an algorithm
with torch's product takes in its place: no word between the hosts, no host synchronisation, and no allocation after the
first call of a problem, but for the graph that several launches become when they come again (`iris/graphed.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from iris import platform, repeat
from iris.errors import ArgumentError
import torch

from . import launch
from .config import FusedConfig
from .plan import plan
from .problem import (
    ALL_REDUCE,
    GATHER_MATMUL,
    MATMUL_GATHER,
    REDUCE_SCATTER,
    Problem,
    check_bias,
    check_tensors,
    describe,
    problem_asked,
)
from .staging import workspace_size
from .unfused import UNFUSED
from .workspace import Workspace

if TYPE_CHECKING:
    from iris.context import Iris

_KEPT = 4096  # calls, and problems, that are known from before


@dataclass(frozen=True)
class _Prepared:
    """What the first call of a problem found out."""

    problem: Problem
    config: FusedConfig
    num_flags: int
    nbytes: int
    exchange: int


class Ops:
    """The fused operations of one context. All are collective, and every rank makes the same calls in the same order.

    `out`, `A`, `B`, `bias`: device tensors of one dtype (bf16, fp16, fp32); sums are kept in fp32 in a fixed order, so
    results are the same bits on all ranks and in each run. `bias` is added once. B may be contiguous or the transpose
    of a contiguous tensor. `async_op`: runs on a side stream; `workspace.wait()` joins it. `config`: a `FusedConfig`,
    the same on all ranks; None chooses by shapes. Ranks whose K (or, in a gather, N) differs must pass one.
    `workspace`: what an earlier call returned. w is the number of ranks; parts are split as `torch.chunk` does.

    Raises `ShapeError`, `DtypeError`, `DeviceError`, `ArgumentError` for bad arguments, `HeapExhausted` when the
    workspace does not fit, `PeerLostError` when a rank was lost in an earlier call.
    """

    def __init__(self, ctx: Iris) -> None:
        self._ctx = ctx
        self._workspace: Workspace | None = None
        self._prepared: dict[tuple, _Prepared] = {}
        self._kernels: dict[tuple, object] = {}
        self._repeats: dict[tuple, tuple] = {}

    def matmul_all_reduce(self, out, A, B, bias=None, async_op=False, config=None, workspace=None) -> Workspace:
        """`out [M,N] = sum over ranks of A [M,K] @ B [K,N] + bias [N]`."""
        return self._call(ALL_REDUCE, out, A, B, bias, async_op, config, workspace)

    def all_gather_matmul(self, out, A, B, bias=None, async_op=False, config=None, workspace=None) -> Workspace:
        """`out [M,N] = gather(A) @ B [K,N] + bias [N]`; A is [M/w,K], gathered by rows, or [M,K/w], along K."""
        return self._call(GATHER_MATMUL, out, A, B, bias, async_op, config, workspace)

    def matmul_all_gather(self, out, A, B, bias=None, async_op=False, config=None, workspace=None) -> Workspace:
        """`out [M,N] = gather(A @ B + bias)`: A [M/w,K], B [K,N], by rows, or A [M,K], B [K,N/w], by columns.

        By columns, `bias` is [N/w], this rank's part.
        """
        return self._call(MATMUL_GATHER, out, A, B, bias, async_op, config, workspace)

    def matmul_reduce_scatter(self, out, A, B, bias=None, async_op=False, config=None, workspace=None) -> Workspace:
        """This rank's part of `sum over ranks of A [M,K] @ B [K,N] + bias [N]`: out is [M/w,N] or [M,N/w]."""
        return self._call(REDUCE_SCATTER, out, A, B, bias, async_op, config, workspace)

    def plan(self, op: str, M: int, N: int, K: int, dtype: torch.dtype, form: str | None = None) -> FusedConfig:
        """The configuration that a call would use, with its reasons and predicted time; launches nothing.

        `M`, `N`: of the whole result; `K`: the depth that one rank multiplies. `form`: "rows", "cols" or "k" for an op
        that has several (by default rows).
        """
        return self._plan(problem_asked(op, M, N, K, self._ctx.num_ranks, dtype, form))

    def forget_repeats(self) -> None:
        """Calls are launched anew: their kernels or the memory that they use have changed."""
        self._repeats.clear()

    def join(self) -> None:
        """Makes the current stream wait for calls with `async_op=True`."""
        self._ctx._side.join()

    def _plan(self, problem: Problem) -> FusedConfig:
        return plan(problem, launch.machine(self._ctx.device))

    def _call(self, op, out, A, B, bias, async_op, config, workspace) -> Workspace:
        ctx = self._ctx
        ctx.check()
        key = None if async_op else self._key(op, out, A, B, bias, config, workspace)
        if key in self._repeats:
            again, target, workspace = self._repeats[key]
            self.join()
            if again():
                if target is not None:
                    out.copy_(target)
                return workspace
        check_tensors(op, out, A, B, bias, ctx.device)
        if config is not None and not isinstance(config, FusedConfig):
            raise ArgumentError(f"{op}: config is {type(config).__name__}; expected an iris_ops.FusedConfig")
        shapes = (op, out.shape, A.shape, B.shape, A.dtype, config)
        prepared = self._prepared.get(shapes)
        if prepared is None:
            if len(self._prepared) >= _KEPT:
                self._prepared.clear()
            prepared = self._prepared[shapes] = self._prepare(op, out, A, B, config)
        check_bias(op, bias, B)
        if bias is not None and bias.stride(0) != 1:
            bias, key = bias.contiguous(), None  # elsewhere in each call
        if workspace is None:
            if self._workspace is None:
                self._workspace = Workspace(ctx)
            workspace = self._workspace
        elif not isinstance(workspace, Workspace) or workspace.ctx is not ctx:
            raise ArgumentError(f"{op}: workspace is {workspace!r}; expected one that an op of this context returned")
        problem, direct = prepared.problem, True
        if problem.empty:
            return workspace
        if launch.writes_to_peers(problem, prepared.config):
            direct = ctx.is_symmetric(out)
        nbytes = prepared.nbytes + (0 if direct else problem.M * problem.N * problem.dtype.itemsize)
        if workspace.reserve(prepared.num_flags, nbytes, prepared.exchange):
            self._repeats.clear()  # they go to memory that graphs may use still, but calls no longer

        def go() -> None:
            target = out
            if not direct:
                target = workspace.staging[prepared.nbytes : nbytes].view(out.dtype).view(out.shape)
            again = launch.launch(self._kernels, ctx, workspace, problem, prepared.config, target, A, B, bias)
            if not direct:
                out.copy_(target)
            if again and key:
                if len(self._repeats) >= _KEPT:
                    self._repeats.clear()
                self._repeats[key] = again, None if direct else target, workspace

        if async_op and ctx.device.type == "cuda":
            workspace._done = ctx._side.run(go, out, A, B, bias)
        else:
            self.join()
            go()
        ctx.check()
        return workspace

    def _key(self, op, out, A, B, bias, config, workspace) -> tuple | None:
        """What a call comes down to: one with the same key passes the same checks and launches the same."""
        if workspace is None:
            workspace = self._workspace
        try:
            tensors = repeat.address(out), repeat.address(A), repeat.address(B), repeat.address(bias)
            key = op, tensors, config, workspace, torch.is_grad_enabled()
            hash(key)
        except (AttributeError, RuntimeError, TypeError):  # wrong arguments: the checks will say so
            return None
        return key

    def _prepare(self, op: str, out, A, B, config: FusedConfig | None) -> _Prepared:
        problem = describe(op, out, A, B, self._ctx.cur_rank, self._ctx.num_ranks)
        chosen = config or self._plan(problem)
        if chosen.algorithm == "two_shot" and op != ALL_REDUCE:
            raise ArgumentError(f"{op}: config.algorithm is 'two_shot', which is for {ALL_REDUCE}; expected 'one_shot'")
        objection = UNFUSED[chosen.algorithm].objection(problem) if chosen.algorithm in UNFUSED else None
        if objection:
            raise ArgumentError(f"{op}: config.algorithm is {chosen.algorithm!r}; expected another, for {objection}")
        return _Prepared(problem, chosen, *workspace_size(problem, chosen, platform.num_programs(self._ctx.device)))
