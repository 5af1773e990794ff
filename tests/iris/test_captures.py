"""Calls that a capture must not contain raise an error first; here a stream only pretends to be captured.

`test_vmem.py` does the same inside of real captures, on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import iris
from iris import platform
from iris.errors import CaptureError
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, run_ranks
from tests.iris.heaps import MIB

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="says that CPUs capture")


def calls(ctx: iris.Iris, held: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """List calls that allocate, free or wait, each with its error message."""
    A, B = torch.ones(64, 32), torch.ones(32, 64)
    return {
        "cannot be allocated on the heap": lambda: ctx.zeros(10),
        "empty_ragged": lambda: ctx.empty_ragged(3),
        r"free\(\) cannot be called": lambda: ctx.free(held),
        "memory_pool": lambda: ctx.memory_pool().__enter__(),
        r"barrier\(\) waits on the host": lambda: ctx.barrier(),
        "device_barrier": lambda: ctx.device_barrier(),
        "first call of a problem|allocated": lambda: ctx.ops.matmul_all_reduce(torch.empty(64, 64), A, B),
        "first call of a size|allocated": lambda: ctx.ccl.all_reduce(torch.empty(64), torch.ones(64)),
    }


def captured(shared: iris.Iris, allocator: str) -> None:
    with iris.iris(16 * MIB, allocator) as ctx:
        held = ctx.ones(10)
        waiting, used = calls(ctx, held), ctx.heap.used
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(platform, "is_capturing", lambda _: True)
            for message, call in waiting.items():
                with pytest.raises(CaptureError, match=message):
                    call()
            if allocator == "vmem":
                with pytest.raises(CaptureError, match="cannot be mapped while a graph is captured"):
                    ctx.heap.trim()
        assert ctx.heap.used == used and (held == 1).all()
        ctx.barrier()
        for call in waiting.values():
            if call is not waiting["memory_pool"]:
                call()


@pytest.mark.parametrize("allocator", ["vmem", "torch"])
def test_what_a_capture_may_not_hold_is_refused(allocator: str) -> None:
    run_ranks(2, captured, allocator)
