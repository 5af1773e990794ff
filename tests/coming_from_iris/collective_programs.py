"""`ctx.ccl`, with the keywords and configurations of ROCm/iris."""

import iris
from iris.ccl import Config, ReduceOp
import pytest
import torch
import torch.distributed as dist


def gather_and_exchange():
    shmem = iris.iris(1 << 22)
    rank, n = shmem.cur_rank, shmem.num_ranks
    inp, out = shmem.full((4, 8), float(rank)), shmem.zeros(4 * n, 8)
    shmem.ccl.all_gather(output_tensor=out, input_tensor=inp)
    shmem.barrier()
    assert torch.equal(out.view(n, 32)[:, 5].cpu(), torch.arange(float(n)))
    inp, out = shmem.zeros(4, 8 * n), shmem.zeros(4, 8 * n)
    inp.copy_(torch.arange(n, device=inp.device).repeat_interleave(8)[None] + 10.0 * rank)
    shmem.ccl.all_to_all(out, inp, config=Config(block_size_m=32, block_size_n=64, swizzle_size=4, comm_sms=8))
    shmem.barrier()
    assert out[1].view(n, 8)[:, 0].tolist() == [10.0 * i + rank for i in range(n)]


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


def fields_are_readable():
    config = Config(block_size_m=32, block_size_n=64)
    assert (config.block_size_m, config.block_size_n, config.swizzle_size) == (32, 64, 4)
    assert (config.all_reduce_distribution, config.all_reduce_num_rings) == (1, 1)
    assert config.reduce_scatter_variant == "two_shot"


def from_and_to_one_rank():
    shmem = iris.iris(1 << 22)
    rank, n = shmem.cur_rank, shmem.num_ranks
    root = n - 1
    tensor = shmem.full((5, 3), rank, dtype=torch.int16)
    shmem.ccl.broadcast(tensor, src=root)
    assert (tensor == root).all()
    part, whole = shmem.full((2, 3), rank + 0.5), shmem.zeros(2 * n, 3)
    shmem.ccl.gather(whole, part, dst=root)
    if rank == root:
        assert whole[::2, 0].tolist() == [i + 0.5 for i in range(n)]
    shmem.ccl.scatter(part, whole, src=root)
    assert (part == rank + 0.5).all()
    total = shmem.zeros(2, 3)
    shmem.ccl.reduce(output_tensor=total, input_tensor=part, dst=root, op=ReduceOp.SUM)
    assert (total == (n * n / 2 if rank == root else 0)).all()
    shmem.barrier()


def messages_round_a_ring():
    shmem = iris.iris(1 << 23)
    rank, n = shmem.cur_rank, shmem.num_ranks
    shmem.ccl.init_p2p(max_numel=1000, dtype=torch.float32)
    mine, theirs = shmem.full((100,), float(rank)), shmem.zeros(100)
    shmem.ccl.sendrecv(mine, theirs, dst=(rank + 1) % n, src=(rank - 1) % n)
    assert (theirs == (rank - 1) % n).all()
    if n > 1 and rank == 0:
        shmem.ccl.send(mine + 7, dst=1)
    if n > 1 and rank == 1:
        shmem.ccl.recv(theirs, src=0)
        assert (theirs == 7).all()
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
