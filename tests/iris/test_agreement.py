"""With IRIS_DEBUG=1 ranks compare their calls: equal calls pass, and others raise an error with the difference."""

from __future__ import annotations

from dataclasses import replace
import os
import time

import iris
from iris.ccl import Config
from iris.errors import ArgumentError, HeapExhausted, PeerLostError, PlatformError
from iris_ops.problem import part_of
import layers
import pytest
import torch

from tests.harness import UNDER_TORCHRUN
from tests.layers import models
from tests.processes import patient, run_fresh

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")


def run(world: int, body, *args, timeout_s: float = 20, debug: str = "1") -> None:
    ended = run_fresh(world, body, *args, env={"IRIS_DEBUG": debug, "IRIS_TIMEOUT": str(timeout_s)})
    assert [end.exitcode for end in ended] == [0] * world, [end.traceback for end in ended]


def same(rank: int, world: int) -> None:
    with iris.iris(1 << 24) as ctx:
        out, whole = ctx.empty(8, 6), ctx.zeros(8 * world, 4)
        A, B = torch.ones(8, 5 + rank), torch.ones(5 + rank, 6)  # each rank its own depth
        config = ctx.ops.plan("matmul_all_reduce", 8, 6, 5, torch.float32)
        for _ in range(3):
            ctx.ops.matmul_all_reduce(out, A, B, config=config)
            ctx.ccl.all_gather(whole, torch.full((8, 4), float(rank)))
        assert (out == sum(5 + r for r in range(world))).all() and whole[-1, 0] == world - 1
        ctx.free(whole)
        assert ctx.broadcast(7 + rank) == 7
        pair = [0, 1] if rank < 2 else [2]
        ctx.barrier(group=pair)
        with pytest.raises(ArgumentError, match="A is NoneType"):  # on all ranks alike, before they compare
            ctx.ops.matmul_all_reduce(out, None, B)
        ctx.barrier()


def test_the_same_calls_pass() -> None:
    """Depths may differ, and groups are among themselves."""
    run(3, same)


def model(rank: int, world: int) -> None:
    with iris.iris(1 << 26) as ctx:
        split = models.build("plain")
        layers.parallelize(split, ctx, sequence_parallel=4)
        assert torch.equal(models.generate(split), models.expected("plain")[2])
        layers.Engine(split, ctx, 2, 32).generate(models.prompt(), 3)


def other_prompts(rank: int, world: int) -> None:
    with iris.iris(1 << 26) as ctx:
        split = models.build("plain")
        layers.parallelize(split, ctx)
        engine = layers.Engine(split, ctx, 1, 16)
        with pytest.raises(ArgumentError, match="Engine.generate.*tokens"):
            engine.generate([[5, 6 + rank]], 3)
        with pytest.raises(ArgumentError, match="Engine.generate.*max_new_tokens"):
            engine.generate([[5, 6]], 3 + rank)
        engine.generate([[5, 6]], 3)


def test_prompts_that_differ_are_named() -> None:
    run(2, other_prompts)


def test_a_model_passes() -> None:
    run(2, model)


DIFFERENT = {
    "M": (
        lambda ctx, r: ctx.ops.matmul_all_reduce(torch.empty(4 + r, 6), torch.ones(4 + r, 5), torch.ones(5, 6)),
        r"matmul_all_reduce: M differs between ranks: 4 on rank 0, 5 on ranks 1, 2; expected the same calls",
    ),
    "K": (
        lambda ctx, r: ctx.ops.matmul_reduce_scatter(torch.empty(3, 6), torch.ones(9, 5 + r), torch.ones(5 + r, 6)),
        r"matmul_reduce_scatter: K, for which no k_per_rank is given, differs between ranks: 5 on rank 0, 6 on rank 1",
    ),
    "op": (
        lambda ctx, r: ctx.barrier()
        if r == 1
        else ctx.ops.matmul_all_reduce(torch.empty(4, 6), torch.ones(4, 5), torch.ones(5, 6)),
        r"their call number \d+: matmul_all_reduce on ranks 0, 2, a barrier on rank 1; expected",
    ),
    "sizes": (lambda ctx, r: ctx.zeros(4 + (r == 2)), r"an allocation: sizes differs between ranks: \(4,\) on ranks 0"),
    "src": (lambda ctx, r: ctx.broadcast(1, src=r % 2), r"broadcast: src differs between ranks: 0 on ranks 0, 2, 1 on"),
    "bias": (
        lambda ctx, r: ctx.ops.matmul_all_reduce(
            torch.empty(4, 6), torch.ones(4, 5), torch.ones(5, 6), torch.ones(6) if r == 1 else None
        ),
        r"matmul_all_reduce: bias differs between ranks: none on ranks 0, 2, given on rank 1; expected",
    ),
    "variant": (
        lambda ctx, r: ctx.ccl.all_reduce(
            torch.empty(4), torch.ones(4), config=Config(all_reduce_variant="two_shot" if r else "one_shot")
        ),
        r"all_reduce: plan differs between ranks: Plan\(variant='one_shot'.* on rank 0, Plan\(variant='two_shot'",
    ),
    "refusal": (
        lambda ctx, r: ctx.ccl.all_reduce(torch.empty(4), None if r == 1 else torch.ones(4)),
        r"all_reduce: inp is NoneType; expected",
    ),
    "op's refusal": (
        lambda ctx, r: ctx.ops.matmul_all_reduce(torch.empty(4, 6), torch.ones(4, 5 + r % 2), torch.ones(5, 6)),
        r"matmul_all_reduce: A is \(4, 6\), B is \(5, 6\)",
    ),
    "root's refusal": (
        lambda ctx, r: ctx.ccl.scatter(torch.empty(4), None if r else torch.ones(4)),
        r"scatter: out is \(4,\) of torch.float32, inp is \(4,\)",
    ),
    "receiver's refusal": (
        lambda ctx, r: ctx.ccl.broadcast(torch.ones(4) if r < 2 else [1.0]),
        "broadcast: tensor is list; expected",
    ),
    "root": (lambda ctx, r: ctx.ccl.broadcast(torch.ones(4), r % 2), "broadcast: src differs between ranks: 0 on"),
    "collective": (
        lambda ctx, r: ctx.ccl.all_reduce(torch.empty(4 + r), torch.ones(4 + r)),
        r"all_reduce: shapes differs between ranks: .*n=4.* on rank 0, .*n=5",
    ),
}  # fmt: skip


def differ(rank: int, world: int, which: str) -> None:
    call, message = DIFFERENT[which]
    with iris.iris(1 << 24) as ctx:
        used, begin = ctx.heap.used, time.monotonic()
        with pytest.raises(ArgumentError, match=message):
            call(ctx, 1 if which == "M" and rank else rank)
        assert time.monotonic() - begin < patient(10) and ctx.heap.used == used, "before anything is launched or kept"
        same = ctx.ones(3)  # and ranks go on together
        ctx.barrier()
        assert same.sum() == 3


@pytest.mark.parametrize("which", DIFFERENT)
def test_what_differs_is_said_on_every_rank(which: str) -> None:
    run(3, differ, which)


def silent(rank: int, world: int, limit: float) -> None:
    with iris.iris(1 << 24) as ctx:
        if rank == 1:
            time.sleep(3 * limit)
            with pytest.raises(ArgumentError, match="call number 1: an allocation on rank 0, a barrier on rank 1"):
                ctx.barrier()
        else:
            message = f"rank 0 lost rank 1 before call number 1, an allocation: it did not come within {limit:g} s"
            with pytest.raises(PeerLostError, match=message):
                ctx.zeros(4)
        os._exit(0)  # nobody is left to close the context with


@pytest.mark.slow
def test_a_rank_that_makes_no_call_is_named() -> None:
    limit = round(patient(1))  # making the context must not take longer
    run(2, silent, limit, timeout_s=limit)


def refused(rank: int, world: int) -> None:
    with pytest.raises(PlatformError, match="IRIS_DEBUG is 'yes'; expected 1, or 0 or nothing"):
        iris.iris(1 << 24)


def test_other_values_are_refused() -> None:
    run(2, refused, debug="yes")


def off(rank: int, world: int) -> None:
    with iris.iris(1 << 24) as ctx:
        assert ctx.agreement is None
        ctx.compare("anything", rank=rank)


def test_nothing_is_compared_by_default() -> None:
    run(2, off, debug="0")


def allowed(rank: int, world: int) -> None:
    """What differs between ranks, and may."""
    with iris.iris(1 << 24) as ctx:
        ctx.barrier(group=[0, 1, 2] if rank else (2, 1, 0))  # a group in any order
        places = [ctx.empty(7, 64) for _ in range(3)]
        M = 7
        for op, depth in (("matmul_all_reduce", 30 + rank), ("matmul_all_gather", 40 + 3 * rank)):
            config = ctx.ops.plan(op, M, 64, depth, torch.float32)  # each has a time of its own in it
            config = replace(config, block_m=16, block_n=32, block_k=16, algorithm="one_shot")
            rows = M if op == "matmul_all_reduce" else part_of(M, world, rank)
            out = places[rank]  # nobody but this rank writes there
            getattr(ctx.ops, op)(out, torch.ones(rows, depth), torch.ones(depth, 64), config=config)
            if op == "matmul_all_reduce":
                k_per_rank = [30 + r for r in range(world)]
                ctx.ops.matmul_all_reduce(out, torch.ones(rows, depth), torch.ones(depth, 64), k_per_rank=k_per_rank)
            if op == "matmul_all_reduce":
                assert (out == sum(30 + r for r in range(world))).all()
            else:
                assert all((out[r * 3 : r * 3 + 3] == 40 + 3 * r).all() for r in range(world))
        mine = ctx.empty(7, 64)[: (2, 2, 0)[rank]]  # of the rows of the sum the last rank has none
        ctx.ccl.reduce_scatter(mine, torch.ones(4, 64))
        assert (mine == world).all()


def test_what_may_differ_passes() -> None:
    run(3, allowed)


def leaving(rank: int, world: int) -> None:
    """Rank 0 ends by the error at once: the others, who come later, get the same."""
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    time.sleep(0.3 * rank)
    with pytest.raises(ArgumentError, match="mine: it differs between ranks: 0 on rank 0, 1 on rank 1, 2 on rank 2"):
        ctx.compare("mine", it=rank)
    os._exit(0)


def test_all_learn_what_differs_before_the_first_leaves() -> None:
    run(3, leaving)


def more_facts(rank: int, world: int) -> None:
    with iris.iris(1 << 20) as ctx:
        facts = {"more": 1} if rank else {}
        with pytest.raises(ArgumentError, match="mine: more differs between ranks: None on rank 0, 1 on rank 1"):
            ctx.compare("mine", **facts)
        ctx.barrier()


def full_on_one(rank: int, world: int) -> None:
    with iris.iris(1 << 20) as ctx:
        used = ctx.heap.used
        with pytest.raises(ArgumentError, match=r"an allocation: sizes differs between ranks: \(3,\) on rank 0"):
            ctx.zeros(3 if rank == 0 else 1 << 30)
        with pytest.raises(HeapExhausted, match="4294967296 bytes"):
            ctx.zeros(1 << 30)
        assert ctx.heap.used == used
        ctx.barrier()


def freed_outside(rank: int, world: int) -> None:
    with iris.iris(1 << 20) as ctx:
        with pytest.raises(ArgumentError, match="is no allocation of this heap"):
            ctx.free(torch.ones(1000))
        ctx.barrier()


@pytest.mark.parametrize("body", [more_facts, full_on_one, freed_outside])
def test_errors_are_alike_on_all_ranks(body) -> None:
    run(2, body, timeout_s=5)


def dead(rank: int, world: int) -> None:
    ctx = iris.iris(1 << 20)
    used = ctx.heap.used
    ctx.barrier()
    if rank == 1:
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match="rank [02] lost rank 1 before call number 2, an allocation"):
        ctx.zeros(5)
    assert ctx.heap.used == used
    with pytest.raises(PeerLostError, match="lost rank 1 in an exchange of the hosts"):
        ctx.barrier()
    ctx.close()  # at once, and without an error: nobody is waited for again
    assert time.monotonic() - begin < patient(10)
    os._exit(0)


def test_a_rank_that_ended_is_lost_at_once_and_once() -> None:
    run(3, dead)


def dead_before_the_last_comes(rank: int, world: int) -> None:
    """Rank 0 sees that rank 1 has ended before rank 2 comes to the call."""
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    if rank == 1:
        os._exit(0)
    time.sleep(rank / 4)
    with pytest.raises(PeerLostError, match=f"rank {rank} lost rank 1 before call number 2"):
        ctx.zeros(5)
    os._exit(0)


def test_who_comes_after_the_others_gave_up_names_the_same_rank() -> None:
    run(3, dead_before_the_last_comes)


def late(rank: int, world: int) -> None:
    """Rank 0 came first, times out first, and ends; ranks that came a little later also report rank 2 as lost."""
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    time.sleep((0, 0.5, 4)[rank])
    if rank < 2:
        with pytest.raises(PeerLostError, match=f"rank {rank} lost rank 2 before call number 2"):
            ctx.barrier()
    os._exit(0)


def test_who_gives_up_later_names_the_same_rank() -> None:
    run(3, late, timeout_s=2)
