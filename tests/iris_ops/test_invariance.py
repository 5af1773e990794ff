"""With `invariant="batch"` a row has the same bits for any number of rows, in any position, among any others."""

from __future__ import annotations

import random

import iris
from iris.machines import machine_named
from iris_ops.planning.plan import plan
from iris_ops.planning.sums import BATCH
from iris_ops.planning.weights import BY_FLAG
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, REDUCE_SCATTER, Request, requested_problem
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks
from tests.iris_ops.invariance import Place, Probe, different_rows, ways
from tests.reference import FORMS, Case

pytestmark = both

H200 = machine_named("NVIDIA H200", 132)
FEW = (1, 2, 9, 33, 70)
MANY = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 47, 64, 65, 100, 127, 128, 129, 160, 200, 255, 256, 257, 300)


def draw_places(rows: tuple[int, ...], rng: random.Random) -> list[Place]:
    places = []
    for M in rows:
        first = rng.choice([0, M - 1, rng.randrange(M)])
        places.append(Place(M, first, rng.choice(["nan", "random"]), rng.random() < 0.7))
    return places


def check_rows(ctx: iris.Iris, case: Case, places: list[Place], fp8: bool = False) -> list[str]:
    ctx.invariant = "batch"
    return different_rows(Probe(ctx, case, fp8=fp8), places)


def check_ways(ctx: iris.Iris, case: Case, M: int) -> tuple[list[str], int]:
    ctx.invariant = "batch"
    configs = ways(ctx, case, M)
    places = [Place(M, first, config=config) for config in configs for first in (0, M - 1)]
    return different_rows(Probe(ctx, case), places), len(configs)


def no_difference(of_ranks: list[list[str]]) -> None:
    messages = [f"rank {rank}: {each}" for rank, differences in enumerate(of_ranks) for each in differences]
    assert not messages, "\n".join(messages[:5])


def case_of(op: str, form: str, **kinds) -> Case:
    seed = random.randrange(1 << 30)
    return Case(op, form, 0, 80, 144, **({"dtype": torch.bfloat16, "bias": True, "seed": seed} | kinds))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("op", "form"), FORMS)
@pytest.mark.some(7)
def test_a_row_has_the_same_bits_among_any_others(world_size, op, form):
    rng = random.Random()
    # a sum in another order shows in float32, and is mostly rounded away in bfloat16
    case = case_of(op, form, dtype=torch.float32)
    no_difference(run_ranks(world_size, check_rows, case, draw_places(FEW, rng)))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("op", "form"), FORMS)
def test_a_row_has_the_same_bits_at_every_number_of_rows(world_size, op, form, dtype):
    rng = random.Random()
    case = case_of(op, form, dtype=dtype, bias=rng.random() < 0.5, transposed=rng.random() < 0.5)
    no_difference(run_ranks(world_size, check_rows, case, draw_places(MANY, rng)))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("op", [ALL_REDUCE, GATHER_MATMUL, REDUCE_SCATTER])
def test_a_row_times_an_fp8_weight_has_the_same_bits(world_size, op):
    case = case_of(op, "" if op == ALL_REDUCE else "rows")
    no_difference(run_ranks(world_size, check_rows, case, draw_places(MANY[::3], random.Random()), True))


KINDS = [(2, torch.bfloat16), (3, torch.float32), (3, torch.bfloat16)]
# A partial sum that is not rounded shows in bfloat16, another order of the ranks' in float32.
FAST = [(*KINDS[0], ALL_REDUCE, ""), (*KINDS[1], ALL_REDUCE, ""), (*KINDS[2], ALL_REDUCE, "")]
REST = [(*kind, *form) for kind in KINDS for form in FORMS if (*kind, *form) not in FAST]


@pytest.mark.parametrize(
    ("world_size", "dtype", "op", "form"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in REST)]
)
def test_all_ways_of_the_order_give_the_same_bits(world_size, dtype, op, form):
    """Whichever of them the plan takes, on this machine or on one that it knows better."""
    results = run_ranks(world_size, check_ways, case_of(op, form, dtype=dtype), 40)
    no_difference([differences for differences, _ in results])
    assert results[0][1] >= 2 or form == "k"  # there ranks' parts of K begin within a step, in one of the two ways


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("op", [ALL_REDUCE, REDUCE_SCATTER])
@pytest.mark.parametrize("machine", [H200, machine_named("interpreter", 1)])
def test_a_bias_comes_before_the_ranks_sum_at_every_number_of_rows_or_at_none(op, fp8, machine):
    """A collective knows of no bias, so rank 0 adds it before; in other ways it follows the sum."""
    mixed = 0
    for N, K in ((7648, 6688), (1600, 5184), (8192, 2048), (40, 24)):
        rows, weights = (1, 64, 129, 200, 300, 777, 8192), BY_FLAG[fp8]
        problems = [requested_problem(Request(op, M, N, K, 2, torch.bfloat16, weights=weights)) for M in rows]
        for biased in (False, True):
            algorithms = [plan(BATCH.promise(problem, biased=biased), machine).algorithm for problem in problems]
            several = len({algorithm == "sequential" for algorithm in algorithms}) == 2
            assert not biased or not several, algorithms
            mixed += several
    assert mixed or not (fp8 and op == REDUCE_SCATTER and machine == H200), "there is nothing to keep apart"


@pytest.mark.gpu
def test_a_bias_comes_last_after_fp8_weights():
    """At sizes of which a plan leaves some numbers of rows to a product and a collective, where there is no bias."""
    places = [Place(M, M - 1, "random") for M in (1, 64, 129, 200, 300, 512)]
    for bias in (True, False):
        case = Case(REDUCE_SCATTER, "rows", 0, 6336, 992, torch.bfloat16, bias=bias)
        no_difference(run_ranks(2, check_rows, case, places, True))


def compare_levels(ctx: iris.Iris, M: int) -> tuple[str, str]:
    plans = []
    for ctx.invariant in (None, "batch"):
        plans.append(ctx.ops.plan(ALL_REDUCE, M, 256, 512, torch.bfloat16).explain())
    return plans[0], plans[1]


def test_a_plan_says_what_was_left_out():
    (free, alike), *_ = run_ranks(2, compare_levels, 64)
    assert "the same bits" not in free and "left out" not in free
    assert "the same bits at every number of rows cost" in alike and "left out" in alike
