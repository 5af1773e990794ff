"""Collectives after each other: stale data, late ranks, epochs that wrap; groups, lost ranks, bad input."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
import os
import random
import signal
import time

import iris
from iris.ccl import Config, ReduceOp
from iris.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    HeapExhausted,
    NotSymmetricError,
    PeerLostError,
    ShapeError,
)
import pytest
import torch
import torch.distributed as dist

from tests.checks import poison
from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.iris.test_ccl import FLAGS, LAMPORT, ONE, OTHERS, TWO, Call, Case, expected, small
from tests.processes import run_fresh

pytestmark = both

CALLS = 1000 if UNDER_TORCHRUN else 30
# Shapes that differ, so that each call finds in flags and staging what another one left there.
CASES = [
    Case("all_reduce", (300,), small(ONE)),
    Case("all_reduce", (7,), ONE, torch.int16),
    Case("all_reduce", (513,), small(TWO)),
    Case("all_reduce", (40, 9), small(FLAGS), torch.float32),
    Case("all_reduce", (1000,), replace(small(FLAGS), comm_sms=2)),
    Case("reduce_scatter", (9, 50), small(FLAGS)),
    Case("reduce_scatter", (8, 33), LAMPORT),
    Case("reduce_scatter", (2, 3), None),  # with three and four ranks, some have no rows
    Case("all_gather", (70,), small(FLAGS)),
    Case("all_gather", (5, 4), LAMPORT, torch.int8),
    Case("all_to_all", (3, 24), small(FLAGS)),
    Case("all_to_all", (3, 48), LAMPORT),
    *(Case("all_reduce", (130,), small(config), torch.int32) for config in OTHERS),
]


def as_int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def set_epochs(ctx: iris.Iris, workspace, epoch: int) -> None:
    """As if every kind of call had been made so often."""
    ctx.barrier()
    for area in workspace.areas.values():
        area.sync[0] = as_int32(epoch)
    ctx.barrier()


def back_to_back(ctx: iris.Iris, count: int, epoch: int | None) -> int:
    """Calls in random order with late ranks, without a barrier between; how many results were wrong."""
    calls = [[Call(ctx, replace(case, seed=seed)) for seed in (0, 1)] for case in CASES]
    results = []
    for pair in calls:
        results.append([])
        for call in pair:
            workspace = call.run()
            call.check()
            results[-1].append(call.out.clone())
    if epoch is not None:
        set_epochs(ctx, workspace, epoch)
    shared, mine = random.Random(1), random.Random(ctx.cur_rank)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for step in range(count):
        index, seed = shared.randrange(len(CASES)), shared.randrange(2)
        if step % ctx.num_ranks == ctx.cur_rank:
            delay = mine.uniform(0, 0.005)
            if ctx.device.type == "cuda" and step % 2:
                torch.cuda._sleep(int(delay * 1e9))
            else:
                time.sleep(delay)
        call = calls[index][seed]
        call.run()
        wrong += (call.out != results[index][seed]).any()
    ctx.barrier()
    for pair in calls:
        for call in pair:
            call.guarded.check()
    return int(wrong)


@pytest.mark.parametrize("epoch", [None, 2**31 - 3, 2**32 - 3])
@pytest.mark.parametrize("world_size", [size for size in WORLDS if size > 1])
def test_calls_after_each_other(world_size: int, epoch: int | None) -> None:
    if not UNDER_TORCHRUN and (world_size == 3) != (epoch is None):
        pytest.skip("covered by the others")
    assert run_ranks(world_size, back_to_back, CALLS, epoch) == [0] * world_size


# --- groups ----------------------------------------------------------------------------------------------------------


def in_groups(rank: int, world_size: int) -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with iris.iris(64 << 20) as ctx:
        for group in (mesh["tp"], mesh.get_group("dp"), None):
            members = [0, 1, 2, 3] if group is None else ctx.hosts.members(group)
            for config in (ONE, TWO, FLAGS, *OTHERS):
                given = torch.arange(40, dtype=torch.float32) + 100 * rank
                out = poison(ctx.empty(40))
                ctx.ccl.all_reduce(out, given, group=group, config=small(config))
                assert torch.equal(out, torch.arange(40) * len(members) + 100.0 * sum(members)), config
            out = poison(ctx.empty(4 * len(members)))
            ctx.ccl.all_gather(out, torch.full((4,), float(rank)), group=group)
            assert torch.equal(out, torch.tensor(members).repeat_interleave(4).float())
        with pytest.raises(ArgumentError, match="expected a ProcessGroup"):
            ctx.ccl.all_reduce(out, out, group=[0, 1])
        # a rank that has allocated what its peer has not: its group finds it as the workspace grows
        if rank == 1:
            ctx.empty(1 << 16)
        raises = pytest.raises(NotSymmetricError, match="number 22 differs.*none on rank 0, .* on rank 1")
        with raises if rank < 2 else nullcontext():
            ctx.ccl.all_reduce(torch.empty(9000), torch.zeros(9000), group=mesh["tp"], config=ONE)
        os._exit(0)  # the other group cannot close with ranks that have raised


@pytest.mark.skipif(UNDER_TORCHRUN, reason="makes its own process groups")
def test_groups() -> None:
    for rank, end in enumerate(run_fresh(4, in_groups)):
        assert end.exitcode == 0, f"rank {rank}: {end.traceback}"


# --- a rank that dies ------------------------------------------------------------------------------------------------


def lose_a_rank(rank: int, world_size: int, config: Config, op: str) -> str:
    ctx = iris.iris(64 << 20)
    call = Call(ctx, Case(op, (6, 30), config))
    call.run()
    call.check()
    ctx.barrier()
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return provoke(call.run)


def lose_a_member(rank: int, world_size: int) -> str | None:
    """Rank 3 dies, the second one of its group."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ctx = iris.iris(64 << 20)
    x = ctx.zeros(100)
    ctx.ccl.all_reduce(x, x, group=mesh["tp"])
    ctx.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return provoke(lambda: ctx.ccl.all_reduce(x, x, group=mesh["tp"])) if rank == 2 else None


def provoke(call) -> str:
    with pytest.raises(PeerLostError) as caught:
        for _ in range(2):  # all that the first one needs may have been sent before
            call()
    with pytest.raises(PeerLostError):
        call()
    time.sleep(1)  # the others must see the process that was killed, not that this one has ended
    return str(caught.value)


killing = pytest.mark.skipif(UNDER_TORCHRUN, reason="ends a rank's process")


@killing
@pytest.mark.parametrize("op, config", [("all_reduce", ONE), ("all_reduce", OTHERS[2]), ("all_gather", FLAGS)])
def test_a_killed_rank_is_named(op: str, config: Config) -> None:
    ended = run_fresh(3, lose_a_rank, config, op, env={"IRIS_TIMEOUT": "100"})
    for rank in (0, 1):
        message = ended[rank].result or ended[rank].traceback
        assert f"rank {rank} lost rank 2: {op}" in message, message


@killing
def test_a_killed_member_of_a_group_is_named() -> None:
    ended = run_fresh(4, lose_a_member, env={"IRIS_TIMEOUT": "100"})
    assert "rank 2 lost rank 3: all_reduce" in ended[2].result, ended[2]


# --- arguments -------------------------------------------------------------------------------------------------------


def refuse(ctx: iris.Iris) -> None:
    w, ccl = ctx.num_ranks, ctx.ccl
    x, y = ctx.zeros(400, 6 * w), ctx.zeros(400, 6 * w)
    other = iris.iris(32 << 10)
    holes = torch.zeros(2, 3, 4, device=ctx.device)[:, :2]
    z = torch.zeros(400, 6 * w, dtype=torch.complex64, device=ctx.device)
    for given in (y, z.imag, z):  # such tensors have been right, at these and at other addresses
        ccl.all_to_all(x.to(given.dtype), given)
    freed = torch.zeros_like(x)
    ccl.all_reduce(x, freed)
    freed.untyped_storage().resize_(0)
    foreign = other.ccl.all_reduce_preamble(other.zeros(4), other.zeros(4))
    wrong = [
        (ShapeError, "all_reduce: inp is", lambda: ccl.all_reduce(x[:2], y)),
        (ShapeError, "all_gather: inp is", lambda: ccl.all_gather(x, y)) if w > 1 else None,
        (ShapeError, "reduce_scatter: inp is", lambda: ccl.reduce_scatter(x[:, :3], y)),
        (ShapeError, "all_to_all: inp is", lambda: ccl.all_to_all(x[:, 1:], y[:, 1:])) if w > 1 else None,
        (DtypeError, "out has dtype torch.float32", lambda: ccl.all_reduce(x, y.half())),
        (DtypeError, "inp has dtype torch.float64", lambda: ccl.all_reduce(x.double(), y.double())),
        (DtypeError, "at most 8 bytes", lambda: ccl.all_to_all(x.to(torch.complex128), y.to(torch.complex128))),
        (DtypeError, "not conjugated", lambda: ccl.all_to_all(torch.zeros_like(z), z.conj())),
        (DtypeError, "not conjugated", lambda: ccl.all_to_all(torch.zeros_like(x), z.conj().imag)),
        (DeviceError, "inp is on meta", lambda: ccl.all_to_all(torch.zeros_like(x), y.to("meta"))),
        (ArgumentError, "inp is a nested tensor", lambda: ccl.all_reduce(x, torch.nested.as_nested_tensor([x, x]))),
        (ArgumentError, "inp has no memory", lambda: ccl.all_reduce(x, freed)),
        (ArgumentError, "out has no memory", lambda: ccl.all_to_all(freed, y)),
        (ArgumentError, "async_op is Config", lambda: ccl.all_reduce(x, y, None, None, ONE)),
        (ArgumentError, "op is 'sum'; expected one of", lambda: ccl.plan("sum", x, y)),
        (ArgumentError, "config is dict", lambda: ccl.plan("all_reduce", x, y, {})),
        (ArgumentError, "inp is list", lambda: ccl.all_reduce(x, [1])),
        (ArgumentError, "op is 'sum'; expected None or iris.ccl", lambda: ccl.all_reduce(x, y, "sum")),
        (ArgumentError, "config is dict", lambda: ccl.all_reduce(x, y, config={})),
        (ArgumentError, "workspace is", lambda: ccl.all_reduce(x, y, workspace=foreign)),
        (ArgumentError, "overlaps inp", lambda: ccl.all_to_all(x, x)),
        (ArgumentError, "overlaps inp", lambda: ccl.all_reduce(x[1:], x[:-1])),
        (ArgumentError, "no expanded tensor", lambda: ccl.all_reduce(x[:1].expand(400, -1), y)),
        (ArgumentError, "whose rows overlap", lambda: ccl.all_reduce(x.as_strided(x.shape, (1, 1)), y)),
        (ArgumentError, "requires grad", lambda: ccl.all_reduce(x, y.clone().requires_grad_())),
        (ArgumentError, "rows at one stride", lambda: ccl.all_reduce(holes, holes.clone())),
        (
            ArgumentError,
            "config.all_reduce_variant is 'one_shot', which cannot serve torch.int64 with .*; expected another all_red",
            lambda: ccl.all_reduce(x.long(), y.long(), config=ONE),
        ),
        (
            ArgumentError,
            "config.protocol is 'lamport', which cannot serve torch.int64 with .*; expected protocol 'flags' or None",
            lambda: ccl.all_reduce(x.long(), y.long(), config=LAMPORT),
        ),
        *(
            (
                ArgumentError,
                f"config.all_reduce_variant is '{config.all_reduce_variant}' and config.protocol is '{wrong}', which "
                f"cannot serve .*; expected protocol '{right}' or None",
                lambda config=config, wrong=wrong: ccl.all_reduce(x, y, config=replace(config, protocol=wrong)),
            )
            for configs, wrong, right in ((OTHERS, "lamport", "flags"), ([ONE], "flags", "lamport"))
            for config in configs
        ),
        (HeapExhausted, "are free", lambda: other.ccl.all_reduce(x, y, config=ONE)) if w > 1 else None,
    ]
    for error, words, call in filter(None, wrong):
        with torch.enable_grad(), pytest.raises(error, match=words):
            call()
    for field, value in (("block_size_m", 3), ("comm_sms", 0), ("all_reduce_variant", "tree"), ("protocol", "x")):
        with pytest.raises(ArgumentError, match=f"Config.{field} is"):
            Config(**{field: value})
    for variant in (None, "one_shot", "atomic"):
        with pytest.raises(
            ArgumentError, match=f"Config.all_reduce_num_rings is 3 and all_reduce_variant is {variant!r}"
        ):
            Config(all_reduce_variant=variant, all_reduce_num_rings=3)
        Config(all_reduce_variant=variant, all_reduce_num_rings=1)
    with pytest.raises(ArgumentError, match="expected a product up to"):
        Config(65536, 32)
    other.close()
    empty = ctx.zeros(0, 5)
    ccl.all_reduce(empty, empty.clone(), ReduceOp.SUM)
    assert ccl.plan("all_reduce", empty, empty.clone()) is None
    x.fill_(float(ctx.cur_rank))
    ccl.all_reduce(y, x)  # the context stays usable
    assert (y == w * (w - 1) / 2).all()


@pytest.mark.parametrize("world_size", [2])
def test_bad_input_is_refused(world_size: int) -> None:
    run_ranks(world_size, refuse)


def outgrow_the_heap(ctx: iris.Iris) -> None:
    """There is room for the new flags of a call but not for what it stages: the flags from before stay."""
    config = Config(protocol="flags", all_reduce_variant="two_shot")
    with iris.iris(16 << 20) as small:
        call = Call(small, Case("all_reduce", (64,), config))
        workspace = call.run()
        used = small.heap.used
        large = torch.empty(64 << 20, device=small.device)
        if ctx.cur_rank:
            time.sleep(1)  # then a peer's signals would come before the new flags are zero
        with pytest.raises(HeapExhausted):
            small.ccl.all_reduce(large, large, config=config, workspace=workspace)
        assert small.heap.used == used
        call.run(workspace=workspace)
        call.check()
        ctx.barrier()


@pytest.mark.parametrize("world_size", [2])
def test_a_call_too_large_for_the_heap_leaves_the_others_as_they_were(world_size: int) -> None:
    run_ranks(world_size, outgrow_the_heap)


def prepared(ctx: iris.Iris) -> None:
    """A preamble makes room: the call that follows takes nothing from the heap. Workspaces are independent."""
    case = Case("all_reduce", (3000,), FLAGS)
    call = Call(ctx, case)
    workspace = ctx.ccl.all_reduce_preamble(call.out, call.inp, FLAGS)
    used = ctx.heap.used
    assert call.run(workspace=workspace) is workspace
    call.check()
    assert ctx.heap.used == used
    assert call.run() is not workspace
    call.check()
    call.run(async_op=True).wait()
    call.check()
    assert ctx.ccl.plan("all_reduce", call.out, call.inp).expected_us > 0
    assert expected(case, ctx.num_ranks, ctx.cur_rank, True).dtype == torch.float64


@pytest.mark.parametrize("world_size", [2])
def test_preamble_makes_a_workspace(world_size: int) -> None:
    run_ranks(world_size, prepared)
