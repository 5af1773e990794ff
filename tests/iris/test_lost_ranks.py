"""A rank is killed, stopped or leaves by an exception, wherever the others wait for it: all name it, and in time."""

from __future__ import annotations

import os
from pathlib import Path
import signal
import time

import iris
from iris import context
from iris.channel import Channel
from iris.errors import IrisError, PeerLostError
from iris.memory import shared_memory
import pytest
import torch
import torch.distributed as dist

from tests.harness import UNDER_TORCHRUN
from tests.processes import patient, run_fresh

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")

WORLD, VICTIM = 3, 1
SHORT_S, LONG_S = 2.0, 60.0  # IRIS_TIMEOUT where it is to pass, and where it is not
FAULTS = ("kill", "stop", "raise")


def _pool(ctx) -> None:
    with ctx.memory_pool():
        torch.zeros(10)


def _op(ctx) -> None:
    ctx.ops.matmul_all_reduce(torch.empty(4, 4), torch.ones(4, 4), torch.ones(4, 4))
    ctx.check()


WAITS = {
    "broadcast from it": lambda ctx: ctx.broadcast(ctx.cur_rank, src=VICTIM),
    "broadcast to it": lambda ctx: ctx.broadcast(torch.zeros(8 << 20), src=0),
    "barrier": lambda ctx: ctx.barrier(),
    "memory_pool": _pool,
    "tracing": lambda ctx: ctx.tracing.enable(16),
    "op": _op,
    "close": lambda ctx: ctx.close(),
    "growth": lambda ctx: ctx.empty(70 << 20, dtype=torch.uint8),
    "compared": lambda ctx: ctx.barrier(),
}


class Mine(ValueError):
    """What the user's own code raises."""


def _fail(fault: str, folder: str) -> None:
    Path(folder, "pid").write_text(str(os.getpid()))
    time.sleep(0.3)  # the others wait by now
    if fault == "raise":
        raise Mine("of the user")
    os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    os._exit(0)  # continued, if ever


def _end_the_stopped(rank: int, fault: str, folder: str) -> None:
    if rank == 0 and fault == "stop":
        time.sleep(0.5)  # for the others to see it stopped, too
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)


def _waiting(rank: int, world: int, wait: str, fault: str, folder: str) -> str | None:
    ctx = iris.iris(256 << 20, "vmem" if wait == "growth" else "torch")
    if wait in ("op", "memory_pool"):
        WAITS[wait](ctx)  # what it makes for the first time is there
    ctx.barrier()
    if rank == VICTIM:
        begin = time.monotonic()
        with pytest.raises(Mine, match="of the user"), ctx:
            _fail(fault, folder)
        assert time.monotonic() - begin < patient(3), "the user's error comes out at once"
        time.sleep(3)  # the others learn of it while this process lives
        return None
    begin = time.monotonic()
    with pytest.raises(PeerLostError, match=rf"rank {rank} lost rank {VICTIM}\b") as caught:
        WAITS[wait](ctx)
    assert time.monotonic() - begin < patient(2 * SHORT_S + 2)
    ctx.close()  # at once, and without an error
    assert time.monotonic() - begin < patient(2 * SHORT_S + 2)
    _end_the_stopped(rank, fault, folder)
    return str(caught.value)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.some(6)
def test_who_waits_for_a_lost_rank_names_it(wait: str, fault: str, tmp_path: Path) -> None:
    limit = SHORT_S if fault == "stop" else LONG_S
    env = {"IRIS_TIMEOUT": str(limit), "IRIS_DEBUG": str(int(wait == "compared"))}
    ended = run_fresh(WORLD, _waiting, wait, fault, str(tmp_path), env=env)
    for rank, end in enumerate(ended):
        if rank != VICTIM:
            assert end.exitcode == 0, end.traceback
            if fault == "raise":
                assert " left" in end.result
    assert ended[VICTIM].exitcode == (0 if fault == "raise" else -signal.SIGKILL), ended[VICTIM].traceback


def _silently(rank: int, world: int, how: str, folder: str) -> None:
    """The victim's sockets stay open when its process ends, for a child has them; or are closed while it lives."""
    ctx, seen = iris.iris(1 << 20), Path(folder, "seen")
    ctx.barrier()
    if rank == VICTIM:
        if how == "closed":
            ctx.hosts.close()
        elif os.fork():
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(600):
            time.sleep(0.1)
            if seen.exists():
                break
        os._exit(0)
    reason = "its process ended" if how == "outlived" else "its process ended, or it closed the context"
    with pytest.raises(PeerLostError, match=rf"rank {rank} lost rank {VICTIM} before mine: {reason}\. "):
        ctx.hosts.all_gather(None, "mine")
    seen.touch()
    os._exit(0)


@pytest.mark.parametrize("how", ["outlived", "closed"])
def test_processes_and_their_connections_are_both_watched(how: str, tmp_path: Path) -> None:
    ended = run_fresh(2, _silently, how, str(tmp_path), env={"IRIS_TIMEOUT": "5"})
    assert ended[0].exitcode == 0, ended[0].traceback


def _until(path: Path) -> None:
    begin = time.monotonic()
    while not path.exists() and time.monotonic() - begin < 30:
        time.sleep(0.01)


def _less_patient(rank: int, world: int, folder: str) -> str:
    """Rank 0 gives up on the victim between the two of them; the others wait for rank 0, the victim from later on."""
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    if rank == 0:
        ctx.hosts._channel.timeout_s = 0.5
    elif rank == VICTIM:
        for other in (0, 2):
            _until(Path(folder, str(other)))
        ctx.hosts.exchange("between two", members=(0, VICTIM))  # what rank 0 had said before
    with pytest.raises(PeerLostError) as caught:
        if rank == 0:
            ctx.hosts.exchange("between two", members=(0, VICTIM))
        ctx.hosts.exchange("mine")
    Path(folder, str(rank)).touch()
    for other in range(world):  # so that nobody learns it of a process that has ended
        _until(Path(folder, str(other)))
    return str(caught.value)


def test_who_gives_up_on_a_rank_tells_the_others(tmp_path: Path) -> None:
    ended = run_fresh(WORLD, _less_patient, str(tmp_path), env={"IRIS_TIMEOUT": "20"})
    assert [end.exitcode for end in ended] == [0] * WORLD, [end.traceback for end in ended]
    reason = "it did not come within 0.5 s (IRIS_TIMEOUT)"
    first, victim, other = (end.result for end in ended)
    assert first.startswith(f"rank 0 lost rank {VICTIM} before between two: {reason}. ")
    assert other.startswith(f"rank 2 lost rank {VICTIM} before mine: {reason}, as rank 0 found. ")
    assert victim.startswith(f"rank {VICTIM} reached mine too late: rank 0 had stopped waiting for it. ")


PLACES = {
    "before": None,
    "between the rendezvous and its calls": (Channel, "_accept"),
    "connected": (context.Iris, "_own_device"),
    "its memory": (shared_memory, "_map"),
    "mapped": (context, "Heap"),
}


def _creating(rank: int, world: int, place: str, fault: str, folder: str, with_group: bool) -> float:
    if with_group:
        dist.init_process_group("gloo")
    if rank == VICTIM:
        if PLACES[place] is None:
            _fail(fault, folder)
        owner, name = PLACES[place]
        setattr(owner, name, lambda *_: _fail(fault, folder))
        with pytest.raises((IrisError, Mine), match="of the user"):
            iris.iris(1 << 20)
        time.sleep(1)
        return 0.0
    begin = time.monotonic()
    expected = "rank 1: .*of the user" if fault == "raise" and PLACES[place] else rf"rank {rank} lost rank {VICTIM}\b"
    if place.startswith("between"):
        expected = rf"rank {rank} lost rank {VICTIM}\b"
    with pytest.raises(IrisError, match=expected):
        iris.iris(1 << 20)
    took = time.monotonic() - begin
    _end_the_stopped(rank, fault, folder)
    return took


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "place, with_group", [*((place, True) for place in PLACES), ("before", False), ("mapped", False)]
)
@pytest.mark.some(4)
def test_a_rank_lost_while_a_context_is_made_is_named(place: str, fault: str, with_group: bool, tmp_path: Path) -> None:
    short = fault == "stop" or place == "before" and not with_group  # whose process nobody has heard of
    env = {"IRIS_TIMEOUT": str(2 * SHORT_S if short else LONG_S)}  # the processes begin some seconds apart
    ended = run_fresh(WORLD, _creating, place, fault, str(tmp_path), with_group, env=env)
    for rank, end in enumerate(ended):
        if rank != VICTIM:
            assert end.exitcode == 0, end.traceback
            assert end.result < patient(3 * SHORT_S + 3)


def _without_the_first(rank: int, world: int) -> None:
    if rank == 0:
        return
    with pytest.raises(
        PeerLostError, match=rf"rank {rank} lost rank 0 before the creation of a context: its store at 127.0.0.1:"
    ):
        iris.iris(1 << 20)


def test_a_first_rank_that_never_comes_is_named() -> None:
    for end in run_fresh(2, _without_the_first, env={"IRIS_TIMEOUT": "1.5"}):
        assert end.exitcode == 0, end.traceback


def _interrupted(rank: int, world: int) -> None:
    def interrupt(*_):
        raise KeyboardInterrupt

    if rank == VICTIM:
        context.Heap = interrupt
        with pytest.raises(KeyboardInterrupt):
            iris.iris(1 << 20)
        time.sleep(1)
    else:
        with pytest.raises(PeerLostError, match=rf"rank {rank} lost rank {VICTIM}\b.* left by KeyboardInterrupt"):
            iris.iris(1 << 20)


def test_an_interrupt_while_a_context_is_made_reaches_all() -> None:
    for end in run_fresh(WORLD, _interrupted, env={"IRIS_TIMEOUT": str(LONG_S)}):
        assert end.exitcode == 0, end.traceback


def _differing_source(rank: int, world: int) -> None:
    with iris.iris(1 << 20) as ctx:
        with pytest.raises(
            iris.errors.ArgumentError, match="broadcast: src differs between ranks: 0 on ranks 0, 2, 1 on rank 1"
        ):
            ctx.broadcast(5, src=int(rank == VICTIM))
        assert ctx.broadcast(rank, src=2) == 2  # and they go on together


def test_sources_that_differ_are_an_error_on_all() -> None:
    for end in run_fresh(WORLD, _differing_source, env={"IRIS_TIMEOUT": str(LONG_S)}):
        assert end.exitcode == 0, end.traceback


def _slowly(rank: int, world: int) -> None:
    """A large value takes longer than the time-out, and something moves all the time."""
    with iris.iris(1 << 20) as ctx:
        value = torch.arange(16 << 20)
        assert torch.equal(ctx.broadcast(value if rank == 0 else None), value)


def test_large_values_pass() -> None:
    for end in run_fresh(2, _slowly, env={"IRIS_TIMEOUT": "5"}):
        assert end.exitcode == 0, end.traceback


def _serialised(rank: int, world: int) -> None:
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    if rank == 0:
        with pytest.raises(PeerLostError, match="under CUDA_LAUNCH_BLOCKING, which runs kernels one at a time"):
            ctx.barrier()
    else:
        time.sleep(3)


def test_a_tool_that_serialises_kernels_is_mentioned() -> None:
    ended = run_fresh(2, _serialised, env={"IRIS_TIMEOUT": "1", "CUDA_LAUNCH_BLOCKING": "1"})
    assert ended[0].exitcode == 0, ended[0].traceback
