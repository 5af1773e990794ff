"""`ctx.ops` of a context with `across`: sums over the ranks of all hosts, in which only shares leave a host.

    matmul_all_reduce       our matmul_reduce_scatter inside each host, torch.distributed's all-reduce of this rank's
                            share across hosts, our all-gather inside. Few rows are reduced whole, without a gather
    matmul_reduce_scatter   ours inside, once for the part of each host, then a reduce-scatter of the shares across

So each rank's network link carries its share of the result only: with w ranks on a host, the w-th part of what an
all-reduce over all ranks that ignores hosts would send there. Ranks are counted host by host, as in the whole world of
a mesh (hosts, tp). Between hosts sums travel in the dtype of `out`.

Waits for other hosts end by IRIS_TIMEOUT, on the host; so these ops are not captured in CUDA graphs. Other ops stay
inside a host: `ctx.ops.inside` has them, and no other name does, for a gather over one host where all were meant would
be silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

from iris import platform
from iris.errors import ArgumentError, CaptureError, ShapeError
from iris.machines import machine_of
import torch
from torch.nn import functional

from .ops import Ops
from .planning.hosts import SCATTER, HostsPlan, Network, plan_all_reduce, plan_reduce_scatter
from .problem import ALL_REDUCE, REDUCE_SCATTER

if TYPE_CHECKING:
    from iris.rank import Rank

    from .config import FusedConfig
    from .workspace import Workspace


def ops_of(ctx: Rank) -> Ops:
    """Return the ops of a context: hierarchical ones where it was made with `across`."""
    return Ops(ctx) if ctx.across is None else cast(Ops, HierarchicalOps(ctx))


class HierarchicalOps:
    """Ops over the ranks of several hosts. All are collective, over all ranks of all hosts.

    `inside`: the ops over the ranks of this host.
    """

    def __init__(self, ctx: Rank) -> None:
        assert ctx.across is not None and ctx.across_rate is not None
        self._ctx, self._line = ctx, ctx.across
        self._network = Network(ctx.across.size, ctx.across_rate.gbs, ctx.across_rate.hop_us)
        self._rooms: dict[torch.dtype, torch.Tensor] = {}
        self.inside = Ops(ctx)

    def matmul_all_reduce(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Compute `out [M, N] = sum over the ranks of all hosts of A [M, K] @ B [K, N] + bias [N]`.

        `config` is for the op inside a host that the plan names. The other arguments and errors are those of `Ops`;
        `async_op` must be False.
        """
        M, N = self._check(ALL_REDUCE, out, A, B, async_op)
        if out.shape != (M, N):
            raise ShapeError(f"{ALL_REDUCE}: out is {tuple(out.shape)}; expected {(M, N)}")
        bias = self._once(bias)
        plan = self._plan(ALL_REDUCE, M, N, A.shape[1], out.dtype, False)
        if plan.way != SCATTER or M == 0:
            workspace = self.inside.matmul_all_reduce(out, A, B, bias, False, config, workspace, scale)
            self._sum(out)
            return workspace
        ranks, rank = self._ctx.num_ranks, self._ctx.cur_rank
        rows = -(-M // ranks)
        whole = self._room(ranks * rows, N, out.dtype)
        share = whole[rank * rows : (rank + 1) * rows]
        own = max(0, min(rows, M - rank * rows))
        share[own:].zero_()
        workspace = self.inside.matmul_reduce_scatter(share[:own], A, B, bias, False, config, workspace, scale)
        self._line.all_reduce(share, ALL_REDUCE)
        collectives: Any = self._ctx
        collectives.ccl.all_gather(whole, share)
        out.copy_(whole[:M])
        return workspace

    def matmul_reduce_scatter(
        self, out: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor | None = None,
        async_op: bool = False, config: FusedConfig | None = None, workspace: Workspace | None = None,
        scale: torch.Tensor | None = None,
    ) -> Workspace:  # fmt: skip
        """Return this rank's rows of the sum over the ranks of all hosts of `A [M,K] @ B [K,N] + bias [N]`.

        `out`: as `torch.chunk` splits M rows over all ranks, counted host by host. Other arguments and errors as in
        `matmul_all_reduce`.
        """
        M, N = self._check(REDUCE_SCATTER, out, A, B, async_op)
        hosts, ranks, rank = self._line.size, self._ctx.num_ranks, self._ctx.cur_rank
        rows = -(-M // (hosts * ranks))
        first = (self._line.rank * ranks + rank) * rows
        own = max(0, min(rows, M - first))
        if out.shape != (own, N):
            raise ShapeError(
                f"{REDUCE_SCATTER}: out is {tuple(out.shape)}; expected {(own, N)}, this rank's rows of {M}"
            )
        bias, per_host = self._once(bias), ranks * rows
        shares = self._room(hosts * rows, N, out.dtype).view(hosts, rows, N)
        for host, share in enumerate(shares):
            block = A[host * per_host : (host + 1) * per_host]
            if block.shape[0] < per_host:  # zeros follow the last row, so that all parts have equally many
                block = functional.pad(block, (0, 0, 0, per_host - block.shape[0]))
            workspace = self.inside.matmul_reduce_scatter(share, block, B, bias, False, config, workspace, scale)
        result = torch.empty(rows, N, dtype=out.dtype, device=out.device)
        self._line.reduce_scatter(result, shares.view(hosts * rows, N), REDUCE_SCATTER)
        out.copy_(result[:own])
        assert workspace is not None
        return workspace

    def plan(self, op: str, M: int, N: int, K: int, dtype: torch.dtype, explained: bool = True) -> HostsPlan:
        """Return how a call over all hosts would be computed, with reasons and predicted times; launches nothing."""
        self._ctx.check()
        if op not in (ALL_REDUCE, REDUCE_SCATTER):
            _refuse(op)
        return self._plan(op, M, N, K, dtype, explained)

    def join(self) -> None:
        """Make the current stream wait for calls of `inside` with `async_op=True`."""
        self.inside.join()

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_") or not hasattr(Ops, name):
            raise AttributeError(name)
        return _refuse(name)

    def _plan(self, op: str, M: int, N: int, K: int, dtype: torch.dtype, explained: bool) -> HostsPlan:
        ranks, network, nbytes = self._ctx.num_ranks, self._network, M * N * dtype.itemsize
        if op == REDUCE_SCATTER:
            rows = -(-M // network.hosts)
            return plan_reduce_scatter(nbytes, ranks, network, self._inside(op, rows, N, K, dtype, explained))
        scattered, reduced = (self._inside(of, M, N, K, dtype, explained) for of in (REDUCE_SCATTER, ALL_REDUCE))
        return plan_all_reduce(nbytes, ranks, network, machine_of(self._ctx.device), scattered, reduced)

    def _inside(self, op: str, M: int, N: int, K: int, dtype: torch.dtype, explained: bool) -> FusedConfig:
        return self.inside.plan(op, M, N, K, dtype, explained=explained)

    def _check(self, op: str, out: Any, A: Any, B: Any, async_op: Any) -> tuple[int, int]:
        self._ctx.check()
        self._line.check()
        if async_op is not False:
            raise ArgumentError(
                f"{op}: async_op is {async_op!r}; expected False with across, whose waits are the host's"
            )
        if platform.is_capturing(self._ctx.device):
            raise CaptureError(f"{op} crosses hosts and cannot be captured in a CUDA graph")
        for name, tensor in (("out", out), ("A", A), ("B", B)):
            if not isinstance(tensor, torch.Tensor) or tensor.dim() != 2:
                shape = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                raise ShapeError(f"{op}: {name} is {shape}; expected a tensor of two dimensions")
        return A.shape[0], B.shape[1]

    def _once(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return `bias` on the first host, whose ranks add it once, and zeros elsewhere, so that all hosts run one
        program."""
        return bias if bias is None or self._line.rank == 0 else torch.zeros_like(bias)

    def _sum(self, out: torch.Tensor) -> None:
        if out.is_contiguous():
            self._line.all_reduce(out, ALL_REDUCE)
        else:
            dense = out.contiguous()
            self._line.all_reduce(dense, ALL_REDUCE)
            out.copy_(dense)

    def _room(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return [rows, columns] of heap memory, which the next call overwrites. Ranks that make the same calls get the
        same offset."""
        size = max(1, rows * columns)
        if dtype not in self._rooms or self._rooms[dtype].numel() < size:
            self._rooms.pop(dtype, None)
            self._rooms[dtype] = self._ctx.heap.reserve((size,), dtype)
        return self._rooms[dtype][: rows * columns].view(rows, columns)


def _refuse(name: str) -> NoReturn:
    raise ArgumentError(
        f"ctx.ops.{name} on a context with across: expected {ALL_REDUCE} or {REDUCE_SCATTER}, which add over all "
        f"hosts; ctx.ops.inside.{name} is over the ranks of this host"
    )
