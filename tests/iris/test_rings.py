"""What the host does for messages: it launches known calls again, fills a kernel's tables, refuses what has no room."""

from __future__ import annotations

from types import SimpleNamespace

from iris.ccl import P2POp, rings, transfer
from iris.errors import ArgumentError
from iris.launch import relaunch
import pytest
import torch

from tests.harness import ON_GPU, WORLDS, both, run_ranks

pytestmark = both
SEVERAL = [w for w in WORLDS if w != 1]


def _known_before(ctx):
    """Calls with the same tensors are launched again without a look at them; others are not taken for them."""
    rank, n, launched, repeated = ctx.cur_rank, ctx.num_ranks, [], []
    after, before = (rank + 1) % n, (rank - 1) % n
    launch = relaunch.launch

    def watched(*args, **options):
        launched.append(1)
        launch(*args, **options)

        def again() -> bool:
            repeated.append(1)
            launch(*args, **options)
            return True

        return relaunch.Launch(again)

    rings.relaunch = SimpleNamespace(launch=watched, ALIGNMENT=relaunch.ALIGNMENT)
    try:
        ctx.ccl.init_p2p(1000, torch.float32)
        mine, theirs, holes = torch.zeros(8), torch.zeros(8), torch.zeros(8, 2)[:, 0]

        def calls(turn: int) -> None:
            mine.fill_(100 * turn + rank)
            ctx.ccl.sendrecv(mine, theirs, after, before)
            assert (theirs == 100 * turn + before).all()
            ctx.ccl.sendrecv(mine, holes, after, before)  # torch copies it
            assert (holes == 100 * turn + before).all()
            ctx.ccl.sendrecv(mine[:4], theirs[:4], before, after)
            assert theirs.tolist() == [100 * turn + after] * 4 + [100 * turn + before] * 4
            ctx.ccl.broadcast(mine, turn % n)
            ctx.ccl.reduce(theirs, mine, 0)
            assert (mine == 100 * turn + turn % n).all() and (rank or (theirs == n * mine).all())

        calls(0)
        calls(n)  # anew, for the rings of broadcasts have grown
        launched.clear()
        repeated.clear()
        calls(n)
        assert (len(launched), len(repeated)) == (1, 4)
        ctx.ccl.init_p2p(1 << 20, torch.float32)  # into other rings
        calls(n)
        assert (len(launched), len(repeated)) == (6, 4)
        with pytest.raises(ArgumentError, match="dst is 9"):
            ctx.ccl.sendrecv(mine, theirs, 9, before)
    finally:
        rings.relaunch = relaunch
    ctx.barrier()


@pytest.mark.skipif(ON_GPU, reason="counts what stands in for launches there")
@pytest.mark.parametrize("world_size", SEVERAL[:2])
def test_known_calls_are_launched_again(world_size):
    run_ranks(world_size, _known_before)


def _too_much(ctx):
    there = (ctx.cur_rank + 1) % ctx.num_ranks
    ctx.ccl.init_p2p(1, torch.uint8)
    for tensors in ([torch.zeros(65)] * 65, [torch.zeros(65 * rings.SLOT.value, dtype=torch.uint8)]):
        listed = [P2POp("recv", each.to(ctx.device), there) for each in tensors]
        with pytest.raises(
            ArgumentError, match="expected at most 262144 together, the room for messages: call ctx.ccl.init_p2p"
        ):
            ctx.ccl.batch_isend_irecv(listed)
    ctx.barrier()


def test_no_number_of_a_table_makes_triton_compile_anew():
    """Triton does so for a 1 in a tuple and for a multiple of 16, even with `do_not_specialize`."""
    assert all(transfer.in_table(x) % 16 == 3 and transfer.in_table(x) >> 4 == x for x in (0, 1, 15, 16, 1 << 47))


@pytest.mark.parametrize("world_size", SEVERAL[:1])
def test_more_than_there_is_room_for_is_refused(world_size):
    run_ranks(world_size, _too_much)
