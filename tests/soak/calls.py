"""Random calls of ops and collectives in a row, drawn by hypothesis in the parent and made by all ranks of a world.

Each rank delays each call by a random time. Outputs lie poisoned between guard bands; every rank compares
its own with float64, within twice the error of torch's own op (tests/checks.py), and ranks that must hold the same bits
do. A failure is shrunk to few calls, and named.
"""

from __future__ import annotations

import random
import time
from typing import Any

from hypothesis import HealthCheck, given, seed, settings, strategies
import iris
import torch

from tests.harness import run_ranks
from tests.iris import test_ccl as ccl
from tests.iris_ops import calls as ops
from tests.iris_ops.test_fuzz import draw_case
from tests.reference import Case

LATE_S = (0.0, 0.0, 0.0, 0.002, 0.02)
_EXAMPLES = 25  # between two looks at the clock
_MOST_CALLS = 4  # in a row
Step = tuple[Any, tuple[float, ...]]


def draw_collective(rng: random.Random, world: int) -> ccl.Case:
    op = rng.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
    rows, cols = rng.choice([1, 2, 3, 5, 9, 16]), rng.choice([1, 3, 8, 37, 64])
    dtype = rng.choice([torch.bfloat16, torch.float16, torch.float32, torch.int32])
    configs = [None, ccl.FLAGS]
    if dtype.is_floating_point and world in (2, 4):  # others are refused for some shapes
        configs += {"all_reduce": [ccl.ONE, ccl.TWO], "reduce_scatter": []}.get(op, [ccl.LAMPORT])
    return ccl.Case(
        op,
        (rows, cols * world if op == "all_to_all" else cols),
        rng.choice(configs),
        dtype,
        on_heap=rng.random() < 0.7,
        seed=rng.randrange(1 << 30),
    )


def steps(world: int) -> strategies.SearchStrategy[list[Step]]:
    cases = strategies.randoms(use_true_random=False).map(
        lambda rng: draw_case(rng, world) if rng.random() < 0.6 else draw_collective(rng, world)
    )
    late = strategies.tuples(*[strategies.sampled_from(LATE_S)] * world)
    return strategies.lists(strategies.tuples(cases, late), min_size=1, max_size=_MOST_CALLS)


def check_steps(ctx: iris.Iris, steps: list[Step]) -> list[str]:
    """All calls after each other, then all results; a digest of each."""
    calls = [(ops.Call if isinstance(case, Case) else ccl.Call)(ctx, case) for case, _ in steps]
    for call, (_, late) in zip(calls, steps, strict=True):
        time.sleep(late[ctx.cur_rank])
        call.run()
    digests = []
    for call in calls:
        try:
            digests.append(ops.bits(call.check()))
        except Exception as error:
            raise AssertionError(f"rank {ctx.cur_rank} of {ctx.num_ranks}, {call.case}: {error!r}") from error
    return digests


def assert_right(world: int, steps: list[Step], timeout_s: float) -> None:
    digests = run_ranks(world, check_steps, steps, timeout=timeout_s)
    cases = [case for case, _ in steps]
    ops.assert_same_bits([case if isinstance(case, Case) else _AsOp(case) for case in cases], digests)


class _AsOp:
    """A collective whose result is the same on all ranks, called as `assert_same_bits` calls ops that are."""

    def __init__(self, case: ccl.Case) -> None:
        self.case = case
        self.op = "matmul_all_reduce" if case.op in ("all_reduce", "all_gather") else case.op

    def __repr__(self) -> str:
        return repr(self.case)


class Calls:
    """Draws and checks until the time is over; counts, and keeps what failed."""

    def __init__(self, number: int, timeout_s: float = 60.0, say=print) -> None:
        self.number, self.timeout_s, self.say = number, timeout_s, say
        self.sequences, self.ops, self.collectives = 0, 0, 0
        self.worlds: dict[int, int] = {}
        self.failures: list[str] = []

    def run(self, worlds: list[int], end: float, most: int | None = None) -> None:
        """`end`: by time.monotonic(). `most`: sequences in all."""
        while time.monotonic() < end and not self.failures and (most is None or self.sequences < most):
            for world in worlds:
                self.number += 1
                self._round(world, end, _EXAMPLES if most is None else most)
            self.say(f"{self.ops} ops and {self.collectives} collectives in {self.sequences} sequences are right")

    def _round(self, world: int, end: float, examples: int) -> None:
        number, failing = self.number, []  # failing: the smallest calls that hypothesis found before the time was over

        @seed(number)
        @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(steps(world))
        def holds(steps: list[Step]) -> None:
            if time.monotonic() < end:
                try:
                    assert_right(world, steps, self.timeout_s)
                except Exception as error:
                    failing[:] = [f"seed {number}, {world} ranks: {error!r}\ncalls: {steps}"[:4000]]
                    raise
                collectives = sum(isinstance(case, ccl.Case) for case, _ in steps)
                self.sequences += 1
                self.collectives += collectives
                self.ops += len(steps) - collectives
                self.worlds[world] = self.worlds.get(world, 0) + len(steps)

        try:
            holds()
        except Exception as error:
            self.failures += failing or [f"seed {number}, {world} ranks: {error!r}"[:4000]]
            self.say(f"CALLS FAILED: {self.failures[-1]}")

    def table(self) -> dict[str, Any]:
        return {
            "sequences": self.sequences,
            "ops": self.ops,
            "collectives": self.collectives,
            "calls_by_ranks": {str(world): count for world, count in sorted(self.worlds.items())},
            "mismatches": len(self.failures),
        }
