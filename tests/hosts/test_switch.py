"""The hosts that tests make: two of three stay connected when the third one ends."""

from __future__ import annotations

from datetime import timedelta
from itertools import permutations
import time

import pytest
import torch
import torch.distributed as dist

from tests.hosts.namespaces import kill_own_host, needs_namespaces, run_hosts

pytestmark = needs_namespaces()


def _talking(rank: int, world_size: int, lost: int) -> float:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    dist.barrier()
    if rank == lost:
        kill_own_host()
    time.sleep(1)  # its network goes after its processes
    first, second = (each for each in range(world_size) if each != lost)
    received = torch.empty(1)
    for source, target in ((first, second), (second, first)):
        if rank == source:
            dist.send(torch.full((1,), float(rank)), target)
        else:
            dist.recv(received, source)
    return received.item()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_lost_host_cuts_no_link_of_others(lost: int) -> None:
    ends = run_hosts((1, 1, 1), _talking, lost, timeout=30)
    for other, rank in (pair for pair in permutations(range(3), 2) if lost not in pair):
        assert ends[rank].exitcode == 0, ends[rank].traceback
        assert ends[rank].result == other
