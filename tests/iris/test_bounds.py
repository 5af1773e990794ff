"""Accesses that leave the heaps: in the interpreter each is an error, before any memory of the process is written."""

from __future__ import annotations

import iris
from iris.errors import ArgumentError
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import UNDER_TORCHRUN, run_ranks

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="kernels that run in the interpreter")


@triton.jit
def access(call: tl.constexpr, x, own, peer, bases, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    mask = i < n
    if call == "store":
        iris.store(x + i, 7, own, peer, bases, mask=mask)
    elif call == "load":
        iris.load(x + i, own, peer, bases, mask=mask, other=0)
    elif call == "get":
        iris.get(x + i, x + i, peer, own, bases, mask=mask)
    elif call == "put":
        iris.put(x + i, x + i, own, peer, bases, mask=mask)
    elif call == "copy":
        iris.copy(x + i, x + i, own, peer, own, bases, mask=mask)
    elif call == "atomic_cas":
        iris.atomic_cas(x, 0, 0, own, peer, bases)
    elif call == "atomic_add":
        iris.atomic_add(x + i, 0, own, peer, bases, mask=mask)
    else:
        iris.atomic_xchg(x + i, 7, own, peer, bases, mask=mask)


CALLS = ["store", "load", "get", "put", "copy", "atomic_cas", "atomic_add", "atomic_xchg"]


def leave_the_heap(ctx, call: str) -> None:
    me, world = ctx.cur_rank, ctx.num_ranks
    peer = (me + 1) % world
    x, elsewhere, bases = ctx.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32), ctx.get_heap_bases()
    tail = ctx.heap.memory[-16:].view(torch.int32)
    for _ in range(2):
        access[(1,)](call, x, me, peer, bases, 48, BLOCK=64)
        access[(1,)](call, tail, me, peer, bases, 4 if call != "store" else 0, BLOCK=64)  # masked beyond the heap's end
        wrong = {
            "outside": (elsewhere, me, peer, "lies outside the heap of rank"),
            "no rank": (x, me, 7, "has no heap"),
        }
        if call != "get":  # which takes its two ranks in either order
            wrong["not the caller"] = x, peer, me, f"lies outside the heap of rank {peer}"
        for tensor, own, other, message in wrong.values():
            with pytest.raises(ArgumentError, match=f"iris.{call}: .*{message}"):
                access[(1,)](call, tensor, own, other, bases, 48, BLOCK=64)
    if call != "atomic_cas":
        with pytest.raises(ArgumentError, match=f"iris.{call}: .*lies outside the heap"):
            access[(1,)](call, tail, me, peer, bases, 5, BLOCK=64)
    assert (elsewhere == 0).all()
    ctx.barrier()


@pytest.mark.parametrize("call", CALLS)
def test_an_access_that_leaves_the_heap_is_refused(call: str) -> None:
    run_ranks(2, leave_the_heap, call)


def addresses_for_bases(ctx) -> int:
    x, addresses = ctx.allocate_symmetric(4, dtype=torch.int32)
    x.zero_()
    ctx.barrier()
    access[(1,)]("store", x, ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks, addresses, 4, BLOCK=4)
    ctx.barrier()
    return int(x.sum())


def test_addresses_of_a_tensor_serve_for_heap_bases() -> None:
    assert run_ranks(2, addresses_for_bases) == [28, 28]
