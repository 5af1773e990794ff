"""Copy engines that carry chunks of rows behind the kernel that computes them (`iris_ops/carry.py`)."""

import random

from iris_ops import FusedConfig
from iris_ops.problem import ALL_REDUCE, MATMUL_GATHER
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks
from tests.iris_ops.calls import assert_same_bits, check_cases
from tests.reference import Case


pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS, scope="session")]


def cases(op: str, world_size: int) -> list[Case]:
    """Chunks of one and of several groups, more chunks than rows, short and empty last parts, any `out`."""
    rng = random.Random(world_size)
    found = []
    for seed, (m, chunks) in enumerate([(128, 1), (256, 4), (200, 3), (5, 2), (16, 32), (130, 8), (256, 2)]):
        config = FusedConfig(16, 32, 16, group_m=rng.choice([1, 2, 3]), chunks=chunks, num_warps=4, stagger_us=seed)
        found.append(
            Case(op, "" if op == ALL_REDUCE else "rows", m, rng.choice([33, 64, 96]), 38, bias=seed % 2 == 0,
                 transposed=seed % 3 == 0, dtype=(torch.bfloat16, torch.float32)[seed % 2], on_heap=seed != 2,
                 pad=(0, 0, 5)[seed % 3], config=config, seed=seed)
        )  # fmt: skip
    return found


@pytest.mark.parametrize("op", [ALL_REDUCE, MATMUL_GATHER])
def test_chunks_arrive_whole(world_size: int, op: str) -> None:
    called = cases(op, world_size)
    assert_same_bits(called, run_ranks(world_size, check_cases, called, 3))
