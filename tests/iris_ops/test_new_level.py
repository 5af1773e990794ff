"""A level of equal bits that is added by one object, one line of the table and a way is kept by that way alone."""

from __future__ import annotations

from dataclasses import dataclass

import iris
from iris import invariance
from iris.machines import machine_named
from iris_ops import FusedConfig, calls, launch
from iris_ops.kernels import lamport_matmul
from iris_ops.planning import plan as engine
from iris_ops.planning.sums import Level
from iris_ops.planning.ways import WAYS
from iris_ops.planning.ways.lamport import Lamport
from iris_ops.problem import ALL_REDUCE, MATMUL_GATHER, Request, requested_problem
import pytest
import torch

from tests.harness import run_ranks
from tests.iris_ops.calls import check_case
from tests.reference import Case

H200 = machine_named("NVIDIA H200", 132)
NAME, KIND = "dozens", "alike in blocks of twelve rows"


@dataclass(frozen=True)
class Dozens(Level):
    def counted(self, problem) -> str:
        return "dozens"

    def refuses(self, problem) -> str | None:
        return "rows go by the dozen" if problem.M % 12 else None


DOZENS = Dozens(NAME, KIND)
_launched: list[int] = []


class InDozens(Lamport):
    kernel = "dozens"
    launcher = "tests.iris_ops.test_new_level:launcher"
    ops = frozenset((ALL_REDUCE,))
    algorithms: tuple[str, ...] = ("one_shot",)
    sums = frozenset((KIND,))

    def means(self, problem, config) -> bool:
        return problem.sums.kind == KIND and config.algorithm == "one_shot"

    def accepts(self, problem, machine) -> str | None:
        return None

    def tiles(self, problem, machine):
        return [FusedConfig(16, 32, 32, num_warps=4, num_stages=1, algorithm="one_shot", kernel=self.kernel)]


def launcher(rank, workspace, problem, config, tensors):
    _launched.append(problem.M)
    return lamport_matmul.launcher(rank, workspace, problem, config, tensors)


def request(op: str, M: int, level: str | None = NAME) -> Request:
    return Request(op, M, 512, 256, 2, torch.bfloat16, invariant=level)


def choose(op: str, M: int):
    return engine.choose((*WAYS, InDozens()), requested_problem(request(op, M)), H200)


@pytest.fixture(autouse=True)
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(invariance.LEVELS, NAME, "tests.iris_ops.test_new_level:DOZENS")
    invariance.level_of.cache_clear()


def test_the_ways_that_keep_a_new_level_serve_it() -> None:
    chosen = choose(ALL_REDUCE, 24)
    assert chosen.kernel == "dozens"
    assert f"rejected lamport_matmul: its sums are alike at any number of rows or in any order, not {KIND}" in (
        chosen.reasons
    )
    assert any("the same bits at every number of dozens cost" in line for line in chosen.reasons)
    free = engine.plan(requested_problem(request(ALL_REDUCE, 24, None)), H200, explained=False)
    assert free.kernel == "lamport_matmul", "without the level"


def test_what_a_level_refuses_is_an_error() -> None:
    with pytest.raises(iris.errors.ArgumentError, match="matmul_all_reduce: rows go by the dozen"):
        choose(ALL_REDUCE, 25)
    with pytest.raises(iris.errors.ArgumentError, match="matmul_all_gather: algorithm is None; expected one that"):
        choose(MATMUL_GATHER, 24)
    refused = invariance.refusal("scores")
    assert "invariant is 'scores'; expected one of None, 'batch', 'ranks', 'dozens'" in str(refused)


def run_dozens(ctx: iris.Iris) -> int:
    _launched.clear()
    ways = (*WAYS, InDozens())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(invariance.LEVELS, NAME, "tests.iris_ops.test_new_level:DOZENS")
        patch.setattr(ctx, "invariant", NAME)
        patch.setattr(calls.Calls, "plan", lambda self, problem: engine.choose(ways, problem, H200))
        for module in (calls, launch):
            patch.setattr(module, "way_for", lambda problem, config: engine.way_for(problem, config, ways))
        check_case(ctx, Case(ALL_REDUCE, "", 24, 48, 64, dtype=torch.bfloat16, bias=True))
    return len(_launched)


def test_a_new_level_runs_and_is_right() -> None:
    assert all(count == 2 for count in run_ranks(2, run_dozens))
