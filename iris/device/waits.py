"""Why every wait ends: a deadline, a look at whether the peers still live, and one status word for all waits of a rank.

A loop that polls is

    end = deadline(ctx)
    polls = 0
    missing = True
    waiting = True
    while waiting:
        late = is_late(end, polls) | anyone_gone(ctx)  # before the look: what came just before the end still counts
        missing = ...                           # the look; the same answer for all threads
        polls += 1
        waiting = keeps_waiting(ctx, missing, late, polls)

and whoever leaves it with something still missing calls `report`. The first wait of a rank that fails marks the status
word and writes a record that the host raises from; all other waits of the rank see the mark and give up too.
"""

import triton
import triton.language as tl

from . import arch
from .function import device_function

# Who waits, by the number that a failure record carries.
WAITERS = (
    "a kernel",
    "device_barrier",
    "matmul_all_reduce",
    "all_gather_matmul",
    "matmul_all_gather",
    "matmul_reduce_scatter",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "an exchange of the hosts",  # (`channel.py`)
    "matmul_all_reduce_norm",
    "all_gather_matmul_gated",
    "moe_route",
    "moe_gate_up",
    "moe_down_all_reduce",
    "moe_down_reduce_scatter",
    "a message",
    "broadcast",
    "gather",
    "scatter",
    "reduce",
    "all_reduce_norm",
)
# A failure record is int64: [kind, waiter, rank, peer, expected, seen], kind 0 while there is none. What is expected is
# an epoch or a count of a LOST peer; of one that stores its results into ours, where its `out` lies (OUT_DIFFERS); of
# a barrier, the digest of its allocations (HEAPS_DIFFER). A peer that LEFT said so in the status word.
RECORD_WORDS = 6
LOST, OUT_DIFFERS, HEAPS_DIFFER, LEFT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
# Nobody waited: a token's expert, which is what was seen, is none of as many as are expected.
BAD_EXPERT = tl.constexpr(5)
# The status word of a rank is 0; the number of the program, from 1, whose wait has failed; -1 once that is recorded;
# or, from here down, that a peer has left: which one, counted among all ranks.
_LEFT_MARK = tl.constexpr(-2)
# Polls between two looks at the rank's status, which would double the time of each.
_POLLS_A_CHECK = tl.constexpr(16)


def left_by(rank: int) -> int:
    """The status word by which a rank that leaves ends its peers' waits; on the host."""
    return _LEFT_MARK.value - rank


@device_function
def healthy(ctx):
    """Whether no wait of this rank has failed so far; the same answer for all threads of a program."""
    # An atomic is done by one thread and its result given to all. Each thread's own load could differ from the next
    # one's, and threads that part company around a barrier hang the program.
    return tl.atomic_add(_status(ctx), 0, sem="relaxed", scope="gpu") == 0


@device_function
def deadline(ctx, patience: tl.constexpr = 1):
    """When a wait that begins now has lasted too long: so many times the context's time-out.

    Twice where peers send what is awaited behind waits of their own: then whom they wait for is reported, not they.
    """
    return arch.clock() + patience * tl.load(ctx.ctx_ptr + 4)


@device_function
def is_late(end, polls):
    """Whether it is past `end` by this thread's clock, after so many polls; lets other ranks run first."""
    arch.pause(polls)
    return arch.clock() > end


@device_function
def anyone_gone(ctx):
    """Whether any rank's process has ended."""
    ranks = tl.arange(0, triton.next_power_of_2(ctx.world_size))
    return arch.any_gone(ctx.pids(ranks, ranks < ctx.world_size))


@device_function
def keeps_waiting(ctx, missing, late, polls):
    """Whether to poll again: something is `missing`, and no wait of this rank, this one included, has failed.

    The same answer for all threads if `missing` is, though they read the clock at different times: one marks, and all
    go by the mark.
    """
    if polls % _POLLS_A_CHECK == 0:
        tl.atomic_cas(_status(ctx), 0, tl.where(late & missing, _own_mark(), 0), sem="relaxed", scope="gpu")
        missing = missing & healthy(ctx)
    return missing


@device_function
def report(ctx, waiter: tl.constexpr, expected, peer, seen, kind: tl.constexpr = LOST):
    """After a wait in vain: writes the record that the host raises from, if it is this program that marked the rank."""
    mark = tl.atomic_cas(_status(ctx), _own_mark(), -1)
    left = mark < -1  # the mark of a peer: whoever is first takes it, and reports it
    if left:
        left = tl.atomic_cas(_status(ctx), mark, -1) == mark
    if left | (mark == _own_mark()):  # once, however many reports follow
        record = tl.load(ctx.ctx_ptr + 3).to(tl.pointer_type(tl.int64))
        tl.store(record + 1, waiter)
        tl.store(record + 2, _name(ctx, ctx.rank))
        tl.store(record + 3, tl.where(left, tl.cast(-mark, tl.int64) + _LEFT_MARK, _name(ctx, peer)))
        tl.store(record + 4, tl.cast(expected, tl.int64))
        tl.store(record + 5, tl.cast(seen, tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(
            record, tl.where(left, tl.cast(LEFT, tl.int64), tl.cast(kind, tl.int64)), sem="release", scope="sys"
        )


@device_function
def report_difference(ctx, waiter: tl.constexpr, expected, peer, seen, kind: tl.constexpr):
    """After a look at what `peer` says of itself, which should be the same here: no wait of this rank goes on."""
    tl.atomic_cas(_status(ctx), 0, _own_mark(), sem="relaxed", scope="gpu")
    report(ctx, waiter, expected, peer, seen, kind)


@device_function
def _status(ctx):
    return tl.load(ctx.ctx_ptr + 2).to(tl.pointer_type(tl.int32))


@device_function
def _own_mark():
    return tl.program_id(0) + 1


@device_function
def _name(ctx, rank):
    """What a rank, counted in a group, is called by the host: its number among all ranks."""
    names = tl.load(ctx.ctx_ptr + 7)
    name = tl.cast(rank, tl.int64)
    if names != 0:
        name = tl.load(names.to(tl.pointer_type(tl.int64)) + tl.maximum(name, 0))
    return name
