"""Calls after each other on one workspace: stale data, late ranks, epochs that wrap, a rank that dies in between."""

from __future__ import annotations

import contextlib
from dataclasses import replace
import os
import random
import re
import signal
import time

import iris
from iris import platform
from iris.device import sync
from iris.device.context import own_context
from iris.device.waits import deadline
from iris.errors import PeerLostError
from iris_ops import FusedConfig
from iris_ops.kernels import gather_matmul
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER
from iris_ops.workspace import Workspace
import pytest
import torch
import triton
import triton.language as tl

from tests.checks import poison
from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.iris_ops.calls import Call
from tests.processes import patient, run_fresh
from tests.reference import FORMS, Case

pytestmark = both

CALLS = 1000 if UNDER_TORCHRUN else 24
BLOCKS = FusedConfig(16, 16, 16, num_warps=4, num_stages=2, comm_programs=2)
# Shapes that differ, so that each call finds in flags and staging what another one left there.
CASES = [
    Case(ALL_REDUCE, "", 18, 20, 16, config=BLOCKS),
    Case(GATHER_MATMUL, "rows", 33, 16, 20, config=BLOCKS),
    Case(ALL_REDUCE, "", 20, 33, 8, config=replace(BLOCKS, algorithm="one_shot")),
    Case(ALL_REDUCE, "", 25, 40, 8, config=replace(BLOCKS, algorithm="two_shot")),
    Case(ALL_REDUCE, "", 3, 17, 8, dtype=torch.float32, config=replace(BLOCKS, algorithm="one_shot")),
    Case(MATMUL_GATHER, "cols", 16, 40, 8, config=BLOCKS),
    Case(REDUCE_SCATTER, "rows", 40, 16, 16, config=BLOCKS),
    Case(GATHER_MATMUL, "k", 16, 20, 40, config=BLOCKS),
    Case(REDUCE_SCATTER, "cols", 16, 36, 16, config=BLOCKS),
    Case(MATMUL_GATHER, "rows", 3, 16, 8, config=BLOCKS),  # with four ranks, one has nothing to send
    # By Lamport values, where a rank that has nothing to send, or gets nothing, must still hear from all.
    *(
        Case(op, form, m, 20, 24, config=replace(BLOCKS, algorithm="one_shot"))
        for m, (op, form) in enumerate(FORMS, 1)
        if op != ALL_REDUCE
    ),
]
# By warp-specialised programs where there are such.
LAMPORT = FusedConfig(64, 64, 32, num_stages=2, num_programs=2, warp_specialised=True, algorithm="two_shot")
PAIR = replace(LAMPORT, algorithm="one_shot")  # between two ranks
LAMPORT_CASES = [Case(ALL_REDUCE, "", m, 136, 24, config=config) for config in (LAMPORT, PAIR) for m in (2, 70)]
LAMPORT_CASES += [Case(REDUCE_SCATTER, "rows", m, 136, 24, config=PAIR) for m in (2, 70)]
CASES += LAMPORT_CASES


class Known:
    """A case's calls with two inputs, and the bits that each gives when nothing disturbs it."""

    def __init__(self, ctx: iris.Iris, case: Case) -> None:
        self.calls = [Call(ctx, replace(case, seed=seed)) for seed in (0, 1)]
        self.results = []
        for call in self.calls:
            self.workspace = call.run()
            ctx.barrier()
            self.results.append(call.check())


def late(step: int, ctx: iris.Iris, rng: random.Random) -> None:
    """Every rank in its turn comes to the call up to 10 ms late."""
    if step % ctx.num_ranks == ctx.cur_rank:
        delay = rng.uniform(0, 0.01)
        if ctx.device.type == "cuda" and step % 2:
            torch.cuda._sleep(int(delay * 1e9))
        else:
            time.sleep(delay)


def back_to_back(ctx: iris.Iris, count: int, epoch: int | None) -> int:
    """`count` calls of all ops in random order; returns how many results were wrong. `epoch`: where they begin."""
    known = [Known(ctx, case) for case in CASES]
    if epoch is not None:
        set_epoch(ctx, known[0].workspace, epoch)
    shared, mine = random.Random(1), random.Random(ctx.cur_rank)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for step in range(count):
        of, seed = shared.choice(known), shared.randrange(2)
        call = of.calls[seed]
        poison(call.out)
        late(step, ctx, mine)
        call.run()
        wrong += (call.out != of.results[seed]).any()
    ctx.barrier()
    for of in known:
        for call in of.calls:
            call.guarded.check()
    return int(wrong)


def set_epoch(ctx: iris.Iris, workspace: Workspace, epoch: int, completed: int | None = None) -> None:
    """As if `epoch` calls had been made; `completed`: the last of them that ended together on all ranks."""
    ctx.barrier()
    w, entered = ctx.num_ranks, sync._ENTERED.value
    workspace.sync[0] = as_int32(epoch)
    workspace.sync[entered : entered + w] = as_int32(epoch)
    workspace.sync[entered + w : entered + 2 * w] = as_int32(epoch if completed is None else completed)
    workspace.flags.fill_(as_int32(epoch))
    workspace.exchange_sync[0] = as_int32(epoch)
    ctx.barrier()


def as_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("world_size", [size for size in WORLDS if UNDER_TORCHRUN or size > 2])
@pytest.mark.some(1)
def test_calls_after_each_other_with_late_ranks(world_size: int) -> None:
    assert run_ranks(world_size, back_to_back, CALLS, None) == [0] * world_size


@pytest.mark.parametrize("epoch", [2**31 - 9, 2**32 - 9])
@pytest.mark.parametrize("world_size", [size for size in WORLDS if size in (2, 4)])
@pytest.mark.some(2)
def test_epochs_wrap(world_size: int, epoch: int) -> None:
    assert run_ranks(world_size, back_to_back, CALLS // 2, epoch) == [0] * world_size


def after_rest(ctx: iris.Iris, case: Case, epoch: int) -> None:
    """Run `case` after so many calls of ops without a final barrier that the last barrier's epoch has wrapped."""
    call = Call(ctx, case)
    set_epoch(ctx, call.run(), epoch, completed=1)
    poison(call.guarded.tensor)
    if ctx.cur_rank == 0:
        time.sleep(0.2)
    call.run()
    call.check()


@pytest.mark.parametrize("world_size", [size for size in WORLDS if size > 1])
@pytest.mark.parametrize("op, form", [(ALL_REDUCE, ""), (MATMUL_GATHER, "rows"), (MATMUL_GATHER, "cols")])
def test_flags_may_rest_for_half_a_wrap(world_size: int, op: str, form: str) -> None:
    run_ranks(world_size, after_rest, Case(op, form, 33, 40, 24, config=BLOCKS), 2**31 + 5)


def never_set(ctx: iris.Iris, case: Case) -> None:
    """`case` in the call whose number would be 0, as flags are at first, while rank 0 is late."""
    call = Call(ctx, case)
    workspace = call.run()
    set_epoch(ctx, workspace, 2**32 - 1)
    workspace.flags.zero_()
    workspace.staging.fill_(255)  # not a number
    poison(call.guarded.tensor)
    ctx.barrier()
    if ctx.cur_rank == 0:
        time.sleep(0.2)
    call.run()
    call.check()


@pytest.mark.parametrize("world_size", [size for size in WORLDS if size in (2, 4)])
@pytest.mark.parametrize("op, form", [(ALL_REDUCE, ""), (REDUCE_SCATTER, "rows"), (GATHER_MATMUL, "rows")])
def test_flags_that_were_never_set_vouch_for_nothing(world_size: int, op: str, form: str) -> None:
    run_ranks(world_size, never_set, Case(op, form, 33, 40, 24, config=BLOCKS))


@triton.jit
def reached_kernel(out, seen, expected, exact: tl.constexpr):
    tl.store(out, tl.cast(sync._reached(tl.load(seen), tl.load(expected), exact), tl.int32))


def compare(ctx: iris.Iris) -> None:
    """A flag has reached an epoch that is its own or up to 2^31 before it, across the wrap too."""
    last = 2**31 - 1
    for expected in (0, 5, last - 1, last, -last - 1, -7, -1):
        for offset in (-last, -3, -1, 0, 1, 3, last):
            pair = (as_int32(expected + offset), expected)
            seen, target = (torch.tensor([value], dtype=torch.int32, device=ctx.device) for value in pair)
            for exact in (False, True):
                out = torch.full((1,), -1, dtype=torch.int32, device=ctx.device)
                reached_kernel[(1,)](out, seen, target, exact)
                assert out.item() == (offset == 0 if exact else offset >= 0), (*pair, exact)


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_flags_are_compared_across_the_wrap(world_size: int) -> None:
    run_ranks(world_size, compare)


@triton.jit
def deadlines_kernel(ctx_ptr, out, WORLD_SIZE: tl.constexpr):
    ctx = own_context(ctx_ptr, WORLD_SIZE)
    tl.store(out, deadline(ctx))
    tl.store(out + 1, deadline(ctx, 2))


def more_patience(ctx: iris.Iris) -> None:
    context, out = ctx.get_device_context(), torch.zeros(2, dtype=torch.int64, device=ctx.device)
    deadlines_kernel[(1,)](context, out, ctx.num_ranks)
    once, twice = out.tolist()
    assert twice - once > 0.9 * context[4].item(), (
        "who waits for one that waits itself must not be the first to give up"
    )


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_who_waits_for_one_that_waits_is_more_patient(world_size: int) -> None:
    run_ranks(world_size, more_patience)


# --- a rank that nobody waits for by its data ------------------------------------------------------------------------


def run_ahead(ctx: iris.Iris, case: Case, late: int) -> None:
    """Calls of which rank `late` makes the first when the others may have made all of theirs."""
    calls = [Call(ctx, replace(case, seed=seed)) for seed in range(4)]
    for call in calls:
        call.run()
    for call in calls:
        poison(call.guarded.tensor)
    ctx.barrier()
    if ctx.cur_rank == late:
        time.sleep(0.3)
    for call in calls:
        call.run()
    for call in calls:
        call.check()


@pytest.mark.parametrize("world_size", [size for size in WORLDS if size == 2 or UNDER_TORCHRUN])
@pytest.mark.parametrize("op, form, late", [(REDUCE_SCATTER, "rows", 0), (MATMUL_GATHER, "rows", 1)])
def test_who_gets_nothing_does_not_run_ahead(world_size: int, op: str, form: str, late: int) -> None:
    """With a single row, which is rank 0's: the others get none of the sum, or rank 0 gets none of theirs."""
    case = Case(op, form, 1, 20, 24, config=replace(BLOCKS, algorithm="one_shot"))
    run_ranks(world_size, run_ahead, case, late)


def slow_mover(ctx: iris.Iris, case: Case) -> None:
    """Delay rank 1 by half a second before it pushes its rows, and again after the first piece."""
    call = Call(ctx, case)
    workspace = call.run()
    push, tell = gather_matmul._push_part, gather_matmul.signal

    def late_push(*args):
        time.sleep(0.5)
        return push(*args)

    def rest_after(*args):
        tell(*args)
        time.sleep(0.5)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if ctx.cur_rank == 1:
            monkeypatch.setattr(gather_matmul, "_push_part", late_push)
            monkeypatch.setattr(gather_matmul, "signal", rest_after)
        poison(call.guarded.tensor)
        workspace.staging.fill_(255)  # not a number
        ctx.barrier()
        begin = time.monotonic()
        call.run()
    assert time.monotonic() - begin > 0.9, "no rank's call ends before all pieces have come"
    call.check()


@pytest.mark.skipif(UNDER_TORCHRUN, reason="the interpreter's kernels can be made slow")
@pytest.mark.parametrize("columns", [20, 0])
@pytest.mark.parametrize("world_size", [2])
def test_a_gather_waits_for_every_piece_of_its_peers_rows(world_size: int, columns: int) -> None:
    """Be there columns to multiply them with or not: else they would come in a later call."""
    run_ranks(world_size, slow_mover, Case(GATHER_MATMUL, "rows", 20, columns, 40, config=BLOCKS))


# --- a rank that dies ------------------------------------------------------------------------------------------------

cpu_only = pytest.mark.skipif(UNDER_TORCHRUN, reason="ends a rank's process")


def lose_a_rank(rank: int, world_size: int, case: Case, dead: int, while_waiting: bool) -> tuple[str, float]:
    """Rank `dead` is killed after half a second: instead of its call, or in its call while that waits for rank 0.

    Returns what the call raised, and how long after the kill.
    """
    ctx = iris.iris(64 << 20)
    call = Call(ctx, case)
    call.run()
    call.check()
    ctx.barrier()
    killed = time.monotonic() + 0.5
    if rank == dead:
        if while_waiting:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        else:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
    elif while_waiting and rank == 0:
        time.sleep(1)
    with pytest.raises(PeerLostError) as caught:
        for _ in range(2):  # all that the first one needs may have been sent before
            call.run()
    with pytest.raises(PeerLostError):  # and so does every further call
        call.run()
    return str(caught.value), time.monotonic() - killed


@cpu_only
@pytest.mark.parametrize("world_size, while_waiting", [(3, False), (2, True)])
@pytest.mark.parametrize("case", CASES[:5], ids=lambda case: f"{case.op}-{case.form}-{case.config.algorithm}")
@pytest.mark.some(4)
def test_a_killed_rank_is_named_within_ten_seconds(case: Case, world_size: int, while_waiting: bool) -> None:
    dead = world_size - 1
    started = time.monotonic()
    # longer than the test waits: a wait that does not look whether its peer lives is never seen to end
    ended = run_fresh(world_size, lose_a_rank, case, dead, while_waiting, env={"IRIS_TIMEOUT": "10000"})
    assert ended[dead].exitcode == -signal.SIGKILL
    for rank, end in enumerate(ended[:dead]):
        assert end.error is None and end.result, f"after {time.monotonic() - started} s: {end.traceback}"
        message, seconds = end.result
        assert f"rank {rank} lost rank {dead}: {case.op}" in message and seconds < patient(10)


def miss_a_rank(outer: iris.Iris, case: Case) -> str | None:
    """Make a call that rank 0 omits, several times, each in a new context."""
    message = None
    Call(outer, case).run()  # compiled while waits are long: one rank may take a second more than another
    outer.barrier()
    for _ in range(3):
        ctx = iris.iris(64 << 20)
        ctx._context_tensor[4] = platform.ticks(0.3)  # of waits in kernels only: making a context takes longer
        call = Call(ctx, case)
        call.run()
        call.check()
        ctx.barrier()
        if ctx.cur_rank:
            for _ in range(3):  # the later ones find a rank that has given up
                call.run()
            if ctx.device.type == "cuda":
                torch.cuda.synchronize()
            with pytest.raises(PeerLostError) as caught:
                ctx.check()
            message = str(caught.value)
        outer.barrier()
        with contextlib.suppress(PeerLostError):
            ctx.close()
    return message


@pytest.mark.skipif(not ON_GPU, reason="on CPUs the call itself raises; see above")
@pytest.mark.parametrize("world_size", [size for size in WORLDS if size > 1])
@pytest.mark.parametrize(
    "case", CASES[:5] + LAMPORT_CASES, ids=lambda case: f"{case.M}-{case.op}-{case.config.algorithm}"
)
def test_threads_of_a_program_give_up_together(case: Case, world_size: int) -> None:
    """Threads read the clock at different times. If one gave up before the others, the kernel would never end."""
    case = replace(case, config=replace(case.config, num_warps=8))
    messages = run_ranks(world_size, miss_a_rank, case)
    lost = r"lost (rank \d|a rank that another of its own programs waits for)"
    all_sum = (world_size - 1) * -(-case.M // world_size) < case.M
    if case.config.algorithm == "two_shot" and all_sum:  # and wait for others' sums longer than for what they sum
        lost = "lost rank 0:"
    assert all(re.search(lost, message) and case.op in message for message in messages[1:]), messages
