"""A way that is added by one class and one line of the table is compared, chosen and run."""

from __future__ import annotations

import iris
from iris.machines import machine_named
from iris_ops import FusedConfig, calls, launch
from iris_ops.kernels import lamport_matmul
from iris_ops.planning import plan as engine
from iris_ops.planning.ways import WAYS
from iris_ops.planning.ways.lamport import Lamport
from iris_ops.planning.weights.fp8 import FP8_FORMAT
from iris_ops.problem import ALL_REDUCE, MATMUL_GATHER, Request, requested_problem
import pytest
import torch

from tests.harness import run_ranks
from tests.iris_ops.calls import check_case
from tests.reference import Case

H200 = machine_named("NVIDIA H200", 132)
_launched: list[int] = []


class Toy(Lamport):
    """It takes no time, for up to 40 rows of an all-reduce in A's dtype."""

    kernel = "toy"
    launcher = "tests.iris_ops.test_new_way:launcher"
    ops = frozenset((ALL_REDUCE,))
    algorithms: tuple[str, ...] = ("one_shot",)
    weights = Lamport.weights - {FP8_FORMAT}

    def accepts(self, problem, machine) -> str | None:
        return None if problem.M <= 40 else "it is for up to 40 rows"

    def tiles(self, problem, machine):
        return [FusedConfig(16, 32, 32, num_warps=4, num_stages=1, algorithm="one_shot", kernel=self.kernel)]

    def together(self, problem, config, machine, gemm):
        return 0.0, -machine.launch_us


def launcher(rank, workspace, problem, config, tensors):
    _launched.append(problem.M)
    return lamport_matmul.launcher(rank, workspace, problem, config, tensors)


def choose(*sizes, **more):
    return engine.choose((*WAYS, Toy()), requested_problem(Request(*sizes, 2, torch.bfloat16, **more)), H200)


def test_a_new_way_is_chosen_where_it_is_the_fastest() -> None:
    chosen = choose(ALL_REDUCE, 16, 512, 256)
    assert chosen.kernel == "toy" and chosen.reasons[2].startswith("toy 16x32x32 one_shot")
    assert chosen.explain().splitlines()[-1] == "chosen toy 16x32x32 one_shot, 4 warps"
    assert choose(MATMUL_GATHER, 16, 512, 256) == engine.plan(
        requested_problem(Request(MATMUL_GATHER, 16, 512, 256, 2, torch.bfloat16)), H200
    )


@pytest.mark.parametrize("more, reason", [
    ({}, "it is for up to 40 rows"),
    ({"weights": FP8_FORMAT}, "it multiplies no weights in fp8"),
    ({"invariant": "ranks"}, "its sums are alike at any number of rows or in any order, not alike on any number of "
                             "ranks"),
])  # fmt: skip
def test_what_it_does_not_accept_is_a_rejection(more: dict, reason: str) -> None:
    chosen = choose(ALL_REDUCE, 41 if not more else 16, 512, 256, **more)
    assert chosen.kernel != "toy" and f"rejected toy: {reason}" in chosen.reasons


def run_toy(ctx: iris.Iris) -> int:
    _launched.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls.Calls, "plan", lambda self, problem: engine.choose((*WAYS, Toy()), problem, H200))
        for module in (calls, launch):
            patch.setattr(module, "way_for", lambda problem, config: Toy())
        check_case(ctx, Case(ALL_REDUCE, "", 24, 48, 64, dtype=torch.bfloat16, bias=True))
    return len(_launched)


def test_a_new_way_runs_and_is_right() -> None:
    assert all(count == 2 for count in run_ranks(2, run_toy))
