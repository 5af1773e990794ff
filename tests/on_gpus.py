"""The tests that run on GPUs, in shares beside each other: `python -m tests.on_gpus --ranks 2` (or `make test-gpu`).

Without slow ones, as `make test` has it on CPUs; `--all` (or `make test-gpu-all`) leaves nothing out.

Most of their time is compilation on CPU cores, so several torchruns share the GPUs, each with a share of one file's
tests. Their kernels take turns on the GPUs, which also shows what only goes wrong when a rank is late. With
IRIS_SHARE_GPUS=1 there may be more ranks than GPUs. One line a share as it ends, and what failed; the logs stay in a
folder that is named at the end if anything did.
"""

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
import math
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import time

from iris import platform
import torch

# Seconds that a test takes on 2 H100 beside 29 others, about, most of them for compilation.
_SECONDS = {
    "layers/test_compile.py": 50, "iris_ops/test_moe_invariance.py": 40, "iris_ops/test_hopper.py": 38,
    "iris_ops/test_fuzz.py": 32, "layers/test_families.py": 20, "layers/test_step_norms.py": 25, "iris/test_ccl.py": 15,
    "iris_ops/test_ops.py": 13, "layers/test_gradients.py": 15, "iris_ops/test_tree_matmul.py": 12,
    "iris_ops/test_outputs_on_gpus.py": 12, "layers/test_sequence.py": 11, "layers/test_folder.py": 9,
    "layers/test_autocast.py": 8, "layers/test_invariance.py": 6, "iris_ops/test_relaunch.py": 8,
    "iris_ops/test_gated.py": 8, "layers/test_fp8.py": 8, "iris/test_transfers.py": 7, "layers/test_images.py": 7,
    "iris_ops/test_launch_graphs.py": 7, "iris/test_rooted.py": 6, "iris_ops/test_moe.py": 5,
    "layers/test_generation.py": 5, "layers/test_recurrent_heads.py": 5, "layers/test_transformers_adapter.py": 5,
    "iris_ops/test_ragged.py": 4, "iris_ops/test_lamport_matmul.py": 4, "layers/test_graphs.py": 4,
    "iris/test_gluon.py": 4, "iris_ops/test_torch_ops.py": 4, "iris_ops/test_moe_calls.py": 3,
    "iris_ops/test_traced.py": 3, "iris_ops/test_graph.py": 3, "iris_ops/test_invariance.py": 2.5,
    "layers/test_fusions.py": 2.5, "coming_from_iris/test_programs.py": 2, "iris/test_ccl_graph.py": 2,
    "layers/test_mixtures.py": 2, "iris_ops/test_fp8.py": 2, "iris_ops/test_fp8_shares.py": 1,
    "iris_ops/test_rmsnorm_epilogue.py": 1, "layers/test_prefill_attention.py": 1,
    "layers/test_refused_plans.py": 0.8, "layers/test_parallelize.py": 0.8, "layers/test_skinny_matmul.py": 0.7,
    "iris_ops/test_bad_input.py": 0.6, "layers/test_linear.py": 0.4, "iris/test_context.py": 0.4,
    "iris_ops/test_copy_gather.py": 0.4, "iris_ops/test_plan.py": 0.2, "layers/test_malformed.py": 0.2,
    "iris_ops/test_predictions.py": 0.2,
}  # fmt: skip
_OTHERS, _LEAST_SECONDS = 1.5, 60  # of a share, beside its start, which takes some 22 s
# rounds, and waits of 0.3 s, need all ranks on their GPUs at the same time, offsets beyond 4 GiB a heap for themselves,
# and to count a GPU's free memory nobody else may take some
_ALONE = "test_litmus.py", "test_epoch.py", "test_far.py", "test_vmem.py"
_MOST_JOBS = 36
_MOST_HEAP, _LEAST_SHARES = 16 << 30, 6  # a test that fails keeps its heap while the next one has its own
_REASONS = 6  # lines of what went wrong, at most
_GRACE_S = 60.0  # for torchrun, which kills ranks that do not end in 30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpus = torch.cuda.device_count()
    ranks = max(2, gpus) if platform.sharing_gpus() else gpus or 2
    parser.add_argument("--ranks", type=int, default=ranks, help="default: all GPUs, or two that share one")
    parser.add_argument("--all", action="store_true", help="slow tests, too")
    parser.add_argument("--jobs", type=int, help="shares at a time; default: by CPU cores")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds that a share may take")
    parser.add_argument("paths", nargs="*", default=["tests"], help="files or folders; default: all")
    args = parser.parse_args()
    # of a share's ranks one compiles while the others wait for what it compiles; two thirds of the time there is work
    args.jobs = args.jobs or max(1, min(_MOST_JOBS, 3 * (os.cpu_count() or 1) // args.ranks - 2))
    args.marks = "gpu" if args.all else "gpu and not slow"
    return args


@dataclass(frozen=True)
class Share:
    """Tests of one torchrun: of one file every `cut`-th, from the `number`-th on, or several files' own."""

    seconds: float
    files: tuple[str, ...]
    number: int = 1
    cut: int = 1

    def __str__(self) -> str:
        return f"{self.files[0]} {self.number}/{self.cut}" if self.cut > 1 else ", ".join(self.files)


def shares(args: argparse.Namespace) -> tuple[list[Share], list[Share]]:
    """Those that may run beside others, which take longest first, and those that may not."""
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": "0"}  # as under torchrun
    command = [sys.executable, "-m", "pytest", "-m", args.marks, "--collect-only", "-q", *args.paths]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True)
    if listed.returncode:
        sys.exit(listed.stdout + listed.stderr)
    files = Counter(line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line)
    seconds = {file: count * _SECONDS.get(file.removeprefix("tests/"), _OTHERS) for file, count in files.items()}
    alone = tuple(file for file in files if file.endswith(_ALONE))
    most = max(_LEAST_SECONDS, sum(seconds.values()) / args.jobs)  # so that all shares begin at once
    found: list[Share] = []
    together: list[str] = []
    for file in sorted(files.keys() - set(alone), key=lambda file: -seconds[file]):
        cut = min(files[file], math.ceil(seconds[file] / most))
        if cut > 1:
            found += [Share(seconds[file] / cut, (file,), number, cut) for number in range(1, cut + 1)]
        else:
            together.append(file)
    while together:  # the longest, and the shortest as long as there is room
        taken = [together.pop(0)]
        while together and sum(map(seconds.__getitem__, [*taken, together[-1]])) <= most:
            taken.append(together.pop())
        found.append(Share(sum(map(seconds.__getitem__, taken)), tuple(taken)))
    found.sort(key=lambda share: -share.seconds)
    return found, [Share(sum(map(seconds.__getitem__, alone)), alone)] if alone else []


def run(args: argparse.Namespace, logs: Path, heap: int, share: Share) -> tuple[str, bool]:
    """The line that says what became of a share, and whether all went well."""
    log = logs / f"{share.files[0].removesuffix('.py').replace('/', '-')}-{share.number}.txt"
    environment = os.environ | {"IRIS_TEST_SHARE": f"{share.number}/{share.cut}", "IRIS_TEST_HEAP": str(heap)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += ["--no-python", sys.executable, "-m", "pytest", "-m", args.marks, "-q", "-p", "no:cacheprovider"]
    command += share.files
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(args.time_limit)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            code = None
    text = log.read_text(errors="replace")
    found = re.findall(r"(\d+ (?:passed|failed|skipped|errors?)\b.*?) in [\d.]+s", text) or ["no result"]
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)))
    failed += list(dict.fromkeys(re.findall(r"^E  .*", text, re.M)))[:_REASONS]
    if code and not failed:  # all tests passed, and then a rank did not end as it should
        failed = [f"exit code {code}", *[line for line in text.splitlines() if line.strip()][-_REASONS:]]
    outcome = f"not done after {args.time_limit:.0f} s" if code is None else found[0]
    line = f"{share}: {outcome}, {time.monotonic() - begin:.0f} s"
    return "\n    ".join([line, *failed]), code == 0


def heap_of(ranks: int, jobs: int) -> int:
    """Bytes of a heap: half of the memory for all, for models and what is not on heaps takes some too."""
    if not torch.cuda.is_available():
        return _MOST_HEAP
    on_each = -(-ranks // torch.cuda.device_count())
    return min(_MOST_HEAP, torch.cuda.get_device_properties(0).total_memory // (2 * jobs * on_each))


def main() -> int:
    args = parse()
    logs = Path(tempfile.mkdtemp(prefix="iris-gpu-tests-"))
    begin, wrong = time.monotonic(), 0
    beside, alone = shares(args)
    count = len(beside) + len(alone)
    where = "" if torch.cuda.is_available() else ", on CPUs, for no GPU is here"
    print(f"{count} shares, {args.jobs} at a time, {args.ranks} ranks each{where}", flush=True)
    for several, jobs in ((beside, args.jobs), (alone, 1)):
        with ThreadPoolExecutor(jobs) as pool:
            heap = heap_of(args.ranks, max(jobs, _LEAST_SHARES))
            if several is beside:  # what must run alone runs here only to compile its kernels, whatever comes of it
                for share in alone:
                    pool.submit(run, args, logs, heap, share)
            for done in as_completed([pool.submit(run, args, logs, heap, share) for share in several]):
                line, well = done.result()
                wrong += not well
                print(line, flush=True)
    ended = f"{wrong} of {count} shares failed; their logs: {logs}" if wrong else "all passed"
    print(f"{ended}, {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
