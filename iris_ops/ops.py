"""`ctx.ops`: problem -> plan -> workspace -> launch.

A call checks its tensors, looks up what was prepared for their shapes, and launches one kernel, or what an algorithm
with torch's product takes in its place: no word between the hosts, no host synchronisation, and no allocation after the
first call of a problem, but for the graph that several launches become when they come again (`iris/launch/graphs.py`).
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
from .planning.operations import BY_NAME
from .planning.plan import unaligned
from .planning.weights import named_format
from .problem import ALL_REDUCE, GATED, GATHER_MATMUL, MATMUL_GATHER, NORM, REDUCE_SCATTER, Request, requested_problem
from .workspace import Workspace

if TYPE_CHECKING:
    from iris.rank import Rank


_KEYWORDS = aliases.keywords(output_tensor="out", A_sharded="A", depths="k_per_rank")  # `depths`: its earlier name


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
        self.outputs = NewOutputs(ctx, self._calls)
        ctx.on_change.append(self.forget_launches)

    @_KEYWORDS
    def matmul_all_reduce(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None, k_per_rank: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N] = sum over ranks of A [M,K] @ B [K,N] + bias [N]`.

        With `scale`, B is quantised: the transpose of a stored weight, whose K and scales are as
        `iris_ops/quantised/packing.py` stores them. It stands for numbers that A's dtype must have room for; it holds
        numbers only. Each rank has its own. Up to 16 rows of bf16, in fp8 and MXFP4 of magnitudes from 2**-61 to 2**63
        or 0, are multiplied as they are by the stored weight. With `torch.float8_e4m3fn` and one float32 scale a
        column more rows are rounded to fp8, where the GPU multiplies those. In the other formats B is converted
        to A's dtype in each call for more rows, and on GPUs other than Hopper.

        `k_per_rank`: each rank's K, with `invariant="ranks"`, where they differ. Raises `ShapeError` where a rank's
        part of K ends within a leaf (`iris_ops/sum_tree.py`), and lists the parts that are possible.
        """
        return self._calls.run(ALL_REDUCE, (out, A, B, bias, scale), None, async_op, config, workspace, k_per_rank)

    @_KEYWORDS
    def matmul_all_reduce_norm(
        self, out: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
        residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
        k_per_rank: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N] = residual [M,N] + sum over ranks of A @ B + bias`, and the first half of an RMSNorm of its rows.

        `scaled` [M,N] is `out * weight [N]`; `squares`, float32 [ceil(N/64),M], the sums of `out**2` over 64 columns.
        The norm is `scaled * rsqrt(squares.sum(0) / N + eps)[:,None]`, a factor that a product of `scaled` may apply
        to its own rows. All contiguous, and what is written apart from all else. One kernel where rows are few.
        `scale`, `k_per_rank`: as in `matmul_all_reduce`.
        """
        epilogue = residual, weight, scaled, squares
        return self._calls.run(NORM, (out, A, B, bias, scale), epilogue, False, config, workspace, k_per_rank)

    @_KEYWORDS
    def all_gather_matmul(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N] = gather(A) @ B [K,N] + bias [N]`; A is [M/w,K], gathered by rows, or [M,K/w], along K.

        With `scale`, float32 [N], B is in `torch.float8_e4m3fn` and stands for `B * scale`. Gathered rows of bf16 are
        rounded to fp8, too, where the GPU multiplies those; else B is converted in each call.
        """
        return self._calls.run(GATHER_MATMUL, (out, A, B, bias, scale), None, async_op, config, workspace)

    def all_gather_matmul_gated(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N/2] = silu(C[:,:N/2]) * C[:,N/2:]` of `C [M,N] = gather(A) @ B [K,N] + bias [N]`; A is [M/w,K].

        The first half of a gated MLP whose tokens the ranks share. Where warp-specialised programs multiply
        (`FusedConfig`), neither half is ever written. `scale`: as in `all_gather_matmul`.
        """
        return self._calls.run(GATED, (out, A, B, bias, scale), None, False, config, workspace)

    @_KEYWORDS
    def matmul_all_gather(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """`out [M,N] = gather(A @ B + bias)`: A [M/w,K], B [K,N], by rows, or A [M,K], B [K,N/w], by columns.

        By columns, `bias` is [N/w], this rank's part.
        """
        return self._calls.run(MATMUL_GATHER, (out, A, B, bias, None), None, async_op, config, workspace)

    @_KEYWORDS
    def matmul_reduce_scatter(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None, k_per_rank: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """Return this rank's part of `sum over ranks of A [M,K] @ B [K,N] + bias [N]`: out is [M/w,N] or [M,N/w].

        `scale`: as in `all_gather_matmul`; each rank has its own. `k_per_rank`: as in `matmul_all_reduce`.
        """
        return self._calls.run(REDUCE_SCATTER, (out, A, B, bias, scale), None, async_op, config, workspace, k_per_rank)

    @_KEYWORDS
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
        k_per_rank: Sequence[int] | None = None,
        weights: str | None = None,
    ) -> FusedConfig:
        """Return the configuration of such a call, with kernel, reasons and predicted time; launch nothing.

        `M`, `N`: of the whole result, before it is gated; `K`: the depth that one rank multiplies. `form`: "rows",
        "cols" or "k" for an op that has several (by default rows). `explained`: whether with its reasons, which take
        longer than the choice. `fp8`: whether B is in fp8, with a scale a column. `algorithm`: the best of that one
        (`FusedConfig`), to compare; raises `ArgumentError` where it cannot serve the call. `aligned`: whether all rows
        of A, B and `out` begin at multiples of 16 bytes, as a call sees for itself. `experts`, `top_k` (by default 1):
        of the ops of a mixture, whose `M` is T and whose `N` and `K` are an expert's (of `moe_gate_up`, `N` is I).
        `k_per_rank`: as the op takes it. `weights`: B's format by name, such as "fp8_block", "int4" (groups of 32),
        "int4/128", "int4/channel" or "mxfp4".
        """
        self._ctx.check()
        ranks, level = self._ctx.num_ranks, self._ctx.invariant
        stored = named_format(weights, fp8)
        request = Request(op, M, N, K, ranks, dtype, form, stored, level, experts, top_k, k_per_rank)
        problem = requested_problem(request)
        config = self._calls.plan(problem, explained, algorithm)
        return config if aligned else unaligned(problem, config)

    def preamble(
        self, op: str, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, config: FusedConfig | None = None,
        workspace: Workspace | None = None,
    ) -> Workspace:  # fmt: skip
        """Return a workspace with room for a call of `op` with such tensors. Collective; multiplies nothing.

        It is `workspace`, what an earlier call returned, or the one that calls take when they are given none.
        """
        self._ctx.check()
        prepared = self._calls.prepare(Call(op, Operands(out, A, B), config=config))
        if workspace is not None:
            self._calls.check_workspace(op, workspace)
        workspace = workspace or self._calls.own_workspace()
        if not prepared.problem.empty:
            self._calls.reserve(workspace, prepared.sizes)
        return workspace

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
                self._calls.run(name, (out, A, B, bias, scale), None, async_op, config, workspace)
            )
