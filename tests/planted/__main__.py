"""Plants each fault in a copy of this checkout and runs the tests that should notice: see the package's docstring."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from tests.compilation import ENV_KERNELS
from tests.planted.faults import FAULTS, Fault
from tests.processes import ROOT

MARKS = "not gpu and not slow"  # what `make test` runs


def run_tests(copy: Path, tests: tuple[str, ...], kernels: str, limit_s: float) -> tuple[str, str]:
    """How the tests in a copy end, "passed", "failed" or "hung", and the first of them that failed."""
    line = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", MARKS, "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        line, cwd=copy, text=True, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": str(copy), ENV_KERNELS: kernels, "IRIS_TEST_TIMEOUT": "40"},
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the ranks that it started, too
        process.communicate()
        return "hung", ""
    first = re.search(r"^(?:FAILED|ERROR) (.*)", printed, re.MULTILINE)
    return ("failed" if process.returncode else "passed"), first[1] if first else printed[-500:] * bool(
        process.returncode
    )


def try_fault(copy: Path, fault: Fault, limit_s: float) -> tuple[str, str]:
    """("caught" or "missed", by which test)."""
    path = copy / fault.file
    sound = path.read_text()
    path.write_text(fault.planted(sound))
    try:
        ended, by = run_tests(copy, fault.tests, fault.kernels, limit_s)
    finally:
        path.write_text(sound)
    return "missed" if ended == "passed" else "caught", by or ended


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", help="the faults to plant, by default all")
    parser.add_argument("--share", default="1/1", help="which part of them, as 1/3")
    parser.add_argument("--limit", type=float, default=600, help="seconds after which a run has hung (default: 600)")
    given = parser.parse_args()
    if unknown := set(given.names) - {fault.name for fault in FAULTS}:
        parser.error(f"no such faults: {', '.join(sorted(unknown))}")
    share, shares = map(int, given.share.split("/"))
    chosen = [fault for fault in FAULTS if not given.names or fault.name in given.names][share - 1 :: shares]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "__pycache__", "build"))
        for fault in chosen:
            begin = time.monotonic()
            outcome, by = try_fault(copy, fault, given.limit)
            missed += outcome == "missed"
            print(f"{outcome:8}{time.monotonic() - begin:6.0f} s  {fault.name}: {by[:150]}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} caught")


if __name__ == "__main__":
    main()
