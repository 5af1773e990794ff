"""`ctx.ops` of a context with `across`: sums over the ranks of all hosts, in which only shares leave a host.

    matmul_all_reduce       our matmul_reduce_scatter inside each host, torch.distributed's all-reduce of this rank's
                            share across hosts, our all-gather inside. Few rows are reduced whole, without a gather
    matmul_all_reduce_norm  the same, then the norm's first half in a kernel of its own
    matmul_reduce_scatter   ours inside, once for the part of each host, then a reduce-scatter of the shares across
    all_gather_matmul       of rows: an all-gather across, then ours inside, once for the rows of each host
    matmul_all_gather       torch's product, then an all-gather across, and ours inside
    moe_down_all_reduce     as matmul_all_reduce, with our moe_down_reduce_scatter or moe_down_all_reduce inside
    moe_route, moe_choose, moe_gate_up    the context's own: no rank is involved

So each rank's network link carries its share of the result only: with w ranks on a host, the w-th part of what an
all-reduce over all ranks that ignores hosts would send there. Ranks are counted host by host, as in the whole world of
a mesh (hosts, tp). Between hosts sums travel in the dtype of `out`.

Waits for other hosts end by IRIS_TIMEOUT because the host watches them. CUDA graphs capture these ops where the group
across hosts is NCCL's; after a replay, `ctx.across.watch()` lets the host watch that one. Other ops stay inside a host:
only `ctx.ops.inside` has them, because a sum over one host in place of all hosts would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, cast

from iris import platform
from iris.ccl.hierarchical import HierarchicalCollectives
from iris.errors import ArgumentError, CaptureError, ShapeError
from iris.machines import machine_of
import torch
from torch.nn import functional

from .kernels import rmsnorm_epilogue
from .ops import Ops
from .planning.hosts import SCATTER, HostsPlan, Network, faster_sum, plan_all_reduce, plan_reduce_scatter
from .planning.needs import PLAIN, WeightFormat
from .planning.operations import DOWN_ALL_REDUCE
from .problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER

if TYPE_CHECKING:
    from iris.rank import Rank

    from .config import FusedConfig
    from .moe.routing import Routing
    from .workspace import Workspace


def ops_of(ctx: Rank) -> Ops:
    """Return the ops of a context: hierarchical ones where it was made with `across`."""
    return Ops(ctx) if ctx.across is None else cast(Ops, HierarchicalOps(ctx))


class HierarchicalOps:
    """Ops over the ranks of several hosts. All are collective, over all ranks of all hosts.

    `config` of a sum: a `HostsPlan`, or a `FusedConfig` for the op inside a host that the plan names. Ranks whose K
    differ must pass a `HostsPlan`, the same on all ranks. `inside`: the ops over the ranks of this host.
    """

    def __init__(self, ctx: Rank) -> None:
        assert ctx.across is not None and ctx.across_rate is not None
        self._ctx, self._line = ctx, ctx.across
        self._network = Network(ctx.across.size, ctx.across_rate.gbs, ctx.across_rate.hop_us)
        self._rooms: dict[torch.dtype, torch.Tensor] = {}
        self._captured: dict[int, torch.Tensor] = {}
        self._collectives = HierarchicalCollectives(ctx)
        self._calls = _Calls(self)
        self._plans: dict[tuple, HostsPlan] = {}
        self.inside, self.outputs = Ops(ctx), _Outputs()

    def matmul_all_reduce(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | HostsPlan | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out [M, N] = sum over the ranks of all hosts of A [M, K] @ B [K, N] + bias [N]`.

        The other arguments and errors are those of `Ops`; `async_op` must be False.
        """
        M, N = self._check(ALL_REDUCE, out, A, B, async_op)
        if out.shape != (M, N):
            raise ShapeError(f"{ALL_REDUCE}: out is {tuple(out.shape)}; expected {(M, N)}")
        bias = self._once(bias)
        plan, config = self._planned(ALL_REDUCE, (M, N, A.shape[1]), out.dtype, config)
        inside = self.inside.matmul_reduce_scatter if plan.way == SCATTER else self.inside.matmul_all_reduce
        return self._sum_of_hosts(
            ALL_REDUCE, plan.way, out, lambda part: inside(part, A, B, bias, False, config, workspace, scale)
        )

    def moe_route(self, experts: torch.Tensor, num_experts: int) -> Routing:
        """Return what `Ops.moe_route` does."""
        return self.inside.moe_route(experts, num_experts)

    def moe_choose(self, *given: Any, **named: Any) -> tuple[Routing, torch.Tensor]:
        """Return what `Ops.moe_choose` does."""
        return self.inside.moe_choose(*given, **named)

    def moe_gate_up(self, *given: Any, **named: Any) -> Workspace:
        """Compute what `Ops.moe_gate_up` does, from this rank's part of the experts."""
        return self.inside.moe_gate_up(*given, **named)

    def moe_down_all_reduce(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, experts: torch.Tensor | Routing,
        weights: torch.Tensor, bias: torch.Tensor | None = None, shared: torch.Tensor | None = None,
        config: FusedConfig | None = None, workspace: Workspace | None = None, scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute what `Ops.moe_down_all_reduce` does, with the sum over the ranks of all hosts.

        Arguments and errors are those of `Ops`; `bias` is added once. `config`: for the op inside a host.
        """
        self._check_call(DOWN_ALL_REDUCE, out=out, A=A)
        bias = self._once(bias)
        size = out.numel() * out.element_size()
        way = faster_sum(size, self._ctx.num_ranks, self._network, machine_of(self._ctx.device))
        inside = self.inside.moe_down_reduce_scatter if way == SCATTER else self.inside.moe_down_all_reduce
        return self._sum_of_hosts(
            DOWN_ALL_REDUCE, way, out,
            lambda part: inside(part, A, B, experts, weights, bias, shared, config, workspace, scale),
        )  # fmt: skip

    def matmul_reduce_scatter(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | HostsPlan | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Return this rank's rows of the sum over the ranks of all hosts of `A [M,K] @ B [K,N] + bias [N]`.

        `out`: as `torch.chunk` splits M rows over all ranks, counted host by host. Other arguments and errors as in
        `matmul_all_reduce`.
        """
        M, N = self._check(REDUCE_SCATTER, out, A, B, async_op)
        hosts, ranks = self._line.size, self._ctx.num_ranks
        rows, first, stop = self._chunk(M)
        own = stop - first
        if out.shape != (own, N):
            raise ShapeError(
                f"{REDUCE_SCATTER}: out is {tuple(out.shape)}; expected {(own, N)}, this rank's rows of {M}"
            )
        bias, per_host = self._once(bias), ranks * rows
        config = config.inside if isinstance(config, HostsPlan) else config
        shares = self._room(hosts * rows, N, out.dtype).view(hosts, rows, N)
        for host, share in enumerate(shares):
            block = A[host * per_host : (host + 1) * per_host]
            if block.shape[0] < per_host:  # zeros follow the last row, so that all parts have equally many
                block = functional.pad(block, (0, 0, 0, per_host - block.shape[0]))
            workspace = self.inside.matmul_reduce_scatter(share, block, B, bias, False, config, workspace, scale)
        result = out.new_empty(rows, N)
        self._line.reduce_scatter(result, shares.view(hosts * rows, N), REDUCE_SCATTER)
        out.copy_(result[:own])
        assert workspace is not None
        return workspace

    def matmul_all_reduce_norm(
        self, out: torch.Tensor, scaled: torch.Tensor, squares: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
        residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        config: FusedConfig | HostsPlan | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None, k_per_rank: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute what `Ops.matmul_all_reduce_norm` does, with the sum over the ranks of all hosts."""
        rmsnorm_epilogue.check((residual, weight, scaled, squares), out)
        workspace = self.matmul_all_reduce(out, A, B, bias, False, config, workspace, scale)
        rmsnorm_epilogue.finish(out, residual, weight, scaled, squares)
        return workspace

    def all_gather_matmul(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out [M, N] = gather(A) @ B [K, N] + bias [N]` of all ranks' rows A, M divided as by `torch.chunk`.

        Other arguments and errors are those of `Ops`; A is not gathered along K, and `async_op` must be False.
        """
        own, N = self._check(GATHER_MATMUL, out, A, B, async_op)
        hosts, ranks, M = self._line.size, self._ctx.num_ranks, out.shape[0]
        rows, first, stop = self._chunk(M)
        if A.shape != (stop - first, B.shape[0]) or out.shape[1] != N:
            raise ShapeError(
                f"{GATHER_MATMUL}: A is {tuple(A.shape)} and out {tuple(out.shape)}; expected {stop - first} of {M} "
                f"rows with {B.shape[0]} columns, and {N} columns of out"
            )
        lines = A.new_empty(hosts * rows, A.shape[1])
        self._line.all_gather(lines, functional.pad(A, (0, 0, 0, rows - own)).contiguous(), GATHER_MATMUL)
        whole = out.new_empty(hosts, ranks * rows, N)
        for part, block in zip(whole, lines.view(hosts, rows, A.shape[1]), strict=True):
            workspace = self.inside.all_gather_matmul(part, block, B, bias, False, config, workspace, scale)
        out.copy_(whole.view(hosts * ranks * rows, N)[:M])
        assert workspace is not None
        return workspace

    def matmul_all_gather(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
    ) -> None:  # fmt: skip
        """Compute `out [M, N] = gather(A [M, K] @ B [K, N/w] + bias [N/w])` along the columns of all w ranks.

        Columns are divided as by `torch.chunk`. Raises as `Ops`; rows are not gathered, and `async_op` must be False.
        """
        M, own = self._check(MATMUL_GATHER, out, A, B, async_op)
        N = out.shape[1]
        columns, first, stop = self._chunk(N)
        if own != stop - first or out.shape[0] != M:
            raise ShapeError(
                f"{MATMUL_GATHER}: B is {tuple(B.shape)} and out {tuple(out.shape)}; expected {stop - first} of {N} "
                f"columns, and {M} rows of out"
            )
        part = A @ B if bias is None else torch.addmm(bias, A, B)
        gathered = self._collectives.gathered(functional.pad(part, (0, columns - own)))  # [hosts, ranks, M, columns]
        out.copy_(gathered.permute(2, 0, 1, 3).flatten(1)[:, :N])

    def plan(self, op: str, M: int, N: int, K: int, dtype: torch.dtype, explained: bool = True) -> HostsPlan:
        """Return how a call over all hosts would be computed, with reasons and predicted times; launches nothing."""
        self._ctx.check()
        if op not in (ALL_REDUCE, REDUCE_SCATTER):
            raise ArgumentError(
                f"plan: op is {op!r} on a context with across: expected {ALL_REDUCE} or {REDUCE_SCATTER}; "
                "ctx.ops.inside.plan plans other ops inside a host"
            )
        return self._plan(op, M, N, K, dtype, explained)

    def join(self) -> None:
        """Make the current stream wait for calls of `inside` with `async_op=True`."""
        self.inside.join()

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_") or not hasattr(Ops, name):
            raise AttributeError(name)
        return _refuse(name)

    def _planned(
        self, op: str, sizes: tuple[int, int, int], dtype: torch.dtype, config: FusedConfig | HostsPlan | None
    ) -> tuple[HostsPlan, FusedConfig | None]:
        """Return the plan of a call, and the configuration of the op inside a host that was passed."""
        if isinstance(config, HostsPlan):
            return config, config.inside
        key = op, *sizes, dtype
        if key not in self._plans:
            self._plans[key] = self._plan(*key, False)
        return self._plans[key], config

    def _plan(
        self, op: str, M: int, N: int, K: int, dtype: torch.dtype, explained: bool, weights: WeightFormat = PLAIN
    ) -> HostsPlan:
        ranks, network, nbytes = self._ctx.num_ranks, self._network, M * N * dtype.itemsize

        def inside(of: str, rows: int) -> FusedConfig:
            return self._plan_inside(of, rows, N, K, dtype, weights, explained)

        if op == REDUCE_SCATTER:
            return plan_reduce_scatter(nbytes, ranks, network, inside(op, -(-M // network.hosts)))
        scattered, reduced = (inside(of, M) for of in (REDUCE_SCATTER, ALL_REDUCE))
        return plan_all_reduce(nbytes, ranks, network, machine_of(self._ctx.device), scattered, reduced)

    def _plan_inside(
        self, op: str, M: int, N: int, K: int, dtype: torch.dtype, weights: WeightFormat, explained: bool
    ) -> FusedConfig:
        calls = self.inside._calls
        return calls.plan(calls.requested(op, M, N, K, dtype, weights=weights), explained)

    def _chunk(self, total: int) -> tuple[int, int, int]:
        """Return the size of a full part of `total`, and where this rank's begins and ends, as `torch.chunk` has it."""
        ranks = self._ctx.num_ranks
        part = -(-total // (self._line.size * ranks))
        rank = self._line.rank * ranks + self._ctx.cur_rank
        return part, min(total, rank * part), min(total, (rank + 1) * part)

    def _check(self, op: str, out: Any, A: Any, B: Any, async_op: Any) -> tuple[int, int]:
        if async_op is not False:
            raise ArgumentError(
                f"{op}: async_op is {async_op!r}; expected False with across, because the host waits for transfers"
            )
        self._check_call(op, out=out, A=A, B=B)
        return A.shape[0], B.shape[1]

    def _check_call(self, op: str, **matrices: Any) -> None:
        self._ctx.check()
        self._line.check()
        if platform.is_capturing(self._ctx.device) and not self._line.capturable:
            raise CaptureError(
                f"{op} is captured in a CUDA graph, and the group across hosts is one of {self._line.backend}: "
                "expected one of NCCL, whose calls a graph can hold"
            )
        for name, tensor in matrices.items():
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ShapeError(f"{op}: {name} is {shape}; expected a tensor of two dimensions")

    def _sum_of_hosts(
        self, op: str, way: str, out: torch.Tensor, inside: Callable[[torch.Tensor], Workspace]
    ) -> Workspace:
        """Fill `out` [M, N] with the sum over all hosts of what `inside` computes.

        `inside` fills its argument: by the way `SCATTER` with this rank's rows of the host's sum, else with all rows.
        """
        (M, N), ranks, rank = out.shape, self._ctx.num_ranks, self._ctx.cur_rank
        if way != SCATTER or M == 0:
            workspace = inside(out)
            self._sum(out, op)
            return workspace
        rows = -(-M // ranks)
        whole = self._room(ranks * rows, N, out.dtype)
        share = whole[rank * rows : (rank + 1) * rows]
        own = max(0, min(rows, M - rank * rows))
        share[own:].zero_()
        workspace = inside(share[:own])
        self._line.all_reduce(share, op)
        collectives: Any = self._ctx
        collectives.ccl.all_gather(whole, share)
        out.copy_(whole[:M])
        return workspace

    def _once(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return `bias` on the first host, whose ranks add it once, and zeros elsewhere, so that all hosts run one
        program."""
        return bias if bias is None or self._line.rank == 0 else torch.zeros_like(bias)

    def _sum(self, out: torch.Tensor, op: str) -> None:
        if out.is_contiguous():
            self._line.all_reduce(out, op)
        else:
            dense = out.contiguous()
            self._line.all_reduce(dense, op)
            out.copy_(dense)

    def _room(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [rows, columns] of heap memory, which the next call overwrites. Ranks that make the same calls get the
        same offset. Memory that a graph was captured with is never freed."""
        size = max(1, rows * columns)
        if dtype not in self._rooms or self._rooms[dtype].numel() < size:
            self._rooms.pop(dtype, None)
            self._rooms[dtype] = self._ctx.heap.reserve((size,), dtype)
        if platform.is_capturing(self._ctx.device):
            self._captured[self._rooms[dtype].data_ptr()] = self._rooms[dtype]
        return self._rooms[dtype][: rows * columns].view(rows, columns)


class _Outputs:
    """New tensors for results: anywhere, because no peer of another host writes them."""

    def new(self, op: str, A: torch.Tensor, B: torch.Tensor, size: Sequence[int], *_: Any) -> torch.Tensor:
        """Return an empty tensor of `size` like A."""
        return A.new_empty(size)

    def keeping(self, kept: Any) -> AbstractContextManager:
        """Return a block in which nothing changes."""
        return nullcontext()


class _Calls:
    """Plans by the sizes that all ranks have in common, for operators whose ranks' parts differ (`torch_ops`)."""

    def __init__(self, ops: HierarchicalOps) -> None:
        self._ops = ops

    def requested(
        self, op: str, M: int, N: int, K: int, dtype: torch.dtype, weights: WeightFormat = PLAIN
    ) -> tuple[str, int, int, int, torch.dtype, WeightFormat]:
        return op, M, N, K, dtype, weights

    def plan(self, request: tuple) -> FusedConfig | HostsPlan:
        """Return the plan of such a call: over all hosts of a sum, inside each of a gather."""
        op, M, N, K, dtype, weights = request
        if op == GATHER_MATMUL:
            return self._ops._plan_inside(op, -(-M // self._ops._line.size), N, K, dtype, weights, False)
        return self._ops._plan(op, M, N, K, dtype, False, weights)


def _refuse(name: str) -> NoReturn:
    raise ArgumentError(
        f"ctx.ops.{name} on a context with across: expected {ALL_REDUCE}, {REDUCE_SCATTER}, {GATHER_MATMUL}, "
        f"{MATMUL_GATHER} or {DOWN_ALL_REDUCE}, which run over all hosts; ctx.ops.inside.{name} is over the ranks of "
        "this host"
    )
