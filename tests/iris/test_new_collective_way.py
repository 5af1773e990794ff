"""A way for a collective that is added by one class and one line of the table is compared, chosen and run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import iris
from iris.ccl import launch, plan, ways
from iris.ccl.problem import ALL_REDUCE
from iris.ccl.ways import TwoShotFlags
import pytest

from tests.harness import run_ranks

_launched: list[str] = []


class Toy(TwoShotFlags):
    """It takes no time."""

    variant, launcher = "toy", "tests.iris.test_new_collective_way:ToyLauncher"
    ops = frozenset((ALL_REDUCE,))

    def exchange_us(self, problem, machine) -> float:
        return 0.0


class ToyLauncher(launch.Flags):
    def staging(self, area, problem):
        _launched.append(problem.op)
        return super().staging(area, problem)


@contextmanager
def added() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (ways, plan):
            patch.setattr(module, "WAYS", (*ways.WAYS, Toy()))
        plan.plan.cache_clear()
        yield
    plan.plan.cache_clear()


def reduce(ctx: iris.Iris) -> None:
    with added():
        inp = ctx.full((24, 40), ctx.cur_rank + 1.0)
        out = ctx.zeros(24, 40)
        chosen = ctx.ccl.plan(ALL_REDUCE, out, inp)
        assert chosen.variant == "toy" and chosen.explain().splitlines()[-1].startswith("chosen toy, flags")
        ctx.ccl.all_reduce(out, inp)
    assert _launched and (out == sum(range(1, ctx.num_ranks + 1))).all()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_new_way_is_chosen_and_right(world_size: int) -> None:
    run_ranks(world_size, reduce)
