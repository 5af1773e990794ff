"""A lock that ranks share: an int32 on the heap, 0 when free. The rank that holds it frees it by a signal."""

import triton.language as tl

from . import atomics
from .function import device_function
from .sync import signal
from .waits import anyone_gone, deadline, is_late, keeps_waiting, report


@device_function
def lock(ctx, word, to_rank, waiter: tl.constexpr):
    """Take the lock in `word` at `to_rank`; return whether it was acquired in time."""
    taken = _try(ctx, word, to_rank)
    if not taken:
        taken = _poll(ctx, word, to_rank, waiter)
    return taken


@device_function
def unlock(ctx, word, to_rank):
    """Free the lock after all of this program's earlier stores."""
    signal(ctx, word, 0, to_rank)


@device_function
def _try(ctx, word, to_rank):
    return atomics.atomic_cas(word, 0, 1, ctx.rank, to_rank, ctx.heap_bases(), sem="acquire", scope="sys") == 0


@device_function
def _poll(ctx, word, to_rank, waiter: tl.constexpr):
    end = deadline(ctx)
    polls = 0
    taken = False
    waiting = True
    while waiting:
        late = is_late(end, polls) | anyone_gone(ctx)  # any rank may hold it
        taken = _try(ctx, word, to_rank)
        polls += 1
        waiting = keeps_waiting(ctx, not taken, late, polls)
    if not taken:
        report(ctx, waiter, 0, to_rank, 1)
    return taken
