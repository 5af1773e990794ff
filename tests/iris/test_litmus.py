"""Litmus tests: no outcome that the order forbids; on GPUs with many rounds, on CPUs for the logic of the tests.

x86 hides missing fences, so the CPU run shows that every round is counted and that a wrong outcome would be seen. The
long run is `python -m benchmarks.litmus`.
"""

import json
from pathlib import Path
import sys

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks are run from the checkout

from benchmarks import litmus  # noqa: E402
from benchmarks.cases.litmus_kernels import ORDERS, RELAXED  # noqa: E402
from benchmarks.litmus import BELOW_2_31, BELOW_2_32, Barrier, Bench, Message, Result  # noqa: E402
from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks  # noqa: E402
from tests.processes import run_benchmark  # noqa: E402

pytestmark = both

ROUNDS, BARRIERS = (200_000, 20_000) if ON_GPU else (6, 12)
BELOW = [BELOW_2_31, BELOW_2_32] if ON_GPU else [2**31 - 2, 2**32 - 2]  # a wrap within the rounds
FULL = [world for world in WORLDS if world == max(WORLDS)]
MESSAGES = [(4, 1), (1 << 10, 4), (64 << 10, 8)]


def _run(ctx, cases: list) -> list[Result]:
    bench = Bench(ctx)
    return [case.run(bench, BARRIERS if isinstance(case, Barrier) else ROUNDS) for case in cases]


def _results(world_size: int, cases: list) -> list[Result]:
    """Return the results, which are equal on all ranks."""
    first, *others = run_ranks(world_size, _run, cases)
    for other in others:
        assert [(r.outcomes, r.forbidden) for r in other] == [(r.outcomes, r.forbidden) for r in first]
    return first


@pytest.mark.parametrize("world_size", FULL)
@pytest.mark.parametrize("order", range(len(ORDERS)), ids=ORDERS)
def test_no_forbidden_outcome(world_size: int, order: int) -> None:
    cases = [case for case in litmus.cases("threads", world_size) if case.order == order]
    if not cases:
        pytest.skip("needs two ranks")
    results = _results(world_size, cases)
    assert not [(result.name, result.outcomes) for result in results if result.failed]
    if order == RELAXED and ON_GPU:
        assert sum(result.reordered for result in results), "the tests would not see a reordering"


@pytest.mark.parametrize("world_size", [world for world in WORLDS if world in (2, max(WORLDS)) and world > 1])
def test_signalled_messages_are_complete(world_size: int) -> None:
    hops = [1, 2] if world_size > 2 else [1]
    cases = [Message(n, w, first, h) for (n, w), first in zip(MESSAGES, BELOW * 2, strict=False) for h in hops]
    assert not [(result.name, result.outcomes) for result in _results(world_size, cases) if result.failed]


@pytest.mark.parametrize("world_size", FULL)
def test_barriers_bring_every_stamp(world_size: int) -> None:
    results = _results(world_size, [Barrier(first) for first in (0, *BELOW)])
    assert not [(result.name, result.outcomes) for result in results if result.failed]


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
@pytest.mark.slow
def test_command_writes_what_it_saw(tmp_path: Path) -> None:
    printed = run_benchmark("litmus", 2, "--rounds", "2", "--barriers", "3", "--out", str(tmp_path))
    report = json.loads((tmp_path / "litmus_cpu_x2.json").read_text())
    assert {result["family"] for result in report["results"]} == set(litmus.FAMILIES) and not report["failures"]
    assert litmus.render(report) in printed
    report["results"][0]["failed"] = True
    assert "FAILED" in litmus.render(report)
