"""Arguments that an op refuses: the typed error on every rank, naming the argument, and a good call afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import iris
from iris.errors import ArgumentError, ClosedError, DeviceError, DtypeError, HeapExhausted, IrisError, ShapeError
from iris_ops import FusedConfig, steps
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, OPS, REDUCE_SCATTER
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
import triton

from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.iris_ops.calls import Call, check_case
from tests.reference import FORMS, Case

pytestmark = both

M, N, K = 20, 24, 16


def good_case(op: str) -> Case:
    return Case(op, dict(FORMS)[op], M, N, K)


# name of the argument -> what is wrong: (what to put in its place, error, what the message says of it)
Change = tuple[str, Callable[[iris.Iris, torch.Tensor], Any], type[IrisError], str]
CHANGES: dict[str, Change] = {
    "a vector A": ("A", lambda ctx, t: t[0], ShapeError, r"A has 1 dimensions \(\d+,\); expected 2"),
    "a batch B": ("B", lambda ctx, t: t[None], ShapeError, r"B has 3 dimensions \(1, \d+, \d+\); expected 2"),
    "a vector out": ("out", lambda ctx, t: t[0], ShapeError, r"out has 1 dimensions \(\d+,\); expected 2"),
    "a matrix bias": ("bias", lambda ctx, t: t[None], ShapeError, r"bias has 2 dimensions \(1, \d+\); expected 1"),
    "a deeper A": ("A", lambda ctx, t: t.new_zeros(t.shape[0], 99), ShapeError, r"A is \(\d+, 99\).*expected A \(M"),
    "a deeper B": ("B", lambda ctx, t: t.new_zeros(99, t.shape[1]), ShapeError, r"B is \(99, \d+\).*expected A \(M"),
    "a wider out": ("out", lambda ctx, t: t.new_zeros(t.shape[0], 99), ShapeError, r"out is \(\d+, 99\).*out \(M"),
    "a higher out": ("out", lambda ctx, t: t.new_zeros(99, t.shape[1]), ShapeError, r"out is \(99, \d+\).*out \(M"),
    "a longer bias": ("bias", lambda ctx, t: t.new_zeros(99), ShapeError, r"bias has 99 elements; expected \d+"),
    "an integer A": ("A", lambda ctx, t: t.int(), DtypeError, "A has dtype torch.int32"),
    "a float64 B": ("B", lambda ctx, t: t.double(), DtypeError, "B has dtype torch.float64; expected one of"),
    "an fp16 B": ("B", lambda ctx, t: t.half(), DtypeError, "B has dtype torch.float16 and A has torch.bfloat16"),
    "an fp32 out": ("out", lambda ctx, t: t.float(), DtypeError, "out has dtype torch.float32 and A has"),
    "an fp32 bias": ("bias", lambda ctx, t: t.float(), DtypeError, "bias has dtype torch.float32 and A has"),
    "A elsewhere": ("A", lambda ctx, t: t.to("meta"), DeviceError, "A is on meta; expected"),
    "B elsewhere": ("B", lambda ctx, t: t.to("meta"), DeviceError, "B is on meta; expected"),
    "bias elsewhere": ("bias", lambda ctx, t: t.to("meta"), DeviceError, "bias is on meta; expected"),
    "out elsewhere": ("out", lambda ctx, t: t.to("meta"), DeviceError, "out is on meta; expected"),
    "no tensor A": ("A", lambda ctx, t: [[1.0]], ArgumentError, "A is list; expected a torch.Tensor"),
    "no B": ("B", lambda ctx, t: None, ArgumentError, "B is NoneType; expected a torch.Tensor"),
    "a number for bias": ("bias", lambda ctx, t: 1.0, ArgumentError, "bias is float; expected a torch.Tensor"),
    "A with grad": ("A", lambda ctx, t: t.clone().requires_grad_(), ArgumentError, "A requires grad.*no_grad"),
    "B with grad": ("B", lambda ctx, t: t.clone().requires_grad_(), ArgumentError, "B requires grad.*no_grad"),
    "A nested": ("A", lambda ctx, t: nested(t), ArgumentError, "A is a nested tensor; expected"),
    "A freed": ("A", lambda ctx, t: freed(t), ArgumentError, "A has no memory; expected"),
    "B freed": ("B", lambda ctx, t: freed(t), ArgumentError, "B has no memory; expected"),
    "bias freed": ("bias", lambda ctx, t: freed(t), ArgumentError, "bias has no memory; expected"),
    "out traced": ("out", lambda ctx, t: traced(t), ArgumentError, "out has no memory; expected"),
    "no config": ("config", lambda ctx, t: "fast", ArgumentError, "config is str; expected an iris_ops.FusedConfig"),
    "a config as dict": ("config", lambda ctx, t: {}, ArgumentError, "config is dict; expected an iris_ops.FusedConf"),
    "a config in its place": (
        "async_op",
        lambda ctx, t: FusedConfig(),
        ArgumentError,
        "async_op is FusedConfig; exp",
    ),
    "no workspace": ("workspace", lambda ctx, t: ctx, ArgumentError, "workspace is .*; expected one that an op"),
}


def nested(t: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor([t[0], t[0, 1:]])


def freed(t: torch.Tensor) -> torch.Tensor:
    """Free a tensor's storage, as sharded parameters are between their uses; a DTensor has no address either."""
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def traced(t: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode().from_tensor(t.clone())


def arguments(call: Call) -> dict[str, Any]:
    return dict(out=call.out, A=call.A, B=call.B, bias=call.bias, async_op=False, config=None, workspace=None)


def refuse_each(ctx: iris.Iris, op: str) -> None:
    call = Call(ctx, good_case(op))
    function = getattr(ctx.ops, op)
    for name, (argument, change, error, message) in CHANGES.items():
        good = arguments(call)
        with pytest.raises(error, match=f"{op}: .*{message}") as caught:
            function(**{**good, argument: change(ctx, good[argument])})
        assert isinstance(caught.value, IrisError), name
        assert not any(ctx in kind[0] for kind, _ in ctx.ops._calls.earlier._prepared), "the wrong workspace is kept"
        call.guarded.check()
        assert call.out.isnan().all(), name
    call.run()
    call.check()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world_size", [size for size in WORLDS if size < 3] or WORLDS)
def test_each_wrong_argument_is_named_and_the_next_call_works(world_size: int, op: str) -> None:
    run_ranks(world_size, refuse_each, op)


def refuse_overlaps(ctx: iris.Iris) -> None:
    memory = ctx.zeros(3 * 16 * 16, dtype=torch.float32)
    square = [memory[i * 256 : (i + 1) * 256].view(16, 16) for i in range(3)]
    a, b, c = square
    shifted = memory[255 : 255 + 256].view(16, 16)  # one element of a, the others of b
    for bias in (None, a[0]):  # such tensors have been right, at other addresses
        ctx.ops.matmul_all_reduce(c, a, b, bias)
    for out, A, B, bias, name in (
        (a, a, b, None, "A"),
        (a, b, a, None, "B"),
        (a, b, a.t(), None, "B"),
        (shifted, a, c, None, "A"),
        (shifted, c, b, None, "B"),
        (a, b, c, a[3], "bias"),
    ):
        with pytest.raises(ArgumentError, match=f"out overlaps {name} in memory"):
            ctx.ops.matmul_all_reduce(out, A, B, bias)
    ctx.ops.matmul_all_reduce(c, a, a, b[0])  # operands may overlap each other
    with pytest.raises(ArgumentError, match="out"):  # rows of one memory: which of them should remain?
        ctx.ops.matmul_all_reduce(c[:1].expand(16, 16), a, b)
    with pytest.raises(ArgumentError, match="out .* whose rows overlap"):
        ctx.ops.matmul_all_reduce(c.as_strided((16, 16), (15, 1)), a, b)
    check_case(ctx, good_case(ALL_REDUCE))


def refuse_after_good_calls(ctx: iris.Iris) -> None:
    """Pass wrong tensors with the shape and strides, some also with the address, of accepted tensors."""
    whole = torch.randn(16, 16, dtype=torch.complex64, device=ctx.device)
    A, square, out = whole.imag, torch.eye(16, device=ctx.device), ctx.zeros(16, 16)
    bias = whole[0].imag.clone()
    calls = {"A": lambda t: (out, t, square), "B": lambda t: (out, square, t), "out": lambda t: (t, square, square)}
    for _ in range(2):
        for given in calls.values():
            ctx.ops.matmul_all_reduce(*given(A))
        ctx.ops.matmul_all_reduce(out, square, square, bias)
    for name, given in calls.items():
        with pytest.raises(ArgumentError, match=f"{name} is a negated view; expected"):
            ctx.ops.matmul_all_reduce(*given(whole.conj().imag))
        with pytest.raises(DeviceError, match=f"{name} is on meta; expected"):
            ctx.ops.matmul_all_reduce(*given(torch.empty_strided((16, 16), A.stride(), device="meta")))
        with pytest.raises(ArgumentError, match=f"{name} is torch.sparse_coo; expected a strided"):
            ctx.ops.matmul_all_reduce(*given(square.to_sparse()))
    with pytest.raises(ArgumentError, match="bias is a negated view; expected"):
        ctx.ops.matmul_all_reduce(out, square, square, torch._neg_view(bias))
    check_case(ctx, good_case(ALL_REDUCE))


def test_what_looks_like_a_good_call_is_refused() -> None:
    run_ranks(WORLDS[0], refuse_after_good_calls)


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_out_may_not_overlap(world_size: int) -> None:
    run_ranks(world_size, refuse_overlaps)


def no_grad_serves(ctx: iris.Iris) -> None:
    call = Call(ctx, good_case(REDUCE_SCATTER))
    call.A.requires_grad_()
    with torch.no_grad():
        call.run()
    call.check()


def test_tensors_with_grad_pass_where_it_is_off() -> None:
    run_ranks(WORLDS[-1], no_grad_serves)


def foreign_workspace(ctx: iris.Iris) -> None:
    call = Call(ctx, good_case(ALL_REDUCE))
    with iris.iris(4 << 20) as other:
        foreign = Call(other, good_case(ALL_REDUCE)).run()
        with pytest.raises(ArgumentError, match="workspace is .*; expected one that an op of this context returned"):
            call.run(foreign)
    with pytest.raises(ClosedError):
        other.ops  # noqa: B018
    call.run()
    call.check()


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_a_workspace_of_another_context_is_refused(world_size: int) -> None:
    run_ranks(world_size, foreign_workspace)


def too_small_a_heap(ctx: iris.Iris, op: str, form: str) -> tuple[int, int]:
    """A call whose staging memory has no room, twice; then calls that have. Returns what is taken from the heap."""
    with iris.iris(4 << 20) as small:
        check_case(small, Case(op, form, M, N, K))
        large = Call(small, Case(op, form, 1 << 11, 1 << 11, 1 << 11, on_heap=False))
        taken = []
        for _ in range(2):
            with pytest.raises(HeapExhausted, match=r"bytes.*are free\)\. Make the heap larger"):
                large.run()
            taken.append(small.heap.used)
        assert large.out.isnan().all()
        check_case(small, Case(op, form, M, N, K, seed=1))
    check_case(ctx, Case(op, form, M, N, K))
    return taken


@pytest.mark.parametrize("op, form", FORMS)
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_an_exhausted_heap_is_reported_and_smaller_calls_work(world_size: int, op: str, form: str) -> None:
    taken = run_ranks(world_size, too_small_a_heap, op, form)
    assert len(set(map(tuple, taken))) == 1, "offsets differ between ranks"
    assert taken[0][0] == taken[0][1], "each attempt takes from the heap"


# --- configurations and plans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [
        ("block_m", 8 if ON_GPU else 12),  # in the interpreter a tile may be as low as one row
        ("block_n", 8),
        ("block_n", 48),
        ("block_k", 0),
        ("block_k", -16),
        ("block_m", 64.0),
        ("block_n", "64"),
        ("block_m", True),
        ("group_m", 0),
        ("num_warps", 0),
        ("num_warps", 3),
        ("num_warps", 64),
        ("group_m", 1 << 31),
        ("num_stages", -1),
        ("num_programs", -1),
        ("num_programs", True),
        ("comm_programs", 0),
        ("stagger_us", -1),
        ("stagger_us", 1.5),
        ("warp_specialised", 1),
        ("warp_specialised", None),
        ("algorithm", "three_shot"),
        ("algorithm", None),
    ],
)
def test_config_refuses_a_bad_value(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"FusedConfig.{name} is .*; expected"):
        FusedConfig(**{name: value})
    with pytest.raises(ArgumentError, match=name):
        replace(FusedConfig(), **{name: value})


@pytest.mark.parametrize("value", [dict(block_m=1 << 14), dict(block_n=1 << 15), dict(block_k=1 << 14)], ids=str)
def test_config_refuses_blocks_larger_than_triton_s(value: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="block_k are .*; expected products of any two up to"):
        FusedConfig(**value)


@pytest.mark.parametrize("value", [dict(block_m=32), dict(block_n=512), dict(num_warps=2), dict(num_stages=1)], ids=str)
def test_config_refuses_what_specialised_warps_cannot_do(value: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="FusedConfig.warp_specialised is True with tiles of .*; expected"):
        FusedConfig(**value, warp_specialised=True)
    FusedConfig(**value)


@pytest.mark.parametrize("blocks", [(256, 256, 64, 2), (64, 256, 128, 3), (128, 256, 64, 4)], ids=str)
def test_config_refuses_more_shared_memory_than_there_is(blocks: tuple[int, int, int, int]) -> None:
    m, n, k, stages = blocks
    with pytest.raises(
        ArgumentError, match="warp_specialised is True with blocks of .* bytes of shared memory; expected"
    ):
        FusedConfig(m, n, k, num_stages=stages, warp_specialised=True)
    FusedConfig(m, n, k, num_stages=stages - 1, warp_specialised=stages > 2)


def refuse_blocks_without_room(ctx: iris.Iris) -> None:
    """The interpreter has room for any; there, what Triton raises on a GPU is raised in the launch's place."""

    def too_large(*_: object, **__: object) -> None:
        raise triton.OutOfResources(393_216, 232_448, "shared memory")

    call = Call(ctx, replace(good_case(ALL_REDUCE), config=FusedConfig(256, 256, 128, num_stages=4)))
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            patch.setattr(steps, "relaunch", SimpleNamespace(launch=too_large))
        with pytest.raises(ArgumentError, match="config has blocks of 256 x 256 x 128, 4 stages .* expected at most"):
            call.run()
    ctx.barrier()
    check_case(ctx, good_case(ALL_REDUCE))


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_blocks_without_room_are_refused_and_the_next_call_works(world_size: int) -> None:
    run_ranks(world_size, refuse_blocks_without_room)


def refuse_plans(ctx: iris.Iris) -> None:
    good = dict(op=REDUCE_SCATTER, M=64, N=64, K=64, dtype=torch.bfloat16, form="rows")
    assert isinstance(ctx.ops.plan(**good), FusedConfig)
    for name, value in (
        ("op", "matmul"),
        ("op", None),
        ("M", -1),
        ("N", 2**31),
        ("K", 1.5),
        ("M", "64"),
        ("N", True),
        ("dtype", torch.float64),
        ("dtype", "bf16"),
        ("form", "k"),
        ("form", "diagonal"),
    ):
        with pytest.raises(ArgumentError, match=f"{name} is .*; expected"):
            ctx.ops.plan(**{**good, name: value})
    for op, form, expected in (
        (ALL_REDUCE, "rows", "none: there is one only"),
        (GATHER_MATMUL, "cols", "one of rows, k"),
        (MATMUL_GATHER, "k", "one of rows, cols"),
    ):
        with pytest.raises(ArgumentError, match=f"form is '{form}' for {op}; expected {expected}"):
            ctx.ops.plan(**{**good, "op": op, "form": form})


def test_plan_refuses_bad_arguments() -> None:
    run_ranks(WORLDS[0], refuse_plans)
