"""What the rings of messages promise: any size and place, senders that go on, any lists that match, and time-outs."""

from __future__ import annotations

import time

import iris
from iris.ccl import P2POp, ReduceOp, rings
from iris.ccl.rings import Rings
from iris.errors import ArgumentError, PeerLostError
import pytest
import torch

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.processes import run_fresh

pytestmark = both
SEVERAL = [w for w in WORLDS if w != 1]
# Bytes: less than a word, a unit's edges, the border between Lamport values and chunks, chunks of several slots.
SIZES = [1, 3, 4, 15, 4095, 4096, 4100, 16390, rings.BORDER - 1, rings.BORDER, rings.BORDER + 1]


def _bytes(seed: int, nbytes: int) -> torch.Tensor:
    """Draw any bytes, including those of the sentinel."""
    drawn = torch.randint(-1, 255, (nbytes,), generator=torch.Generator().manual_seed(seed))
    drawn[: nbytes // 3] = 255
    return drawn.to(torch.uint8)


def _placed(ctx, values: torch.Tensor, shift: int) -> torch.Tensor:
    """Place `values` at an offset from an aligned address, between bytes that must not change."""
    memory = torch.full((values.numel() + 64,), 7, dtype=torch.uint8, device=ctx.device)
    place = memory[16 + shift : 16 + shift + values.numel()]
    place.copy_(values)
    return place


def _untouched(place: torch.Tensor) -> bool:
    whole = torch.empty(0, dtype=torch.uint8, device=place.device).set_(place.untyped_storage())
    begin = place.storage_offset()
    return bool((whole[:begin] == 7).all() and (whole[begin + place.numel() :] == 7).all())


def _sized(ctx):
    rank, n = ctx.cur_rank, ctx.num_ranks
    after, before = (rank + 1) % n, (rank - 1) % n
    ctx.ccl.init_p2p(max(SIZES), torch.uint8)
    for i, nbytes in enumerate(SIZES):
        for shift in (0, 4, 2, 1) if nbytes < 20_000 else (i % 3,):
            mine = _placed(ctx, _bytes(10 * nbytes + rank, nbytes), shift)
            theirs = _placed(ctx, torch.full((nbytes,), 9), (shift + rank) % 5)
            ctx.ccl.sendrecv(mine, theirs, after, before)
            assert torch.equal(theirs.cpu(), _bytes(10 * nbytes + before, nbytes)), (nbytes, shift)
            assert _untouched(theirs), (nbytes, shift)
            everyone = _placed(ctx, _bytes(nbytes + rank, nbytes), shift)
            ctx.ccl.broadcast(everyone, n - 1)
            assert torch.equal(everyone.cpu(), _bytes(nbytes + n - 1, nbytes)) and _untouched(everyone)
    ctx.barrier()


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", SEVERAL)
def test_any_size_at_any_address(world_size):
    run_ranks(world_size, _sized)


def _summed(ctx):
    """Of ones whose sum is exact, and of those whose rounding shows the order and the width of the sum."""
    rank, n = ctx.cur_rank, ctx.num_ranks
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.uint8, torch.int32, torch.int64):
        for count in (5, 4096, rings.BORDER // dtype.itemsize + 8):
            of = [_drawn(count, dtype, 100 * count + r) for r in range(n)]
            root, out = count % n, torch.zeros(count, dtype=dtype, device=ctx.device)
            ctx.ccl.reduce(out, of[rank].to(ctx.device), root, ReduceOp.SUM)
            want = of[0].float() if dtype.is_floating_point else of[0].clone()
            for each in of[1:]:
                want += each
            want = want.to(dtype) if rank == root else torch.zeros(count, dtype=dtype)
            assert torch.equal(out.cpu(), want), (dtype, count)
    x = torch.full((1000,), rank + 1.0, device=ctx.device)  # in place
    ctx.ccl.reduce(x, x, 0)
    assert (x == (n * (n + 1) / 2 if rank == 0 else rank + 1)).all()
    nan = torch.full((100,), -1, dtype=torch.int32, device=ctx.device).view(torch.float32)  # the sentinel's bits
    ctx.ccl.reduce(x[:100], nan, 0)
    assert x[:100].isnan().all() == (rank == 0)
    ctx.barrier()


def _drawn(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(count, generator=generator).to(dtype)
    return torch.randint(-100, 100, (count,), generator=generator).to(dtype)


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", SEVERAL)
def test_sums_are_in_rank_order(world_size):
    run_ranks(world_size, _summed)


def _ahead(ctx):
    """Senders run ahead of a receiver until its ring is full; what they send in one call it takes in several."""
    rank, n, count = ctx.cur_rank, ctx.num_ranks, 40
    ctx.ccl.init_p2p(64 * rings.MESSAGE_BYTES, torch.uint8)
    given = [_drawn(1000 * (1 + i % 5), torch.float32, i) for i in range(count)]
    if rank == 0:
        for i in range(0, count // 2):  # 120 slots of 64
            ctx.ccl.send(given[i].to(ctx.device), 1)
        for i in range(count // 2, count, 5):
            ctx.ccl.batch_isend_irecv([P2POp("send", each.to(ctx.device), 1) for each in given[i : i + 5]])
    elif rank == 1:
        if not ON_GPU:
            time.sleep(0.5)
        places = [torch.zeros_like(each, device=ctx.device) for each in given]
        for i in range(0, count // 2, 4):
            ctx.ccl.batch_isend_irecv([P2POp("recv", each, 0) for each in places[i : i + 4]])
        for place in places[count // 2 :]:
            ctx.ccl.recv(place, 0)
        for want, got in zip(given, places, strict=True):
            assert torch.equal(got.cpu(), want)
    assert n > 1
    ctx.barrier()


@pytest.mark.parametrize("world_size", SEVERAL[:1])
def test_a_sender_goes_on_before_its_receiver_comes(world_size):
    run_ranks(world_size, _ahead)


def _crowd(ctx):
    """More messages to each rank than a launch takes, of all sizes, then exchanges in place."""
    rank, n = ctx.cur_rank, ctx.num_ranks
    ctx.ccl.init_p2p(1 << 20, torch.float32)
    sizes = [0, 1, 5, 4096, 300_000, 3, 7, *range(20, 32)]
    for turn in range(2):
        sends, takes, expected = [], [], []
        for i, count in enumerate(sizes):
            for peer in range(n):
                sends.append(
                    P2POp("send", _drawn(count, torch.int16, 1000 * turn + 100 * i + rank).to(ctx.device), peer)
                )
                takes.append(P2POp("recv", torch.zeros(count, dtype=torch.int16, device=ctx.device), peer))
                expected.append(_drawn(count, torch.int16, 1000 * turn + 100 * i + peer))
        ctx.ccl.batch_isend_irecv([*takes, *sends] if rank % 2 else [*sends, *takes])
        for op, want in zip(takes, expected, strict=True):
            assert torch.equal(op.tensor.cpu(), want)
    both_ways = torch.arange(10.0, device=ctx.device) + 100 * rank
    ctx.ccl.sendrecv(both_ways[:8], both_ways[2:], (rank + 1) % n, (rank - 1) % n)
    before = 100.0 * ((rank - 1) % n)
    assert both_ways.tolist() == [100.0 * rank, 100.0 * rank + 1, *(before + i for i in range(8))]
    ctx.barrier()


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_batch_of_very_many_messages(world_size):
    run_ranks(world_size, _crowd)


def _in_pieces(ctx):
    """Tensors larger than the rings of rooted collectives may become."""
    rank, n, most = ctx.cur_rank, ctx.num_ranks, rings.MOST_SLOTS
    rings.MOST_SLOTS = 64 * n
    try:
        count = 500_000  # of float32: 3.8 rings
        of = [_drawn(count * n, torch.float32, r) for r in range(n)]
        x = of[rank].to(ctx.device, copy=True)
        ctx.ccl.broadcast(x, 1 % n)
        assert torch.equal(x.cpu(), of[1 % n])
        whole, part = torch.zeros(n * n * count, device=ctx.device), torch.zeros(count, device=ctx.device)
        ctx.ccl.gather(whole, of[rank].to(ctx.device), 0)
        assert torch.equal(whole.cpu(), torch.cat(of) if rank == 0 else torch.zeros(n * n * count))
        ctx.ccl.scatter(part, of[0].to(ctx.device), 0)
        assert torch.equal(part.cpu(), of[0].split(count)[rank])
        ctx.ccl.reduce(x, of[rank].to(ctx.device), n - 1)
        total = torch.stack(of).sum(0) if n < 3 else None
        if rank == n - 1 and total is not None:
            assert torch.equal(x.cpu(), total)
    finally:
        rings.MOST_SLOTS = most
    ctx.barrier()


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", SEVERAL[:2])
def test_tensors_larger_than_a_ring(world_size):
    run_ranks(world_size, _in_pieces)


def _late(ctx):
    """Units with an element like the sentinel, into slots that held such before, of a sender that comes late."""
    rank, count = ctx.cur_rank, rings.BORDER // 4 + 1000
    ctx.ccl.init_p2p(count, torch.float32)
    for turn in range(16):  # the ring has room for seven
        given = torch.arange(count, dtype=torch.int32) + 10 * turn
        given[::1000] = -1
        if rank == 0:
            time.sleep(0.0 if ON_GPU else 0.1)
            ctx.ccl.send(given.to(ctx.device), 1)
        elif rank == 1:
            got = torch.zeros(count, dtype=torch.int32, device=ctx.device)
            ctx.ccl.recv(got, 0)
            assert torch.equal(got.cpu(), given), turn
    ctx.barrier()


@pytest.mark.parametrize("world_size", SEVERAL[:1])
def test_elements_like_the_sentinel_are_awaited(world_size):
    run_ranks(world_size, _late)


def _overlapping(ctx):
    """Gather from a part of the result, and scatter into the input."""
    rank, n = ctx.cur_rank, ctx.num_ranks
    whole = torch.arange(4.0 * n, device=ctx.device) + 100 * rank
    ctx.ccl.gather(whole, whole[4 * rank : 4 * rank + 4], 0)
    if rank == 0:
        assert whole.tolist() == [100.0 * r + 4 * r + i for r in range(n) for i in range(4)]
    whole = torch.arange(4.0 * n, device=ctx.device)
    part = whole[:4]
    ctx.ccl.scatter(part, whole, n - 1)
    assert part.tolist() == [4.0 * rank + i for i in range(4)]
    whole = torch.arange(4.0 * n, device=ctx.device) + 100 * rank
    ctx.ccl.gather(whole, whole[2:6], 0)  # at the root of neither part
    if rank == 0:
        assert whole.tolist() == [100.0 * r + 2 + i for r in range(n) for i in range(4)]
    ctx.barrier()


@pytest.mark.parametrize("world_size", SEVERAL[:2])
def test_tensors_that_overlap(world_size):
    run_ranks(world_size, _overlapping)


def _turns(ctx):
    """Rings go round many times, by sizes that stand otherwise each time; captured on GPUs."""
    rank, n = ctx.cur_rank, ctx.num_ranks
    after, before = (rank + 1) % n, (rank - 1) % n
    # for few ranks of the interpreter as many slots in proportion: messages go round once and a half
    ctx.ccl.init_p2p(5 << 20 if ON_GPU or n != 2 else 5 << 18, torch.uint8)
    counts = [3, 70_000, 20_000, 1_100_000 if ON_GPU else 275_000 if n == 2 else 150_000, 1]
    mine = [torch.zeros(count, dtype=torch.int32, device=ctx.device) for count in counts]
    theirs = [torch.zeros_like(each) for each in mine]

    def calls():
        for one, other in zip(mine, theirs, strict=True):
            ctx.ccl.sendrecv(one, other, after, before)
            ctx.ccl.broadcast(other, 0)

    calls()
    again = calls
    ctx.barrier()
    if ON_GPU:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls()
        again = graph.replay
    for turn in range(100 if ON_GPU else 3):
        for one, other in zip(mine, theirs, strict=True):
            one.copy_(torch.arange(one.numel()) * 7 + 1000 * turn + rank)
            other.fill_(-5)
        again()
        for other in theirs:
            assert torch.equal(other.cpu(), torch.arange(other.numel(), dtype=torch.int32) * 7 + 1000 * turn + n - 1)
    ctx.barrier()


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", SEVERAL)
def test_rings_go_round(world_size):
    run_ranks(world_size, _turns)


def _lost(rank, world_size, way):
    with pytest.raises(PeerLostError, match="rank 1 lost rank 0" if rank else "rank 0 lost rank 1") as caught:
        with iris.iris(1 << 24) as ctx:
            ctx.ccl.init_p2p(256 * rings.MESSAGE_BYTES if way == "large" else 1, torch.uint8)
            ctx.ccl.reduce(torch.zeros(4), torch.zeros(4))
            x = torch.zeros(1000 if way != "large" else 200_000, device=ctx.device)
            if rank == 0 and way == "full":
                for _ in range(100):  # nobody takes
                    ctx.ccl.send(x, 1)
            elif rank == 1 and way == "large":
                ctx.ccl.recv(x[: rings.BORDER // 4 + 4], 0)
            elif rank == 1 and way == "reduce":
                ctx.ccl.reduce(x, x, 1)
            elif rank == 1 and way == "small":
                ctx.ccl.recv(x, 0)
            else:
                time.sleep(3.0)
            ctx.check()
            ctx.barrier()
    if (rank, way) in ((0, "full"), (1, "small"), (1, "large"), (1, "reduce")):
        assert ("reduce" if way == "reduce" else "a message") + " waited" in str(caught.value)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")
@pytest.mark.parametrize("way", ["small", "large", "full", "reduce"])
@pytest.mark.some(2)
def test_a_peer_that_does_not_come_is_named(way):
    ended = run_fresh(2, _lost, way, env={"IRIS_TIMEOUT": "1"})
    assert [end.exitcode for end in ended] == [0, 0], [end.traceback for end in ended]


def _untaken(rank, world_size, log):
    with iris.iris(1 << 26) as ctx:
        ctx.ccl.init_p2p(100, torch.float32)
        x = torch.full((100,), 1.0 + rank, device=ctx.device)
        if rank == 0:
            ctx.ccl.send(x, 1)
            look = Rings.untaken
            Rings.untaken = lambda rings: (time.sleep(1), look(rings))[1]  # when rank 1 could have received already
        with pytest.raises(
            ArgumentError, match=r"messages have not been received, from rank 0 to rank 1 \(at most 8 KiB\)"
        ):
            ctx.ccl.init_p2p(1 << 17, torch.float32)
        if rank == 1:  # it is still there
            ctx.ccl.recv(x, 0)
            assert (x == 1).all()
        ctx.ccl.init_p2p(1 << 17, torch.float32)
        ctx.ccl.sendrecv(x, x.clone(), (rank + 1) % world_size, (rank - 1) % world_size)
        if rank == 1:
            ctx.ccl.send(x, 0)
        ctx.log.warning = lambda text: (log / str(rank)).write_text(text)
    reported = [(log / str(r)).read_text() if (log / str(r)).exists() else "" for r in range(world_size)]
    assert (reported[rank] == "close: rank 1 sent messages of at most 8 KiB that this rank never received") == (
        rank == 0
    )


@pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")
def test_messages_that_nobody_takes_are_told_of(tmp_path):
    ended = run_fresh(2, _untaken, tmp_path, env={"IRIS_TIMEOUT": "30"})
    assert [end.exitcode for end in ended] == [0, 0], [end.traceback for end in ended]
