"""`ctx.ccl`, with the keywords and configurations of ROCm/iris."""

import iris
from iris.ccl import Config, ReduceOp
import pytest
import torch
import torch.distributed as dist


def sums_by_every_variant():
    shmem = iris.iris(1 << 22)
    n = shmem.num_ranks
    inp, out = shmem.full((16, 24), shmem.cur_rank + 1.0), shmem.zeros(16, 24)
    for variant in ("atomic", "ring", "two_shot", "one_shot", "spinlock"):
        config = Config(block_size_m=32, block_size_n=64, all_reduce_variant=variant, all_reduce_num_rings=1)
        workspace = shmem.ccl.all_reduce_preamble(output_tensor=out, input_tensor=inp, config=config)
        out.fill_(float("nan"))
        shmem.ccl.all_reduce(out, inp, op=ReduceOp.SUM, async_op=False, config=config, workspace=workspace)
        torch.cuda.synchronize() if out.is_cuda else None
        assert (out == n * (n + 1) / 2).all(), variant
    shmem.barrier()


def tiles_of_a_sum():
    """Whose tile is whose as the newest kernel of ROCm/iris numbers them, where fields of the Config are open."""
    shmem = iris.iris(1 << 24)
    rank, n = shmem.cur_rank, shmem.num_ranks
    M, N = 225, 200
    inp, out = shmem.full((M, N), 1.0), shmem.empty(M, N)
    for config, rows, cols, group, turns in (
        (None, 32, 64, 4, False),
        (Config(), 32, 64, 4, False),
        (Config(block_size_m=16, block_size_n=32), 16, 32, 4, False),
        (Config(block_size_m=64), 64, 64, 4, False),
        (Config(swizzle_size=2), 32, 64, 2, False),
        (Config(block_size_m=16, block_size_n=32, all_reduce_distribution=0), 16, 32, 4, True),
    ):
        out.fill_(-1)
        shmem.barrier()
        shmem.ccl.reduce_scatter(out, inp, config=config)
        shmem.barrier()
        down, across = -(-M // rows), -(-N // cols)
        share = -(-down * across // n)
        want = torch.full((M, N), -1.0)
        for tile in range(down * across):
            owner = tile % n if turns else tile // share
            first = tile // (group * across) * group
            height, inside = min(down - first, group), tile % (group * across)
            m, k = first + inside % height, inside // height
            if owner == rank:
                want[rows * m : rows * (m + 1), cols * k : cols * (k + 1)] = n
        assert torch.equal(out.cpu(), want), config
    shmem.barrier()


def a_configuration_that_changes():
    shmem = iris.iris(1 << 22)
    n = shmem.num_ranks
    inp, out = shmem.full((64, 64), shmem.cur_rank + 1.0), shmem.zeros(64, 64)
    config = Config(block_size_m=32, block_size_n=32)
    for variant, distribution in (("two_shot", 0), ("two_shot", 1), ("one_shot", 0), ("two_shot", 1)):
        config.all_reduce_variant, config.all_reduce_distribution = variant, distribution
        out.fill_(float("nan"))
        shmem.ccl.all_reduce(out, inp, config=config)
        shmem.barrier()
        assert (out == n * (n + 1) / 2).all()
        assert shmem.ccl.plan("all_reduce", out, inp, config).variant == variant
    with pytest.raises(ValueError, match="all_reduce_variant"):
        config.all_reduce_variant = "three_shot"
    assert config == Config(32, 32, all_reduce_variant="two_shot", all_reduce_distribution=1)
    shmem.barrier()


def a_preamble_for_calls_of_groups():
    """The preamble knows no group; each call may name one."""
    shmem = iris.iris(1 << 22)
    rank, n = shmem.cur_rank, shmem.num_ranks
    groups = [dist.new_group(list(range(first, n, 2))) for first in range(min(n, 2))]
    group, members = groups[rank % 2], range(rank % 2, n, 2)
    inp, out = shmem.full((16, 8), rank + 1.0), shmem.zeros(16, 8)
    workspace = shmem.ccl.all_reduce_preamble(out, inp, config=Config(all_reduce_variant="two_shot"))
    for times in (1, 2):
        out.fill_(float("nan"))
        used = shmem.ccl.all_reduce(out, inp, group=group, workspace=workspace)
        assert (out == sum(member + 1 for member in members)).all(), times
        shmem.ccl.all_reduce(out, inp, group=group, workspace=used)
        shmem.ccl.all_reduce(out, inp, workspace=workspace)
        assert (out == n * (n + 1) / 2).all(), times
    workspace.wait()
    shmem.barrier()
