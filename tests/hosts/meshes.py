"""Make what tests on several hosts share: a mesh, a context on its "tp", and models drawn from a name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import iris
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

SHORT = {"IRIS_TIMEOUT": "60"}


@contextmanager
def on_mesh(first: str, world_size: int, inside: int = 2, heap: int = 1 << 26) -> Iterator[tuple[DeviceMesh, Any]]:
    """A mesh of `world_size` ranks, `inside` on each host, and a context of each host, by "hosts" with `across`."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (world_size // inside, inside), mesh_dim_names=(first, "tp"))
    with iris.iris(heap, group=mesh["tp"], across=mesh["hosts"] if first == "hosts" else None) as ctx:
        yield mesh, ctx
