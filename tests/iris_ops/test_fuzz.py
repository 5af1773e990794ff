"""Random calls against float64: sizes at and around edges, empty parts, any op, form, dtype, layout and blocks.

The calls follow from their seeds alone; a failure names its case, which `check_case` runs again.
"""

from __future__ import annotations

import random

from iris_ops import FusedConfig
from iris_ops.problem import ALL_REDUCE
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.iris_ops.calls import assert_same_bits, check_cases
from tests.reference import FORMS, Case

pytestmark = both

SIZES = [1, 2, 3, 17, 127, 129, 255, 5, 7, 13, 61, 97, 16, 32, 64, 128, 256]
# Of all-reduce; the others' algorithms with torch's product serve some shapes only.
ANY_SHAPE = ("one_shot", "two_shot", "overlapped", "sequential")
PER_TEST = 20
DRAW = 7
# Tests of PER_TEST calls for each number of ranks; on GPUs every call compiles a kernel of its own.
TESTS = {size: 3 for size in WORLDS} if UNDER_TORCHRUN else {1: 4, 2: 6, 3: 4, 4: 4}


def draw_case(rng: random.Random, world_size: int) -> Case:
    op, form = rng.choice(FORMS)
    M, N, K = (rng.choice(SIZES) for _ in range(3))
    if rng.random() < 0.1:
        M = 0
    if rng.random() < 0.05:
        N = 0
    if rng.random() < 0.1:
        K = 0
    explicit = rng.random() < 0.5
    return Case(
        op,
        form,
        M,
        N,
        K,
        dtype=rng.choice([torch.bfloat16, torch.float16, torch.float32]),
        bias=rng.random() < 0.5,
        transposed=rng.random() < 0.5,
        on_heap=rng.random() < 0.7,
        pad=rng.choice([0, 0, 1, 8]),
        config=draw_config(rng, op, M, N, K, world_size) if explicit else None,
        uneven=explicit and rng.random() < 0.5,  # ranks of different sizes plan differently
        seed=rng.randrange(1 << 30),
    )


def draw_config(rng: random.Random, op: str, M: int, N: int, K: int, world_size: int) -> FusedConfig:
    """Blocks down to a half or a third of each size, so that a product takes a few of them."""

    def block(size: int) -> int:
        whole = max(16, 1 << max(0, size - 1).bit_length())
        return max(16, min(128, whole // rng.choice([1, 2, 2])))

    m, n, k = block(M), block(N), block(K)
    while UNDER_TORCHRUN and m * n > 1 << 13:  # accumulators in registers
        m //= 2
    return FusedConfig(
        m,
        n,
        min(k, 64) if UNDER_TORCHRUN else k,  # operands in shared memory, fp32 ones too
        group_m=rng.choice([1, 2, 8]),
        num_warps=4,
        num_stages=rng.choice([1, 2]),
        num_programs=rng.choice([0, 1, 2, 7]),
        comm_programs=rng.choice([1, 3, 16]),
        stagger_us=rng.choice([0, 0, 5]),
        splits=rng.choice([1, 2, 3]),
        algorithm=rng.choice(ANY_SHAPE if op == ALL_REDUCE else ("one_shot", "overlapped")),
    )


@pytest.mark.parametrize("world_size, part", [(size, part) for size in WORLDS for part in range(TESTS[size])])
@pytest.mark.some(6, on_gpus=1)
def test_random_calls(world_size: int, part: int) -> None:
    rng = random.Random(f"{world_size} ranks, part {part}, draw {DRAW}")
    cases = [draw_case(rng, world_size) for _ in range(PER_TEST)]
    assert_same_bits(cases, run_ranks(world_size, check_cases, cases, 1))
