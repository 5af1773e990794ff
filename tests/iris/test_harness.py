"""The harness itself: results in order, errors from ranks, worlds that end, bounds that can be missed."""

import os
import signal
import time

import pytest
import torch

from tests import harness
from tests.checks import guarded
from tests.harness import WORLDS, run_ranks


def _rank_and_bytes(ctx):
    tensor = ctx.heap.allocate((5000,), torch.int32)
    was = int(tensor.abs().sum())
    tensor.fill_(7)
    return ctx.cur_rank, was, ctx.heap.used


@pytest.mark.parametrize("world_size", WORLDS)
def test_results_come_in_rank_order_and_each_body_finds_a_new_heap(world_size):
    first = run_ranks(world_size, _rank_and_bytes)
    assert [rank for rank, _, _ in first] == list(range(world_size))
    assert run_ranks(world_size, _rank_and_bytes) == first
    assert all(was == 0 for _, was, _ in first)


def _fail_on(ctx, rank):
    if ctx.cur_rank == rank:
        raise KeyError("this one")
    ctx.barrier()


def test_an_exception_on_one_rank_is_raised_with_its_traceback(monkeypatch):
    monkeypatch.setattr(harness, "_GRACE_S", 1.0)
    with pytest.raises(KeyError, match="this one") as caught:
        run_ranks(2, _fail_on, 1)
    assert "on rank 1" in str(caught.value.__cause__) and "_fail_on" in str(caught.value.__cause__)
    assert len(run_ranks(2, _rank_and_bytes)) == 2


def _kill_on(ctx, rank):
    if ctx.cur_rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_dies_is_an_error_and_the_next_world_works():
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        run_ranks(2, _kill_on, 1)
    assert len(run_ranks(2, _rank_and_bytes)) == 2


def _sleep(ctx):
    time.sleep(3600)  # as patient as a busy machine makes the limit


@pytest.mark.slow  # ends a world of workers, which others must start anew
def test_a_rank_that_hangs_ends_at_the_time_out_and_says_where_it_was():
    with pytest.raises(TimeoutError, match="in _sleep"):
        run_ranks(2, _sleep, timeout=1)


def _write_next_to(ctx, row, column):
    out = guarded(ctx, (4, 5), torch.bfloat16, row_pad=3)
    assert out.tensor.isnan().all() and out.tensor.stride() == (8, 1)
    out.tensor.fill_(1.0)
    out.check()
    out.tensor.as_strided((6, 8), (8, 1))[row, column] = 1.0
    out.check()


@pytest.mark.parametrize("row, column", [(0, 5), (3, 5), (5, 0)])
def test_guard_bands_see_a_write_beside_the_tensor(row, column):
    with pytest.raises(AssertionError, match="guard bytes"):
        run_ranks(1, _write_next_to, row, column)
