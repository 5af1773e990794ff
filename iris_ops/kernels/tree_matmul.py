"""Products whose sums over ranks have the same bits on any number of ranks: `matmul_all_reduce` and
`matmul_reduce_scatter` with `invariant="ranks"`.

`iris_ops/sum_tree.py` says in which order products along K are added, whoever has them. A program multiplies a tile
leaf by leaf. It keeps the sums that wait for one to their right, and adds them as soon as that is there
(`tree_steps.py`). A sum whose other half another rank has is a root. Roots travel in fp32 as Lamport values, which show
by themselves whether they have arrived (`lamport_steps.py`). The receiver joins all ranks' roots in the tree's order,
with the same steps. Then come the bias and the only rounding.

    EXCHANGE    a root goes to     then
    "all"       every rank         each rank joins all roots: all-reduce in one shot
    "owners"    its rows' owners   they join them and send the sums to everyone: all-reduce in two shots
    "scatter"   its owners         they join them: reduce-scatter

A buffer has a block for each root, where those of `lamport_steps.py` have one for each rank. A rank sends its roots to
itself, too. No wait is circular: a program sends all of its roots before it takes any. A rank without leaves sends no
root, so there peers tell each other that they have begun (`MEETS`).

Columns of B are the tensor cores' rows, as in `lamport_matmul.py`, however many rows A has: one instruction for all.
A leaf's blocks stand in the loop one behind the other, so that all of the next leaf's are loaded while it is summed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from iris.device import arch
from iris.device.context import DeviceContext
from iris.device.function import device_function
from iris.device.lamport import load_bases, settled, take, without_sentinel
from iris.device.sync import advance, next_epoch
from iris.device.tracing import PRODUCT, SUM, device_tracing
import torch
import triton
import triton.language as tl

from ..planning.workspace_size import exchange_ld, exchanged_part, tiles_of
from ..problem import ALL_REDUCE, REDUCE_SCATTER, Problem
from ..sum_tree import Step, Tree, leaf_steps, places, root_steps
from ..workspace import refuse_capture
from .lamport_steps import Exchange, part_at
from .launching import grid_of, product_arguments, shared_arguments
from .tile_orders import by_columns
from .tiles import Matrix, add_bias, first_row, rows_from
from .tree_steps import ENDS, SOURCE, Steps, packed

if TYPE_CHECKING:
    from iris.rank import Rank

    from ..config import FusedConfig
    from ..operands import Operands
    from ..workspace import Workspace
    from .launching import Launch

_EXCHANGES = {ALL_REDUCE: "all", REDUCE_SCATTER: "scatter"}


@device_function
def _root_exchange(ctx, bases, epoch, staging, half_elements, part_rows, part_cols, ld, number, count, WAITER):
    """The `Exchange` of call `epoch` in which root `number` of `count` is sent."""
    buffer = staging + tl.cast(epoch & 1, tl.int64) * half_elements
    step = tl.cast(part_rows, tl.int64) * ld
    own_block, behind = buffer + number * step, buffer + count * step
    return Exchange(ctx, bases, buffer, own_block, step, behind, epoch, part_rows, part_cols, ld, WAITER)


@device_function
def _join(exchange, steps, place, mask, PAIR: tl.constexpr):
    """(the sum of all ranks' roots at `place`, whether all came in time). `PAIR`: two ranks have one each."""
    if PAIR:  # looked at together
        return exchange.sum_all(place, mask, tl.float32)
    total = tl.zeros(place.shape, tl.float32)
    waiting, ok = steps.nothing(total), True
    for i in range(steps.count):
        step = tl.load(steps.table + i)
        root, came = take(
            exchange.ctx, exchange.buffer + i * exchange.step + place, 0, mask, step >> SOURCE, exchange.epoch,
            exchange.WAITER, tl.float32, 1,
        )  # fmt: skip
        total, waiting = steps.add(step, root, waiting)
        ok = ok & came
    return total, ok


@device_function
def _join_own_part(
    exchange, steps, bias, C, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BY_COLS: tl.constexpr,
    HAS_BIAS: tl.constexpr, TO_ALL: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """Joins the roots of this rank's part. The sums go to `out` or, `TO_ALL`, in fp32 to everyone."""
    ctx = exchange.ctx
    SHARE: tl.constexpr = triton.next_power_of_2((BLOCK_M + ctx.world_size - 1) // ctx.world_size)
    own_rows, own_cols, width, before = part_at(C.rows, exchange.part_rows, ctx.rank), C.cols, exchange.ld, 0
    if BY_COLS:
        own_rows, own_cols = C.rows, part_at(C.cols, exchange.part_cols, ctx.rank)
        width, before = own_cols, ctx.rank * exchange.part_cols
    shares = tl.cdiv(own_rows, SHARE)
    for t in range(tl.program_id(0), shares * tl.cdiv(own_cols, BLOCK_N), tl.num_programs(0)):
        share, tile_n = by_columns(t, shares)
        row, col = share * SHARE, tile_n * BLOCK_N
        r, c = row + tl.arange(0, SHARE), col + tl.arange(0, BLOCK_N)
        mask = (r < own_rows)[:, None] & (c < width)[None, :]
        span = ctx.tracing.record_event_start(SUM, ctx.rank, exchange.buffer, share, tile_n, nbytes=0)
        total, ok = _join(exchange, steps, exchange.places(r, c), mask, PAIR)
        ctx.tracing.record_event_end(span)
        if HAS_BIAS:
            total = add_bias(total, bias + before, col, own_cols, BLOCK_N)
        if TO_ALL:
            if ok:
                place = exchange.own_sums() + exchange.places(r, c)
                exchange.send_to_all(without_sentinel(total, tl.float32), place, mask, TO_SELF=True)
        else:
            target, inside = C.until(own_rows, own_cols).pointers(row, col, SHARE, BLOCK_N)
            tl.store(target, arch.round_to(total, C.data.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["M", "part_rows", "num_leaves", "first_root", "num_roots"])
def tree_matmul_kernel(
    a,
    b,
    bias,
    out,
    staging,
    sync,
    ctx_ptr,
    leaf_table,
    root_table,
    num_leaves,
    first_root,
    num_roots,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_om,
    stride_on,
    part_rows,
    part_cols,
    ld,
    half_elements,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LEAF_BLOCKS: tl.constexpr,
    LEAF_PLACES: tl.constexpr,
    ROOT_PLACES: tl.constexpr,
    EXCHANGE: tl.constexpr,
    PAIR: tl.constexpr,
    BY_COLS: tl.constexpr,
    MEETS: tl.constexpr,
    WORLD_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TMA_A: tl.constexpr,
    TMA_B: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    WAITER: tl.constexpr,
    TRACING: tl.constexpr = False,
):
    # K: of this rank's share, which has num_leaves leaves of LEAF_BLOCKS blocks each.
    # leaf_table [num_leaves], root_table [num_roots]: int32, see `tree_steps.py`. first_root: this rank's first of all.
    # staging: fp32 as int32, [2 buffers], each [num_roots, part_rows, ld] and what follows; sync: [epoch, finished]
    arch.follow()
    FOLDED: tl.constexpr = TMA_A and len(a.block_shape) == 3
    A = Matrix(a, M, K, stride_am, stride_ak, TMA_A)
    B = Matrix(b, K, N, stride_bk, stride_bn, TMA_B, B_TRANSPOSED)
    C = Matrix(out, M, N, stride_om, stride_on, False)
    dtype: tl.constexpr = out.dtype.element_ty
    own, all_bases = (tl.load(ctx_ptr), next_epoch(sync)), load_bases(ctx_ptr, WORLD_SIZE)  # while a tile is multiplied
    leaves, roots = Steps(leaf_table, num_leaves, LEAF_PLACES), Steps(root_table, num_roots, ROOT_PLACES)
    tracing = device_tracing(ctx_ptr, TRACING)
    num_m, num_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)

    for t in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
        tile_m, tile_n = by_columns(t, num_m)
        row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
        span = tracing.record_event_start(PRODUCT, -1, out, tile_m, tile_n, nbytes=0)
        first = first_row(row, M, BLOCK_M)
        r, own_row = rows_from(first, row, M, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
        own_row &= r < M
        c = col + tl.arange(0, BLOCK_N)
        root = first_root + tl.zeros((), tl.int32)
        waiting = leaves.nothing(tl.zeros((BLOCK_N, BLOCK_M), tl.float32))
        for leaf in range(num_leaves):
            step = tl.load(leaf_table + leaf)  # on its way while the leaf is summed
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for block in tl.static_range(LEAF_BLOCKS):
                k = (leaf * LEAF_BLOCKS + block) * BLOCK_K
                x = A.load(first, k, BLOCK_M, BLOCK_K)
                y = B.load(k, col, BLOCK_K, BLOCK_N)
                total = arch.dot(y.T, x.T, total)
            total, waiting = leaves.add(step, total, waiting)
            if (step >> ENDS) & 1:
                own_rank, epoch = settled(own)
                ctx = DeviceContext.initialize(ctx_ptr, own_rank.to(tl.int32), WORLD_SIZE, TRACING)
                bases = settled(all_bases)
                exchange = _root_exchange(
                    ctx, bases, epoch, staging, half_elements, part_rows, part_cols, ld, root, num_roots, WAITER
                )
                values = without_sentinel(total.T, tl.float32)
                if EXCHANGE == "all":
                    exchange.send_tile(values, r, c, own_row, N, TO_SELF=True)
                else:
                    exchange.send_to_owners(values, r, c, own_row, M, N, BY_COLS)
                root += 1
        tracing.record_event_end(span)

    own_rank, epoch = settled(own)
    rank, bases = own_rank.to(tl.int32), settled(all_bases)
    ctx = DeviceContext.initialize(ctx_ptr, rank, WORLD_SIZE, TRACING)
    exchange = _root_exchange(
        ctx, bases, epoch, staging, half_elements, part_rows, part_cols, ld, first_root, num_roots, WAITER
    )
    if MEETS:
        exchange.tell_peers()
    arch.lead()
    advance(sync, epoch)  # which all programs have read; meanwhile the values are under way

    if EXCHANGE != "all":
        _join_own_part(exchange, roots, bias, C, BLOCK_M, BLOCK_N, BY_COLS, HAS_BIAS, EXCHANGE == "owners", PAIR)
    if EXCHANGE != "scatter":
        for t in range(tl.program_id(0), num_m * num_n, tl.num_programs(0)):
            tile_m, tile_n = by_columns(t, num_m)
            row, col = tile_m * BLOCK_M, tile_n * BLOCK_N
            r, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
            mask = (r < M)[:, None] & (c < ld)[None, :]
            span = tracing.record_event_start(SUM, rank, staging, tile_m, tile_n, nbytes=0)
            if EXCHANGE == "owners":
                total = exchange.take_sums(r, c, mask, tl.float32)
            else:
                total, _ = _join(exchange, roots, exchange.places(r, c), mask, PAIR)
                if HAS_BIAS:
                    total = add_bias(total, bias, col, N, BLOCK_N)
            tracing.record_event_end(span)
            target, inside = C.places(r, c)
            tl.store(target, arch.round_to(total, dtype), mask=inside)
    if MEETS:
        exchange.hear_from_peers(tl.float32)


class _Tables:
    """The steps of a rank's trees on its device. They stay: a captured graph may refer to them."""

    def __init__(self, rank: Rank) -> None:
        self._known: dict[Tree, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(
        self, rank: Rank, tree: Tree, own: tuple[Step, ...], joint: tuple[Step, ...], sources: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._known.get(tree)
        if found is None:
            refuse_capture(rank)
            first = (rank.cur_rank,) * len(own)
            found = self._known[tree] = _table(rank.device, own, first), _table(rank.device, joint, sources)
        return found


def _table(device: torch.device, steps: tuple[Step, ...], sources: tuple[int, ...]) -> torch.Tensor:
    words = [packed(*step, source) for step, source in zip(steps, sources, strict=True)]
    return torch.tensor(words or [0], dtype=torch.int32, device=device)


def tables_of(rank: Rank, tree: Tree) -> tuple[torch.Tensor, torch.Tensor]:
    """What becomes of this rank's leaves and of all ranks' roots, as `tree_steps.py` reads it."""
    own, joint = leaf_steps(tree.leaves, tree.spans[rank.cur_rank]), root_steps(tree.leaves, tree.spans)
    return rank.once(_Tables).of(rank, tree, own, joint, _sources(tree))


def _sources(tree: Tree) -> tuple[int, ...]:
    """Which rank each root comes from."""
    return tuple(source for source, roots in enumerate(tree.roots) for _ in roots)


def launcher(rank: Rank, workspace: Workspace, problem: Problem, config: FusedConfig, tensors: Operands) -> Launch:
    out, A, B, bias, _ = tensors
    me, device = rank.cur_rank, rank.device
    tree = problem.tree
    own_steps, all_steps = leaf_steps(tree.leaves, tree.spans[me]), root_steps(tree.leaves, tree.spans)
    sources = _sources(tree)
    leaf_table, root_table = tables_of(rank, tree)
    rows, cols = exchanged_part(problem, config)
    values = workspace.exchange.view(torch.int32)
    exchange = "owners" if config.algorithm == "two_shot" else _EXCHANGES[problem.op]
    args = dict(
        leaf_table=leaf_table,
        root_table=root_table,
        num_leaves=len(own_steps),
        first_root=sources.index(me) if me in sources else 0,
        num_roots=len(all_steps),
        M=problem.M,
        N=problem.N,
        part_rows=rows,
        part_cols=cols,
        ld=exchange_ld(cols),
        half_elements=values.numel() // 2,
        staging=values,
        LEAF_BLOCKS=tree.width // config.block_k,
        LEAF_PLACES=places(own_steps),
        ROOT_PLACES=places(all_steps),
        EXCHANGE=exchange,
        PAIR=problem.world_size == 2 and all(len(roots) == 1 for roots in tree.roots),
        BY_COLS=problem.form == "cols",
        MEETS=exchange == "scatter" or (exchange == "all" and not all(tree.roots)),
        **shared_arguments(rank, workspace.exchange_sync, problem, config, out),
        **product_arguments(out, A, B, bias, config),
    )
    return tree_matmul_kernel, grid_of(device, config, tiles_of(problem.M, problem.N, config)), args
