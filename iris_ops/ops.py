"""`ctx.ops`: problem -> plan -> workspace -> launch.

A call checks its tensors, looks up what was prepared for their shapes, and launches one kernel; an algorithm with
torch's product launches several. After the first call of a problem, the ranks exchange nothing on the host, the host
waits for no device, and nothing is allocated, except the CUDA graph that several launches become when they are repeated
(`iris/launch/graphs.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from iris import aliases
import torch

from .calls import Call
from .config import FusedConfig
from .moe.ops import MixtureOps
from .operands import Operands
from .outputs import NewOutputs
from .planning.operations import ALL_REDUCE, BY_NAME, GATED, GATHER_MATMUL, MATMUL_GATHER, NORM, REDUCE_SCATTER
from .planning.plan import unaligned
from .planning.weights import named_format
from .workspace import Workspace

if TYPE_CHECKING:
    from iris.rank import Rank


_KEYWORDS = aliases.keywords(output_tensor="out", A_sharded="A", depths="k_per_rank")  # `depths`: its earlier name


class Ops(MixtureOps):
    """Run the fused operations of one context. All are collective: every rank makes the same calls in the same order.

    `out`, `A`, `B` and `bias` are device tensors of one dtype: bfloat16, float16 or float32. B may be contiguous or the
    transpose of a contiguous tensor. Below, w is the number of ranks; parts are those of `torch.chunk`.

    Sums are accumulated in float32 in a fixed order, so all ranks hold the same bits, in each run. Partial sums travel
    between ranks in the tensors' dtype, so in float16 each rank's must not exceed 65504.

    Args:
        ctx: the context.
        bias: is added once. Either all ranks pass one or none does; ranks that differ in it return different sums
            without an error, unless IRIS_DEBUG=1 compares them.
        async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
        config: a `FusedConfig`, the same on all ranks; None chooses one by shapes. If ranks differ in K, or in a
            gather in N, they must pass one.
        workspace: the result of an earlier call.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: for bad arguments.
        HeapExhausted: if the workspace does not fit on the heap.
        PeerLostError: if a rank was lost in an earlier call.
    """

    def __init__(self, ctx: Rank) -> None:
        super().__init__(ctx)
        self.outputs = NewOutputs(ctx, self._calls)
        ctx.on_change.append(self.forget_launches)

    @_KEYWORDS
    def matmul_all_reduce(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None, k_per_rank: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out = sum over ranks of A @ B + bias`.

        Args:
            out: [M, N].
            A: [M, K].
            B: [K, N]; K may differ between ranks, with `k_per_rank`. With `scale`, the transpose of a quantised weight,
                as `iris_ops/quantised/packing.py` stores it. All its numbers must be finite and fit in A's dtype.
            bias: [N].
            async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call; None for the context's own.
            scale: the scales of a quantised B, each rank's own. On Hopper few rows of bfloat16 are multiplied by the
                stored weight; with fp8 and MXFP4, A's magnitudes must then be 0 or from 2**-61 to 2**63. With one
                float32 scale a column and `torch.float8_e4m3fn`, more rows are rounded to fp8, if the GPU multiplies
                those. Otherwise each call converts B to A's dtype.
            k_per_rank: each rank's K, if they differ, so that all ranks plan alike. Ranks that plan by their own K
                alone may choose different exchanges: then a call ends in a time-out, or its result is wrong.

        Returns:
            The workspace of the call.

        Raises:
            ShapeError: also if a rank's part of K ends inside a leaf (`iris_ops/sum_tree.py`), with the parts that are
                possible.
        """
        return self._calls.run(ALL_REDUCE, Operands(out, A, B, bias, scale), async_op, config, workspace, k_per_rank)

    @_KEYWORDS
    def matmul_all_reduce_norm(
        self, out: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
        residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
        k_per_rank: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out = residual + sum over ranks of A @ B + bias`, and the first half of an RMSNorm of its rows.

        The norm is `scaled * rsqrt(squares.sum(0) / N + eps)[:, None]`; a product of `scaled` may apply that factor to
        its own rows instead. All tensors are contiguous, and those that are written overlap no other. For few rows
        this is one kernel.

        Args:
            out: [M, N].
            scaled: [M, N], receives `out * weight`.
            squares: float32 [ceil(N / 64), M], receives the sums of `out**2` over 64 columns each.
            A: [M, K].
            B: [K, N].
            residual: [M, N], the same values on all ranks.
            weight: [N], the norm's weight.
            bias: [N].
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call; None for the context's own.
            scale: as in `matmul_all_reduce`.
            k_per_rank: as in `matmul_all_reduce`.

        Returns:
            The workspace of the call.
        """
        tensors, epilogue = Operands(out, A, B, bias, scale), (residual, weight, scaled, squares)
        return self._calls.run(NORM, tensors, False, config, workspace, k_per_rank, epilogue)

    @_KEYWORDS
    def all_gather_matmul(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out = gather(A) @ B + bias`.

        Args:
            out: [M, N].
            A: [M / w, K], gathered by rows, or [M, K / w], gathered along K.
            B: [K, N]. With `scale`, in `torch.float8_e4m3fn`.
            bias: [N].
            async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call; None for the context's own.
            scale: float32 [N], by which B's columns are multiplied. Gathered rows of bfloat16 are rounded to fp8, too,
                if the GPU multiplies fp8; otherwise each call converts B.

        Returns:
            The workspace of the call.
        """
        return self._calls.run(GATHER_MATMUL, Operands(out, A, B, bias, scale), async_op, config, workspace)

    def all_gather_matmul_gated(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out = silu(C[:, :N/2]) * C[:, N/2:]` for `C [M, N] = gather(A) @ B + bias`.

        This is the first half of a gated MLP whose tokens the ranks share. Warp-specialised kernels write neither half
        of C.

        Args:
            out: [M, N / 2].
            A: [M / w, K].
            B: [K, N].
            bias: [N].
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call; None for the context's own.
            scale: as in `all_gather_matmul`.

        Returns:
            The workspace of the call.
        """
        return self._calls.run(GATED, Operands(out, A, B, bias, scale), False, config, workspace)

    @_KEYWORDS
    def matmul_all_gather(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out = gather(A @ B + bias)`.

        Args:
            out: [M, N].
            A: [M / w, K] to gather by rows, or [M, K] to gather by columns.
            B: [K, N] to gather by rows, or [K, N / w] to gather by columns.
            bias: [N], or [N / w], this rank's part, to gather by columns.
            async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call; None for the context's own.

        Returns:
            The workspace of the call.
        """
        return self._calls.run(MATMUL_GATHER, Operands(out, A, B, bias), async_op, config, workspace)

    @_KEYWORDS
    def matmul_reduce_scatter(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None, k_per_rank: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute this rank's part of `sum over ranks of A @ B + bias`.

        Args:
            out: [M / w, N] or [M, N / w].
            A: [M, K].
            B: [K, N].
            bias: [N].
            async_op: whether the call runs on a side stream; `workspace.wait()` makes the current stream wait for it.
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call; None for the context's own.
            scale: as in `all_gather_matmul`; each rank has its own.
            k_per_rank: as in `matmul_all_reduce`.

        Returns:
            The workspace of the call.
        """
        tensors = Operands(out, A, B, bias, scale)
        return self._calls.run(REDUCE_SCATTER, tensors, async_op, config, workspace, k_per_rank)

    @_KEYWORDS
    def plan(
        self, op: str, M: int, N: int, K: int, dtype: torch.dtype, form: str | None = None, explained: bool = True,
        fp8: bool = False, algorithm: str | None = None, aligned: bool = True, experts: int | None = None,
        top_k: int | None = None, k_per_rank: Sequence[int] | None = None, weights: str | None = None,
    ) -> FusedConfig:  # fmt: skip
        """Return the configuration of a call, with its kernel, its reasons and its predicted time; launch nothing.

        Args:
            op: the name of an op.
            M: rows of the whole result; for a mixture, the number of tokens.
            N: columns of the whole result, before an epilogue; for a mixture, those of an expert's result
                (`moe_gate_up`: I).
            K: the inner size of the product that one rank computes.
            dtype: the tensors' dtype.
            form: "rows", "cols" or "k", for an op that has several; by default "rows".
            explained: whether to list the reasons, which takes longer than the choice.
            fp8: whether B is in fp8, with a scale for each column.
            algorithm: the algorithm (`FusedConfig.algorithm`) whose best configuration is returned, for comparisons.
            aligned: whether all rows of A, B and `out` begin at multiples of 16 bytes, which a call finds out by
                itself.
            experts: the number of experts, for the ops of mixtures.
            top_k: experts of a token, by default 1.
            k_per_rank: as the op takes it.
            weights: B's format by name, such as "fp8_block", "int4" (groups of 32), "int4/128", "int4/channel" or
                "mxfp4".

        Raises:
            ArgumentError: for bad arguments, and for an `algorithm` that does not support the call.
        """
        self._ctx.check()
        more = dict(form=form, weights=named_format(weights, fp8), k_per_rank=k_per_rank, experts=experts, top_k=top_k)
        problem = self._calls.requested(op, M, N, K, dtype, **more)
        config = self._calls.plan(problem, explained, algorithm)
        return config if aligned else unaligned(problem, config)

    def preamble(
        self, op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None,
        workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """Return a workspace with room for a call of `op` with these tensors; multiply nothing. Collective.

        Args:
            op: the name of an op.
            out: as in the op.
            A: as in the op.
            B: as in the op.
            config: a `FusedConfig`, the same on all ranks; None plans one.
            workspace: the result of an earlier call, which is returned; None for the one that calls use by default.

        Raises:
            ShapeError, DtypeError, DeviceError, ArgumentError: for bad arguments.
            HeapExhausted: if the workspace does not fit on the heap.
        """
        self._ctx.check()
        call = Call(op, Operands(out, A, B), config=config, workspace=workspace)
        prepared = self._calls.prepare(call)
        self._calls.check_workspace(op, workspace)
        return self._calls.room(call, prepared)

    def forget_launches(self) -> None:
        """Forget known launches: their kernels or the memory that they use have changed."""
        self._calls.earlier.forget()

    def join(self) -> None:
        """Make the current stream wait for calls with `async_op=True`."""
        self._ctx.side.join()

    if not TYPE_CHECKING:  # a type checker is to see the methods alone

        def __getattr__(self: Ops, name: str) -> Callable[..., Workspace]:
            """Return an op that has no method here, with the parameters of `all_gather_matmul`."""
            if name not in BY_NAME:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return lambda out, A, B, bias=None, async_op=False, config=None, workspace=None, scale=None: (
                self._calls.run(name, Operands(out, A, B, bias, scale), async_op, config, workspace)
            )
