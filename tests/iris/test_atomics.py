"""Atomics on peers' memory: what they leave, what they return, and that none is lost when all ranks go at once."""

import iris
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both

INTEGERS = [torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64]
NARROW = [torch.float16, torch.bfloat16]
N, INSIDE = 8, 5
ROUNDS = 6


@triton.jit
def _both_spellings(
    pointer, value, rank, to, bases, ctx_ptr, mask, OP: tl.constexpr, VIA_CONTEXT: tl.constexpr, WORLD: tl.constexpr,
    SEM: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD)
    if VIA_CONTEXT:
        if OP == "add":
            old = ctx.atomic_add(pointer, value, to, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "xchg":
            old = ctx.atomic_xchg(pointer, value, to, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "xor":
            old = ctx.atomic_xor(pointer, value, to, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "and":
            old = ctx.atomic_and(pointer, value, to, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "or":
            old = ctx.atomic_or(pointer, value, to, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "min":
            old = ctx.atomic_min(pointer, value, to, mask=mask, sem=SEM, scope=SCOPE)
        else:
            old = ctx.atomic_max(pointer, value, to, mask=mask, sem=SEM, scope=SCOPE)
    else:
        if OP == "add":
            old = iris.atomic_add(pointer, value, rank, to, bases, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "xchg":
            old = iris.atomic_xchg(pointer, value, rank, to, bases, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "xor":
            old = iris.atomic_xor(pointer, value, rank, to, bases, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "and":
            old = iris.atomic_and(pointer, value, rank, to, bases, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "or":
            old = iris.atomic_or(pointer, value, rank, to, bases, mask=mask, sem=SEM, scope=SCOPE)
        elif OP == "min":
            old = iris.atomic_min(pointer, value, rank, to, bases, mask=mask, sem=SEM, scope=SCOPE)
        else:
            old = iris.atomic_max(pointer, value, rank, to, bases, mask=mask, sem=SEM, scope=SCOPE)
    return old


@triton.jit
def _apply_kernel(
    target, values, old, rank, to, bases, ctx_ptr, inside, OP: tl.constexpr, VIA_CONTEXT: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, WORLD: tl.constexpr, SEM: tl.constexpr, SCOPE: tl.constexpr,
):  # fmt: skip
    """old[i] = target[i] at `to`, before it became OP(target[i], values[i])."""
    i = tl.arange(0, N) if N > 1 else 0
    mask = i < inside if MASKED else None
    value = tl.load(values + i)
    was = _both_spellings(target + i, value, rank, to, bases, ctx_ptr, mask, OP, VIA_CONTEXT, WORLD, SEM, SCOPE)
    tl.store(old + i, was, mask=mask)


def _launch(ctx, target, values, old, to, op, via_context=False, inside=None, sem=None, scope=None):
    _apply_kernel[(1,)](
        target, values, old, ctx.cur_rank, to, ctx.get_heap_bases(), ctx.get_device_context(), inside or 0, OP=op,
        VIA_CONTEXT=via_context, N=target.numel(), MASKED=inside is not None, WORLD=ctx.num_ranks, SEM=sem, SCOPE=scope,
    )  # fmt: skip


# OP(a, b) in torch, for a block that only one rank touches
MEANING = {
    "add": torch.add,
    "xchg": lambda a, b: b,
    "min": torch.minimum,
    "max": torch.maximum,
    "xor": torch.bitwise_xor,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}


def _supported(op: str, dtype: torch.dtype) -> bool:
    if dtype in INTEGERS:
        return True
    if dtype in NARROW:
        return op == "add"
    if ON_GPU:
        return op in ("add", "xchg", "min", "max")
    # The interpreter orders negative fp64 values wrongly.
    return op in ("add", "xchg") or op in ("min", "max") and dtype == torch.float32


SUPPORTED = [(op, dtype) for op in MEANING for dtype in INTEGERS + FLOATS + NARROW if _supported(op, dtype)]


def _meanings(ctx, cases):
    """Each rank works on its neighbour's block alone: the values left and returned are torch's."""
    to, before = (ctx.cur_rank + 1) % ctx.num_ranks, (ctx.cur_rank - 1) % ctx.num_ranks
    for number, (op, dtype) in enumerate(cases):
        for length, inside in ((1, None), (N, None), (N, INSIDE)):
            first = torch.arange(length).mul(7).sub(11).to(dtype)
            operands = [torch.arange(length).mul(5).add(rank - 13).to(dtype) for rank in range(ctx.num_ranks)]
            target = ctx.empty(length, dtype=dtype).copy_(first)
            old = ctx.zeros(length, dtype=dtype)
            values = operands[ctx.cur_rank].to(ctx.device)
            ctx.barrier()
            _launch(ctx, target, values, old, to, op, via_context=number % 2 == 1, inside=inside)
            ctx.barrier()
            n = length if inside is None else inside
            left = torch.cat([MEANING[op](first, operands[before])[:n], first[n:]])
            returned = torch.cat([first[:n], torch.zeros_like(first)[n:]])
            assert torch.equal(target.cpu(), left), (op, dtype, length, inside, target, left)
            assert torch.equal(old.cpu(), returned), (op, dtype, length, inside, old, returned)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_each_atomic_leaves_and_returns(world_size):
    run_ranks(world_size, _meanings, SUPPORTED)
    if ON_GPU or world_size == 2:
        run_ranks(world_size, _meanings, SUPPORTED[1:] + SUPPORTED[:1])  # each by the other spelling


@triton.jit
def _tickets_kernel(counter, tickets, rank, to, bases, rounds, SEM: tl.constexpr, SCOPE: tl.constexpr):
    for i in range(rounds):
        ticket = iris.atomic_add(counter, 1, rank, to, bases, sem=SEM, scope=SCOPE)
        tl.store(tickets + i, ticket)


def _tickets(ctx, dtype):
    """All ranks draw from one counter: every ticket comes once, at every rank, with every `sem`."""
    sems = [None, "relaxed", "acquire", "release", "acq_rel"]
    counter = ctx.zeros(1, dtype=dtype)
    tickets = torch.zeros(len(sems), ROUNDS, dtype=dtype, device=ctx.device)
    for to in range(ctx.num_ranks):
        counter.zero_()
        ctx.barrier()
        for sem, row in zip(sems, tickets, strict=True):
            _tickets_kernel[(1,)](counter, row, ctx.cur_rank, to, ctx.get_heap_bases(), ROUNDS, SEM=sem, SCOPE="sys")
        ctx.barrier()
        drawn = [ctx.broadcast(tickets, src) for src in range(ctx.num_ranks)]
        everyone = torch.cat([t.flatten().cpu() for t in drawn]).sort().values
        assert torch.equal(everyone, torch.arange(len(sems) * ROUNDS * ctx.num_ranks, dtype=dtype)), everyone


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_no_ticket_is_drawn_twice(world_size, dtype):
    run_ranks(world_size, _tickets, dtype)


def _sum_of_all(ctx, dtype):
    total = ctx.zeros(N, dtype=dtype)
    values = torch.full((N,), ctx.cur_rank + 1, dtype=dtype, device=ctx.device)
    old = torch.zeros_like(values)
    ctx.barrier()
    for _ in range(ROUNDS):
        for to in range(ctx.num_ranks):
            _launch(ctx, total, values, old, to, "add")
    ctx.barrier()
    assert (total == ROUNDS * ctx.num_ranks * (ctx.num_ranks + 1) // 2).all(), total


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", INTEGERS + FLOATS + NARROW, ids=str)
def test_no_addition_is_lost(world_size, dtype):
    run_ranks(world_size, _sum_of_all, dtype)


@triton.jit
def _swap_kernel(word, cmp, value, old, rank, to, bases, ctx_ptr, VIA_CONTEXT: tl.constexpr, WORLD: tl.constexpr):
    if VIA_CONTEXT:
        ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD)
        was = ctx.atomic_cas(word, tl.load(cmp), tl.load(value), to, sem="acq_rel", scope="sys")
    else:
        was = iris.atomic_cas(word, tl.load(cmp), tl.load(value), rank, to, bases)
    tl.store(old, was)


@triton.jit
def _increment_kernel(word, rank, to, bases, rounds):
    for _ in range(rounds):
        seen = iris.load(word, rank, to, bases, volatile=True)
        swapped = False
        while not swapped:
            was = iris.atomic_cas(word, seen, seen + 1, rank, to, bases, sem="acq_rel", scope="sys")
            swapped = was == seen
            seen = was


def _compare_and_swap(ctx, dtype):
    to, before = (ctx.cur_rank + 1) % ctx.num_ranks, (ctx.cur_rank - 1) % ctx.num_ranks
    word = ctx.empty(1, dtype=dtype)

    def number(value):
        return torch.tensor([value], dtype=dtype, device=ctx.device)

    for via_context in (False, True):
        for cmp, expected in ((5, 100 + before), (6, 5)):
            word.fill_(5)
            old = number(0)
            ctx.barrier()
            _swap_kernel[(1,)](
                word, number(cmp), number(100 + ctx.cur_rank), old, ctx.cur_rank, to, ctx.get_heap_bases(),
                ctx.get_device_context(), VIA_CONTEXT=via_context, WORLD=ctx.num_ranks,
            )  # fmt: skip
            ctx.barrier()
            assert (word.item(), old.item()) == (expected, 5)
            ctx.barrier()
    word.zero_()
    ctx.barrier()
    for target in range(ctx.num_ranks):
        _increment_kernel[(1,)](word, ctx.cur_rank, target, ctx.get_heap_bases(), ROUNDS)
    ctx.barrier()
    assert word.item() == ROUNDS * ctx.num_ranks


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_compare_and_swap(world_size, dtype):
    run_ranks(world_size, _compare_and_swap, dtype)
