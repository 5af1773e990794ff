"""`ctx.broadcast`: values and their types arrive on every rank, and a bad call fails on every rank alike."""

from collections import namedtuple

import iris
from iris import errors
import numpy as np
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks

pytestmark = both

Point = namedtuple("Point", "x y")


def _values(rank):
    return [
        None, True, rank, 2**80 + rank, rank + 0.5, float("inf"), 1j * rank, f"text {rank}", b"bytes",
        [1, rank, 2.5], (rank, "a"), {rank}, {"a": [rank], rank: None}, Point(rank, (1,)), range(rank, 9),
        np.float32(rank), np.int64(rank), np.arange(rank + 2, dtype=np.int16).reshape(1, -1), np.zeros((0, 3)),
        torch.float16, torch.Size([rank, 2]), ValueError("boxed"),
    ]  # fmt: skip


# which torch writes and cannot read
OTHERS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32]


class Broken:
    def __reduce__(self):
        return len, (5,)


def _tensors(rank):
    grid = torch.arange(24.0).view(4, 6) + rank
    return [
        torch.tensor(rank), grid, grid.bfloat16(), grid.t(), grid[1:3, ::2], grid.int(), grid > 5,
        torch.empty(0, 3), grid.to(torch.complex64), torch.nn.Parameter(grid), torch.nn.Parameter(grid, False),
        grid.clone().requires_grad_(), *(grid.to(dtype) for dtype in OTHERS), grid.to(OTHERS[0])[0, 0],
        grid.to(OTHERS[0]).t(), torch.nn.Parameter(grid.to(OTHERS[0]), False),
    ]  # fmt: skip


def _same(mine, expected):
    assert type(mine) is type(expected), (mine, expected)
    if isinstance(expected, torch.Tensor):
        assert mine.dtype == expected.dtype and mine.requires_grad == expected.requires_grad
        as_bytes = mine.dtype in OTHERS
        assert mine.shape == expected.shape
        same = (each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if as_bytes else each.cpu()
                for each in (mine, expected))  # fmt: skip
        assert torch.equal(*same)
    elif isinstance(expected, np.ndarray):
        assert mine.dtype == expected.dtype and np.array_equal(mine, expected)
    elif isinstance(expected, Exception):
        assert mine.args == expected.args
    else:
        assert mine == expected


def _broadcasts(ctx):
    for src in {0, ctx.num_ranks - 1}:
        mine, expected = (_values(r) + _tensors(r) for r in (ctx.cur_rank, src))
        for value, want in zip(mine, expected, strict=True):
            _same(ctx.broadcast(value, src), want)
        _same(ctx.broadcast(value=_values(ctx.cur_rank), src=src)[3], _values(src)[3])
    if ctx.num_ranks > 1:
        named = "" if ctx.cur_rank == 0 else "rank 0: "
        broken = f"^{named}value is a Broken, which cannot be pickled: object of ty"
        with pytest.raises(iris.errors.ArgumentError, match=broken):
            ctx.broadcast(Broken())
    # what the others hold is not looked at
    assert ctx.broadcast(5 if ctx.cur_rank == 0 else (lambda: None)) == 5


@pytest.mark.parametrize("world_size", WORLDS)
def test_broadcast_keeps_values_and_types(world_size):
    run_ranks(world_size, _broadcasts)


def _bad_broadcasts(ctx):
    for src in (-1, ctx.num_ranks, 1.0, "0", True, None):
        with pytest.raises(errors.ArgumentError, match="src is"):
            ctx.broadcast(1, src)
    if ctx.num_ranks > 1:
        with pytest.raises(errors.ArgumentError, match="cannot be pickled"):
            ctx.broadcast(lambda: None, 0)
    with pytest.raises(errors.ArgumentError, match="stream is 'side'; expected None or a torch.cuda.Stream"):
        ctx.barrier("side")
    assert ctx.broadcast(ctx.cur_rank, 0) == 0


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_bad_broadcast_fails_on_every_rank_alike(world_size):
    run_ranks(world_size, _bad_broadcasts)
