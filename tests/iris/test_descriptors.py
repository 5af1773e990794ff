"""A rank without a free file descriptor: every rank raises an error that names it, and blames no peer."""

from __future__ import annotations

from contextlib import contextmanager
import os
import resource
import time

import iris
from iris.errors import IrisError
import pytest
import torch
import torch.distributed as dist

from tests.harness import UNDER_TORCHRUN
from tests.processes import patient, run_fresh

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")


@contextmanager
def none_left(rank: int, spare: int = 0):
    """On rank 1 of the block's ranks, no file can be opened beyond `spare` ones."""
    opened: list[int] = []
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
        try:
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            for descriptor in opened[len(opened) - spare :]:
                os.close(descriptor)
            del opened[len(opened) - spare :]
    try:
        yield
    finally:
        for descriptor in opened:
            os.close(descriptor)


def creating(rank: int, world: int, spare: int) -> str:
    dist.init_process_group("gloo")
    begin = time.monotonic()
    with none_left(rank, spare), pytest.raises(IrisError) as raised:
        iris.iris(1 << 20)
    assert time.monotonic() - begin < patient(10), "nobody waits for the time-out"
    return str(raised.value)


def using(rank: int, world: int, allocator: str) -> str:
    with pytest.raises(IrisError) as raised, iris.iris(1 << 28, allocator) as ctx:
        torch.zeros(1)
        with none_left(rank):
            for _ in range(3):
                assert ctx.broadcast(rank) == 0
                ctx.barrier()
            ctx.empty(3 << 24)  # beyond what is mapped at first
        if allocator == "torch":
            raise IrisError("rank 1: no descriptor was needed: ulimit -n")
    return str(raised.value)


@pytest.mark.parametrize("spare", [0, 4, 9])
def test_a_context_that_cannot_be_made_names_the_rank(spare: int) -> None:
    check(run_fresh(3, creating, spare, env={"IRIS_TIMEOUT": "30"}))


@pytest.mark.parametrize("allocator", ["torch", "vmem"])
def test_a_context_is_used_without_one_and_names_the_rank_where_one_is_needed(allocator: str) -> None:
    check(run_fresh(2, using, allocator, env={"IRIS_TIMEOUT": "30"}))


def check(ended: list) -> None:
    for rank, end in enumerate(ended):
        assert end.exitcode == 0, end.traceback
        assert "ulimit -n" in end.result or rank != 1, end.result
        assert "rank 1" in end.result or "{1: " in end.result, end.result
        assert not any(f"lost rank {other}" in end.result for other in (0, 2)), end.result
