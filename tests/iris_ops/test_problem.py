"""From shapes to a problem: forms, uneven and empty parts, what does not fit. No kernel runs."""

from __future__ import annotations

from iris.errors import ShapeError
from iris_ops.problem import (
    GATHER_MATMUL,
    OPS,
    Problem,
    describe,
)
import pytest
import torch

from tests.reference import FORMS, Case

SIZES = [0, 1, 2, 3, 5, 8, 17]


def described(case: Case, rank: int, world_size: int) -> Problem:
    a, b, out = (torch.empty(shape, dtype=case.dtype, device="meta") for shape in case.shapes(world_size, rank))
    return describe(case.op, out, a, b, rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("op, form", FORMS)
def test_all_ranks_find_the_same_problem(op: str, form: str, world_size: int) -> None:
    """Also where parts are empty, and where a rank's shapes fit two forms."""
    for M in SIZES:
        for N in SIZES:
            for K in SIZES:
                case = Case(op, form, M, N, K)
                problems = {described(case, rank, world_size) for rank in range(world_size)}
                if M == 0 or (N == 0 and op != GATHER_MATMUL):
                    assert all(problem.empty for problem in problems)
                    continue
                assert len(problems) == 1, case
                (problem,) = problems
                assert (problem.M, problem.N, problem.K) == (M, N, K) and not problem.empty
                if world_size > 1 and min(M, N, K) > 1:
                    assert problem.form == form


@pytest.mark.parametrize("which", ["A", "B", "out"])
@pytest.mark.parametrize("op", OPS)
def test_shapes_that_fit_no_form_are_refused(op: str, which: str) -> None:
    shapes = dict(zip(("A", "B", "out"), Case(op, dict(FORMS)[op], 20, 24, 16).shapes(2, 1), strict=True))
    for dim in (0, 1):
        wrong = {**shapes, which: tuple(size + 7 if i == dim else size for i, size in enumerate(shapes[which]))}
        tensors = {name: torch.empty(shape, device="meta") for name, shape in wrong.items()}
        with pytest.raises(ShapeError, match="on rank 1; expected A .* with w = 2 ranks") as caught:
            describe(op, tensors["out"], tensors["A"], tensors["B"], 1, 2)
        assert f"{which} is {wrong[which]}" in str(caught.value)


def test_a_part_of_another_rank_is_refused() -> None:
    """10 rows on 4 ranks are 3, 3, 3 and 1."""
    b = torch.empty(16, 24, device="meta")
    out = torch.empty(10, 24, device="meta")
    for rank in range(4):
        own = 3 if rank < 3 else 1
        for rows in (1, 2, 3):
            a = torch.empty(rows, 16, device="meta")
            if rows == own:
                assert describe(GATHER_MATMUL, out, a, b, rank, 4).form == "rows"
            else:
                with pytest.raises(ShapeError, match="torch.chunk"):
                    describe(GATHER_MATMUL, out, a, b, rank, 4)
