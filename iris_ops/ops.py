"""`ctx.ops`: problem -> plan -> workspace -> launch.

A call checks its tensors, looks up what was prepared for their shapes, and launches one kernel, or what an algorithm
with torch's product takes in its place: no word between the hosts, no host synchronisation, and no allocation after the
first call of a problem, but for the graph that several launches become when they come again (`iris/launch/graphs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import proxy

from iris import aliases, platform
from iris.errors import ArgumentError, IrisError, ShapeError
from iris.heap import check_memory, span
from iris.invariance import RANKS
from iris.launch import relaunch
from iris.launch.streams import check_async
import torch

from . import launch
from .calls import NAMES, Prepared, key_of
from .checks import check_bias, check_overlap, check_tensors, warn_of_overflow
from .config import FusedConfig
from .kernels import rmsnorm_epilogue
from .kernels.rmsnorm_epilogue import Epilogue
from .local import gating
from .moe.ops import MixtureOps
from .operands import Operands
from .outputs import NewOutputs
from .planning.asked import asked, planned
from .planning.kernel_names import ends_with_norm
from .planning.machine import machine_of
from .planning.moe_problem import MoeProblem
from .planning.plan import check_order, unaligned
from .planning.torch_ways import TORCH_WAYS
from .planning.workspace_size import workspace_size
from .problem import (
    ALL_REDUCE,
    GATED,
    GATHER_MATMUL,
    MATMUL_GATHER,
    REDUCE_SCATTER,
    Problem,
    describe,
    promised,
)
from .workspace import Workspace

if TYPE_CHECKING:
    from iris.rank import Rank


_KEYWORDS = aliases.keywords(output_tensor="out", A_sharded="A")


class Ops(MixtureOps):
    """The fused operations of one context. All are collective, and every rank makes the same calls in the same order.

    `out`, `A`, `B`, `bias`: device tensors of one dtype (bf16, fp16, fp32); sums are kept in fp32 in a fixed order, so
    results are the same bits on all ranks and in each run. Between ranks partial sums may travel in that dtype, so in
    fp16 each rank's must fit, up to 65504. `bias` is added once: either all ranks pass one or none does, and ranks
    that differ in it return different sums without an error, unless IRIS_DEBUG=1 compares them. B may be contiguous or
    the transpose of a contiguous tensor. `async_op`: runs on a side stream; `workspace.wait()` joins it. `config`: a
    `FusedConfig`, the same on all ranks; None chooses by shapes. Ranks whose K (or, in a gather, N) differs must pass
    one.
    `workspace`: what an earlier call returned. w is the number of ranks; parts are split as `torch.chunk` does.

    Raises `ShapeError`, `DtypeError`, `DeviceError`, `ArgumentError` for bad arguments, `HeapExhausted` when the
    workspace does not fit, `PeerLostError` when a rank was lost in an earlier call.
    """

    def __init__(self, ctx: Rank) -> None:
        super().__init__(ctx)
        self._workspace: Workspace | None = None
        self.kernels: dict[tuple, object] = {}
        self._calls = relaunch.Calls(len(NAMES))
        self._epilogue_calls = relaunch.Calls(len((*NAMES, *rmsnorm_epilogue.EPILOGUE_NAMES)))
        self._device_of = relaunch.device_of(ctx.device)
        this = proxy(self)  # no circle: what holds heap memory goes when the context closes
        self.outputs = NewOutputs(ctx, lambda *call: this._prepare(*call), lambda: this._own_workspace())
        ctx.on_change.append(self.forget_launches)

    @_KEYWORDS
    def matmul_all_reduce(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None, depths: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N] = sum over ranks of A [M,K] @ B [K,N] + bias [N]`.

        With `scale`, float32 [N], B is in `torch.float8_e4m3fn` and stands for `B * scale`, which A's dtype must have
        room for; it holds numbers only. Each rank has its own. Up to 16 rows of bf16, of magnitudes from 2**-61 to
        2**63 or 0, are multiplied as they are, more are rounded to eight bits where the GPU multiplies those.

        `depths`: each rank's K, with `invariant="ranks"`, where they differ. Raises `ShapeError` where a rank's part of
        the whole K ends within a leaf (`iris_ops/sum_tree.py`), and says which parts are possible.
        """
        return self._call(ALL_REDUCE, out, A, B, bias, async_op, config, workspace, scale=scale, depths=depths)

    def matmul_all_reduce_norm(
        self, out: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
        residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
        depths: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N] = residual [M,N] + sum over ranks of A @ B + bias`, and the first half of an RMSNorm of its rows.

        `scaled` [M,N] is `out * weight [N]`; `squares`, float32 [ceil(N/64),M], the sums of `out**2` over 64 columns.
        The norm is `scaled * rsqrt(squares.sum(0) / N + eps)[:,None]`, a factor that a product of `scaled` may apply
        to its own rows. All contiguous, and what is written apart from all else. One kernel where rows are few.
        `scale`, `depths`: as in `matmul_all_reduce`.
        """
        epilogue = residual, weight, scaled, squares
        return self._call(rmsnorm_epilogue.OP, out, A, B, bias, False, config, workspace, epilogue, scale, depths)

    @_KEYWORDS
    def all_gather_matmul(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N] = gather(A) @ B [K,N] + bias [N]`; A is [M/w,K], gathered by rows, or [M,K/w], along K.

        With `scale`, float32 [N], B is in `torch.float8_e4m3fn` and stands for `B * scale`. Gathered rows of bf16 are
        rounded to eight bits, too, where the GPU multiplies those; else B is converted in each call.
        """
        return self._call(GATHER_MATMUL, out, A, B, bias, async_op, config, workspace, scale=scale)

    def all_gather_matmul_gated(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N/2] = silu(C[:,:N/2]) * C[:,N/2:]` of `C [M,N] = gather(A) @ B [K,N] + bias [N]`; A is [M/w,K].

        The first half of a gated MLP whose tokens the ranks share. Where warp-specialised programs multiply
        (`FusedConfig`), neither half is ever written. `scale`: as in `all_gather_matmul`.
        """
        return self._call(GATED, out, A, B, bias, False, config, workspace, scale=scale)

    @_KEYWORDS
    def matmul_all_gather(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N] = gather(A @ B + bias)`: A [M/w,K], B [K,N], by rows, or A [M,K], B [K,N/w], by columns.

        By columns, `bias` is [N/w], this rank's part.
        """
        return self._call(MATMUL_GATHER, out, A, B, bias, async_op, config, workspace)

    @_KEYWORDS
    def matmul_reduce_scatter(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None, depths: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """This rank's part of `sum over ranks of A [M,K] @ B [K,N] + bias [N]`: out is [M/w,N] or [M,N/w].

        `scale`: as in `all_gather_matmul`; each rank has its own. `depths`: as in `matmul_all_reduce`.
        """
        return self._call(REDUCE_SCATTER, out, A, B, bias, async_op, config, workspace, scale=scale, depths=depths)

    def plan(
        self,
        op: str,
        M: int,
        N: int,
        K: int,
        dtype: torch.dtype,
        form: str | None = None,
        explained: bool = True,
        fp8: bool = False,
        algorithm: str | None = None,
        aligned: bool = True,
        experts: int | None = None,
        top_k: int | None = None,
        depths: Sequence[int] | None = None,
    ) -> FusedConfig:
        """The configuration that a call would use, with its kernel, reasons and predicted time; launches nothing.

        `M`, `N`: of the whole result, before it is gated; `K`: the depth that one rank multiplies. `form`: "rows",
        "cols" or "k" for an op that has several (by default rows). `explained`: whether with its reasons, which take
        longer than the choice. `fp8`: whether B is in eight bits. `algorithm`: the best of that one (`FusedConfig`), to
        compare; raises `ArgumentError` where it cannot serve the call. `aligned`: whether all rows of A, B and `out`
        begin at multiples of 16 bytes, as a call sees for itself. `experts`, `top_k` (by default 1): of the ops of a
        mixture, whose `M` is T and whose `N` and `K` are an expert's (of `moe_gate_up`, `N` is I). `depths`: as the op
        takes them.
        """
        self._ctx.check()
        ranks, level = self._ctx.num_ranks, self._ctx.invariant
        problem = asked(op, M, N, K, ranks, dtype, form, fp8, level, experts, top_k, depths)
        found = self._plan(problem, explained, algorithm)
        return found if aligned or not isinstance(problem, Problem) else unaligned(problem, found)

    def _plan(
        self, problem: Problem | MoeProblem, explained: bool = False, algorithm: str | None = None
    ) -> FusedConfig:
        return planned(problem, machine_of(self._ctx.device), explained, algorithm)

    def preamble(
        self, op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None,
        workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """A workspace with room for a call of `op` with such tensors. Collective; multiplies nothing.

        It is `workspace`, what an earlier call returned, or the one that calls take when they are given none.
        """
        self._ctx.check()
        prepared = self._prepare(op, out, A, B, None, config, None, None)
        if workspace is not None:
            self._check_workspace(op, workspace)
        workspace = workspace or self._own_workspace()
        if not prepared.problem.empty and workspace.reserve(prepared.num_flags, prepared.nbytes, prepared.exchange):
            self.forget_launches()
        return workspace

    def forget_launches(self) -> None:
        """Calls are launched anew: their kernels or the memory that they use have changed."""
        self._calls.forget()
        self._epilogue_calls.forget()
        self._mixture.forget()

    def join(self) -> None:
        """Makes the current stream wait for calls with `async_op=True`."""
        self._ctx.side.join()

    def _call(
        self, op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None, async_op: bool,
        config: FusedConfig | None, workspace: Workspace | None, epilogue: Epilogue | None = None,
        scale: torch.Tensor | None = None, depths: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        ctx, calls = self._ctx, self._calls if epilogue is None else self._epilogue_calls
        ctx.check()
        own = self._workspace if workspace is None else workspace
        key = key_of(op, self._device_of, out, A, B, bias, config, own, epilogue, scale, depths)
        try:
            known = calls.known.get(key)
        except TypeError:  # a wrong argument that has no hash
            key = known = None
        if known and async_op is False and ctx.agreement is None:
            again, target, workspace = known
            ctx.side.join()
            if again():
                if target is not None:
                    out.copy_(target)
                return workspace
        return self._make(calls, key, op, out, A, B, bias, async_op, config, workspace, epilogue, scale, depths)

    def _make(
        self, calls: relaunch.Calls, key: tuple | None, op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
        bias: torch.Tensor | None, async_op: bool, config: FusedConfig | None, workspace: Workspace | None,
        epilogue: Epilogue | None, scale: torch.Tensor | None, depths: Sequence[int] | None,
    ) -> Workspace:  # fmt: skip
        """A call that cannot be repeated as it is."""
        ctx = self._ctx
        try:
            check_async(op, async_op)
            prepared = calls.prepared(key, lambda: self._prepare(op, out, A, B, bias, config, epilogue, scale, depths))
            problem, addresses = prepared.problem, calls.addresses(key)
            if workspace is not None:
                self._check_workspace(op, workspace)
            if epilogue is None:
                check_memory(op, NAMES, addresses, prepared.spans)
                check_overlap(op, addresses, prepared.spans)
            else:
                rmsnorm_epilogue.check_places((*NAMES, *rmsnorm_epilogue.EPILOGUE_NAMES), addresses, prepared.spans)
        except IrisError as error:
            ctx.tell_refusal(op, None, error)
            raise
        if bias is not None and bias.stride(0) != 1:
            bias, key = bias.contiguous(), None  # elsewhere in each call
        if op == MATMUL_GATHER and problem.form == "rows" and B.shape[1] < problem.N:
            # one element in all, gathered by columns and taken as by rows (`describe`): this rank has none of those
            A, B, bias, key = A[:0], A.t(), None, None
        direct = not prepared.writes_to_peers or ctx.heap.holds(addresses[0], addresses[0] + prepared.spans[0])
        if ctx.agreement is not None:
            own = workspace is None or workspace is self._workspace
            there = None if own or workspace is None else ctx.heap.offset(workspace.sync)
            place = ctx.heap.offset(out)
            own_place = direct and not ctx.hands_out(place)
            ctx.compare(op, **prepared.facts(bias is not None, async_op, there, place if own_place else None))
        workspace = workspace or self._own_workspace()
        if problem.empty:
            return workspace
        grown, staged = True, None
        try:
            grown = workspace.reserve(prepared.num_flags, prepared.nbytes, prepared.exchange)
            if not direct:
                nbytes = problem.M * problem.N * problem.dtype.itemsize
                staged = workspace.results(nbytes).view(out.dtype).view(out.shape)
        finally:  # where there was no room for all of it, some has grown all the same
            if grown:
                self.forget_launches()  # calls go to memory that graphs may use still, but they no longer
        inside = epilogue if epilogue and ends_with_norm(problem, prepared.config) else None
        halves = problem.gated and not launch.gates(prepared.config)  # both are written, and gated behind the product
        if epilogue is not inside or halves:
            key = None  # a launch alone would not be the whole call
        came_before = key in calls.known and not async_op

        def go() -> None:
            again, launched = calls.moved(key, direct), None
            target = out if staged is None else staged
            if halves:
                target = out.new_empty(problem.M, problem.N)
            if again is None or not again():
                launched = launch.launch(
                    self.kernels, ctx, workspace, problem, prepared.config, Operands(target, A, B, bias, scale),
                    addresses, came_before, inside,
                )  # fmt: skip
                again = launched and launched.again
            if not direct:
                out.copy_(target)
            if epilogue is not None and inside is None:
                rmsnorm_epilogue.finish(out, *epilogue)
            if halves:
                gating.gate(out, target)
            if again or not async_op:  # which leaves alone what is known of the call
                calls.keep(key, again and (again, staged, workspace), launched, direct)

        if async_op and ctx.device.type == "cuda":
            workspace._done = ctx.side.run(go, out, A, B, bias, scale)
        else:
            ctx.side.join()
            go()
            if ctx.agreement is not None:
                warn_of_overflow(ctx, op, out, A, B)
        ctx.check()
        return workspace

    def _own_workspace(self) -> Workspace:
        if self._workspace is None:
            self._workspace = Workspace(self._ctx)
        return self._workspace

    def _check_workspace(self, op: str, workspace: object) -> None:
        if not isinstance(workspace, Workspace) or workspace.ctx is not self._ctx:
            raise ArgumentError(f"{op}: workspace is {workspace!r}; expected one that an op of this context returned")

    def _prepare(
        self, op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None,
        config: FusedConfig | None, epilogue: Epilogue | None, scale: torch.Tensor | None,
        depths: Sequence[int] | None = None,
    ) -> Prepared:  # fmt: skip
        """Checks whatever does not depend on addresses, and chooses."""
        device = self._ctx.device
        check_tensors(op, out, A, B, bias, scale, device)
        if config is not None and not isinstance(config, FusedConfig):
            raise ArgumentError(f"{op}: config is {type(config).__name__}; expected an iris_ops.FusedConfig")
        problem = describe(op, out, A, B, self._ctx.cur_rank, self._ctx.num_ranks)
        problem = promised(problem, self._ctx.invariant, depths, bias is not None)
        if problem.depths and problem.depths[self._ctx.cur_rank] != problem.K:
            raise ShapeError(
                f"{op}: A is {tuple(A.shape)} on rank {self._ctx.cur_rank}, whose depths are {problem.depths}; expected"
                f" {problem.depths[self._ctx.cur_rank]} columns"
            )
        if config is not None and problem.invariant == RANKS:
            check_order(problem, config, machine_of(device))
        chosen = config or self.outputs.foreseen(problem) or self._plan(problem)
        if chosen.algorithm == "two_shot" and problem.op != ALL_REDUCE:
            raise ArgumentError(f"{op}: config.algorithm is 'two_shot', which is for {ALL_REDUCE}; expected 'one_shot'")
        reason = TORCH_WAYS[chosen.algorithm].supports(problem) if chosen.algorithm in TORCH_WAYS else None
        if reason:
            raise ArgumentError(f"{op}: config.algorithm is {chosen.algorithm!r}; expected another, for {reason}")
        check_bias(op, bias, B)
        if epilogue is not None:
            rmsnorm_epilogue.check(epilogue, out)
        sizes = workspace_size(problem, chosen, platform.num_programs(device))
        spans = tuple(map(span, (out, A, B, bias, scale, *(epilogue or ()))))
        return Prepared(problem, chosen, launch.writes_to_peers(problem, chosen), *sizes, spans)
