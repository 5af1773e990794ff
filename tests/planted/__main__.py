"""Plants each fault in a copy of a commit and runs the tests that should notice: see the package's docstring."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
import contextlib
import json
import os
from pathlib import Path
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from tests.compilation import ENV_KERNELS
from tests.planted.faults import FAULTS, Fault
from tests.processes import ROOT

FAST = "not gpu and not slow"  # what `make test` runs
_SHORT = {"IRIS_TEST_TIMEOUT": "40"}  # seconds that the ranks of a test wait for each other, not 120
_NO_TESTS = 4, 5  # pytest's exit codes: of a test that is not in its file, and where none is chosen


@contextlib.contextmanager
def copies(commit: str, count: int) -> Iterator[queue.SimpleQueue[Path]]:
    """So many git worktrees of `commit`, which are removed at the end; of "." copies of this one as it stands."""
    free: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        paths = [Path(folder, str(number)) for number in range(count)]
        try:
            for path in paths:
                if commit == ".":
                    shutil.copytree(ROOT, path, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
                else:
                    _git("worktree", "add", "--detach", str(path), commit)
                free.put(path)
            yield free
        finally:
            for path in paths:
                if path.exists() and commit != ".":
                    _git("worktree", "remove", "--force", str(path))


def _git(*args: str) -> None:
    subprocess.run(["git", *args], cwd=ROOT, check=True, capture_output=True)


def file_of(test: str) -> str:
    """The file of a test, or of a file itself."""
    return test.partition("::")[0]


def run_tests(
    copy: Path, tests: Sequence[str], marks: str, limit_s: float, *options: str, kernels: str = "", gpus: int = 0
) -> dict[str, Any]:
    """How the tests in a copy end ("passed", "failed" or "hung"), those that failed, and seconds.

    On so many `gpus`, under torchrun, if there are any.
    """
    there = [test for test in tests if (copy / file_of(test)).exists()]
    if not there:
        return {"ended": "no such tests", "by": [], "seconds": 0.0}
    ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), "-m"] if gpus else []
    line = [sys.executable, "-m", *ranks, "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", *options, *there]
    begin = time.monotonic()
    process = subprocess.Popen(
        line, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy), ENV_KERNELS: kernels, **_SHORT}, text=True,
        start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=limit_s)
        ended = {0: "passed", **dict.fromkeys(_NO_TESTS, "no such tests")}.get(process.returncode, "failed")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks that it started, too
        printed, _ = process.communicate()
        ended = "hung"
    by = re.findall(r"^(?:FAILED|ERROR) (.*)", printed, re.MULTILINE)
    by = by or ([printed[-2000:]] if ended == "failed" else [])
    return {"ended": ended, "by": by, "seconds": round(time.monotonic() - begin, 1)}


def plant(copy: Path, fault: Fault) -> str | None:
    """Replaces the fault's text in the copy; returns what stood in the file, or None where the text is not there."""
    path = copy / fault.file
    text = path.read_text() if path.exists() else ""
    if text.count(fault.old) != 1:
        return None
    path.write_text(text.replace(fault.old, fault.new))
    return text


def try_fault(copy: Path, fault: Fault, marks: str, limit_s: float, gpus: int = 0) -> dict[str, Any]:
    """Whether the fault's tests notice it."""
    text = plant(copy, fault)
    if text is None:
        return {"name": fault.name, "file": fault.file, "outcome": "not there"}
    try:
        tests = fault.on_gpus if gpus else fault.tests
        found = run_tests(copy, tests, marks, limit_s, "-x", kernels=fault.kernels, gpus=gpus)
    finally:
        (copy / fault.file).write_text(text)
    outcome = {"passed": "missed", "failed": "caught", "hung": "caught"}.get(found["ended"], found["ended"])
    return {"name": fault.name, "file": fault.file, "outcome": outcome, **found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", help="the faults to plant, by default all")
    parser.add_argument("--at", default="HEAD", help="the commit that is copied, or . (default: HEAD)")
    parser.add_argument("--marks", default=FAST, help=f"which tests run, as pytest's -m (default: {FAST!r})")
    parser.add_argument("--jobs", type=int, default=2, help="copies that are tested at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a run has hung (default: 600)")
    parser.add_argument("--out", default="planted.json", help="where the results go (default: planted.json)")
    parser.add_argument("--gpus", type=int, default=0, help="only the faults that GPUs see, on so many of them")
    given = parser.parse_args()
    if given.gpus:
        given.marks, given.jobs = "gpu", 1
    chosen = [fault for fault in FAULTS if not given.names or fault.name in given.names]
    chosen = [fault for fault in chosen if not given.gpus or fault.on_gpus]
    if unknown := set(given.names) - {fault.name for fault in FAULTS}:
        parser.error(f"no such faults: {', '.join(sorted(unknown))}")

    def save(results: list[dict[str, Any]]) -> None:
        report = {"at": given.at, "marks": given.marks, "results": results}
        Path(given.out).write_text(json.dumps(report, indent=1) + "\n")

    with copies(given.at, given.jobs) as free, ThreadPoolExecutor(given.jobs) as pool:

        def in_a_copy(work, *args) -> dict[str, Any]:
            copy = free.get()
            try:
                return work(copy, *args, given.marks, given.limit, given.gpus)
            finally:
                free.put(copy)

        judged, copy = [], free.get()
        for kernels in dict.fromkeys(fault.kernels for fault in chosen):
            alike = [fault for fault in chosen if fault.kernels == kernels]
            asked = {fault: fault.on_gpus if given.gpus else fault.tests for fault in alike}
            tests = list(dict.fromkeys(test for each in asked.values() for test in each))
            sound = run_tests(copy, tests, given.marks, 10 * given.limit, kernels=kernels, gpus=given.gpus)
            print(f"without a fault: {sound['ended']} in {sound['seconds']} s", *sound["by"], sep="\n", flush=True)
            known = sound["ended"] == "passed" or all("::" in by.partition(" ")[0] for by in sound["by"])
            judged += [each for each in alike if known and not any(by.startswith(asked[each]) for by in sound["by"])]
        free.put(copy)
        results = []
        try:
            for found in pool.map(lambda fault: in_a_copy(try_fault, fault), judged):
                results.append(found)
                by = " ".join(found.get("by", ()))[:100]
                print(f"{found['outcome']:14}{found.get('seconds', 0):6.1f} s  {found['name']}: {by}", flush=True)
                save(results)
        except BaseException:
            pool.shutdown(cancel_futures=True)  # else an interrupt would wait for all that are left
            raise
    caught = sum(found["outcome"] == "caught" for found in results)
    unsound = len(chosen) - len(judged)
    print(f"{caught} of {len(results)} caught; {unsound} not judged, for their tests fail without a fault")


if __name__ == "__main__":
    main()
