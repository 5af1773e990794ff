"""The plug-in's heap has room for every plan of the rows that it replaces, without vLLM and without a GPU."""

from __future__ import annotations

from iris.ccl.norm import staged_bytes
from iris.machines import machine_named
from iris_ops.planning.operations import DOWN_ALL_REDUCE
from iris_ops.planning.plan import plan, workspace_size
from iris_ops.planning.ways.sequential import SEQUENTIAL
from iris_ops.problem import ALL_REDUCE, Request, requested_problem
from layers.vllm import limits
import pytest
import torch

BF16 = torch.bfloat16
MODELS = {  # hidden size, inputs of the two row-parallel layers of all ranks together
    "8B": (4096, 4096, 14336), "14B": (5120, 5120, 13824), "32B": (5120, 8192, 25600), "70B": (8192, 8192, 28672),
    "small": (2048, 4096, 6144), "6144": (6144, 6144, 16384), "deepseek": (7168, 16384, 18432),
}  # fmt: skip

MIXTURES = {  # hidden size, experts, their width, chosen ones of a token
    "qwen3-30b-a3b": (2048, 128, 768, 8), "qwen3-235b": (4096, 128, 1536, 8), "mixtral": (4096, 8, 14336, 2),
    "160 experts": (6144, 160, 1536, 8),
}  # fmt: skip


def rounded(nbytes: int) -> int:
    return 1 << max(12, (nbytes - 1).bit_length()) if nbytes else 0


@pytest.mark.parametrize("gpu", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("model", MODELS)
def test_all_plans_fit_the_heap(model: str, world: int, gpu: str) -> None:
    hidden, *inputs = MODELS[model]
    machine, rows = machine_named(gpu, 132), limits.most_rows(world, hidden)
    flags = staging = exchange = collective = 0
    for K in inputs:
        for m in (*range(1, 33), *range(40, rows + 1, 24), rows):
            problem = requested_problem(Request(ALL_REDUCE, m, hidden, K // world, world, BF16))
            config = plan(problem, machine, explained=False)
            sizes = workspace_size(problem, config, machine.num_programs)
            flags, staging = max(flags, sizes.flags), max(staging, sizes.staging)
            exchange = max(exchange, sizes.exchange)
            if config.kernel == SEQUENTIAL:  # its all-reduce holds all ranks' rows twice, at most
                collective = max(collective, 2 * world * m * hidden * BF16.itemsize)
    norm = staged_bytes(rows, hidden, BF16, world)
    total = sum(map(rounded, (4 * flags, staging, exchange, collective, norm)))
    assert total <= limits.HEAP_BYTES - (1 << 20), (rows, total)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("model", MIXTURES)
def test_mixtures_fit_beside_the_other_plans(model: str, world: int) -> None:
    hidden, count, width, top_k = MIXTURES[model]
    machine, most = machine_named("NVIDIA H200", 132), limits.most_rows(world, hidden, mixtures=True)
    exchanged = 2 * world * most * hidden * BF16.itemsize
    for rows in (1, 16, limits.FEW_ROWS, most):
        request = Request(DOWN_ALL_REDUCE, rows, hidden, width // world, world, BF16, experts=count, top_k=top_k)
        problem = requested_problem(request)
        sizes = workspace_size(problem, plan(problem, machine, explained=False), machine.num_programs)
        assert sum(map(rounded, (sizes.staging, sizes.exchange))) <= rounded(exchanged), (rows, sizes)


def test_small_models_get_more_rows() -> None:
    assert [limits.most_rows(2, hidden) for hidden in (2048, 4096, 5120, 8192)] == [512, 256, 256, 128]
    assert limits.most_rows(8, 8192) == limits.FEW_ROWS
