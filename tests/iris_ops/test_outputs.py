"""Outputs on the heap: ranks hold, drop and outlive them each in its own order, and every result stays what it was.

Nothing here is the same on two ranks but the calls: so outputs lie at other places on each, and on one of them there
may be no room.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import copy
import gc
import logging
import re

import iris
from iris.ccl import Config
from iris.errors import NotSymmetricError
from iris_ops import FusedConfig, calls, torch_ops
from iris_ops.problem import ALL_REDUCE, MATMUL_GATHER
import layers
import pytest
import torch

from tests.checks import assert_close_to_reference
from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.reference import Case, Inputs

pytestmark = both

# on GPUs more than a MiB, below which torch keeps segments of their own, and so that a few fill the region
SIZE, DEPTH, DTYPE = (1024, 256, torch.bfloat16) if ON_GPU else (48, 24, torch.float32)
PORTABLE = FusedConfig(32, 32, 32, num_warps=4)
SPECIALISED = FusedConfig(128, 128, 64, num_stages=3, num_programs=7, warp_specialised=True)
CONFIGS = {"portable": PORTABLE, **({"warp-specialised": SPECIALISED} if ON_GPU else {})}
FORMS = {ALL_REDUCE: "", MATMUL_GATHER: "rows"}
STEPS = 6


@contextmanager
def planned(config: FusedConfig) -> Iterator[None]:
    """Calls without a config take this one, in which peers write the result."""
    with pytest.MonkeyPatch.context() as monkeypatch, torch.no_grad():
        monkeypatch.setattr(calls.Calls, "plan", lambda *_: config)
        yield


class Product:
    """An op's calls on inputs that change from step to step, each with its exact result."""

    def __init__(self, ctx: iris.Iris, op: str, size: int = SIZE) -> None:
        self.ctx, self.case = ctx, Case(op, FORMS[op], size, SIZE, DEPTH, dtype=DTYPE)
        self.inputs = Inputs.random(self.case, ctx.num_ranks, ctx.device)
        self.exact, self.torchs = (self.inputs.result(self.case, ctx.cur_rank, exact) for exact in (True, False))

    def __call__(self, step: int = 0) -> torch.Tensor:
        """Of A times a power of two, so of the first step's result times that, bit for bit."""
        A, B, bias = (each[self.ctx.cur_rank] * 2.0**times for each, times in self._scaled(step))
        size = (self.case.M, self.case.N)
        return torch_ops.product(self.case.op, self.ctx, A, B.t().contiguous().t(), bias, size)

    def _scaled(self, step: int) -> list[tuple[list[torch.Tensor], int]]:
        return [(self.inputs.A, step % 5), (self.inputs.B, 0), (self.inputs.bias, step % 5)]

    def check(self, result: torch.Tensor, step: int = 0) -> None:
        times = 2.0 ** (step % 5)
        assert_close_to_reference(result, self.exact * times, self.torchs * times)


def place(ctx: iris.Iris, t: torch.Tensor) -> int | None:
    return ctx.heap.offset(t) if ctx.heap.contains(t) else None


# --- lifetimes that differ by rank -----------------------------------------------------------------------------------


def lives(ctx: iris.Iris, op: str, config: FusedConfig) -> list[int | None]:
    """The places of all results. Each rank keeps some, or a view of them, or a cycle that holds them, at random."""
    chance = torch.Generator().manual_seed(7 + ctx.cur_rank)
    product, held, places = Product(ctx, op), [], []
    product.check(product.exact.to(DTYPE))
    with planned(config):
        for step in range(STEPS):
            out = product(step)
            product.check(out, step)
            places.append(place(ctx, out))
            rows = slice(0, 5)
            held_by = (out, out[rows], [out], None)[int(torch.randint(4, (), generator=chance))]
            if isinstance(held_by, list):
                held_by.append(held_by)  # it dies when the collector comes
            if held_by is not None:
                shown = held_by if isinstance(held_by, torch.Tensor) else held_by[0]
                held.append((held_by, shown, shown.clone()))
            del out, held_by
            if held and int(torch.randint(2, (), generator=chance)):
                held.pop(int(torch.randint(len(held), (), generator=chance)))
            for _, shown, copied in held:
                assert torch.equal(shown, copied), "a later call wrote to what is still held"
    ctx.barrier()
    assert len({id(shown.untyped_storage()) for _, shown, _ in held}) == len(held)
    del held
    gc.collect()
    return places


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2, 3], scope="session")
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("op", FORMS)
def test_each_rank_lets_go_of_outputs_in_its_own_time(world_size: int, op: str, config: str) -> None:
    places = run_ranks(world_size, lives, op, CONFIGS[config])
    if not UNDER_TORCHRUN:
        assert len(set(map(tuple, places))) == world_size, "the ranks' outputs were to lie elsewhere on each"
        assert all(where is not None for rank in places for where in rank)


def full_on_one(ctx: iris.Iris, op: str) -> list[bool]:
    """Which results lie on the heap: while rank 0 holds all that its heap has room for, its own do not."""
    product, on_heap = Product(ctx, op), []
    messages: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: messages.append(record.getMessage())
    logger = ctx.log.logger
    logger.addHandler(listener)
    try:
        with planned(PORTABLE):
            first = product()
            held: list[torch.Tensor] = []
            while ctx.cur_rank == 0 and held is not None:
                more = ctx.ops.outputs.empty((SIZE, SIZE), DTYPE)
                if more is None:
                    break
                held.append(more.fill_(7))
            for step in range(4):
                out = product(step)
                product.check(out, step)
                on_heap.append(ctx.heap.contains(out))
                del out
                if step == 1:
                    assert all((each == 7).all() for each in held), "a peer wrote to another tensor"
                    held.clear()
            product.check(first)
    finally:
        logger.removeHandler(listener)
    warnings = [message for message in messages if "finds no room on the heap" in message]
    assert len(warnings) == (ctx.cur_rank == 0), messages
    for message in warnings:
        held, whole = map(int, re.findall(r"outputs that are alive hold (\d+) of (\d+) bytes; let go", message)[0])
        assert 0 < held <= whole < held + SIZE * SIZE * DTYPE.itemsize
    return on_heap


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2], scope="session")
def test_one_rank_without_room_copies_and_its_peers_do_not(world_size: int, op: str) -> None:
    results = run_ranks(world_size, full_on_one, op)
    if not UNDER_TORCHRUN:
        assert results == [[False, False, True, True], [True] * 4]


def copies(ctx: iris.Iris) -> None:
    product = Product(ctx, ALL_REDUCE)
    with planned(PORTABLE):
        out = product()
        twin, alias = copy.deepcopy(out), out.view(-1)
        assert not out._is_view() and out.is_contiguous() and not out.requires_grad
        assert not ctx.heap.contains(twin) and alias.data_ptr() == out.data_ptr()
        out.zero_()
        del out
        for step in range(3):
            product(step)
        assert not alias.any(), "the memory of a view whose base is gone"
        product.check(twin)
        # an output may be the `out` of another call, wherever each rank has it
        again = [product() for _ in range(2)][ctx.cur_rank % 2]
        A, B, bias = (each[ctx.cur_rank] for each in (product.inputs.A, product.inputs.B, product.inputs.bias))
        again.fill_(torch.nan)
        ctx.ops.matmul_all_reduce(again, A, B, bias)
        product.check(again)
        # to collectives and to whoever asks where peers have it, it is a tensor outside the symmetric heap
        assert not ctx.is_symmetric(again)
        with pytest.raises(NotSymmetricError):
            ctx.peer_view(again, 0)
        again.fill_(torch.nan)
        ctx.ccl.all_reduce(
            again, torch.ones_like(again), config=Config(protocol="flags", all_reduce_variant="two_shot")
        )
        assert (again == ctx.num_ranks).all()
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2], scope="session")
def test_outputs_are_ordinary_tensors(world_size: int) -> None:
    run_ranks(world_size, copies)


def layer(ctx: iris.Iris) -> None:
    """A layer's result, eager and compiled, of several sizes: the region grows, and what lies in the old one stays."""
    torch.manual_seed(3)
    part = DEPTH
    linear = torch.nn.Linear(part * ctx.num_ranks, SIZE, bias=False, device=ctx.device, dtype=DTYPE)
    row = layers.RowParallelLinear.from_linear(linear, ctx=ctx)
    first = ctx.cur_rank * part
    held = []
    with planned(PORTABLE):
        compiled = torch.compile(row, backend="eager", fullgraph=True)
        for rows in (SIZE, 3 * SIZE, SIZE):
            whole = torch.randn(rows, part * ctx.num_ranks, device=ctx.device).to(DTYPE)
            for call in (row, compiled):
                result = call(whole[:, first : first + part])
                assert ctx.heap.contains(result)
                held.append((result, whole.double() @ linear.weight.double().t(), whole @ linear.weight.t()))
        for result, exact, torchs in held:
            assert_close_to_reference(result, exact, torchs, float(exact.abs().max()) * 8)
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2], scope="session")
def test_layers_return_them(world_size: int) -> None:
    run_ranks(world_size, layer)


# --- what is wrong, and what only looks so ---------------------------------------------------------------------------
