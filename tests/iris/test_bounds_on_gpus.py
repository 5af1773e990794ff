"""Accesses that leave the heaps, on GPUs with IRIS_DEBUG=1: nothing is accessed, and the next call raises."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness import ON_GPU
from tests.iris.test_bounds import CALLS
from tests.processes import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not ON_GPU, reason="compiled kernels, on GPUs")]

PROGRAM = """
import os
import iris
from iris.errors import ArgumentError
import torch
from tests.iris.test_bounds import CALLS, access

kept = []
for call in CALLS:
    kept.append(ctx := iris.iris(1 << 22))
    me, peer, bases = ctx.cur_rank, (ctx.cur_rank + 1) % ctx.num_ranks, ctx.get_heap_bases()
    x, elsewhere = ctx.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32, device=ctx.device)
    tail = ctx.heap.memory[-16:].view(torch.int32)
    y, addresses = ctx.allocate_symmetric(64, dtype=torch.int32)
    access[(1,)](call, x, me, peer, bases, 48, BLOCK=64)
    access[(1,)](call, y, me, peer, addresses, 48, BLOCK=64)
    access[(1,)](call, tail, me, peer, bases, 4 if call != "store" else 0, BLOCK=64)
    ctx.barrier()
    access[(1,)](call, elsewhere if me else x, me, peer if me else 7, bases, 48, BLOCK=64)
    torch.cuda.synchronize()
    assert (elsewhere == 0).all()
    try:
        ctx.check()
    except ArgumentError as error:
        print(error, flush=True)
    else:
        print(f"{call} raised nothing", flush=True)
os._exit(0)
"""


def test_an_access_that_leaves_the_heap_is_reported() -> None:
    port = 20000 + (int(os.environ["MASTER_PORT"]) * 7 + 11) % 12000
    environment = {
        **os.environ, "IRIS_DEBUG": "1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    printed = [line for line in done.stdout.splitlines() if line.startswith("iris.")]
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    peers = [rank if rank and call == "copy" else (rank + 1) % ranks if rank else 7 for call in CALLS]
    assert [line.split(":")[0] for line in printed] == [f"iris.{call}" for call in CALLS], done.stdout
    for line, peer in zip(printed, peers, strict=True):  # of a copy on rank 1, the source is outside
        assert f"rank {rank} named rank {rank} as the caller and rank {peer} as peer" in line
