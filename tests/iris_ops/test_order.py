"""In which order tiles are computed: each once, none before what it waits for, all programs about equally loaded."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import iris
from iris import platform
from iris_ops import FusedConfig
from iris_ops.kernels.hopper import operands
from iris_ops.kernels.stream_k import Units
from iris_ops.kernels.tile_orders import OthersFirst, SourceTiles, own_blocks, turn
from iris_ops.operands import Operands
from iris_ops.planning.waves import countable, shared_tiles, skew_steps
from iris_ops.problem import MATMUL_GATHER, Problem
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
def units_kernel(tiles, firsts, depths, completes, count, steps, shared, sharers, skew, programs):
    unit = tl.arange(0, MOST)
    units = Units(count, steps, shared, sharers, skew, True)
    tile, first, depth, complete = units.at(unit, programs)
    tl.store(tiles + unit, tile)
    tl.store(firsts + unit, first)
    tl.store(depths + unit, depth)
    tl.store(completes + unit, complete.to(tl.int32))


@triton.jit
def others_first_kernel(rows, columns, first, own_rows, M, N, group, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    tile = tl.arange(0, MOST)
    begin, own = own_blocks(first, own_rows, M, BLOCK_M)
    tiles = OthersFirst(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), begin, own, group, BLOCK_M, BLOCK_N)
    row, column, _ = tiles.place(tile)
    tl.store(rows + tile, row)
    tl.store(columns + tile, column)


@triton.jit
def source_tiles_kernel(
    rows, columns, rank, part_rows, num_m, num_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORLD_SIZE: tl.constexpr
):
    tile = tl.arange(0, MOST)
    tiles = SourceTiles(rank, part_rows, num_m, num_n, BLOCK_M, BLOCK_N, 2, WORLD_SIZE)
    row, column, _ = tiles.place(tile)
    tl.store(rows + tile, row)
    tl.store(columns + tile, column)


def run(ctx: iris.Iris, kernel, count: int, outputs: int, *args: int, **constants: int) -> list[list[int]]:
    """The first `count` of what `kernel` stores."""
    tensors = [torch.full((MOST.value,), -1, dtype=torch.int32, device=ctx.device) for _ in range(outputs)]
    kernel[(1,)](*tensors, *args, **constants)
    return [each[:count].tolist() for each in tensors]


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


def check_sources(ctx: iris.Iris, world_size: int) -> None:
    block_m, block_n = 64, 32
    for part_rows, n in ((1, 1), (64, 32), (65, 33), (300, 100)):
        num_m, num_n = -(-part_rows // block_m), -(-n // block_n)
        count = world_size * num_m * num_n
        for rank in {0, 1 % world_size, world_size - 1}:
            rows, columns = run(ctx, source_tiles_kernel, count, 2, rank, part_rows, num_m, num_n,
                                BLOCK_M=block_m, BLOCK_N=block_n, WORLD_SIZE=world_size)  # fmt: skip
            parts = [source * part_rows for source in range(world_size)]
            tops = [part + i * block_m for part in parts for i in range(num_m)]
            assert sorted(zip(rows, columns, strict=True)) == [(r, c * block_n) for r in tops for c in range(num_n)]
            order = [(row // part_rows - rank) % world_size for row in rows]
            assert order == sorted(order), "this rank's first, then as others' arrive"


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_tiles_of_gathered_rows_come_in_the_order_in_which_they_arrive(world_size: int) -> None:
    run_ranks(1, check_sources, world_size)


@pytest.mark.parametrize("kept_by", [2, 3, 4, 8])
def test_own_tiles_come_behind_what_they_sum(kept_by: int) -> None:
    run_ranks(1, check_turns, kept_by)


SPECIALISED = FusedConfig(64, 64, 64, warp_specialised=True)


def product_of(tiles: int, steps: int) -> Problem:
    """Return a rank's product with these numbers of tiles and steps along K, with the blocks of `SPECIALISED`."""
    return Problem(MATMUL_GATHER, "rows", 64 * tiles, 64, 64 * steps, 1, torch.bfloat16)


def check_units(ctx: iris.Iris) -> None:
    """Check that consecutive programs compute each step of each tile once, and that the last knows the others."""
    for programs, tiles, steps, splits, stagger_us in (
        (132, 160, 112, 4, 20), (132, 80, 128, 4, 1000), (132, 480, 100, 4, 0), (131, 133, 7, 4, 5), (7, 5, 3, 2, 1000),
        (132, 131, 1, 4, 20), (3, 1, 2, 8, 20), (132, 184, 64, 4, 40),
        (132, 142, 5, 4, 20), (16, 3, 3, 4, 1000), (16, 1, 16, 64, 30),
    ):  # fmt: skip
        problem, config = product_of(tiles, steps), replace(SPECIALISED, splits=splits, stagger_us=stagger_us)
        shared, sharers = shared_tiles(problem, config, programs)
        skew = skew_steps(problem, config, programs, 100.0)
        count = tiles - shared + 2 * programs
        tile, first, depth, complete = run(ctx, units_kernel, count, 4, tiles, steps, shared, sharers, skew, programs)
        taken = [depth[p] + depth[p + programs] for p in range(sharers)]
        assert all(b >= a - 1 for a, b in zip(taken, taken[1:], strict=False)) and abs(taken[-1] - taken[0] - skew) <= 2
        assert min(taken) >= max(1, shared * steps // sharers // 2) and max(taken) <= steps
        covered: dict[int, list[tuple[int, int, int, int]]] = {}
        for unit in range(count):
            if depth[unit]:
                covered.setdefault(tile[unit], []).append((first[unit], depth[unit], unit, complete[unit]))
        assert sorted(covered) == list(range(tiles))
        for number, spans in covered.items():
            at = 0
            for begin, length, _, _ in sorted(spans):
                assert begin == at
                at += length
            assert at == steps
            *others, (_, _, last, whole) = sorted(spans)
            assert whole and not any(span[3] for span in others)
            if number < shared:
                by = [unit % programs for _, _, unit, _ in sorted(spans)]
                assert by == list(range(by[0], last % programs + 1)), "whose parts are added"
                assert all(unit < 2 * programs for _, _, unit, _ in others) and last >= programs


def test_programs_share_the_tiles_that_fill_no_wave() -> None:
    run_ranks(1, check_units)


def check_deepest(ctx: iris.Iris) -> None:
    shared, sharers, programs = 131, 132, 132
    steps = 1 << 15
    while countable(shared, sharers, steps + 1):
        steps += 1
    for skew in (0, 1000):
        given = shared, steps, shared, sharers, skew, programs
        tile, first, depth, _ = run(ctx, units_kernel, 2 * programs, 4, *given)
        assert min(depth) >= 0 and sum(depth) == shared * steps, skew
        assert {t for t, d in zip(tile, depth, strict=True) if d} == set(range(shared)), skew


def test_steps_of_shared_tiles_are_counted_as_deep_as_int32_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deeper products, of some four million, have no shared tiles."""
    run_ranks(1, check_deepest)
    monkeypatch.setattr(platform, "num_programs", lambda device: 132)
    ctx = SimpleNamespace(device=torch.device("cpu"))
    workspace = SimpleNamespace(flags=torch.zeros(1 << 10), staging=torch.zeros(1 << 25, dtype=torch.uint8))
    config = replace(SPECIALISED, block_m=128, block_n=128, splits=4)
    for K, shared, programs in ((1 << 21, 130, 132), (1 << 22, 0, 130)):
        problem = Problem(MATMUL_GATHER, "rows", 1280, 1664, K, 1, torch.bfloat16)
        A, B = (torch.empty(size, K, dtype=torch.bfloat16, device="meta") for size in (1280, 1664))
        given = Operands(A, A, B.t())
        grid, args = operands.specialised_arguments(ctx, workspace, problem, config, {}, given)
        assert (
            grid == (programs, 1, 1)
            and args["shared_tiles"] == shared
            and (args["form"].SHARED if "form" in args else args["SHARED"]) == (shared > 0)
        ), K


def check_others_first(ctx: iris.Iris) -> None:
    block_m, block_n, N = 64, 128, 1000
    for M, group in ((1, 1), (65, 8), (130, 3), (320, 1), (320, 3), (321, 8), (512, 3)):
        part, blocks = -(-M // 2), -(-M // block_m)
        owners = [range(min(M, rank * part), min(M, (rank + 1) * part)) for rank in range(2)]
        count, orders = blocks * -(-N // block_n), []
        for own in owners:
            given = own.start, len(own), M, N, group
            rows, cols = run(ctx, others_first_kernel, count, 2, *given, BLOCK_M=block_m, BLOCK_N=block_n)
            order = list(zip(rows, cols, strict=True))
            assert sorted(order) == [(r, c) for r in range(0, M, block_m) for c in range(0, N, block_n)]
            alone = [set(range(row, min(M, row + block_m))) <= set(own) for row, _ in order]
            for first in range(0, count, blocks * group):  # of some columns together, the peer's first
                assert alone[first : first + blocks * group] == sorted(alone[first : first + blocks * group])
            orders.append(order)
        for programs in (1, 5, 132):
            assert passes(orders, owners, block_m, programs), (M, group, programs)


def passes(orders: list[list[tuple[int, int]]], owners: list[range], block_m: int, programs: int) -> bool:
    """Whether all get through, side by side: each sends a tile, and waits for the peer's if any of its rows are own."""
    done, sent = [[0] * programs for _ in orders], [set() for _ in orders]
    going = True
    while going:
        going = False
        for rank, p in product(range(2), range(programs)):
            while (t := p + done[rank][p] * programs) < len(orders[rank]):
                row, _ = tile = orders[rank][t]
                sent[rank].add(tile)
                own = owners[rank]
                if row < own.stop and own.start < row + block_m and tile not in sent[1 - rank]:
                    break
                done[rank][p] += 1
                going = True
    return [sum(each) for each in done] == [len(order) for order in orders]


def test_rows_that_two_ranks_send_each_other_come_in_an_order_without_circles() -> None:
    run_ranks(1, check_others_first)
