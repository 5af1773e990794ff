"""A short form of each part of the soak, and that what would be wrong is seen."""

from __future__ import annotations

from collections.abc import Callable
import gc
import itertools
import json
import os
from pathlib import Path
import tempfile
import time

from iris_tp.bench.timing import Captured
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, run_ranks
from tests.processes import Ended
from tests.soak import __main__ as soak
from tests.soak import faults, report
from tests.soak.calls import Calls
from tests.soak.faults import Case, Told
from tests.soak.states import HOWS, STATES

pytest.importorskip("transformers")
TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return faults.save_model(tmp_path_factory.mktemp("model"))


# Each way to fail in turn, of each rank in turn; the other rank's are slow.
IN_TURN = [
    pytest.param(state, how, victim, marks=[pytest.mark.slow] * (victim != index // len(HOWS) % 2))
    for index, (state, how) in enumerate(zip(STATES, itertools.cycle(HOWS), strict=False))
    for victim in (0, 1)
]


@pytest.mark.parametrize(("state", "how", "victim"), IN_TURN)
def test_a_fault_in_each_state(state: str, how: str, victim: int, model: Path, tmp_path: Path) -> None:
    case = Case(state, how, victim, delay_s=0.1)
    outcome, _ = faults.run_to_the_fault(case, model, tmp_path, TIMEOUT_S)
    assert not outcome["wrong"], f"{case}: {outcome['wrong']}"


def test_random_calls_of_late_ranks() -> None:
    calls = Calls(number=7, say=lambda text: None)
    calls.run([2], time.monotonic() + 30, most=5)
    assert not calls.failures and calls.ops and calls.collectives, calls.table()


@pytest.mark.slow
def test_a_run_leaves_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", tempfile.gettempdir())
    arguments = ["--parts", "faults", "--states", "barrier", "--times", "1", "--timeout", "2", "--seconds", "90"]
    assert soak.main([*arguments, "--device", "cpu", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "soak_cpu_x2.json").read_text())
    assert written["passed"] and not written["failures"]
    assert {how: cell["cases"] for how, cell in written["faults"]["barrier"].items()} == dict.fromkeys(HOWS, 1)
    assert "| barrier | " in report.rendered(written)


# --- what is wrong is seen -------------------------------------------------------------------------------------------

RIGHT = Told(10.5, "PeerLostError", True, "PeerLostError: rank 0 lost rank 1: barrier")
WRONG: dict[str, tuple[Ended, str]] = {
    "no error": (Ended(0, None), "no error of its own"),
    "hangs": (Ended(None), "hangs"),
    "too early": (Ended(0, Told(9.0, RIGHT.kind, True, RIGHT.text)), "before the fault"),
    "too late": (Ended(0, Told(30.0, RIGHT.kind, True, RIGHT.text)), "took 20.0 s"),
    "untyped": (Ended(0, Told(10.5, "KeyError", False, "KeyError: rank 1")), "no IrisError"),
    "another rank": (Ended(0, Told(10.5, RIGHT.kind, True, "rank 0 lost rank 12")), "does not name rank 1"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_survivor_that_does_otherwise_is_told(what: str) -> None:
    case, (ended, message) = Case("barrier", "SIGKILL", 1, 0.1), WRONG[what]
    assert message in faults._survivor(case, ended, 10.0, 15.0, [])
    assert faults._survivor(case, Ended(0, RIGHT), 10.0, 15.0, []) is None


def test_the_page_is_up_to_date() -> None:
    text = report.PAGE.read_text()
    assert report.page(text) == text, "run python -m tests.soak.report"


# --- what a captured graph refers to ---------------------------------------------------------------------------------


def capturing(ctx) -> bool:
    def replay_alone() -> tuple[Callable[[], None], torch.Tensor]:
        given, out = torch.full((1 << 20,), 3.0, device=ctx.device), torch.empty(1 << 20, device=ctx.device)
        torch.add(given, 1, out=out)
        return Captured(lambda: torch.add(given, 1, out=out)).replay, out

    replay, out = replay_alone()
    gc.collect()
    others = [torch.zeros(1 << 20, device=ctx.device) for _ in range(8)]  # where `given` was, had it been freed
    out.zero_()
    replay()
    return bool((out == 4).all()) and not any(other.any() for other in others)


@pytest.mark.gpu
@pytest.mark.skipif(not UNDER_TORCHRUN, reason="captures CUDA graphs")
def test_a_replay_keeps_what_its_graph_refers_to() -> None:
    world = int(os.environ["WORLD_SIZE"])
    assert run_ranks(world, capturing) == [True] * world
