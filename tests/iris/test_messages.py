"""Messages between two ranks: order, any dtype and strides, many at once, groups, replay, bad arguments."""

import iris
from iris.ccl import P2POp, rings
from iris.errors import ArgumentError
import pytest
import torch
import torch.distributed as dist

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.processes import run_fresh

pytestmark = both
SEVERAL = [w for w in WORLDS if w != 1]
DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float32, torch.float64, torch.complex128]


def _values(rank: int, *shape: int, dtype: torch.dtype, turn: int = 0) -> torch.Tensor:
    drawn = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(1000 * turn + rank))
    return drawn % 2 == 1 if dtype == torch.bool else drawn.to(dtype)


def _rounds(ctx, dtype):
    rank, n = ctx.cur_rank, ctx.num_ranks
    with pytest.raises(
        ArgumentError, match="expected at most 0 together, the room for messages: call ctx.ccl.init_p2p"
    ):
        ctx.ccl.send(torch.zeros(4, device=ctx.device), (rank + 1) % n)
    ctx.ccl.init_p2p(64, torch.complex128)
    second = ctx.zeros(2, 3, dtype=dtype)
    for turn in range(3):
        mine = _values(rank, 7, 3, dtype=dtype, turn=turn).to(ctx.device)
        theirs = torch.full((7, 6), 2, device=ctx.device).to(dtype)[:, ::2]  # of rows with holes
        ctx.ccl.sendrecv(mine.t().contiguous().t(), theirs, (rank + 1) % n, (rank - 1) % n)
        assert torch.equal(theirs.cpu(), _values((rank - 1) % n, 7, 3, dtype=dtype, turn=turn))
        for giver in range(n - 1):  # along the ranks, whoever is not concerned goes on
            if rank == giver:
                ctx.ccl.send(mine, giver + 1)
                ctx.ccl.send(mine[:2], giver + 1, tag=1)
            elif rank == giver + 1:
                first = torch.zeros(7, 3, dtype=dtype, device=ctx.device)
                ctx.ccl.recv(first, giver)
                ctx.ccl.recv(second.zero_(), giver)
                want = _values(giver, 7, 3, dtype=dtype, turn=turn)
                assert torch.equal(first.cpu(), want) and torch.equal(second.cpu(), want[:2])
    ctx.barrier()


@pytest.mark.some(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", SEVERAL)
def test_messages_between_two_ranks_and_round_a_ring(world_size, dtype):
    run_ranks(world_size, _rounds, dtype)


def _sent_first(ctx):
    rank, n, size = ctx.cur_rank, ctx.num_ranks, 200_000
    ctx.ccl.init_p2p(size, torch.float32)
    received = torch.empty(size, device=ctx.device)
    for turn in range(3):
        ctx.ccl.send(_values(rank, size, dtype=torch.float32, turn=turn).to(ctx.device), (rank + 1) % n)
        ctx.ccl.recv(received, (rank - 1) % n)
        assert torch.equal(received.cpu(), _values((rank - 1) % n, size, dtype=torch.float32, turn=turn))
    ctx.barrier()


@pytest.mark.parametrize("world_size", SEVERAL)
def test_all_ranks_may_send_first_what_fits_into_the_buffer(world_size):
    run_ranks(world_size, _sent_first)


def _batches(ctx, group=None, ranks=None):
    """Every rank to every rank, itself too, twice each, of sizes and dtypes that differ; listed in other orders."""
    ranks = ranks or tuple(range(ctx.num_ranks))
    n, rank = len(ranks), ranks.index(ctx.cur_rank)
    ctx.ccl.init_p2p(100, torch.float64)
    for turn in range(3):

        def message(source, target, which, turn=turn):
            shape, dtype = (source + 1, target + 2 + which), torch.int64 if which else torch.bfloat16
            return _values(10 * source + target + 100 * which, *shape, dtype=dtype, turn=turn)

        sends = [P2POp("send", message(rank, to, i).to(ctx.device), to) for i in range(2) for to in range(n)]
        places = {(of, i): torch.zeros_like(message(of, rank, i), device=ctx.device) for of in range(n) for i in (0, 1)}
        takes = [P2POp(dist.irecv, place, of) for (of, _), place in places.items()]
        ctx.ccl.batch_isend_irecv([*takes, *sends] if (rank + turn) % 2 else [*sends, *takes], group)
        for (of, i), place in places.items():
            assert torch.equal(place.cpu(), message(of, rank, i)), (of, i)
    if n > 2:  # a pair alone, of which the others know nothing
        pair = torch.full((5,), rank, device=ctx.device)
        if rank < 2:
            ctx.ccl.batch_isend_irecv([P2POp("isend", pair, 1 - rank), P2POp("recv", pair, 1 - rank)], group)
        assert (pair == (1 - rank if rank < 2 else rank)).all()
    ctx.ccl.batch_isend_irecv([], group)
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS)
def test_many_messages_at_once(world_size):
    run_ranks(world_size, _batches)


def _in_groups(ctx):
    mesh = torch.distributed.device_mesh.init_device_mesh(ctx.device.type, (2, 2), mesh_dim_names=("a", "b"))
    for name in ("a", "b"):
        group = mesh[name].get_group()
        _batches(ctx, group, tuple(dist.get_process_group_ranks(group)))


@pytest.mark.four
@pytest.mark.parametrize("world_size", [w for w in WORLDS if w == 4])
def test_peers_count_in_their_group(world_size):
    run_ranks(world_size, _in_groups)


def _freed(t):
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _refused(ctx):
    ctx.ccl.init_p2p(8, torch.float32)
    x, there = torch.zeros(4, device=ctx.device), (ctx.cur_rank + 1) % ctx.num_ranks
    slots = ctx.ccl._message_rings().slots
    part = torch.zeros(rings.BORDER // 4, device=ctx.device)
    too_much = [part] * (slots * rings.MESSAGE_BYTES // rings.BORDER) + [x[:1]]
    batch = ctx.ccl.batch_isend_irecv
    calls = [
        ("init_p2p", lambda: ctx.ccl.init_p2p(0)),
        ("init_p2p", lambda: ctx.ccl.init_p2p(4, "float32")),
        ("send: dst is 9", lambda: ctx.ccl.send(x, 9)),
        ("recv: tensor is list", lambda: ctx.ccl.recv([0.0], there)),
        ("sendrecv: recv_tensor is None", lambda: ctx.ccl.sendrecv(x, None, there, there)),
        ("sendrecv: src is -1", lambda: ctx.ccl.sendrecv(x, x, there, -1)),
        (
            "4 bytes, and earlier messages of the call between the same ranks take 262144",
            lambda: batch([P2POp("send", t, there) for t in too_much]),
        ),
        ("p2p_op_list is 'send'", lambda: batch("send")),
        (r"p2p_op_list\[1\].peer is True", lambda: batch([P2POp("send", x, there), P2POp("recv", x, True)])),
        (r"p2p_op_list\[0\].tensor requires grad", lambda: batch([P2POp("send", x.clone().requires_grad_(), there)])),
        ("recv: tensor .*no expanded", lambda: ctx.ccl.recv(x[:1].expand(4), there)),
        ("send: tensor has no memory", lambda: ctx.ccl.send(_freed(x), there)),
        ("P2POp: op is 'broadcast'", lambda: batch([P2POp("broadcast", x, there)])),
    ]
    for text, call in calls:
        with pytest.raises(ArgumentError, match=text):
            call()
    ctx.ccl.sendrecv(x + 3, x, there, (ctx.cur_rank - 1) % ctx.num_ranks)  # nobody waits for what was refused
    assert (x == 3).all()
    ctx.barrier()


@pytest.mark.parametrize("world_size", WORLDS[:2])
def test_bad_arguments_are_refused_before_anybody_waits(world_size):
    run_ranks(world_size, _refused)


def _compared(rank, world):
    with iris.iris(1 << 22) as ctx:
        ctx.ccl.init_p2p(100, torch.float32)
        x, y, after, before = torch.full((4,), rank), torch.zeros(4), (rank + 1) % world, (rank - 1) % world
        for _ in range(2):  # all round the ring
            ctx.ccl.sendrecv(x.float(), y, after, before)
            ctx.ccl.batch_isend_irecv([P2POp("recv", y, before), P2POp("send", x + 0.5, after)])
        assert (y == before + 0.5).all()
        if rank < 2:  # before anything is staged, so the context stays sound
            say = "what rank 0 sends to rank 1 differs between ranks: 3 of torch.float32 on rank 0, 4 of torch.float64"
            with pytest.raises(ArgumentError, match=say):
                ctx.ccl.send(y[:3], 1) if rank == 0 else ctx.ccl.recv(y.double(), 0)
        ctx.barrier()


@pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")
def test_messages_that_differ_are_errors_on_both_ranks():
    ended = run_fresh(3, _compared, env={"IRIS_DEBUG": "1", "IRIS_TIMEOUT": "30"})
    assert [end.exitcode for end in ended] == [0] * 3, [end.traceback for end in ended]


def _replayed(ctx):
    rank, n = ctx.cur_rank, ctx.num_ranks
    mine, out = torch.zeros(1000, device=ctx.device), torch.zeros(3, 1000, device=ctx.device)
    ctx.ccl.init_p2p(2000, torch.float32)
    after, before = (rank + 1) % n, (rank - 1) % n

    def calls():
        ctx.ccl.sendrecv(mine, out[0], after, before)
        both = [P2POp("send", tensor, after) for tensor in (mine, out[0])]
        ctx.ccl.batch_isend_irecv([*both, *(P2POp("recv", out[i], before) for i in (1, 2))])

    calls()
    ctx.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    for turn in range(5):
        mine.copy_(_values(rank, 1000, dtype=torch.float32, turn=turn))
        graph.replay()
        of = [_values(r, 1000, dtype=torch.float32, turn=turn) for r in range(n)]
        assert torch.equal(out.cpu(), torch.stack([of[before], of[before], of[before - 1]])), turn
    ctx.barrier()


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("world_size", WORLDS)
def test_captured_messages_are_replayed(world_size):
    run_ranks(world_size, _replayed)
