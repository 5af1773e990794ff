"""What goes wrong outside: ranks that die or do not come, memory that is not there, environments that do not fit."""

import os
from pathlib import Path
import resource
import signal
import time

import iris
from iris import creation, errors, platform
from iris.device.sync import wait
import pytest
import torch
import triton
import triton.language as tl

from tests import fresh
from tests.processes import patient, run_fresh

WAITS = {
    "device_barrier": lambda ctx: ctx.device_barrier(),
    "barrier": lambda ctx: ctx.barrier(),
    "broadcast": lambda ctx: ctx.broadcast(ctx.cur_rank, 0),
    "close": lambda ctx: ctx.close(),
}


def _wait_for_the_dead(rank, world_size, victim, wait, how):
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    if rank == victim:
        time.sleep(0.3)  # the others wait by now
        if how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    begin = time.monotonic()
    with pytest.raises(errors.PeerLostError, match=rf"rank {rank} lost rank {victim}: device_barrier") as caught:
        WAITS[wait](ctx)
    took = time.monotonic() - begin
    with pytest.raises(errors.ClosedError if wait == "close" else errors.PeerLostError):  # and so does all that follows
        ctx.zeros(1)
    ctx.close()
    with pytest.raises(errors.ClosedError):
        ctx.zeros(1)
    return took, str(caught.value)


def _wait_for_the_late(rank, world_size):
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    if rank == 1:
        time.sleep(3)
        return None
    begin = time.monotonic()
    with pytest.raises(errors.PeerLostError, match=r"rank 0 lost rank 1.*1.5 s \(IRIS_TIMEOUT\)"):
        ctx.device_barrier()
    return time.monotonic() - begin


def test_a_rank_that_does_not_come_is_an_error_after_the_time_out():
    ended = run_fresh(2, _wait_for_the_late, env={"IRIS_TIMEOUT": "1.5"})
    assert [end.exitcode for end in ended] == [0, 0], ended[0].traceback
    assert 1.5 <= ended[0].result < patient(4.5)


@triton.jit
def _wait_for_own_kernel(ctx_ptr, flag, RANK: tl.constexpr):
    ctx = iris.DeviceContext.initialize(ctx_ptr, RANK, 2)
    wait(ctx, flag, 1, RANK)


def _wait_for_own_programs(rank, world_size):
    ctx = iris.iris(1 << 20)
    _wait_for_own_kernel[(1,)](ctx.get_device_context(), ctx.zeros(1, dtype=torch.int32), RANK=rank)
    with pytest.raises(errors.PeerLostError, match=f"rank {rank} lost a rank that another of its own programs waits"):
        ctx.check()


def test_who_waits_for_its_own_programs_has_not_lost_itself():
    for end in run_fresh(2, _wait_for_own_programs, env={"IRIS_TIMEOUT": "1.5"}):
        assert end.exitcode == 0, end.traceback


def _come_after_a_failed_wait(rank, world_size):
    ctx = iris.iris(1 << 20)
    ctx.barrier()
    if rank == 0:
        ctx._status.fill_(7)  # as a kernel's wait leaves it; its record, from which this host raises, comes later
        ctx.device_barrier()
        time.sleep(3)
        return None
    with pytest.raises(errors.PeerLostError, match="rank 1 lost rank 0: device_barrier"):
        ctx.device_barrier()


def test_who_has_given_up_vouches_for_nothing_more():
    ended = run_fresh(2, _come_after_a_failed_wait, env={"IRIS_TIMEOUT": "1.5"})
    assert [end.exitcode for end in ended] == [0, 0], ended[1].traceback


def _bad_time_out(rank, world_size):
    for text in ("soon", "0", "-1", "nan", "inf", "", "1e30"):
        if rank == world_size - 1:  # only there: the others learn of it
            os.environ["IRIS_TIMEOUT"] = text
        with pytest.raises(errors.PlatformError, match=f"IRIS_TIMEOUT is '{text}'"):
            iris.iris(1 << 20)
    os.environ["IRIS_TIMEOUT"] = "7.5"
    with iris.iris(1 << 20) as ctx:
        ctx.barrier()


def _bad_heap_on_one_rank(rank, world_size):
    with pytest.raises(errors.ArgumentError, match="heap_size is -5"):
        iris.iris(-5 if rank == 1 else 1 << 20)
    with iris.iris(1 << 20) as ctx:
        ctx.barrier()


@pytest.mark.parametrize("body", [_bad_time_out, _bad_heap_on_one_rank])
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_is_wrong_on_one_rank_raises_on_all(world_size, body):
    for end in run_fresh(world_size, body):
        assert end.exitcode == 0, end.traceback


def _too_large(rank, world_size, limited):
    if rank in limited:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
    with pytest.raises(errors.HeapExhausted, match="heap_size is .* could not be allocated"):
        iris.iris(8 << 30 if limited else 1 << 46)
    with iris.iris(1 << 20) as ctx:
        ctx.zeros(10)
        ctx.barrier()


@pytest.mark.parametrize("limited", [[], [1], [0, 1, 2]], ids=str)
def test_memory_that_one_rank_cannot_have_raises_on_all(limited):
    for end in run_fresh(3, _too_large, limited):
        assert end.exitcode == 0, end.traceback


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is for machines without a GPU")
def test_triton_imported_before_iris_is_an_error_that_says_what_to_do():
    works = "import iris; ctx = iris.iris(1 << 20); ctx.barrier(); print(ctx.ones(2).sum().item())"
    ways = (("import triton; ", {"TRITON_INTERPRET": "1"}), ("import torch; ", {}))
    late = fresh.run("import triton; import iris")
    assert late.returncode == 1
    assert "iris.errors.PlatformError: triton was imported before iris" in late.stderr
    assert "Import iris first, or set TRITON_INTERPRET=1" in late.stderr
    for done in (fresh.run(first + works, **env) for first, env in ways):
        assert (done.returncode, done.stdout) == (0, "2.0\n"), done.stderr


def test_fewer_gpus_than_ranks_is_an_error(monkeypatch):
    monkeypatch.setattr(platform, "name", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert platform.device(1, 2) == torch.device("cuda", 1)
    for rank, world_size in ((2, 3), (0, 3)):
        with pytest.raises(errors.PlatformError, match=f"{world_size} ranks on this host but 2 GPUs"):
            platform.device(rank, world_size)


def test_two_ranks_on_one_gpu_are_refused_unless_that_is_meant(monkeypatch):
    requests = [creation.Request("gpu-a", "1", "torch", "0", "None", ("", ""), None) for _ in range(2)]
    with pytest.raises(errors.PlatformError, match="two ranks use the same GPU.*IRIS_SHARE_GPUS=1"):
        creation.agree(requests)
    monkeypatch.setenv("IRIS_SHARE_GPUS", "1")
    creation.agree(requests)


def test_ranks_that_share_gpus_take_the_next_one(monkeypatch):
    monkeypatch.setattr(platform, "name", lambda: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert platform.backend() == "nccl"
    monkeypatch.setenv("IRIS_SHARE_GPUS", "1")
    assert [platform.device(rank, 4).index for rank in range(4)] == [0, 1, 0, 1]
    assert platform.backend() == "gloo", "NCCL refuses two ranks on a GPU"
    monkeypatch.setenv("IRIS_SHARE_GPUS", "yes")
    with pytest.raises(errors.PlatformError, match="IRIS_SHARE_GPUS is 'yes': expected 0 or 1"):
        platform.device(0, 4)
