"""Numbers of rows that no tile divides: tiles that are loaded from an earlier row on, or folded (`tiles.first_row`)."""

from __future__ import annotations

from dataclasses import replace

import iris
from iris_ops import FusedConfig
from iris_ops.kernels import descriptors
from iris_ops.kernels.hopper import operands as hopper_operands
from iris_ops.kernels.tiles import first_row, rows_from
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER
import pytest
import torch
import triton
import triton.language as tl

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
@pytest.mark.some(12, on_gpus=11)
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


@triton.jit
def owned_kernel(counts, row, end, rows, BLOCK_M: tl.constexpr, FOLDED: tl.constexpr):
    """Adds one to the count of each row, of a part of a matrix that ends at `end`, that a tile has as its own."""
    first = first_row(row, rows, BLOCK_M)
    r, own = rows_from(first, row, rows, tl.arange(0, BLOCK_M), BLOCK_M, FOLDED)
    tl.atomic_add(counts + r, 1, mask=own & (r < end))


@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("rows", [20, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 191])
def test_each_row_is_one_tile_s_own(rows: int, parts: int) -> None:
    """Tiles of 64, which begin anew with each part of the rows, as owners' do."""
    counts = torch.zeros(rows, dtype=torch.int32, device="cuda" if ON_GPU else "cpu")
    part = -(-rows // parts)
    for begin in range(0, rows, part):
        end = min(rows, begin + part)
        for row in range(begin, end, 64):
            owned_kernel[(1,)](counts, row, end, rows, BLOCK_M=64, FOLDED=32 <= rows < 64)
    assert counts.eq(1).all(), counts


@on_ranks
@pytest.mark.skipif(not ON_GPU, reason="warp-specialised programs")
def test_rows_that_copy_engines_bring(world_size: int) -> None:
    config = FusedConfig(128, 128, 64, num_stages=5, warp_specialised=True, algorithm="copy_gather")
    rows = [world_size * each for each in (130, 200, 255, 256)]
    cases = [Case(GATHER_MATMUL, "rows", m, 320, 256, bias=m % 3 > 0, config=config, seed=m) for m in rows]
    assert_same_bits(cases, run_ranks(world_size, check_cases, cases))


def test_what_lies_where_a_fold_is() -> None:
    """A matrix of 40 rows as a tile of 64: both halves are whole, and hold each row."""
    for rows in (33, 40, 47):
        A = torch.arange(rows * 16, dtype=torch.float32).view(rows, 16)
        shape, strides = descriptors.folded(A, 64)
        halves = A.as_strided(shape, strides).reshape(64, 16)
        assert torch.equal(halves[:32], A[:32]) and torch.equal(halves[32:], A[rows - 32 :])


@pytest.mark.parametrize(
    "rows, folds, described, dims",
    [(64, True, True, 2), (50, True, True, 2), (47, True, True, 3), (32, True, True, 3), (31, True, False, 2),
     (47, False, True, 2), (100, False, True, 2)],
)  # fmt: skip
def test_rows_are_described_where_it_pays(rows: int, folds: bool, described: bool, dims: int) -> None:
    A = torch.zeros(rows, 64, dtype=torch.bfloat16)
    given, tma = descriptors.rows_operand(A, (64, 32), folds)
    assert tma == described and len(given.shape) == dims
