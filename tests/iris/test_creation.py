"""Making a context: where one rank fails all do, and an exception in its block is the user's."""

from __future__ import annotations

import os
import signal
import time

import iris
from iris import connections
from iris.errors import ArgumentError, HeapExhausted, PeerLostError, PlatformError, VersionError
import pytest
import torch
import torch.distributed as dist

from tests.harness import UNDER_TORCHRUN
from tests.processes import patient, run_fresh

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="processes of its own")
VICTIM = 1


def fail(how: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)


def no_memfd(*_: object) -> int:
    raise OSError(24, "Too many open files")


def no_peer(*_: object):
    raise PlatformError("cannot open the heap of a rank")


def no_device(*_: object) -> torch.device:
    raise RuntimeError("CUDA error: out of memory")


STEPS = {
    "memfd_create": (lambda: setattr(os, "memfd_create", no_memfd), HeapExhausted, "Too many open files"),
    "mapping a peer": (
        lambda: setattr(__import__("iris.memory.shared_memory").memory.shared_memory, "_map_peer", no_peer),
        PlatformError,
        "cannot open the heap of a rank",
    ),
    "the device": (lambda: setattr(iris.platform, "device", no_device), PlatformError, "CUDA error: out of memory"),
    "the barrier": (
        lambda: setattr(iris.context.DeviceBarrier, "__init__", no_device), PlatformError, "CUDA error: out of memory"
    ),
    "the group": (lambda: None, ArgumentError, "group is int"),
}  # fmt: skip


def failing(rank: int, world: int, step: str) -> None:
    dist.init_process_group("gloo")
    spoil, kind, text = STEPS[step]
    if rank == VICTIM:
        spoil()
    begin = time.monotonic()
    with pytest.raises((kind, RuntimeError) if rank == VICTIM else kind, match=text) as raised:
        iris.iris(1 << 20, group=5 if step == "the group" and rank == VICTIM else None)
    assert rank == VICTIM or f"rank {VICTIM}: " in str(raised.value)
    assert time.monotonic() - begin < patient(5)
    os._exit(0)


@pytest.mark.parametrize("step", STEPS)
def test_no_rank_fails_alone_while_a_context_is_made(step: str) -> None:
    ended = run_fresh(3, failing, step, env={"IRIS_TIMEOUT": "20"})
    assert [end.exitcode for end in ended] == [0, 0, 0], [end.traceback for end in ended]


TRITONS = ("3.6.0", "3.7.1", "3.7.1")


def mixed(rank: int, world: int) -> None:
    connections.versions = lambda: f"iris 0.1.0, torch 2.13.0, triton {TRITONS[rank]}"
    begin = time.monotonic()
    for _ in range(2):  # it leaves nothing behind that the next one stumbles over
        with pytest.raises(VersionError, match="rank 0 has .* triton 3.6.0; rank 1 has .* triton 3.7.1; expected"):
            iris.iris(1 << 20)
    assert time.monotonic() - begin < patient(10)
    connections.versions = lambda: "the same"
    with iris.iris(1 << 20) as ctx:
        ctx.barrier()


def test_mixed_versions_are_told_to_every_rank() -> None:
    ended = run_fresh(3, mixed, env={"IRIS_TIMEOUT": "20"})
    assert [end.exitcode for end in ended] == [0, 0, 0], [end.traceback for end in ended]


def reduce(ctx: iris.Iris) -> None:
    ctx.ops.matmul_all_reduce(torch.empty(8, 8), torch.ones(8, 8), torch.ones(8, 8))


def all_leave(rank: int, world: int) -> None:
    """An exception that all ranks raise is the user's on all of them, and the next context works."""
    for _ in range(3):
        with pytest.raises(KeyError, match="everywhere"):
            with iris.iris(1 << 22) as ctx:
                reduce(ctx)
                ctx.barrier()
                raise KeyError("everywhere")
    with iris.iris(1 << 22) as ctx:
        assert ctx.broadcast(rank) == 0
        large = torch.arange(3 << 20)
        assert torch.equal(ctx.broadcast(large if rank == 1 else None, src=1), large)


def test_an_exception_on_all_ranks_is_the_users() -> None:
    ended = run_fresh(2, all_leave, env={"IRIS_TIMEOUT": "20"})
    assert [end.exitcode for end in ended] == [0, 0], [end.traceback for end in ended]


# --- the rank that serves the store of the process group -------------------------------------------------------------


def killed_while_a_context_is_made(rank: int, world: int) -> list[str]:
    if rank == VICTIM:
        iris.channel.Channel._dial = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match="its process ended"):
        iris.iris(1 << 20)
    return os.listdir(os.environ["TMPDIR"])


def test_nothing_stays_of_a_rank_that_is_killed_while_a_context_is_made(tmp_path) -> None:
    ended = run_fresh(2, killed_while_a_context_is_made, env={"IRIS_TIMEOUT": "10", "TMPDIR": str(tmp_path)})
    assert ended[VICTIM].exitcode == -signal.SIGKILL and ended[0].result == [], ended
