"""Which processes are the world: torchrun's environment, one process, a subgroup, a dimension of a mesh."""

import atexit
import os

import iris
from iris import errors
import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from tests.processes import Ended, run_fresh

NO_TORCHRUN = {name: None for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}


def _results(ended: list[Ended]) -> list:
    for rank, end in enumerate(ended):
        assert end.exitcode == 0, f"rank {rank} ended with {end.exitcode}\n{end.traceback}"
    return [end.result for end in ended]


@triton.jit
def _send_kernel(src, dst, ctx_ptr, rank, to, WORLD: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, rank, WORLD)
    i = tl.arange(0, 4)
    ctx.put(src + i, dst + i, to)


def _ring(ctx, name):
    """The name that the rank before this one sent, by RMA and counted in the context."""
    src, dst = ctx.full((4,), name, dtype=torch.int32), ctx.zeros(4, dtype=torch.int32)
    ctx.barrier()
    to = (ctx.cur_rank + 1) % ctx.num_ranks
    _send_kernel[(1,)](src, dst, ctx.get_device_context(), ctx.cur_rank, to, WORLD=ctx.num_ranks)
    ctx.barrier()
    received = dst.tolist()
    assert len(set(received)) == 1
    return received[0]


def _from_the_environment(rank, world_size):
    assert not dist.is_initialized()
    with iris.iris(1 << 20) as ctx:
        assert (ctx.cur_rank, ctx.num_ranks) == (rank, world_size)
        assert dist.get_backend() == "gloo"
        return _ring(ctx, rank)


@pytest.mark.parametrize("world_size", [1, 3])
def test_torchrun_s_environment_is_enough(world_size):
    received = _results(run_fresh(world_size, _from_the_environment))
    assert received == [(rank - 1) % world_size for rank in range(world_size)]


def _after_the_last_context(rank, world_size, made_by_user):
    if made_by_user:
        dist.init_process_group("gloo")
    for _ in range(2):
        with iris.iris(1 << 20) as ctx:
            assert _ring(ctx, rank) == (rank - 1) % world_size
        assert dist.is_initialized(), "the next context takes it as it is"
    atexit._run_exitfuncs()
    return dist.is_initialized()


@pytest.mark.parametrize("made_by_user", [False, True])
def test_only_a_group_that_a_context_made_is_destroyed_when_the_process_ends(made_by_user):
    assert _results(run_fresh(2, _after_the_last_context, made_by_user)) == [made_by_user] * 2


def _alone(rank, world_size):
    with iris.iris() as ctx:
        assert (ctx.cur_rank, ctx.num_ranks, ctx.heap_size) == (0, 1, 1 << 30)
        assert not dist.is_initialized()
        assert ctx.broadcast("x") == "x"
        assert _ring(ctx, 7) == 7
        with pytest.raises(errors.ArgumentError):
            ctx.broadcast(1, src=1)


def test_one_process_without_torchrun_is_a_world_of_one():
    _results(run_fresh(1, _alone, env=NO_TORCHRUN))


def _default_group(rank, world_size):
    dist.init_process_group("gloo")
    ctx = iris.iris(1 << 20)
    return _ring(ctx, rank), ctx.num_ranks


def test_an_existing_default_group_is_the_world():
    assert _results(run_fresh(2, _default_group)) == [(1, 2), (0, 2)]


def _mesh(rank, world_size):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(errors.ArgumentError, match=r"\('dp', 'tp'\).*mesh\['tp'\]"):
        iris.iris(1 << 20, group=mesh)
    tp, dp = iris.iris(1 << 20, group=mesh["tp"]), iris.iris(1 << 20, group=mesh.get_group("dp"))
    world = iris.iris(1 << 20)
    assert (tp.cur_rank, tp.num_ranks) == (rank % 2, 2) and (dp.cur_rank, dp.num_ranks) == (rank // 2, 2)
    assert tp.get_heap_bases().shape == (2,)
    names = [_ring(tp, rank), _ring(dp, rank), _ring(world, rank)]
    sent = [ctx.broadcast(rank, src) for ctx in (tp, dp) for src in (0, 1)]
    tp.barrier(group=mesh["tp"])
    world.barrier(group=mesh["tp"])
    world.device_barrier(group=mesh["dp"].get_group())
    with pytest.raises(errors.ArgumentError, match="distinct ranks of this context"):
        tp.barrier(group=mesh["dp"])
    for ctx in (tp, dp, world):
        ctx.close()
    return names, sent


def test_each_dimension_of_a_mesh_can_be_the_world():
    for rank, (names, sent) in enumerate(_results(run_fresh(4, _mesh))):
        assert names == [rank ^ 1, rank ^ 2, (rank - 1) % 4]
        row, column = rank // 2 * 2, rank % 2
        assert sent == [row, row + 1, column, column + 2]


def _subgroups(rank, world_size):
    dist.init_process_group("gloo")
    odd, rest = dist.new_group([3, 1]), dist.new_group([0, 2, 4])
    mine, other = (odd, rest) if rank in (1, 3) else (rest, odd)
    with pytest.raises(errors.ArgumentError, match="group does not contain this rank"):
        iris.iris(1 << 20, group=other)
    with iris.iris(1 << 20, group=mine) as ctx:
        assert ctx.broadcast(rank, 0) == dist.get_global_rank(mine, 0)
        return ctx.cur_rank, _ring(ctx, rank)


def test_a_subgroup_is_a_world_and_others_are_refused():
    received = _results(run_fresh(5, _subgroups))
    assert {name for _, name in received[1::2]} == {1, 3} and {name for _, name in received[::2]} == {0, 2, 4}
    assert sorted(rank for rank, _ in received[::2]) == [0, 1, 2]


def _allocator_from_environment(rank, world_size):
    with pytest.raises(errors.ArgumentError, match="IRIS_ALLOCATOR is 'elsewhere'"):
        iris.iris(1 << 20)
    if rank == 1:
        del os.environ["IRIS_ALLOCATOR"]
    with pytest.raises(errors.ArgumentError, match="allocator differs between ranks: elsewhere, torch"):
        iris.iris(1 << 20)
    os.environ["IRIS_ALLOCATOR"] = "torch"
    iris.iris(1 << 20, "anything").close()


def test_the_environment_overrides_the_allocator():
    _results(run_fresh(2, _allocator_from_environment, env={"IRIS_ALLOCATOR": "elsewhere"}))
