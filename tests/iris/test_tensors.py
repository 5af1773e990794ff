"""Constructors: what torch gives, on the heap, at the same offset on all ranks; bad calls raise and take nothing."""

import itertools
import operator
import os
import random

import iris
from iris import errors, heap
from iris.errors import ArgumentError
import pytest
import torch

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both

# name, positional arguments, keywords; each is called on the context and on torch
CALLS = [
    ("zeros", (2, 3), {}),
    ("zeros", ((2, 3),), {}),
    ("zeros", ([4],), {"dtype": torch.float16}),
    ("zeros", (torch.Size([2, 0, 3]),), {}),
    ("zeros", ((),), {"dtype": torch.int8}),
    ("zeros", (), {"size": (2, 2)}),
    ("zeros", (3,), {"dtype": float}),
    ("ones", (5,), {"dtype": torch.bfloat16, "requires_grad": True}),
    ("ones", (1, 2, 1), {"dtype": torch.bool}),
    ("ones", (3,), {"dtype": torch.complex64, "layout": torch.strided}),
    ("empty", (3, 4), {"dtype": torch.int32}),
    ("empty", (2, 3, 4, 5), {"memory_format": torch.channels_last}),
    ("full", ((2, 3), 7), {}),
    ("full", ((2,), 1.5), {}),
    ("full", ((2,), True), {}),
    ("full", ((2,), 3), {"dtype": torch.float64}),
    ("full", (), {"size": (2,), "fill_value": 4}),
    ("rand", (3, 4), {}),
    ("rand", ((257,),), {"dtype": torch.float64, "requires_grad": True}),
    ("randn", (129,), {}),
    ("randn", (2, 3), {"dtype": torch.bfloat16}),
    ("randint", (10, (3, 4)), {}),
    ("randint", (-5, 6, (7,)), {"dtype": torch.int32}),
    ("randint", (), {"low": 2, "high": 9, "size": (4,)}),
    ("randint", (9, (5,)), {"dtype": torch.float32}),
    ("arange", (5,), {}),
    ("arange", (1, 2.5), {}),
    ("arange", (1, 10, 3), {"dtype": torch.int16}),
    ("arange", (5, -1, -2), {}),
    ("arange", (), {"start": 1, "end": 4}),
    ("arange", (0,), {}),
    ("linspace", (0, 1, 5), {}),
    ("linspace", (3, -3, 4), {"dtype": torch.float64}),
    ("linspace", (), {"start": 0, "end": 10, "steps": 3, "dtype": torch.int32}),
]


def _same_as_torch(ctx, name, args, keywords):
    outside = torch.get_rng_state()
    if ctx.device.type == "cuda":
        outside = torch.cuda.get_rng_state()
    result = getattr(ctx, name)(*args, **keywords)
    torch.cuda.set_rng_state(outside) if ctx.device.type == "cuda" else torch.set_rng_state(outside)
    theirs = getattr(torch, name)(*args, device=ctx.device, **keywords)
    assert result.dtype == theirs.dtype and result.shape == theirs.shape and result.stride() == theirs.stride()
    assert result.requires_grad == theirs.requires_grad and result.is_leaf
    assert result.device == ctx.device and ctx.is_symmetric(result)
    if name != "empty":
        assert torch.equal(result, theirs), (result, theirs)
    # the same values into `out`
    if "memory_format" not in keywords:
        out = torch.zeros_like(result, requires_grad=False)
        onto = ctx.empty(out.shape, dtype=out.dtype)
        torch.cuda.set_rng_state(outside) if ctx.device.type == "cuda" else torch.set_rng_state(outside)
        used = ctx.heap.used
        assert getattr(ctx, name)(*args, out=onto, **keywords) is onto
        assert ctx.heap.used == used
        assert onto.requires_grad == result.requires_grad
        assert name == "empty" or torch.equal(onto, result)


def _all_calls(ctx):
    for call in CALLS:
        try:
            _same_as_torch(ctx, *call)
        except Exception as error:
            raise AssertionError(f"{call}: {error}") from error


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_every_constructor_gives_what_torch_gives(world_size):
    run_ranks(world_size, _all_calls)


def _default_dtype(ctx):
    torch.set_default_dtype(torch.float64)
    try:
        assert ctx.zeros(2).dtype == ctx.full((1,), 0.5).dtype == ctx.arange(0, 1, 0.5).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        assert ctx.ones(3).sum().item() == 3
    first = torch.Generator(ctx.device).manual_seed(5)
    again = torch.Generator(ctx.device).manual_seed(5)
    assert torch.equal(ctx.randn(9, generator=first), torch.randn(9, generator=again, device=ctx.device))
    assert torch.equal(
        ctx.randint(99, (9,), generator=first), torch.randint(99, (9,), generator=again, device=ctx.device)
    )


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_default_dtype_default_device_and_generators(world_size):
    run_ranks(world_size, _default_dtype)


def _zeros_like(ctx):
    base = torch.randn(4, 6, device=ctx.device)
    for like in (base, base.t(), base[::2, 1:3], base.bfloat16(), base.expand(3, 4, 6), torch.tensor(3)):
        for keywords in ({}, {"dtype": torch.int32}, {"memory_format": torch.contiguous_format}):
            theirs = torch.zeros_like(like, **keywords)
            result = ctx.zeros_like(like, **keywords)
            assert (
                result.stride() == theirs.stride()
                and result.dtype == theirs.dtype
                and torch.equal(result.cpu(), theirs.cpu())
            )
            assert ctx.is_symmetric(result)


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_zeros_like_keeps_strides_and_dtype(world_size):
    run_ranks(world_size, _zeros_like)


def _offsets(ctx):
    """Ranks whose Python differs in what it frees and when."""
    offsets = []
    for i in range(20):
        tensor = ctx.rand(i + 1, 7) if i % 3 else ctx.zeros((i,), dtype=torch.int8)
        offsets.append(tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize)
        if i % (ctx.cur_rank + 2):
            del tensor
    base = int(ctx.get_heap_bases()[ctx.cur_rank])
    assert all((offset - base) % 256 == 0 for offset in offsets)
    return [offset - base for offset in offsets]


@pytest.mark.parametrize("world_size", WORLDS)
def test_the_same_calls_give_the_same_offsets_on_all_ranks(world_size):
    offsets = run_ranks(world_size, _offsets)
    assert all(mine == offsets[0] for mine in offsets)
    assert sorted(set(offsets[0])) == offsets[0]


def _membership(ctx):
    t = ctx.zeros(4, 4)
    assert ctx.as_symmetric(t) is t
    inside = [t, t[1:, 2:], t.t(), t.view(torch.int32), t[0, 0], ctx.empty(0, 5), torch.nn.Parameter(t)]
    assert all(ctx.is_symmetric(x) for x in inside)
    whole = ctx._segment.local
    assert ctx.is_symmetric(whole)
    outside = [torch.zeros(4, device=ctx.device), t + 1, t.clone(), torch.zeros(2, device="meta"), t.to_sparse()]
    assert not any(ctx.is_symmetric(x) for x in outside)
    for x in outside:
        with pytest.raises(errors.NotSymmetricError, match="ctx.empty"):
            ctx.as_symmetric(x)
    with pytest.raises(errors.ArgumentError, match="expected a torch.Tensor"):
        ctx.is_symmetric([1, 2])


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_what_is_symmetric_and_what_is_not(world_size):
    run_ranks(world_size, _membership)


def _bad_calls(ctx):
    kept, fixed = ctx.zeros(3), ctx.zeros(3, dtype=torch.int32)
    outside = torch.zeros(3, device=ctx.device)
    nested = torch.nested.nested_tensor([kept, kept[:2]])
    other_device = "cpu" if ctx.device.type == "cuda" else "cuda"
    bad = [
        (errors.ArgumentError, r"zeros\(-3\).*negative", lambda: ctx.zeros(-3)),
        (errors.ArgumentError, r"zeros\(.a.\).*(not str|invalid)", lambda: ctx.zeros("a")),
        (errors.ArgumentError, r"ones\(1\.5\)", lambda: ctx.ones(1.5)),
        (errors.ArgumentError, r"ones\(True\)", lambda: ctx.ones(True)),
        (errors.ArgumentError, "torch.rand takes", lambda: ctx.rand(None)),
        (errors.HeapExhausted, "heap_size", lambda: ctx.zeros(1 << 42)),
        (errors.HeapExhausted, r"a tensor \(1099511627776, 4\) of torch.float32 needs", lambda: ctx.zeros(1 << 40, 4)),
        (errors.HeapExhausted, "overflow", lambda: ctx.empty(1 << 40, 1 << 40)),
        (errors.ArgumentError, "zeros", lambda: ctx.zeros(1 << 70)),
        (errors.DtypeError, "dtype is 'float32'", lambda: ctx.zeros(3, dtype="float32")),
        (errors.DtypeError, "not implemented for", lambda: ctx.rand(3, dtype=torch.int32)),
        (errors.ArgumentError, "require gradients", lambda: ctx.zeros(3, dtype=torch.int32, requires_grad=True)),
        (errors.ArgumentError, "colour", lambda: ctx.zeros(3, colour=1)),
        (errors.ArgumentError, "layout", lambda: ctx.zeros(3, layout=torch.sparse_coo)),
        (errors.ArgumentError, "pin_memory", lambda: ctx.zeros(3, pin_memory=True)),
        (errors.DeviceError, f"device is '{other_device}", lambda: ctx.zeros(3, device=other_device)),
        (errors.DeviceError, "device is 'nowhere'", lambda: ctx.zeros(3, device="nowhere")),
        (errors.ArgumentError, "out is 'there'", lambda: ctx.zeros(3, out="there")),
        (errors.NotSymmetricError, "outside this heap", lambda: ctx.zeros(3, out=outside)),
        (errors.DeviceError, "meta", lambda: ctx.zeros(3, out=torch.zeros(3, device="meta"))),
        (errors.ShapeError, r"\(3,\).*expected \(4,\)", lambda: ctx.zeros(4, out=kept)),
        (errors.DtypeError, "out is torch.int32", lambda: ctx.zeros(3, out=fixed, dtype=torch.float32)),
        (errors.ArgumentError, "step", lambda: ctx.arange(0, 5, 0)),
        (errors.ArgumentError, "arange", lambda: ctx.arange(5, 0)),
        (errors.ArgumentError, "linspace", lambda: ctx.linspace(0, 1)),
        (errors.ArgumentError, "negative", lambda: ctx.linspace(0, 1, -2)),
        (errors.ArgumentError, "randint", lambda: ctx.randint(5, 0, (3,))),
        (errors.ArgumentError, r"full\(", lambda: ctx.full((2,), "x")),
        (errors.ArgumentError, "zeros_like", lambda: ctx.zeros_like(3)),
        (errors.ArgumentError, "rand", lambda: ctx.rand(3, generator="seed")),
        (errors.ArgumentError, "tensor is a nested tensor", lambda: ctx.zeros_like(nested)),
        (errors.ArgumentError, "tensor is a nested tensor", lambda: ctx.is_symmetric(nested)),
        (errors.ArgumentError, "tensor is a nested tensor", lambda: ctx.as_symmetric(nested)),
        (errors.ArgumentError, "tensor is a nested tensor", lambda: ctx.peer_view(nested, 0)),
        (errors.ArgumentError, "tensor is a nested tensor", lambda: ctx.free(nested)),
        (errors.ArgumentError, r"\(3,\) .* is no allocation", lambda: ctx.free(outside.to_sparse())),
    ]
    for kind, text, call in bad:
        used = ctx.heap.used
        with pytest.raises(kind, match=text) as caught:
            call()
        assert isinstance(caught.value, errors.IrisError)
        assert ctx.heap.used == used, text
    ctx.barrier()
    assert ctx.ones(3, out=kept) is kept and kept.sum().item() == 3


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_bad_calls_raise_typed_errors_and_take_nothing(world_size):
    run_ranks(world_size, _bad_calls)


def _exhaust(ctx):
    free = ctx.heap.free_bytes
    needs = (
        rf"needs {free + 256} bytes in one piece; expected at most {free}, .*{free} of the heap's {ctx.heap.size} bytes"
    )
    with pytest.raises(errors.HeapExhausted, match=needs):  # in whole granules
        ctx.empty(free + 1, dtype=torch.uint8)
    half = free // 512 * 256
    first, between, rest = (ctx.empty(n, dtype=torch.uint8) for n in (half - 256, 1, free - half))
    ctx.free(first, rest)
    needs = (
        rf"needs {free - 256} bytes in one piece; expected at most {free - half}, .*{free - 256} of .* bytes are free"
    )
    with pytest.raises(errors.HeapExhausted, match=needs):
        ctx.empty(free - 256, dtype=torch.uint8)
    ctx.free(between)
    last = ctx.empty(free, dtype=torch.uint8)
    assert ctx.is_symmetric(last)
    with pytest.raises(errors.HeapExhausted):
        ctx.empty(1)
    with pytest.raises(MemoryError):
        ctx.zeros(0)
    ctx.barrier()
    return ctx.heap.used


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_a_full_heap_is_an_error_and_the_context_still_works(world_size):
    assert len(set(run_ranks(world_size, _exhaust))) == 1


def _free_all_or_nothing(ctx):
    first, second = ctx.ones(300), ctx.ones(300)
    used, free = ctx.heap.used, ctx.heap.free_bytes
    outside, part = torch.ones(3, device=ctx.device), second[:2]
    for wrong in ((first, outside), (first, second, first), (first, second[1:]), (first, part), (first, second[:0])):
        with pytest.raises(errors.ArgumentError, match="is no allocation of this heap"):
            ctx.free(*wrong)
        assert (ctx.heap.used, ctx.heap.free_bytes) == (used, free)
    ctx.free(first, second)
    assert ctx.heap.free_bytes > free
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_what_cannot_be_freed_keeps_the_others(world_size):
    run_ranks(world_size, _free_all_or_nothing)


def _two_contexts(ctx):
    with iris.iris(1 << 20) as other:
        foreign = other.zeros(3)
        assert not ctx.is_symmetric(foreign) and other.is_symmetric(foreign)
        with pytest.raises(errors.NotSymmetricError):
            ctx.zeros(3, out=foreign)
        if ON_GPU and os.environ.get("IRIS_ALLOCATOR") == "vmem":  # the driver's memory can be shared, whoever made it
            ours = ctx.as_symmetric(foreign)
            assert ctx.is_symmetric(ours) and not ctx.is_symmetric(foreign)
            ours[1] = 2
            assert foreign.tolist() == [0, 2, 0]
            foreign[1] = 0
            ctx.free(ours)
        else:
            with pytest.raises(errors.NotSymmetricError):
                ctx.as_symmetric(foreign)
    assert foreign.sum().item() == 0  # its memory lives as long as the tensor
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_a_tensor_of_another_heap_is_refused(world_size):
    run_ranks(world_size, _two_contexts)


def test_what_meets_itself_is_found_whatever_its_strides() -> None:
    draw = random.Random(0)
    seen = set()
    for _ in range(4000):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
        strides = [draw.randint(0, 9) for _ in shape]
        places = [sum(map(operator.mul, each, strides)) for each in itertools.product(*map(range, shape))]
        meets = len(set(places)) < len(places)
        seen.add((meets, len(shape)))
        t = torch.zeros(200).as_strided(shape, strides)
        if not meets:
            heap.check_written("call", "t", t)
        else:
            with pytest.raises(ArgumentError, match="call: t .* has strides"):
                heap.check_written("call", "t", t)
    assert len(seen) == 8
