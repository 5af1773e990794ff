"""In which order tiles are computed: each once, none before what it waits for, all programs about equally loaded."""

from __future__ import annotations

import iris
from iris_ops.matmul_reduce_scatter import turn
from iris_ops.tiles import grouped, paired_tile
import pytest
import torch
import triton
import triton.language as tl

from tests.harness import both, run_ranks

pytestmark = both

MOST = tl.constexpr(4096)


@triton.jit
def turn_kernel(steps, numbers, owned, early, programs, WORLD_SIZE: tl.constexpr):
    t = tl.arange(0, MOST)
    step, number = turn(t, owned, early, programs, WORLD_SIZE)
    tl.store(steps + t, step)
    tl.store(numbers + t, number)


@triton.jit
def paired_kernel(tiles, firsts, depths, pairs, spread, K, BLOCK_K: tl.constexpr):
    unit = tl.arange(0, MOST)
    tile, first, depth = paired_tile(unit, pairs, spread, K, BLOCK_K)
    tl.store(tiles + unit, tile)
    tl.store(firsts + unit, first)
    tl.store(depths + unit, depth)


@triton.jit
def grouped_kernel(rows, columns, num_m, num_n, GROUP_M: tl.constexpr):
    tile = tl.arange(0, MOST)
    row, column = grouped(tile, num_m, num_n, GROUP_M)
    tl.store(rows + tile, row)
    tl.store(columns + tile, column)


def run(ctx: iris.Iris, kernel, count: int, outputs: int, *args: int, **constants: int) -> list[list[int]]:
    """The first `count` of what `kernel` stores."""
    found = [torch.full((MOST.value,), -1, dtype=torch.int32, device=ctx.device) for _ in range(outputs)]
    kernel[(1,)](*found, *args, **constants)
    return [each[:count].tolist() for each in found]


def check_turns(ctx: iris.Iris, world_size: int) -> None:
    for owned, programs in ((1, 3), (5, 132), (64, 132), (130, 132), (300, 132), (301, 131), (100, 8)):
        for early in {1, min(owned, -(-2 * programs // world_size)), owned}:
            total = owned * world_size
            steps, numbers = run(ctx, turn_kernel, total, 2, owned, early, programs, WORLD_SIZE=world_size)
            place = {tile: t for t, tile in enumerate(zip(steps, numbers, strict=True))}
            assert sorted(place) == [(step, number) for step in range(world_size) for number in range(owned)]
            for number in range(owned):
                assert all(place[step, number] < place[0, number] for step in range(1, world_size)), (owned, early)
            if early < owned and owned > 2 * programs:
                own = [sum(steps[t] == 0 for t in range(p, total, programs)) for p in range(programs)]
                assert max(own) - min(own) <= 4, "own tiles take longest"


@pytest.mark.parametrize("kept_by", [2, 3, 4, 8])
def test_own_tiles_come_behind_what_they_sum(kept_by: int) -> None:
    run_ranks(1, check_turns, kept_by)


def check_pairs(ctx: iris.Iris) -> None:
    for tiles, programs, K, block_k in (
        (66, 132, 4096, 64),
        (500, 132, 520, 64),
        (40, 132, 64, 64),
        (3, 4, 30, 64),
        (9, 5, 2048, 16),
    ):
        pairs = min(tiles, programs // 2)
        for spread in (0, 300, 1024):
            units = tiles + pairs
            tile, first, depth = run(ctx, paired_kernel, units, 3, pairs, spread, K, BLOCK_K=block_k)
            covered: dict[int, list[tuple[int, int]]] = {}
            for unit in range(units):
                covered.setdefault(tile[unit], []).append((first[unit], depth[unit]))
            assert sorted(covered) == list(range(tiles))
            for number, spans in covered.items():
                assert len(spans) == (2 if number < pairs else 1)
                (begin, head), *rest = sorted(spans, key=lambda span: (span[0], span[1]))
                assert begin == 0 and sum(depth for _, depth in spans) == K
                assert all(at == head and at % block_k == 0 for at, _ in rest)
            heads = depth[:pairs]
            assert heads == sorted(heads) and max(heads) <= -(-K // 2 // block_k) * block_k
            assert spread or len(set(heads)) == 1
            assert tile[:pairs] == tile[2 * pairs - 1 : pairs - 1 : -1], "who waits has a partner that came before"


def test_pairs_of_programs_share_tiles() -> None:
    run_ranks(1, check_pairs)


def check_groups(ctx: iris.Iris) -> None:
    for num_m, num_n, group_m in ((1, 7, 8), (10, 5, 8), (16, 9, 8), (17, 3, 8), (9, 1, 2), (64, 32, 8)):
        rows, columns = run(ctx, grouped_kernel, num_m * num_n, 2, num_m, num_n, GROUP_M=group_m)
        assert sorted(zip(rows, columns, strict=True)) == [(m, n) for m in range(num_m) for n in range(num_n)]
        groups = -(-num_m // group_m)
        heights = [
            len(set(rows[g * -(-num_m // groups) * num_n :][: -(-num_m // groups) * num_n])) for g in range(groups)
        ]
        assert sum(heights) == num_m and max(heights) <= group_m, "groups follow each other"
        assert max(heights) - min(heights) < groups


def test_groups_of_row_blocks_are_about_equally_high() -> None:
    run_ranks(1, check_groups)
