"""Bound every wait: by a deadline, by a check that peers still live, and by one status word for all waits of a rank.

A loop that polls is

    end = deadline(ctx)
    polls = 0
    missing = True
    waiting = True
    while waiting:
        late = is_late(end, polls) | anyone_gone(ctx)  # before the load: data that comes just in time counts
        missing = ...                           # the load; the same answer for all threads
        polls += 1
        waiting = keeps_waiting(ctx, missing, late, polls)

and a loop that ends with something still missing calls `report`. The first wait of a rank that fails marks the status
word and writes a record that the host raises from; all other waits of the rank see the mark and give up too.
"""

import triton
import triton.language as tl

from . import arch
from .function import device_function

# What waits, by the number that a failure record of this rank carries.
WAITERS = [
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
    *(
        f"iris.{call}"  # which do not wait (`bounds.py`)
        for call in (
            "load",
            "store",
            "get",
            "put",
            "copy",
            "atomic_cas",
            "atomic_add",
            "atomic_xchg",
            "atomic_xor",
            "atomic_and",
            "atomic_or",
            "atomic_min",
            "atomic_max",
        )
    ),
]


def waiter_number(name: str) -> int:
    """Return the number by which failure records name what waits. A new name gets the next one."""
    if name not in WAITERS:
        WAITERS.append(name)
    return WAITERS.index(name)


# A failure record is int64: [kind, waiter, rank, peer, expected, seen], kind 0 while there is none. `expected` and
# `seen` are an epoch or a count of a LOST peer; the place of `out` of a peer that stores its results into ours
# (OUT_DIFFERS); or the digest of a barrier's allocations (HEAPS_DIFFER). A peer that LEFT wrote that into the status
# word.
RECORD_WORDS = 6
LOST, OUT_DIFFERS, HEAPS_DIFFER, LEFT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3), tl.constexpr(4)
# Nobody waited: a token's expert, `seen`, is not below the number of experts, `expected`.
BAD_EXPERT = tl.constexpr(5)
# Nor here: `expected` is an address outside the heaps, `seen` the two ranks that the access named, 32 bits each.
OUTSIDE_HEAP = tl.constexpr(6)
# The status word of a rank is 0; the number of the program, from 1, whose wait has failed; -1 once that is recorded;
# or, from here down, the mark of a peer that has departed, by its number among all ranks.
_LEFT_MARK = tl.constexpr(-2)
# Polls between two looks at the rank's status, which would double the time of each.
_POLLS_A_CHECK = tl.constexpr(16)


def departure_mark(rank: int) -> int:
    """Return the status word by which a rank that leaves ends its peers' waits; on the host."""
    return _LEFT_MARK.value - rank


@device_function
def healthy(ctx):
    """Return whether no wait of this rank has failed so far; the same answer for all threads of a program.

    Args:
        ctx: the device context.
    """
    # One thread performs an atomic and all get its result. Each thread's own load could differ from the next one's, and
    # threads that diverge around a barrier hang the program.
    return tl.atomic_add(_status(ctx.ctx_ptr), 0, sem="relaxed", scope="gpu") == 0


@device_function
def deadline(ctx, patience: tl.constexpr = 1):
    """Return the time at which a wait that begins now has lasted `patience` times the context's time-out.

    `patience` is 2 if the sender itself has to wait first. The sender's wait then fails first, and the error names the
    rank that the sender waited for, not the sender.
    """
    return arch.clock() + patience * tl.load(ctx.ctx_ptr + 4)


@device_function
def is_late(end, polls):
    """Return whether it is past `end` by this thread's clock, after `polls` polls; let other ranks run first."""
    arch.pause(polls)
    return arch.clock() > end


@device_function
def anyone_gone(ctx):
    """Return whether any rank's process has ended."""
    ranks = tl.arange(0, triton.next_power_of_2(ctx.world_size))
    return arch.any_gone(ctx.pids(ranks, ranks < ctx.world_size))


@device_function
def keeps_waiting(ctx, missing, late, polls):
    """Return whether to poll again: something is `missing`, and no wait of this rank, this one included, has failed.

    The same answer for all threads if `missing` is, though they read the clock at different times: one marks, and all
    follow the mark.
    """
    if polls % _POLLS_A_CHECK == 0:
        tl.atomic_cas(_status(ctx.ctx_ptr), 0, tl.where(late & missing, _own_mark(), 0), sem="relaxed", scope="gpu")
        missing = missing & healthy(ctx)
    return missing


@device_function
def report(ctx, waiter: tl.constexpr, expected, peer, seen, kind: tl.constexpr = LOST):
    """Write the record of a failed wait, from which the host raises, if this program marked the status word."""
    _report(ctx.ctx_ptr, ctx.rank, waiter, expected, peer, seen, kind)


@device_function
def _report(ctx_ptr, rank, waiter: tl.constexpr, expected, peer, seen, kind: tl.constexpr):
    status = _status(ctx_ptr)
    mark = tl.atomic_cas(status, _own_mark(), -1)
    departed = mark < -1  # the mark of a peer: the first program takes and reports it
    if departed:
        departed = tl.atomic_cas(status, mark, -1) == mark
    if departed | (mark == _own_mark()):  # once, however many reports follow
        record = tl.load(ctx_ptr + 3).to(tl.pointer_type(tl.int64))
        tl.store(record + 1, waiter)
        tl.store(record + 2, _name(ctx_ptr, rank))
        tl.store(record + 3, tl.where(departed, tl.cast(-mark, tl.int64) + _LEFT_MARK, _name(ctx_ptr, peer)))
        tl.store(record + 4, tl.cast(expected, tl.int64))
        tl.store(record + 5, tl.cast(seen, tl.int64))
        tl.debug_barrier()
        tl.atomic_xchg(
            record, tl.where(departed, tl.cast(LEFT, tl.int64), tl.cast(kind, tl.int64)), sem="release", scope="sys"
        )


@device_function
def report_difference(ctx, waiter: tl.constexpr, expected, peer, seen, kind: tl.constexpr):
    """Report a value of `peer` that should be the same here; no wait of this rank continues."""
    tl.atomic_cas(_status(ctx.ctx_ptr), 0, _own_mark(), sem="relaxed", scope="gpu")
    report(ctx, waiter, expected, peer, seen, kind)


@device_function
def report_outside(ctx_ptr, waiter: tl.constexpr, address, named):
    """Report an access that leaves the heaps (`bounds.py`) to the rank of a context tensor."""
    tl.atomic_cas(_status(ctx_ptr), 0, _own_mark(), sem="relaxed", scope="gpu")
    rank = tl.load(ctx_ptr)
    _report(ctx_ptr, rank, waiter, address, rank, named, OUTSIDE_HEAP)


@device_function
def _status(ctx_ptr):
    return tl.load(ctx_ptr + 2).to(tl.pointer_type(tl.int32))


@device_function
def _own_mark():
    return tl.program_id(0) + 1


@device_function
def _name(ctx_ptr, rank):
    """Return the number among all ranks of a rank counted in a group, which the host reports."""
    names = tl.load(ctx_ptr + 7)
    name = tl.cast(rank, tl.int64)
    if names != 0:
        name = tl.load(names.to(tl.pointer_type(tl.int64)) + tl.maximum(name, 0))
    return name
