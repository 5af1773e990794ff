"""Each program of this folder runs on 1, 2 and 4 ranks; its assertions check the results."""

from collections.abc import Callable
import inspect
import warnings

import pytest

from tests.harness import WORLDS, both, run_ranks

from . import (
    collective_programs,
    fused_programs,
    host_programs,
    kernel_programs,
    message_programs,
)

pytestmark = both

MODULES = (
    kernel_programs, host_programs, collective_programs, message_programs, fused_programs,
)  # fmt: skip
PROGRAMS = [
    program
    for module in MODULES
    for name, program in inspect.getmembers(module, inspect.isfunction)
    if program.__module__ == module.__name__ and not name.startswith("_")
]


def _run(ctx, program: Callable[[], None]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*coming-from-iris")  # an unchanged program needs no word of ours
        program()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("world_size", [w for w in WORLDS if w not in (1, 3)])
def test_a_program_written_for_iris_runs(world_size: int, program: Callable[[], None]) -> None:
    run_ranks(world_size, _run, program)


@pytest.mark.parametrize("world_size", [w for w in WORLDS if w == 1])
def test_all_programs_run_on_one_rank(world_size: int) -> None:
    for program in PROGRAMS:
        run_ranks(world_size, _run, program)
