"""vLLM's custom all-reduce (https://github.com/vllm-project/vllm), measured where vLLM is installed.

vLLM takes this kernel for messages of less than 8 MiB between the GPUs of one host; so are the rows that it supports
here. It reads the peers' inputs in place. In a CUDA graph the ranks exchange the inputs' addresses once, after the
capture (`capturing`); a call outside a graph copies its input into a shared buffer first, as in vLLM itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
import functools
import os
from typing import Any

from iris_tp.bench.inputs import Call, Inputs
from iris_tp.bench.rows import Row
from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.rivals import contender
from benchmarks.rivals.contender import RIVAL, Contender

NAME = "vLLM custom all-reduce"
LIMIT = 8 << 20  # bytes: vLLM's own
WORLDS = (2, 4, 6, 8)
# the peers' memory is reached over NVLink, and a line of log for each capture helps nobody
QUIET = {"VLLM_SKIP_P2P_CHECK": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}


def installed(team: Team) -> bool:
    """Return whether vLLM can be imported; say so where it cannot."""
    return contender.installed(team, "vllm", "vLLM")


def supports(nbytes: int, world: int, dtype: torch.dtype) -> bool:
    wide = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return wide and world in WORLDS and nbytes < LIMIT and nbytes % 16 == 0


def settle() -> None:
    """Prepare the environment; call it before vLLM is imported."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)


@functools.cache
def communicator(device: torch.device) -> Any:
    """Return vLLM's communicator of all ranks. Collective."""
    settle()
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    reducer = CustomAllreduce(dist.new_group(backend="gloo"), device, LIMIT)
    if reducer.disabled:
        raise RuntimeError("vLLM's custom all-reduce does not serve these GPUs")
    return reducer


def reduced(device: torch.device, partial: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the sum of all ranks' `partial` to `out`, and return it."""
    return communicator(device).all_reduce(partial, out=out, registered=torch.cuda.is_current_stream_capturing())


def capturing(device: torch.device) -> AbstractContextManager:
    """Return the context to capture in: at its end the ranks exchange the addresses that were captured."""
    return communicator(device).capture()


def contenders(team: Team, rows: list[Row], dtype: torch.dtype) -> list[Contender]:
    if not team.cuda or not installed(team):
        return []

    @functools.cache
    def memory() -> torch.Tensor:
        """Return room for the partial results of all rows: the peers keep it mapped."""
        return torch.empty(LIMIT // dtype.itemsize, dtype=dtype, device=team.device)

    def prepare(inputs: Inputs) -> Call:
        rows, columns = inputs.out_shape
        partial, out = memory()[: rows * columns].view(rows, columns), inputs.new(rows, columns)

        def call(i: int) -> torch.Tensor:
            torch.matmul(inputs.A[i], inputs.B[i], out=partial)
            return reduced(team.device, partial, out)

        return call

    def served(row: Row, world: int, dtype: torch.dtype) -> bool:
        return supports(row.M * row.N * dtype.itemsize, world, dtype)

    capture = functools.partial(capturing, team.device)
    return [Contender(f"cuBLAS + {NAME}", RIVAL, {"ar": prepare}, served, capture=capture)]
