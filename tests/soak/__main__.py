"""`python -m tests.soak --seconds 600 [--ranks 2]`: random calls, stress and faults, as long as one likes.

On CPUs calls are random, of all shapes; on GPUs, where every new shape is compiled, they are of fixed shapes, 10^5 one
by one and 10^4 times 100 in a graph (`benchmarks.stress`, which CPUs run shortly, too). Then faults, several at a time,
until each state has met each fault `--times` times or the time is over. `soak_<gpu>_x<ranks>.json` is written as the
run goes, so that one which is cut off leaves what it has. Exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing.util
import os
from pathlib import Path
import re
import shutil
import sys
import tempfile
import time
import traceback
from typing import Any

import iris  # noqa: F401  before triton on a machine without a GPU
from iris_tp.bench.team import Team, launch
import torch

from benchmarks import stress
from benchmarks.measuring import report
from tests import harness
import tests.layers  # noqa: F401  so that the server of ranks imports models' code
from tests.processes import ENV_START, run_fresh
from tests.soak import faults, resources
from tests.soak.states import HOWS, STATES

PARTS = ("calls", "stress", "faults")
# The server that ranks are forked from must not begin to use a GPU, not even to ask whether there is one.
_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_STOPS_S = 10.0  # before the end of the time, in which what is under way ends


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("tests.soak", description=__doc__.splitlines()[0])
    gpu = torch.cuda.is_available()
    parser.add_argument("--seconds", type=report.at_least(10.0), default=600.0, help="of the whole run")
    parser.add_argument("--device", type=report.device, choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    parser.add_argument("--ranks", type=report.at_least(2), help="default: all GPUs, or two CPU ranks")
    parser.add_argument("--times", type=report.at_least(1), default=20, help="each state meets each fault, at most")
    parser.add_argument("--parts", type=report.some_of(PARTS), help="default: all; GPUs have no calls of all shapes")
    parser.add_argument("--states", type=lambda text: report.some_of(STATES)(text), default=list(STATES))
    parser.add_argument("--jobs", type=report.at_least(1), help="fault cases at a time; default: by CPU cores")
    parser.add_argument("--timeout", type=report.at_least(0.5), help="IRIS_TIMEOUT of faults; default 5, on GPUs 10")
    parser.add_argument("--calls", type=report.at_least(0), help="of stress, one by one; default 100000, CPUs 2000")
    parser.add_argument("--replays", type=report.at_least(0), help="of stress; default 10000, CPUs 20")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON file")
    parser.add_argument("--name", help="of the JSON file; default: soak, GPU, ranks")
    parser.add_argument("--add", action="store_true", help="to what the file has of parts that this run leaves out")
    args = parser.parse_args(argv)
    gpu = args.device == "cuda"
    args.ranks = args.ranks or (max(2, torch.cuda.device_count()) if gpu else 2)
    args.parts = args.parts or (PARTS[1:] if gpu else PARTS)
    if gpu and "calls" in args.parts:
        parser.error("--parts calls: expected stress,faults on GPUs, where every random shape would be compiled")
    args.jobs = args.jobs or max(4, min(16, (os.cpu_count() or 2) // args.ranks))  # most of them wait
    args.timeout = args.timeout or (10.0 if gpu else 5.0)
    args.calls = (100_000 if gpu else 2000) if args.calls is None else args.calls
    args.replays = (10_000 if gpu else 20) if args.replays is None else args.replays
    args.benchmark, args.dtype = "soak", "bfloat16"
    args.command = report.command("soak", sys.argv[1:] if argv is None else argv).replace("benchmarks.", "tests.")
    return args


class Soak:
    """The parts of a run, and what is written of them."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder, self.begin = args, folder, time.monotonic()
        self.end = self.begin + args.seconds - _STOPS_S
        team = Team(0, args.ranks, torch.device(args.device))
        self.failures: list[str] = []
        self.written = report.describe_run(team, args) | {"cpus": os.cpu_count(), "seconds_asked": args.seconds}
        self.written |= {"timeout_s": args.timeout, "slack_s": faults.SLACK_S}
        args.name = args.name or f"soak_{report.slug(self.written['gpu']).partition('-')[0]}_x{args.ranks}"
        self.seconds = 0.0
        if args.add and (path := report.path(self.written, args)).exists():
            self._add(json.loads(path.read_text()))

    def _add(self, earlier: dict[str, Any]) -> None:
        """Add the parts of an `earlier` run on the same number of equal GPUs to those of this run."""
        kept = {
            part: earlier[part] for part in (*PARTS, "resources") if part in earlier and part not in self.args.parts
        }
        self.failures += [each for each in earlier["failures"] if each not in self.failures]
        self.seconds = earlier["seconds"]
        self.written |= kept | {"command": f"{earlier['command']} && {self.written['command']}"}

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:4.0f} s] {text}", flush=True)

    def share(self, part: float) -> float:
        """When that part of the time that is left is over."""
        now = time.monotonic()
        return now + part * max(0.0, self.end - now)

    def write(self, **entries: Any) -> None:
        self.written |= entries
        self.written["seconds"] = self.seconds + time.monotonic() - self.begin
        self.written["failures"] = self.failures
        path = report.path(self.written, self.args)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(report.rounded(self.written), indent=1, allow_nan=False) + "\n")
        partial.replace(path)

    def run(self) -> bool:
        if any(end.exitcode for end in run_fresh(2, faults.touch, self.args.device)):
            self.say("a forked process cannot use the GPU: ranks are spawned, which takes them seconds")
            os.environ[ENV_START] = "spawn"
        before = resources.Before(self.folder / "tmp", self.args.ranks if self.args.device == "cuda" else 0)
        for part in self.args.parts:
            try:
                getattr(self, part)()
            except Exception as error:
                self.failures.append(f"{part}: {error!r}\n{traceback.format_exc()[-2000:]}")
            self.write()
        harness.close_pools()
        figures, wrong = before.after()
        self.failures += wrong
        self.written["resources"] = self.written.get("resources", {}) | figures
        self.write(passed=not self.failures)
        return not self.failures

    def calls(self) -> None:
        from tests.soak.calls import Calls

        end = self.share(0.22)
        worlds = sorted({2, 3, self.args.ranks})
        random_calls = Calls(1000 * self.args.seed, say=self.say)
        random_calls.run(worlds, min(end, self.share(0.3)))  # what is kept of calls that are new, is kept by now
        held = resources.of_ranks(worlds) if not random_calls.failures else {}
        random_calls.run(worlds, end)
        more, wrong = resources.growth(held, resources.of_ranks(worlds) if held and not random_calls.failures else held)
        harness.close_pools()
        self.failures += [*random_calls.failures, *wrong]
        self.write(calls=random_calls.table(), resources=more)

    def stress(self) -> None:
        gpu = self.args.device == "cuda"
        here = self.folder / "stress"
        left = self.end - time.monotonic()
        limit_s = 0.6 * left if gpu else min(left, max(50.0, 0.12 * left))
        requested = ["--ranks", self.args.ranks, "--device", self.args.device, "--calls", self.args.calls, "--replays",
                 self.args.replays, "--seed", self.args.seed, "--out", here, "--name", "stress"]  # fmt: skip
        requested += ["--time-limit", round(limit_s / 3)] + ([] if gpu else ["--graph-calls", 20])
        options = stress.parse([str(each) for each in requested])
        code = launch(stress.run, options, limit_s)
        path = here / "stress.json"
        recorded = json.loads(path.read_text()) if path.exists() else {}
        kept = {key: recorded.get(key) for key in ("command", "cases", "calls", "replays", "deviating")}
        if code or not recorded:
            self.failures.append(f"stress ended with {code}; deviating: {kept['deviating']}")
        self.write(stress=kept | {"command": re.sub(r" --name \S+", "", kept["command"] or "")})

    def faults(self) -> None:
        args = self.args
        model = faults.save_model(self.folder / "model")
        here = self.folder / "faults"
        here.mkdir()
        self.failures += faults.warm_up(args.ranks, model, here, args.states)
        self.say(f"{len(args.states)} states run without a fault; now with, {args.jobs} cases at a time")
        run = faults.Faults(here, args.timeout, args.jobs, self.say)
        every = args.jobs * 4

        def tell() -> None:
            if len(run.results) % every == 0:
                self.say(f"{len(run.results)} faults, {len(run.failures)} went wrong")
                self.write(faults=run.table())

        latest = self.end - args.timeout - faults.SLACK_S  # what begins then ends in time
        run.run(faults.draw(args.ranks, args.times, args.states, list(HOWS), args.seed), model, latest, tell)
        self.failures += run.failures
        self.write(faults=run.table(), repeated=run.repeated)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    folder = Path(tempfile.mkdtemp(prefix="iris-soak-"))
    (folder / "tmp").mkdir()
    multiprocessing.util.get_temp_dir()  # which goes when this process ends: not in our folder
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
    soak = Soak(args, folder)
    try:
        passed = soak.run()
    finally:
        harness.close_pools()
        shutil.rmtree(folder, ignore_errors=True)
    for failure in soak.failures:
        soak.say(f"FAILED: {failure}")
    soak.say(f"{'passed' if passed else 'FAILED'}: {report.path(soak.written, args)}")
    return 0 if passed else 1


if __name__ == "__main__":
    for name, value in (faults.QUIET | _FORKS).items():
        os.environ.setdefault(name, value)
    sys.exit(main())
