"""Kernels of `benchmarks.litmus`: what ranks see of each other's accesses, round after round, counted on the device.

`threads_kernel` runs a litmus test in the usual notation, "Wx Wy | Ry Rx" for message passing: a thread is a rank, W
writes this round's value, R reads. Every lane of every program has variables of its own. Which rank is which thread,
and where each variable lives, differs from program to program, so all links and all distances take part. A round ends
when every thread has signalled every other one that it is done, which carries what it saw to thread 0, the judge.

`message_kernel` passes a payload by the library's own `signal` and `wait`, to the next rank, or to the next but one
with the rank in between passing on the signal alone. `stamp_kernel` goes with a barrier that is a separate kernel.

Rounds carry numbers that never repeat, so nothing is reset; they start where the caller chooses, just below a wrap of
32 bits for example. A program waits only for the same program of other ranks, and all programs are resident.
"""

from iris.device import arch, atomics  # before triton on a machine without a GPU
from iris.device.context import own_context
from iris.device.function import device_function
from iris.device.sync import signal, wait
from iris.device.waits import healthy
import triton
import triton.language as tl

LANES = 32
SPACING = tl.constexpr(8)  # int32 from one lane's variable to the next one's: a sector of memory
MOST_THREADS = tl.constexpr(4)
OUTCOMES = tl.constexpr(32)  # of up to four reads, and 16 more with INVALID
INVALID = tl.constexpr(16)  # a value of no thread, or older than it may be

RELAXED, RELEASE_ACQUIRE, ACQ_REL = 0, 1, 2
ORDERS = ("relaxed", "release-acquire", "acq_rel")


@triton.constexpr_function
def steps(test, thread):
    """Return ("W", 0), ("R", 1) ... for "Wx Ry": what a thread does with which variable."""
    return [(word[0], "xyz".index(word[1])) for word in test.split("|")[thread].split()]


@triton.constexpr_function
def num_threads(test):
    return len(test.split("|"))


@triton.constexpr_function
def num_steps(test, thread):
    return len(steps(test, thread))


@triton.constexpr_function
def is_write(test, thread, step):
    return steps(test, thread)[step][0] == "W"


@triton.constexpr_function
def variable(test, thread, step):
    return steps(test, thread)[step][1]


@triton.constexpr_function
def read_number(test, thread, step):
    """Return how many reads come before this one, in the threads' order."""
    before = [kind for other in range(thread) for kind, _ in steps(test, other)]
    before += [kind for kind, _ in steps(test, thread)[:step]]
    return before.count("R")


@triton.constexpr_function
def wrote_before(test, thread, step):
    """Return whether the thread itself has written what it reads."""
    return ("W", steps(test, thread)[step][1]) in steps(test, thread)[:step]


@device_function
def _write(pointers, values, ORDER: tl.constexpr):
    if ORDER == 2:
        tl.atomic_xchg(pointers, values, sem="acq_rel", scope="sys")
    elif ORDER == 1:
        tl.atomic_xchg(pointers, values, sem="release", scope="sys")
    else:
        tl.atomic_xchg(pointers, values, sem="relaxed", scope="sys")


@device_function
def _read(pointers, values, ORDER: tl.constexpr):
    nothing = tl.zeros_like(values)
    if ORDER == 2:
        return tl.atomic_add(pointers, nothing, sem="acq_rel", scope="sys")
    elif ORDER == 1:
        return tl.atomic_add(pointers, nothing, sem="acquire", scope="sys")
    else:
        return arch.load_fresh(pointers, nothing == 0)


@device_function
def _thread(places, values, TEST: tl.constexpr, THREAD: tl.constexpr, ORDER: tl.constexpr):
    """Do a thread's accesses; return a bit for each read: whether it saw another thread's value of this round."""
    seen = ()
    for s in tl.static_range(num_steps(TEST, THREAD)):
        if is_write(TEST, THREAD, s):
            _write(places[variable(TEST, THREAD, s)], values + THREAD, ORDER)
            seen += (values,)
        else:
            seen += (_read(places[variable(TEST, THREAD, s)], values, ORDER),)
    code = tl.zeros_like(values)
    for s in tl.static_range(num_steps(TEST, THREAD)):
        if not is_write(TEST, THREAD, s):
            writer = seen[s] - values  # of this round: 0 to 3; of the round before: -4 to -1
            old = (writer >= -MOST_THREADS) & (writer < 0)
            own = writer == THREAD
            new = (writer >= 0) & (writer < num_threads(TEST)) & (writer != THREAD)
            if wrote_before(TEST, THREAD, s):
                valid = new | own
            else:
                valid = new | old
            code |= new.to(tl.int32) << read_number(TEST, THREAD, s)
            code |= tl.where(valid, 0, INVALID)
    return code


@device_function
def _stagger(number):
    """Wait up to a microsecond, so that threads meet in every order."""
    if not arch.INTERPRET:
        delay = (number * 40503 >> 7) & 1023
        begin = arch.clock()
        while arch.clock() - begin < delay:
            pass


@triton.jit(do_not_specialize=["first", "rounds"])
def threads_kernel(
    ctx_ptr, variables, reported, flags, counts, first, rounds,
    TEST: tl.constexpr, ORDER: tl.constexpr, WORLD_SIZE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Run one litmus test. variables: int32 [programs, 3, LANES, SPACING], all `4 * (first - 1)`. reported: int32
    [programs, 2, 4, LANES]. flags: int32 [programs, 4], all `first - 1`. counts: int64 [programs, OUTCOMES], of judges.
    """
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    program = tl.program_id(0)
    NUM: tl.constexpr = num_threads(TEST)
    me = (ctx.rank + program) % WORLD_SIZE
    rank_0 = (WORLD_SIZE - program % WORLD_SIZE) % WORLD_SIZE
    lanes = tl.arange(0, LANES)
    if me < NUM:
        places = ()
        turn = program // WORLD_SIZE
        for v in tl.static_range(3):
            home = (rank_0 + turn % NUM) % WORLD_SIZE
            places += (ctx.remote(variables + ((program * 3 + v) * LANES + lanes) * SPACING, home),)
            turn = turn // NUM
        flags += program * MOST_THREADS
        outcomes = tl.arange(0, OUTCOMES)
        tally = tl.zeros((LANES, OUTCOMES), tl.int32)
        ok = True
        i = 0
        while (i < rounds) & ok:
            number = first + i
            values = tl.zeros((LANES,), tl.int32) + number * MOST_THREADS
            _stagger(number + me * 77)
            code = tl.zeros((LANES,), tl.int32)
            for q in tl.static_range(NUM):
                if me == q:
                    code = _thread(places, values, TEST, q, ORDER)
            # Two halves in turn: who reports the next round but one has the judge's signal of the next, which it
            # sends after it has read the reports of this one.
            half = reported + ((program * 2 + i % 2) * MOST_THREADS) * LANES + lanes
            ctx.store(half + me * LANES, code, rank_0)
            for q in tl.static_range(NUM):
                if me != q:
                    signal(ctx, flags + me, number, (rank_0 + q) % WORLD_SIZE)
            for q in tl.static_range(NUM):
                if me != q:
                    ok = wait(ctx, flags + q, number, (rank_0 + q) % WORLD_SIZE) & ok
            if (me == 0) & ok:
                for q in tl.static_range(1, NUM):
                    code |= tl.load(half + q * LANES)
                tally += (code[:, None] == outcomes[None, :]).to(tl.int32)
            i += 1
        if me == 0:
            tl.store(counts + program * OUTCOMES + outcomes, tl.sum(tally.to(tl.int64), 0))


@device_function
def _arrival(ctx, flag, expected, peer, ORDERED: tl.constexpr):
    if ORDERED:
        return wait(ctx, flag, expected, peer)
    else:  # polls without an acquire; bounded by the wait for the answer, which is ordered and fails if this one lies
        seen = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")
        polls = 0
        while (seen - expected < 0) & (polls < 10000000):
            arch.pause(polls)
            seen = tl.atomic_add(flag, 0, sem="relaxed", scope="sys")
            polls += 1
        return seen - expected >= 0


@device_function
def _announce(ctx, flag, value, to_rank, ORDERED: tl.constexpr):
    if ORDERED:
        signal(ctx, flag, value, to_rank)
    else:
        atomics.atomic_xchg(flag, value, ctx.rank, to_rank, ctx.heap_bases(), sem="relaxed", scope="sys")


@triton.jit(do_not_specialize=["first", "rounds"])
def message_kernel(
    ctx_ptr, inbox, flags, counts, n, first, rounds,
    HOPS: tl.constexpr, ORDERED: tl.constexpr, WORLD_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Send n words, a multiple of BLOCK, from every program to the rank HOPS further on, and check what it receives.

    inbox: int32 [programs, n]. flags: int32 [programs, 4], all `first - 1`. counts: int64 [programs, 2], rounds in
    which the whole payload was there, and rounds in which some of it was not.
    """
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    program = tl.program_id(0)
    following, previous = (ctx.rank + 1) % WORLD_SIZE, (ctx.rank + WORLD_SIZE - 1) % WORLD_SIZE
    target, source = (ctx.rank + HOPS) % WORLD_SIZE, (ctx.rank + WORLD_SIZE - HOPS) % WORLD_SIZE
    flags += program * 4
    inbox += program.to(tl.int64) * n
    complete = tl.zeros((), tl.int64)
    stale = tl.zeros((), tl.int64)
    ok = True
    i = 0
    while (i < rounds) & ok:
        number = first + i
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            ctx.store(inbox + at, number + at, target)
        _announce(ctx, flags, number, following, ORDERED)
        ok = _arrival(ctx, flags, number, previous, ORDERED) & ok
        if HOPS == 2:
            if ok:
                _announce(ctx, flags + 1, number, following, ORDERED)
            ok = _arrival(ctx, flags + 1, number, previous, ORDERED) & ok
        wrong = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, n, BLOCK):
            at = start + tl.arange(0, BLOCK)
            wrong |= (tl.load(inbox + at) != number + at).to(tl.int32)
        some = (tl.max(wrong) != 0).to(tl.int64)
        if ok:
            stale += some
            complete += 1 - some
            signal(ctx, flags + 2, number, source)  # it may be overwritten
        ok = wait(ctx, flags + 2, number, target) & ok
        i += 1
    tl.store(counts + program * 2, complete)
    tl.store(counts + program * 2 + 1, stale)


@triton.jit
def stamp_kernel(ctx_ptr, stamps, number, counts, WORLD_SIZE: tl.constexpr):
    """Stamp every rank after a barrier: first read all ranks' stamps of the round, then write this rank's next one.

    stamps: int32 [2, world] on the heap. number: int32, the round. counts: int64 [2], rounds in which all stamps held
    the round's number, and in which some did not. Two sets of stamps in turn: a peer that stamps the next round but one
    has passed the next barrier, into which this rank goes after it has looked here. One program.
    """
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    now = tl.load(number)
    some = 0
    for peer in tl.static_range(WORLD_SIZE):
        some |= (tl.load(stamps + (now & 1) * WORLD_SIZE + peer) != now).to(tl.int32)
    for peer in tl.static_range(WORLD_SIZE):
        ctx.store(stamps + ((now + 1) & 1) * WORLD_SIZE + ctx.rank, now + 1, peer)
    tl.store(number, now + 1)
    if healthy(ctx):
        tl.store(counts + some, tl.load(counts + some) + 1)
