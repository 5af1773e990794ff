"""The planner's orders: plans of one product share one, whatever the number of rows, and what that costs is known."""

from __future__ import annotations

import random

from iris.errors import ArgumentError
from iris.machines import INTERPRETER, machine_named
from iris_ops import FusedConfig, sum_tree
from iris_ops.local import skinny_matmul
from iris_ops.planning import orders, sums
from iris_ops.planning.plan import plan, way_named
from iris_ops.planning.weights import BY_FLAG
from iris_ops.problem import GATHER_MATMUL, SUMS, Problem, Request, requested_problem
import pytest
import torch

from tests.reference import FORMS

MACHINES = {"NVIDIA H100": 132, "NVIDIA H200": 132, "AMD Instinct MI300X": 304, "NVIDIA A100": 108, INTERPRETER: 1}
BATCH = sums.Sums(sums.ROWS_ALIKE, sums.BATCH)
ROWS = (1, 3, 16, 17, 64, 65, 128, 200, 256, 512, 1000, 4096, 16384, 60000)


@pytest.mark.parametrize("name", [name for name in MACHINES if name != INTERPRETER])
def test_a_product_without_ranks_is_of_one_instruction(name):
    """By the tiles of `skinny_matmul`, which go by the number of rows, and which multiply columns by rows."""
    machine = machine_named(name, MACHINES[name])
    for rows in (*range(1, 66), 100, 128, 200, 1000, 4096):
        for columns in (64, 1024, 4096, 28672):
            problem = Problem(GATHER_MATMUL, "rows", rows, columns, 1024, 1, torch.bfloat16, sums=BATCH)
            m, n = skinny_matmul.tile_of(rows, columns, 1, machine.num_programs, orders.least_rows(machine))
            tile = FusedConfig(m, n, algorithm="one_shot")
            assert orders.of_tiles(problem, tile, machine) == orders.of_product(problem, machine), (rows, columns, tile)


def order_of(problem: Problem, machine) -> orders.Order | None:
    config = plan(problem, machine, explained=False)
    return way_named(config.kernel).order(problem, config, machine)


@pytest.mark.parametrize("name", MACHINES)
def test_plans_of_any_number_of_rows_share_an_order(name):
    machine, rng = machine_named(name, MACHINES[name]), random.Random()
    for _ in range(12):
        op, form = rng.choice(FORMS)
        world, dtype = (
            rng.choice([1, 2, 3, 4, 8]),
            rng.choice([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32]),
        )
        N, K = (rng.choice([64, 80, 1000, 2880, 4096, 8192, 14336, 77]) for _ in range(2))
        fp8 = (
            dtype == torch.bfloat16
            and (op, form) != (GATHER_MATMUL, "k")
            and "gather" not in op[-7:]
            and rng.random() < 0.3
        )
        problems = [
            requested_problem(Request(op, M, N, K, world, dtype, form or None, BY_FLAG[fp8], "batch")) for M in ROWS
        ]
        distinct = {order_of(problem, machine) for problem in problems}
        assert len(distinct) == 1 and None not in distinct, f"{problems[0]} on {name}: {[*map(str, distinct)]}"


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plans_of_any_number_of_ranks_share_an_order(name, dtype):
    """Whatever each has of K, of a sum, or of N, of a product around which something is gathered."""
    machine, rng = machine_named(name, MACHINES[name]), random.Random()
    N, K = rng.choice([96, 2880, 4096]), rng.choice([1024, 2048, 14336, 18944])
    for op, form in FORMS:
        distinct = set()
        for world in (1, 2, 3, 4, 8):
            k_per_rank = sum_tree.shares(K, world)
            for M in (1, 48, 1000, 9000):
                sizes = (N // world, K) if op == GATHER_MATMUL else (N, k_per_rank[-1]) if op in SUMS else (N, K)
                given = {"k_per_rank": k_per_rank} if op in SUMS else {}
                if form == "k" and K // world % 256:
                    continue  # no whole blocks: an error, see below
                problem = requested_problem(
                    Request(op, M, *sizes, world, dtype, form or None, invariant="ranks", **given)
                )
                distinct.add(order_of(problem, machine))
        assert len(distinct) == 1 and None not in distinct, (
            f"{op} {form}, N {N}, K {K} on {name}: {[*map(str, distinct)]}"
        )


@pytest.mark.parametrize("invariant", ["rows", True, 1, ["batch"]])
def test_another_level_is_refused(invariant):
    with pytest.raises(ArgumentError, match="invariant is"):
        requested_problem(Request("matmul_all_reduce", 1, 16, 16, 2, torch.bfloat16, invariant=invariant))
