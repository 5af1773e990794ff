"""A host that ends, or that no packet reaches, is named on all ranks of the other hosts within IRIS_TIMEOUT."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

from iris.across import Across
from iris.errors import ArgumentError, PeerLostError
import layers
import pytest
import torch
import torch.distributed as dist

from tests.hosts.meshes import on_mesh
from tests.hosts.namespaces import kill_own_host, needs_namespaces, run_hosts
from tests.layers import models
from tests.processes import patient

pytestmark = needs_namespaces()

_LIMIT_S = 8.0
_ENV = {"IRIS_TIMEOUT": str(_LIMIT_S)}


def _vanish(how: str) -> None:
    if how == "killed":
        kill_own_host()
    subprocess.run(["ip", "link", "set", "iris1", "down"], check=True)
    time.sleep(_LIMIT_S + 5)
    os._exit(0)


def _generating(rank: int, world_size: int, lost: int, how: str) -> tuple[float, str, str]:
    with on_mesh("pp", world_size) as (mesh, ctx):
        model = models.build("plain")
        layers.parallelize(model, ctx, mesh=mesh)
        models.generate(model)
        calls = 0

        def count(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2 and rank // 2 == lost:
                if rank % 2 == 0 or how == "unplugged":
                    _vanish(how)
                time.sleep(30)  # until rank 0 of this host ends it

        model.register_forward_pre_hook(count)
        dist.barrier()
        begin = time.monotonic()
        with pytest.raises(PeerLostError) as first:
            models.generate(model)
        seconds = time.monotonic() - begin
        with pytest.raises(PeerLostError) as again:  # at once
            models.generate(model)
        return seconds, str(first.value), str(again.value)


@pytest.mark.parametrize(
    "lost, how", [(1, "killed"), (0, "killed"), pytest.param(1, "unplugged", marks=pytest.mark.slow)]
)
def test_a_lost_stage_is_named(lost: int, how: str) -> None:
    ends = run_hosts((2, 2), _generating, lost, how, env=_ENV)
    for rank, end in enumerate(ends):
        if rank // 2 == lost:
            continue
        assert end.exitcode == 0, end.traceback
        seconds, first, again = end.result
        assert seconds < patient(_LIMIT_S + 2)
        named = f"lost host host{'ab'[lost]}"
        assert all(named in message for message in (first, again)), (first, again)


def _before_loading(rank: int, world_size: int) -> str:
    with on_mesh("dp", world_size, 1) as (mesh, ctx):
        if rank == 1:
            kill_own_host()
        with pytest.raises(PeerLostError) as caught:
            layers.parallelize(models.build("plain"), ctx, mesh=mesh)
        return str(caught.value)


def test_a_host_that_ends_before_a_split_is_missed() -> None:
    first, _ = run_hosts((1, 1), _before_loading, env={"IRIS_TIMEOUT": "4"})
    assert first.exitcode == 0, first.traceback
    assert "rank 1 of the 2 across hosts" in first.result


def _line(rank: int, world_size: int) -> list[str]:
    """Member 1 ends; 2 finds that out, and leaves; 0, which waits for 2, names 1."""
    dist.init_process_group("gloo")
    line = Across(dist.group.WORLD)
    assert line.names == ["hosta", "hostb", "hostc"]
    assert line.exchange("numbers", rank) == [0, 1, 2]
    total = torch.full((3,), float(rank))
    line.all_reduce(total, "a sum")
    assert total.tolist() == [3.0] * 3
    with pytest.raises(ArgumentError, match="hosts make different calls"):
        line.exchange(f"call {rank == 2}", None)
    if rank == 1:
        time.sleep(0.5)
        kill_own_host()
    source = {0: 2, 2: 1}[rank]
    with pytest.raises(PeerLostError) as caught:
        line.receive(torch.empty(3), source, "a test")
    if rank == 2:
        os._exit(0)  # as a program does that an exception ends
    return str(caught.value)


def test_the_first_loss_is_the_one_that_is_named() -> None:
    ends = run_hosts((1, 1, 1), _line, env=_ENV)
    assert ends[0].exitcode == 0, ends[0].traceback
    assert "host hosta lost host hostb" in ends[0].result


def _sum_of_three(rank: int, world_size: int, lost: int) -> str:
    dist.init_process_group("gloo")
    line = Across(dist.group.WORLD)
    if rank == lost:
        time.sleep(0.5)  # until the others have their lines
        kill_own_host()
    with pytest.raises(PeerLostError) as caught:
        line.all_reduce(torch.ones(3), "a sum")
    return str(caught.value)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_sum_of_several_names_the_one_that_ended(lost: int) -> None:
    ends = run_hosts((1, 1, 1), _sum_of_three, lost, env=_ENV)
    for end in (ends[rank] for rank in range(3) if rank != lost):
        assert end.exitcode == 0, end.traceback
        named = end.result.partition(" in a sum")[0]  # alone, where the others tell that they have failed, too
        assert named.endswith(f"lost host host{'abc'[lost]} (rank {lost} of the 3 across hosts)"), end.result


def _waiting_for_one_that_leaves(rank: int, world_size: int, call: str) -> str:
    dist.init_process_group("gloo")
    line = Across(dist.group.WORLD)
    line.all_reduce(torch.ones(3), "a sum")
    if rank == 0:  # the host of the store
        time.sleep(0.5)
        line.leave(ValueError("out of luck"))
        os._exit(0)
    with pytest.raises(PeerLostError) as caught:
        if call == "receive":
            line.receive(torch.empty(3), rank - 1, "a call")
        elif call == "sum":
            line.all_reduce(torch.ones(3), "a call")
        else:
            line.exchange("a call", None)
    return str(caught.value)


@pytest.mark.parametrize("call", ["receive", "sum", "exchange"])
def test_those_that_wait_read_why_the_host_of_the_store_leaves(call: str) -> None:
    for end in run_hosts((1, 1, 1), _waiting_for_one_that_leaves, call, env=_ENV)[1:]:
        assert end.exitcode == 0, end.traceback
        assert "lost host hosta (rank 0 of the 3 across hosts) in a call: it left by ValueError: out of" in end.result
