"""Measures anew what the tables show, the most telling first: `python -m benchmarks.again --budget 400`.

Each step is one benchmark with its own limit, which ends early where the budget does; what was skipped is printed. All
write JSON files to `--out`; those of `benchmarks/results/` are what `python -m benchmarks.report` renders.

Rivals that are installed come from elsewhere, and a kernel of theirs that hangs would take a whole run with it. So a
few rows run first; if they do not come through, the rest runs without FlashInfer, then without vLLM, too.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

import torch

from benchmarks.measuring import report

SPARE_S = 15.0  # of the budget, for starting and ending
PROBE_S = 110.0
PROBE = "ops --quick --modes graph --shapes given --ops ar,rs,ag,ga --rows 16,8192,2048;1024,4096,2048"


@dataclass(frozen=True)
class Step:
    """`line`: a benchmark and its arguments; `name`: of the JSON file, where it is not the benchmark's own."""

    key: str
    line: str
    limit_s: float
    name: str = ""


STEPS = [
    Step("ops", "ops --quick --modes graph --shapes facts", 85),
    Step("norms", "norms --quick --modes graph", 60),
    Step("between", "ops --quick --modes graph --shapes between", 70, "ops_between_{gpu}"),
    Step("models", "ops --quick --modes graph --shapes prefill-sample,decode-sample", 110, "ops_models_{gpu}"),
    Step("ccl", "ccl --modes graph", 60),
    Step(
        "llm-8b",
        "llm --model llama-3-8b --compile --contenders ours,nccl,ours-batch,ours-ranks,vllm,vllm-batch"
        " --batches 1,16,64 --prompts 128,2048 --rounds 2 --vllm-limit 190",
        200,
        "llm_llama-3-8b_compiled_{gpu}",
    ),
    Step("rma", "rma", 40),
    Step(
        "llm-32b",
        "llm --model qwen3-32b --compile --contenders ours,nccl,vllm --batches 1,16,64 --prompts 128 --rounds 2"
        " --vllm-limit 170",
        110,
        "llm_qwen3-32b_compiled_{gpu}",
    ),
    Step(
        "llm-70b",
        "llm --model llama-3-70b --compile --contenders ours,nccl,vllm --batches 1,16,64 --prompts 128 --rounds 2"
        " --vllm-limit 200",
        130,
        "llm_llama-3-70b_compiled_{gpu}",
    ),
]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    keys = [step.key for step in STEPS]
    parser.add_argument("--only", type=report.some_of(keys), default=",".join(keys), help="default: %(default)s")
    parser.add_argument("--budget", type=report.at_least(1.0), default=1200.0, help="seconds; default: %(default)s")
    parser.add_argument("--ranks", type=report.at_least(1), default=torch.cuda.device_count() or 2)
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the JSON files")
    parser.add_argument("--no-probe", action="store_true", help="trust the rivals that are installed")
    return parser.parse_args(argv)


def line_of(step: Step, gpu: str, ranks: int, out: Path, limit_s: float) -> list[str]:
    """Return the command of a step."""
    name = step.name or f"{step.line.split()[0]}_{{gpu}}"
    command = [sys.executable, "-m", f"benchmarks.{step.line.split()[0]}", *step.line.split()[1:]]
    named = ["--name", f"{name.format(gpu=gpu)}_x{ranks}"]
    return [*command, "--ranks", str(ranks), "--time-limit", f"{limit_s:.0f}", *named, "--out", str(out)]


def run(line: list[str], timeout_s: float) -> bool:
    """Run the command; return whether it succeeded. Kill it, with its children, after `timeout_s`."""
    began = time.monotonic()
    with subprocess.Popen(line, start_new_session=True) as child:
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            code = -9
    print(f"=== {' '.join(line[2:])}: {code} after {time.monotonic() - began:.0f} s", flush=True)
    return code == 0


def probe(ranks: int, out: Path) -> None:
    """Leave out, through the environment, the rivals with which a few rows fail."""
    for without in ("", "flashinfer", "flashinfer,vllm"):
        os.environ["IRIS_WITHOUT"] = without
        probe = PROBE.split()
        line = [sys.executable, "-m", f"benchmarks.{probe[0]}", *probe[1:], "--ranks", str(ranks), "--name", "probe"]
        if run([*line, "--out", str(out)], PROBE_S):
            return


def main() -> None:
    args = parse()
    end = time.monotonic() + args.budget
    gpu = report.slug(torch.cuda.get_device_name()).partition("-")[0] if torch.cuda.is_available() else "cpu"
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.no_probe:
        probe(args.ranks, args.out)
        (args.out / "probe.json").unlink(missing_ok=True)
    skipped = []
    for step in (step for step in STEPS if step.key in args.only):
        limit = min(step.limit_s, end - time.monotonic() - SPARE_S)
        if limit < step.limit_s / 3:
            skipped.append(step.key)
            continue
        run(line_of(step, gpu, args.ranks, args.out, limit), end - time.monotonic())
    print(f"left out for want of time: {', '.join(skipped)}" if skipped else "all measured")


if __name__ == "__main__":
    main()
