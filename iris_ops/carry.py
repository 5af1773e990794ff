"""Rows that a running kernel has finished, carried to the peers by copy engines while it computes on.

    stream   begun | the kernel: ... rows of chunk 0 | rows of chunk 1 | ...      | all ranks are done
    a peer's lane  | awaits chunk 0 .............. copies it, awaits chunk 1 ... copies it | ended

The programs of the kernel count the tiles that they store into `out` (`count`); the last tile of a chunk of rows raises
the number of calls that have finished it. In each peer's lane a program without much else awaits that number and ends,
and then a copy engine takes the chunk over the link, so no multiprocessor is held up by stores that the link cannot
take. One multiprocessor is left to the programs that wait; all others have a program of the kernel, registers filled.

Numbers only advance, here and in the lanes' memory of what they have seen, so a captured call can be replayed. A kernel
counts all its tiles, also when a wait has failed, so the lanes end when it does, and like it within the time-out; then
the barrier at the end signals no peer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from iris import repeat, streams
from iris.device import arch
from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.sync import wait
import torch
import triton
import triton.language as tl

from .config import FusedConfig
from .problem import ALL_REDUCE, MATMUL_GATHER, Problem, owned_part

if TYPE_CHECKING:
    from .workspace import Workspace

MOST_CHUNKS = 32
STRIDE = 4  # words from one count to the next: addresses that all are as aligned as the first
_MOST_CHUNKS, _STRIDE = tl.constexpr(MOST_CHUNKS), tl.constexpr(STRIDE)
# Multiprocessors for the programs that wait in lanes.
LEFT_FREE = 1


def objection(problem: Problem, config: FusedConfig) -> str | None:
    """Why rows of this problem cannot be carried so."""
    if config.algorithm != "overlapped" or problem.op not in (ALL_REDUCE, MATMUL_GATHER) or problem.form == "cols":
        return "rows of an overlapped matmul_all_reduce, or matmul_all_gather by rows, are carried in chunks"
    if config.splits > 1:
        return "tiles that are carried in chunks are not cut along K"
    return None


def chunk_rows(config: FusedConfig, rows: int) -> int:
    """Rows of a chunk where a rank has at most so many: whole groups of row blocks, which are finished together."""
    group = config.block_m * config.group_m
    return -(-rows // (max(1, min(config.chunks, MOST_CHUNKS)) * group)) * group


def rows_of(problem: Problem, config: FusedConfig, rank: int) -> tuple[slice, int]:
    """(the rows that `rank` sends to all, the rows of a chunk)."""
    part = owned_part(problem, config)[0] if problem.op == ALL_REDUCE else problem.part_rows
    begin = min(problem.M, rank * part)
    return slice(begin, min(problem.M, begin + part)), chunk_rows(config, part)


@device_function
def count(counts, tile_m, num_m, num_n, chunk_m):
    """One more tile of row block `tile_m` stands in this rank's `out`; a chunk is `chunk_m` row blocks.

    `counts`: int32 [2, MOST_CHUNKS, STRIDE], of each chunk the tiles of this call and the calls that have finished it.
    """
    chunk = tile_m // chunk_m
    tiles = min(chunk_m, num_m - chunk * chunk_m) * num_n
    counted = counts + chunk * _STRIDE
    arch.drain_stores()
    tl.debug_barrier()  # a release covers one thread; the barrier brings every thread's stores before it
    if tl.atomic_add(counted, 1, sem="acq_rel", scope="sys") == tiles - 1:
        tl.store(counted, 0)
        tl.atomic_add(counted + _MOST_CHUNKS * _STRIDE, 1, sem="release", scope="sys")


@triton.jit
def await_chunk_kernel(words, finished, seen, WORLD_SIZE: tl.constexpr, WAITER: tl.constexpr):
    """Ends when the calls that have `finished` a chunk are one more than this lane has `seen`. One program."""
    ctx = own_context(words, WORLD_SIZE)
    expected = tl.load(seen) + 1
    tl.store(seen, expected)
    wait(ctx, finished, expected, ctx.rank, WAITER)


def carried(
    workspace: Workspace, out: torch.Tensor, rows: slice, chunk: int, waiter: int, kernel: Callable[[], None]
) -> Callable[[], bool]:
    """A function that launches `kernel`, and carries its `rows` of `out` to all peers, so many at a time."""
    ctx, w = workspace.ctx, workspace.ctx.num_ranks
    pieces = [slice(begin, min(begin + chunk, rows.stop)) for begin in range(rows.start, rows.stop, chunk)]
    lanes = []
    for i in range(1, w):
        peer, seen = (ctx.cur_rank + i) % w, workspace.seen[i - 1]
        steps = []
        for number, piece in enumerate(pieces):
            args = dict(
                words=ctx.get_device_context(),
                finished=workspace.counts[1, number],
                seen=seen[number],
                WORLD_SIZE=w,
                WAITER=waiter,
            )
            awaited = repeat.launcher(workspace.kernels, ctx.device, await_chunk_kernel, (1, 1, 1), args, num_warps=1)
            steps.append((awaited, out[piece], ctx.peer_view(out, peer)[piece]))
        lanes.append((workspace.lanes[i - 1], workspace.marks[i], steps))
    begun = workspace.marks[0]

    def again() -> bool:
        stream = streams.current(ctx.device)
        begun.set(stream)
        kernel()
        for lane, ended, steps in lanes:
            with lane.instead_of(stream) as beside:
                begun.wait(beside)
                for awaited, here, there in steps:
                    awaited()
                    there.copy_(here, non_blocking=True)
                ended.set(beside)
        for _, ended, _ in lanes:
            ended.wait(stream)
        workspace.meet()
        return True

    return again
