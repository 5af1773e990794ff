"""Code that the variants share: a case with its tensors, the product of a tile, the push of a tile, and how a variant
runs.

A variant is a function `all_scatter(case)` that launches kernels in the current stream, after which `case.out` holds
the whole product on every rank. Its kernels begin with `enter` and end with `leave`, so that no rank writes into an
`out` that its owner may still read, and calls can follow each other without a host in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import iris
from iris.device import arch, sync
from iris.device.function import device_function
from iris_ops.kernels.tile_orders import grouped
from iris_ops.kernels.tiles import Matrix
from iris_tp import launch
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

USER = tl.constexpr(0)  # who waits, in the message if a wait fails: a kernel of the user


@dataclass(frozen=True)
class Blocks:
    """A tile's size, how its product is computed, and how many programs only move data where some do."""

    m: int = 128
    n: int = 256
    k: int = 64
    group_m: int = 8
    warps: int = 8
    stages: int = 3
    movers: int = 16


SMALL = Blocks(m=32, n=32, k=32, group_m=2, warps=4, stages=1, movers=1)


class Case:
    """`out = A @ [B_0, B_1, ...]` for A [M, K] and this rank's weight [N, K], the transpose of B_rank."""

    def __init__(self, ctx: iris.Iris, A: torch.Tensor, weight: torch.Tensor, blocks: Blocks) -> None:
        self.ctx, self.blocks, self.A, self.weight = ctx, blocks, A.contiguous(), weight.contiguous()
        (self.M, self.K), self.N = A.shape, weight.shape[0]
        self.out = ctx.empty(self.M, ctx.num_ranks * self.N, dtype=A.dtype)
        self.tiles = triton.cdiv(self.M, blocks.m) * triton.cdiv(self.N, blocks.n)
        self.sync = ctx.zeros(sync.sync_words(ctx.num_ranks), dtype=torch.int32)
        self.flags = ctx.zeros(self.tiles, dtype=torch.int32)  # the epoch in which this rank had each tile
        self.programs = ctx.get_cu_count()
        self.second_stream = torch.cuda.Stream(ctx.device) if ctx.device.type == "cuda" else None
        ctx.barrier()

    def args(self) -> dict:
        """Return the arguments that all kernels take."""
        blocks, on_gpu = self.blocks, self.ctx.device.type == "cuda"
        return dict(
            a=_described(self.A, blocks.m, blocks.k) if on_gpu else self.A,
            b=_described(self.weight, blocks.n, blocks.k) if on_gpu else self.weight,
            out=self.out,
            flags=self.flags,
            sync_words=self.sync,
            ctx_ptr=self.ctx.get_device_context(),
            M=self.M,
            N=self.N,
            K=self.K,
            BLOCK_M=blocks.m,
            BLOCK_N=blocks.n,
            BLOCK_K=blocks.k,
            GROUP_M=blocks.group_m,
            WORLD_SIZE=self.ctx.num_ranks,
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )

    def grid(self, limit: int | None = None) -> tuple[int]:
        """Return a grid of at most one program a multiprocessor, so that all are resident and may wait for each
        other."""
        return (max(1, min(self.tiles, limit or self.programs)),)


def _described(t: torch.Tensor, rows: int, cols: int) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [rows, cols])


@device_function
def tile_product(
    a, b, tile, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr
):
    """Return the product of one tile in fp32, and where the tile begins.

    a [M, K] and b [N, K] are contiguous, or descriptors.
    """
    A = Matrix(a, M, K, K, 1)
    B = Matrix(b, K, N, 1, K, True)
    row, col = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = arch.dot(A.load(row, k, BLOCK_M, BLOCK_K), B.load(k, col, BLOCK_K, BLOCK_N), acc)
    return acc, row, col


@device_function
def place(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Return the row and column at which a tile begins."""
    tile_m, tile_n = grouped(tile, tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@device_function
def tile_of_out(ctx, out, row, col, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return pointers to a tile in this rank's columns of out [M, world * N], and which of them exist."""
    mine = Matrix(out + ctx.rank * N, M, N, ctx.world_size * N, 1)
    return mine.pointers(row, col, BLOCK_M, BLOCK_N)


@device_function
def push(ctx, pointers, values, mask):
    """Store a tile at every peer, the next rank first."""
    for i in tl.static_range(1, ctx.world_size):
        ctx.store(pointers, values, (ctx.rank + i) % ctx.world_size, mask=mask)


@device_function
def move_tile(ctx, out, tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Copy a tile of this rank to every peer."""
    row, col = place(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    pointers, mask = tile_of_out(ctx, out, row, col, M, N, BLOCK_M, BLOCK_N)
    push(ctx, pointers, tl.load(pointers, mask=mask), mask)


@device_function
def store_tile(ctx, out, acc, row, col, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a finished tile in this rank's own out, and return the arguments of `push`."""
    pointers, mask = tile_of_out(ctx, out, row, col, M, N, BLOCK_M, BLOCK_N)
    values = arch.round_to(acc, out.dtype.element_ty)
    tl.store(pointers, values, mask=mask)
    return pointers, values, mask


def demonstrate(all_scatter: Callable[[Case], None], M: int = 96, N: int = 80, K: int = 64) -> None:
    """Run a variant on fresh data, twice, and check every rank's result."""
    with iris.iris(heap_size=1 << 26) as ctx:
        on_gpu = ctx.device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            A = torch.randn(M, K, generator=generator).to(ctx.device, dtype)
            weights = torch.randn(ctx.num_ranks, N, K, generator=generator).to(ctx.device, dtype)
            case = Case(ctx, A, weights[ctx.cur_rank], SMALL)
            case.out.fill_(float("nan"))
            ctx.barrier()
            all_scatter(case)
            exact = A.double() @ weights.double().flatten(0, 1).T
            error = (case.out - exact).abs().max() / exact.abs().max()
            assert error < (1e-2 if on_gpu else 1e-5), error
        ctx.barrier()
        shape = tuple(case.out.shape)
        ctx.info(f"{case.tiles} tiles of mine, {shape} in all from {ctx.num_ranks} ranks; error {error:.1e}")


def run(all_scatter: Callable[[Case], None]) -> None:
    """Run `demonstrate` on every rank."""
    launch.run(demonstrate, None, all_scatter)
