"""Ranks of several hosts that make one context: all of them raise the same error, which names the hosts."""

from __future__ import annotations

import os

import iris
from iris.errors import PlatformError
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.hosts.meshes import SHORT
from tests.hosts.namespaces import needs_namespaces, run_hosts

pytestmark = needs_namespaces()


def _context(rank: int, world_size: int) -> float:
    with iris.iris(1 << 20) as ctx:
        values = ctx.zeros(4).fill_(rank + 1.0)
        total = ctx.zeros(4)
        ctx.ccl.all_reduce(total.view(1, 4), values.view(1, 4))
        return total[0].item()


def _refused(ends: list) -> str:
    """The one message that all ranks raise."""
    for end in ends:
        assert type(end.error) is PlatformError, (end.error, end.traceback)
    messages = {str(end.error) for end in ends}
    assert len(messages) == 1, messages
    return messages.pop()


def test_two_hosts_are_named_on_every_rank() -> None:
    message = _refused(run_hosts((2, 2), _context, env=SHORT))
    assert "ranks 0, 1 on hosta; ranks 2, 3 on hostb" in message
    assert 'init_device_mesh(device, (2, 2), mesh_dim_names=("pp", "tp"))' in message
    assert 'iris.iris(group=mesh["tp"])' in message


def test_a_border_in_the_middle_of_a_group_and_three_hosts() -> None:
    message = _refused(run_hosts((1, 2, 1), _context, env=SHORT, own_tmp=True))
    assert "3 hosts" in message
    assert "rank 0 on hosta; ranks 1, 2 on hostb; rank 3 on hostc" in message
    assert "(hosts, ranks of a host)" in message


def test_hosts_of_one_name_are_told_apart() -> None:
    """Both have a process 2, which is another one on each."""
    message = _refused(run_hosts((1, 1), _context, names=["node", "node"], env=SHORT))
    assert "rank 0 on node (kernel " in message and message.count("pid:[") == 2


@pytest.mark.parametrize("kinds", [("pid", "mnt"), ("net", "pid", "mnt")])
def test_other_processes_alone_are_another_host(kinds: tuple[str, ...]) -> None:
    _refused(run_hosts((1, 1), _context, kinds=kinds, env=SHORT))


def test_folders_that_are_not_shared() -> None:
    message = _refused(run_hosts((1, 1), _context, kinds=("mnt",), own_tmp=True, env=SHORT))
    assert "set TMPDIR" in message and "rank 0 on " in message and "rank 1" in message


def test_two_networks_alone_are_one_host() -> None:
    for end in run_hosts((1, 1), _context, kinds=("net",), env=SHORT):
        assert end.result == 3.0, end.traceback


def _on_each_host(rank: int, world_size: int) -> tuple[float, float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    with iris.iris(1 << 20, group=mesh["tp"]) as ctx:
        total = ctx.zeros(1, 4)
        ctx.ccl.all_reduce(total, ctx.zeros(1, 4).fill_(rank + 1.0))
        across = torch.full((1,), total[0, 0].item())
        dist.all_reduce(across, group=mesh["dp"].get_group())
        pids = os.getpid(), ctx.hosts.pids[ctx.cur_rank]
        assert pids[0] == pids[1]
        return total[0, 0].item(), across.item()


def test_a_context_on_each_host() -> None:
    ends = run_hosts((2, 2), _on_each_host, env=SHORT)
    assert [end.result for end in ends] == [(3.0, 10.0)] * 2 + [(7.0, 10.0)] * 2, [end.traceback for end in ends]
