"""Ranks that compare their calls, as IRIS_DEBUG=1 has them: the same ones pass, others are errors that say how."""

from __future__ import annotations

import os
import time

import iris
from iris.errors import ArgumentError, PeerLostError, PlatformError
import layers
import pytest
import torch

from tests.harness import UNDER_TORCHRUN
from tests.layers import models
from tests.processes import run_fresh

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


def test_a_model_passes() -> None:
    run(2, model)


DIFFERENT = {
    "M": (
        lambda ctx, r: ctx.ops.matmul_all_reduce(torch.empty(4 + r, 6), torch.ones(4 + r, 5), torch.ones(5, 6)),
        r"matmul_all_reduce: M differs between ranks: 4 on rank 0, 5 on ranks 1, 2; expected the same calls",
    ),
    "op": (
        lambda ctx, r: ctx.barrier()
        if r == 1
        else ctx.ops.matmul_all_reduce(torch.empty(4, 6), torch.ones(4, 5), torch.ones(5, 6)),
        r"their call number \d+: matmul_all_reduce on ranks 0, 2, a barrier on rank 1; expected",
    ),
    "sizes": (lambda ctx, r: ctx.zeros(4 + (r == 2)), r"an allocation: sizes differs between ranks: \(4,\) on ranks 0"),
    "src": (lambda ctx, r: ctx.broadcast(1, src=r % 2), r"broadcast: src differs between ranks: 0 on ranks 0, 2, 1 on"),
    "collective": (
        lambda ctx, r: ctx.ccl.all_reduce(torch.empty(4 + r), torch.ones(4 + r)),
        r"all_reduce: shapes differs between ranks: Problem\(.*n=4.* on rank 0, Problem\(.*n=5",
    ),
}  # fmt: skip


def differ(rank: int, world: int, which: str) -> None:
    call, message = DIFFERENT[which]
    with iris.iris(1 << 24) as ctx:
        used, begin = ctx._heap.used, time.monotonic()
        with pytest.raises(ArgumentError, match=message):
            call(ctx, 1 if which == "M" and rank else rank)
        assert time.monotonic() - begin < 10 and ctx._heap.used == used, "before anything is launched or kept"
        same = ctx.ones(3)  # and ranks go on together
        ctx.barrier()
        assert same.sum() == 3


@pytest.mark.parametrize("which", DIFFERENT)
def test_what_differs_is_said_on_every_rank(which: str) -> None:
    run(3, differ, which)


def elsewhere(rank: int, world: int) -> None:
    """`out` is another allocation on rank 1: its peers would write where it does not look."""
    with iris.iris(1 << 24) as ctx:
        places = ctx.empty(64, 64), ctx.empty(64, 64)
        from iris_ops import FusedConfig

        config = FusedConfig(32, 32, 32, num_warps=4)
        with pytest.raises(ArgumentError, match=r"matmul_all_reduce: out differs between ranks: at \d+ of the heap on"):
            ctx.ops.matmul_all_reduce(places[rank], torch.ones(64, 32), torch.ones(32, 64), config=config)


def test_results_at_different_places_are_found_out() -> None:
    run(2, elsewhere)


def silent(rank: int, world: int) -> None:
    with iris.iris(1 << 24) as ctx:
        if rank == 1:
            time.sleep(5)
            with pytest.raises(PeerLostError, match="rank 1 lost rank 0 before a barrier: its store"):
                ctx.barrier()
        else:
            with pytest.raises(PeerLostError, match="rank 0 lost rank 1: it made no call number 1 within 2 s"):
                ctx.zeros(4)
        os._exit(0)  # nobody is left to close the context with


def test_a_rank_that_makes_no_call_is_named() -> None:
    run(2, silent, timeout_s=2)


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
