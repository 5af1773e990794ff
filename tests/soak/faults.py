"""A rank fails while all of them work, and what that does to the others: one case is one world of new processes.

Right is: each survivor raises an `IrisError` that names the lost rank, within IRIS_TIMEOUT and `SLACK_S`; a stopped
rank that goes on raises one, too; the exception of a rank stays its own. No process hangs, nothing stays in the folder
for temporary files, and a folder that a model was being saved to loads as the old or as the new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
import faulthandler
import itertools
import os
from pathlib import Path
import random
import re
import shutil
import signal
import statistics
import tempfile
import threading
import time
from typing import Any

import torch

from tests.processes import Ended, run_fresh
from tests.soak.states import FAULT, HOWS, MODEL, PID, STATES, Fault, fail_later

SLACK_S = 10.0  # beside the time-out, for a machine that is busy with other cases
HUNG, _HANGS_S = 86, 3.0  # the exit code of a rank that hangs, and how much longer than it may it is let
_SETTING_UP_S = 60.0  # until the victim fails
_LONGEST_DELAY_S = 0.5  # of work in the state before that
_MOST_RUNS = 4  # of one case
_EARLY = "raised before the fault"
QUIET = {
    "TQDM_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "FATAL",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore",
}
_MOST_FAILURES = 20  # of which one run tells


@dataclass(frozen=True)
class Case:
    state: str
    how: str
    victim: int
    delay_s: float
    world: int = 2

    def __str__(self) -> str:
        return f"{self.state}, {self.how} of rank {self.victim} of {self.world} after {self.delay_s:.3f} s"


@dataclass(frozen=True)
class Told:
    """What a rank raised: when, and whether it is of the library's own errors."""

    at: float
    kind: str
    typed: bool
    text: str


def _watch(rank: int, case: Case, folder: Path, limit_s: float) -> None:
    """Ends this process where it hangs after the fault; its stack is in a file then. From a thread."""
    longest_s = _HANGS_S + limit_s * (2 if rank == case.victim else 1)  # a stopped one goes on after the others' errors

    def watch() -> None:
        while not (folder / f"over-{rank}").exists():
            time.sleep(0.5)
            with suppress(OSError, ValueError):
                if time.monotonic() - float((folder / FAULT).read_text()) > longest_s:
                    with open(folder / f"stack-{rank}", "w") as file:
                        faulthandler.dump_traceback(file)
                    _wake(case, folder)
                    os._exit(HUNG)

    threading.Thread(target=watch, daemon=True).start()


def _wake(case: Case, folder: Path) -> None:
    if case.how == "SIGSTOP":
        with suppress(OSError, ValueError):
            os.kill(int((folder / PID).read_text()), signal.SIGCONT)


def rank_body(rank: int, world: int, case: Case, model: Path, folder: Path, limit_s: float) -> Told | None:
    caught, reported = threading.Event(), None
    tempfile.tempdir = os.environ["TMPDIR"]  # which may be another one in the server that this process is forked from
    _watch(rank, case, folder, limit_s)
    import layers  # noqa: F401  # seconds, which would count as a wait for this rank

    _arrive(rank, world, folder)
    try:
        with STATES[case.state](model, folder) as work:
            work()
            if rank == case.victim:
                caught = fail_later(case.how, case.delay_s, folder)
            end = time.monotonic() + _SETTING_UP_S + limit_s
            while time.monotonic() < end:
                work()
    except Exception as error:
        import iris

        typed = isinstance(error, iris.IrisError)
        reported = Told(time.monotonic(), type(error).__name__, typed, f"{_causes(error)}"[:1500])
    caught.set()
    (folder / f"over-{rank}").touch()
    if rank == case.victim:  # lives on, so that the others' errors do not come from the end of its process
        others = [folder / f"over-{other}" for other in range(world)]
        end = time.monotonic() + limit_s
        while time.monotonic() < end and not all(other.exists() for other in others):
            time.sleep(0.02)
    else:
        _wake(case, folder)
    return reported


def _arrive(rank: int, world: int, folder: Path) -> None:
    """Waits until every rank has come here: what follows is bounded by a short IRIS_TIMEOUT."""
    (folder / f"here-{rank}").touch()
    end = time.monotonic() + _SETTING_UP_S
    while time.monotonic() < end and not all((folder / f"here-{other}").exists() for other in range(world)):
        time.sleep(0.01)


def _causes(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return " <- ".join(texts)


def touch(rank: int, world: int, device: str) -> None:
    """Uses the device as little as can be; also starts the server that ranks are forked from."""
    torch.zeros(1, device=device)


def warm_body(rank: int, world: int, state: str, model: Path, folder: Path) -> int:
    """The state without a fault, which also compiles its kernels."""
    with STATES[state](model, folder) as work:
        for _ in range(3):
            work()
    return rank


def run_case(case: Case, model: Path, folder: Path, timeout_s: float) -> dict[str, Any]:
    """`{"seconds": until the last survivor's error, "wrong": [reasons], "early": whether ranks raised before it}`."""
    folder.mkdir(parents=True)
    temporary = Path(tempfile.mkdtemp(prefix="soak-"))  # a socket's path may have 107 letters
    env = {"IRIS_TIMEOUT": str(timeout_s), "TMPDIR": str(temporary), **QUIET}
    limit_s = timeout_s + SLACK_S
    whole_s = _SETTING_UP_S + 2 * limit_s
    ended = run_fresh(case.world, rank_body, case, model, folder, limit_s, env=env, timeout=whole_s)
    failed_at = float((folder / FAULT).read_text()) if (folder / FAULT).exists() else None
    wrong, seconds = [], []
    if failed_at is None:
        wrong.append("the victim never came to its fault")
    for rank, end in enumerate(ended):
        if end.exitcode == HUNG:
            wrong.append(f"rank {rank} hangs: {(folder / f'stack-{rank}').read_text()[:3000]}")
            continue
        reason = _victim(case, end) if rank == case.victim else _survivor(case, end, failed_at, limit_s, seconds)
        wrong += [f"rank {rank} {reason}"] if reason else []
    if left := sorted(os.listdir(temporary)):
        wrong.append(f"left in the folder for temporary files: {', '.join(left)}")
    shutil.rmtree(temporary)
    if case.state == "saving" and (mixed := _unusable(folder / "saved")):
        wrong.append(f"the saved folder {mixed}")
    return {"seconds": max(seconds, default=None), "wrong": wrong, "early": any(_EARLY in each for each in wrong)}


def run_to_the_fault(case: Case, model: Path, folder: Path, timeout_s: float) -> tuple[dict[str, Any], int]:
    """`run_case`, again with twice the time-out as long as ranks are too late for each other before the fault.

    On a machine that other programs keep busy, no time-out is long enough by itself. Returns what the last run found
    and how many were repeated.
    """
    for number in range(_MOST_RUNS):
        outcome = run_case(case, model, folder / f"run-{number}", timeout_s * 2**number)
        if not outcome["early"]:
            break
    return outcome, number


def _survivor(case: Case, end: Ended, failed_at: float | None, limit_s: float, seconds: list[float]) -> str | None:
    reported = end.result
    if not isinstance(reported, Told):
        return _no_error(end)
    if failed_at is None or reported.at < failed_at:
        return f"{_EARLY}: {reported.text}"
    seconds.append(reported.at - failed_at)
    if not reported.typed:
        return f"raised what is no IrisError: {reported.text}"
    if not re.search(rf"\brank {case.victim}\b", reported.text):
        return f"does not name rank {case.victim}: {reported.text}"
    return f"took {seconds[-1]:.1f} s to raise" if seconds[-1] > limit_s else None


def _victim(case: Case, end: Ended) -> str | None:
    reported = end.result
    if case.how == "SIGKILL":
        return None if end.exitcode == -signal.SIGKILL else f"ended with {end.exitcode}, not by SIGKILL"
    if not isinstance(reported, Told):
        return _no_error(end)
    if case.how == "exception":
        return None if Fault.text in reported.text else f"raised another exception than its own: {reported.text}"
    return None if reported.typed else f"went on and raised what is no IrisError: {reported.text}"


def _no_error(end: Ended) -> str:
    if end.exitcode is None:
        return "hangs"
    return f"ended with {end.exitcode} and no error of its own: {end.traceback[-1500:]}"


def _unusable(folder: Path) -> str | None:
    """Return what is wrong with a folder whose weights all have one value, or that was not written yet."""
    import transformers

    try:
        model = transformers.LlamaForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        return f"does not load: {type(error).__name__}: {error}"
    values = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return None if bool((values == values[0]).all()) else "holds a mix of two models"


def save_model(folder: Path) -> Path:
    """The checkpoint that ranks load."""
    import transformers

    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL)).save_pretrained(folder)
    return folder


def warm_up(world: int, model: Path, folder: Path, states: list[str]) -> list[str]:
    """Runs each state without a fault; what went wrong."""
    wrong = []
    for state in states:
        here = folder / f"warm {state}"
        here.mkdir()
        for rank, end in enumerate(run_fresh(world, warm_body, state, model, here, env=QUIET, timeout=240.0)):
            if end.exitcode != 0:
                wrong.append(f"{state} without a fault: rank {rank} ended with {end.exitcode}: {end.traceback[-1500:]}")
    return wrong


def draw(world: int, times: int, states: list[str], hows: list[str], seed: int) -> Iterator[Case]:
    """Each state and each way to fail `times` times, in rounds."""
    rng = random.Random(seed)
    for number, state, how in itertools.product(range(times), states, hows):
        yield Case(state, how, (number + rng.randrange(2)) % world, rng.uniform(0, _LONGEST_DELAY_S), world)


class Faults:
    """Runs cases, several at a time, until all are done or the time is over; `table()` is what came of them."""

    def __init__(self, folder: Path, timeout_s: float, jobs: int, say=print) -> None:
        self.folder, self.timeout_s, self.jobs, self.say = folder, timeout_s, jobs, say
        self.results: list[tuple[Case, dict[str, Any]]] = []
        self.failures: list[str] = []
        self.repeated = 0  # runs whose ranks were too late for each other before the fault, on a busy machine
        self._lock = threading.Lock()

    def run(self, cases: Iterator[Case], model: Path, end: float, tell=lambda: None) -> None:
        """Run cases until `end`, a time of time.monotonic(). `tell` is called after each case."""
        numbered = enumerate(cases)

        def take_turns() -> None:
            while time.monotonic() < end and len(self.failures) < _MOST_FAILURES:
                with self._lock:
                    number, case = next(numbered, (None, None))
                if case is None:
                    return
                outcome, again = run_to_the_fault(case, model, self.folder / f"case-{number}", self.timeout_s)
                with self._lock:
                    self.repeated += again
                    self.results.append((case, outcome))
                    if outcome["wrong"]:
                        self.failures.append(f"{case}: {'; '.join(outcome['wrong'])}")
                        self.say(f"FAULT CASE FAILED: {self.failures[-1]}")
                    tell()

        with ThreadPoolExecutor(self.jobs) as pool:
            for done in [pool.submit(take_turns) for _ in range(self.jobs)]:
                done.result()

    def table(self) -> dict[str, dict[str, Any]]:
        """By state, then by how the rank failed: cases, those that went wrong, seconds until the survivors' errors."""
        outcome: dict[str, dict[str, Any]] = {}
        for state, how in itertools.product(STATES, HOWS):
            here = [result for case, result in self.results if (case.state, case.how) == (state, how)]
            if here:
                seconds = [result["seconds"] for result in here if result["seconds"] is not None]
                outcome.setdefault(state, {})[how] = {
                    "cases": len(here),
                    "wrong": sum(bool(result["wrong"]) for result in here),
                    "median_s": statistics.median(seconds) if seconds else None,
                    "max_s": max(seconds, default=None),
                }
        return outcome
