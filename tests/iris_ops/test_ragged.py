"""Numbers of rows that no tile divides: tiles that are loaded from an earlier row on, or folded (`tiles.first_row`)."""

from __future__ import annotations

from dataclasses import replace

import iris
from iris_ops import FusedConfig
from iris_ops.kernels import descriptors
from iris_ops.kernels.hopper import operands as hopper_operands
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER
import pytest

from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.iris_ops.calls import assert_same_bits, check_cases
from tests.reference import FORMS, Case

pytestmark = both
on_ranks = pytest.mark.parametrize("world_size", WORLDS if ON_GPU else [2], scope="session")

# Tiles of 64 rows and of 128, several a program; as Lamport values and pushed; warp-specialised where the GPU can.
FEW = FusedConfig(64, 64, 64, num_warps=4, num_stages=3, algorithm="one_shot")
MANY = FusedConfig(64, 64, 64, group_m=2, num_warps=4, num_stages=3, num_programs=3, comm_programs=2)
SPECIALISED = FusedConfig(128, 128, 64, num_stages=3, num_programs=5, warp_specialised=True)
# Below a tile's half, half of it, between, all but 17, all but some that cost little; the same behind whole tiles.
ROWS = [20, 32, 40, 47, 60, 64, 65, 70, 100, 112, 120, 129, 150] if ON_GPU else [20, 40, 47, 65, 100]


def folds_of(ctx: iris.Iris, cases: list[Case]) -> tuple[list[str], set[int]]:
    """(digests of `check_cases`, of how many rows operands were folded)."""
    heights, fold = set(), descriptors.folded
    modules = descriptors, hopper_operands
    for module in modules:
        module.folded = lambda A, high: heights.add(A.shape[0]) or fold(A, high)
    try:
        digests = check_cases(ctx, cases)
        ctx.device_barrier()
        written = ctx.ops._calls.own_workspace().exchange != 255
        assert not written.any(), "values that nobody expects: sent twice, or for no row"
        return digests, heights
    finally:
        for module in modules:
            module.folded = fold


def calls_of(op: str, form: str, config: FusedConfig, world_size: int) -> list[Case]:
    n, k = (72 * world_size, 40) if not ON_GPU else (192 * world_size, 328)
    parts = world_size if op != ALL_REDUCE and form == "rows" else 1  # of a gather by rows, each rank has so many
    sizes = [rows * parts - (parts > 1 and turn % 2) for turn, rows in enumerate(ROWS)]  # the last part a row shorter
    if op != MATMUL_GATHER and parts > 1:  # others multiply the rows of all: a tile's half and more of those
        sizes += [32, 47]
    calls = []
    for turn, rows in enumerate(sizes):
        changes = dict(bias=turn % 2 == 0, transposed=turn % 3 > 0, pad=8 * (turn % 2), seed=turn)
        calls.append(Case(op, form, rows, n, k * (world_size if form == "k" else 1), config=config, **changes))
    return calls


@on_ranks
@pytest.mark.parametrize("config", [FEW, MANY, SPECIALISED], ids=["few", "many", "specialised"])
@pytest.mark.parametrize("op, form", FORMS)
@pytest.mark.some(8, on_gpus=11)
def test_rows_that_no_tile_divides(world_size: int, op: str, form: str, config: FusedConfig) -> None:
    if config is SPECIALISED and (op == GATHER_MATMUL or not ON_GPU):
        pytest.skip("no program warp-specialised pushes these")
    cases = calls_of(op, form, config, world_size)
    if op == ALL_REDUCE and config is not MANY:
        others = ("two_shot", "one_shot") if config is SPECIALISED else ("two_shot",)
        cases += [replace(case, config=replace(config, algorithm=other)) for other in others for case in cases]
    folds = run_ranks(world_size, folds_of, cases)
    assert_same_bits(cases, [digests for digests, _ in folds])
    folded = set.union(*(heights for _, heights in folds))
    by_parts = op == GATHER_MATMUL and config is MANY  # whose rows are read from two places
    assert by_parts or folded, "no operand was folded"


@on_ranks
@pytest.mark.skipif(not ON_GPU, reason="warp-specialised programs")
def test_rows_that_copy_engines_bring(world_size: int) -> None:
    config = FusedConfig(128, 128, 64, num_stages=5, warp_specialised=True, algorithm="copy_gather")
    rows = [world_size * each for each in (130, 200, 255, 256)]
    cases = [Case(GATHER_MATMUL, "rows", m, 320, 256, bias=m % 3 > 0, config=config, seed=m) for m in rows]
    assert_same_bits(cases, run_ranks(world_size, check_cases, cases))
