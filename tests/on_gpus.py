"""Run the GPU tests in parallel shares: `python -m tests.on_gpus --ranks 2` (or `make test-gpu`).

Without slow ones, as `make test` has it on CPUs; `--all` (or `make test-gpu-all`) leaves nothing out.

Most of their time is compilation on CPU cores, so several torchruns share the GPUs, each with a share of one file's
tests. Their kernels take turns on the GPUs, which also shows what only goes wrong when a rank is late. With
IRIS_SHARE_GPUS=1 there may be more ranks than GPUs. One line a share as it ends, and what failed; the logs stay in a
folder that is named at the end if anything did.
"""

import argparse
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import dataclass
import fcntl
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

# Seconds that a file's tests take on 2 H100 beside 35 others, about, most of them for compilation. With slow tests it
# is more, of all files alike.
_SECONDS = {
    "iris_ops/test_ops.py": 690, "iris_ops/test_hopper.py": 520, "layers/test_compile.py": 320,
    "iris_ops/test_graph.py": 320, "iris_ops/test_ragged.py": 270, "layers/test_step_norms.py": 180,
    "iris_ops/test_moe_invariance.py": 150, "layers/test_skinny_matmul.py": 150, "iris_ops/test_tree_matmul.py": 140,
    "iris_ops/test_quantised.py": 500, "iris_ops/test_moe_formats.py": 300, "layers/test_kept_weights.py": 120,
    "layers/test_quantised_experts.py": 90, "iris_ops/test_moe_choose.py": 60, "iris_ops/test_moe.py": 130,
    "layers/test_sequence.py": 130, "iris_ops/test_moe_calls.py": 120, "iris_ops/test_fp8.py": 120,
    "layers/test_recurrent_heads.py": 110, "coming_from_iris/test_programs.py": 100, "iris_ops/test_gated.py": 100,
    "iris/test_transfers.py": 90, "iris_ops/test_launch_graphs.py": 90, "layers/test_autocast.py": 90,
    "iris/test_ccl.py": 90, "layers/test_families.py": 85, "layers/test_mixtures.py": 85, "layers/test_fp8.py": 80,
    "iris_ops/test_outputs_on_gpus.py": 80, "layers/test_invariance.py": 70, "iris_ops/test_fuzz.py": 70,
    "iris/test_ccl_graph.py": 65, "iris_ops/test_rmsnorm_epilogue.py": 55, "layers/test_prefill_attention.py": 40,
    "iris_ops/test_traced.py": 40, "iris_ops/test_invariance.py": 40, "layers/test_engine.py": 40,
    "iris_ops/test_relaunch.py": 40, "iris_ops/test_copy_gather.py": 35, "iris/test_gluon.py": 35,
    "layers/test_gradients.py": 35, "iris_ops/test_fp8_shares.py": 35, "layers/test_folder.py": 35,
    "layers/test_generation.py": 35, "iris/test_rma.py": 30, "layers/test_fusions.py": 30,
    "layers/test_fused_heads.py": 30, "iris_ops/test_bad_input.py": 30, "iris_ops/test_epoch.py": 30,
    "iris_ops/test_torch_ops.py": 30, "iris/test_tiles.py": 30, "layers/test_decode_attention.py": 30,
    "layers/test_parallelize.py": 30, "layers/test_pretrained.py": 30, "iris/test_places_of_results.py": 30,
    "iris/test_atomics.py": 30, "layers/test_lifecycle.py": 25, "layers/test_gated.py": 25,
    "layers/test_images.py": 25, "layers/test_linear.py": 25, "layers/test_refused_plans.py": 25,
    "iris_ops/test_order.py": 25, "layers/test_graphs.py": 25, "layers/test_saving.py": 25,
    "iris/test_ccl_calls.py": 25,
}  # fmt: skip
_OTHERS, _LEAST_SECONDS = 15, 60  # of a file; of a share, beside its start, which takes some 22 s
_FOR_GPUS = re.compile(r"^pytestmark = .*\bboth\b|^ +\*both,$|\bmark\.gpu\b", re.M)  # in the files that have such tests
# rounds, and waits of 0.3 s, need all ranks on their GPUs at the same time, offsets beyond 4 GiB a heap for themselves,
# to count a GPU's free memory nobody else may take some, and what is measured is the machine's if nobody else uses it
_ALONE = "test_litmus.py", "test_epoch.py", "test_far.py", "test_vmem.py", "test_calibrate.py"
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
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("tests")], help="files or folders; default: all")
    args = parser.parse_args()
    if lost := [str(path) for path in args.paths if not path.exists()]:
        parser.error(f"no such files: {', '.join(lost)}")
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
    """Return the shares that may run in parallel, the longest first, and those that may not.

    It reads the files, because pytest would import them for half a minute to count their tests.
    """
    given = [file for path in args.paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    files = sorted(str(path) for path in given if _FOR_GPUS.search(path.read_text()))
    seconds = {file: _SECONDS.get(file.removeprefix("tests/"), _OTHERS) for file in files}
    alone = tuple(file for file in files if file.endswith(_ALONE))
    parallel = {file: each for file, each in seconds.items() if file not in alone}
    most = max(_LEAST_SECONDS, sum(parallel.values()) / args.jobs)
    parts = _cut(parallel, most)
    while len(parts) > args.jobs:  # all begin at once; one that began later would end alone
        most *= 1.02
        parts = _cut(parallel, most)
    parts.sort(key=lambda share: -share.seconds)
    return parts, [Share(sum(map(seconds.__getitem__, alone)), alone)] if alone else []


def _cut(seconds: dict[str, float], most: float) -> list[Share]:
    """Shares of these files of about `most` seconds at most."""
    parts: list[Share] = []
    together: list[str] = []
    for file in sorted(seconds, key=lambda file: -seconds[file]):
        cut = math.ceil(seconds[file] / most)
        if cut > 1:
            parts += [Share(seconds[file] / cut, (file,), number, cut) for number in range(1, cut + 1)]
        else:
            together.append(file)
    while together:  # the longest, and the shortest as long as there is room
        taken = [together.pop(0)]
        while together and sum(map(seconds.__getitem__, [*taken, together[-1]])) <= most:
            taken.append(together.pop())
        parts.append(Share(sum(map(seconds.__getitem__, taken)), tuple(taken)))
    return parts


def run(args: argparse.Namespace, logs: Path, heap: int, share: Share, turn: str = "") -> tuple[str, bool]:
    """Run a share. Return a line with its result, and whether all its tests passed.

    Where there is a file `turn`, its tests begin when this process has unlocked it, and its ranks start before.
    """
    log = logs / f"{share.files[0].removesuffix('.py').replace('/', '-')}-{share.number}{'-alone' if turn else ''}.txt"
    environment = os.environ | {"IRIS_TEST_SHARE": f"{share.number}/{share.cut}", "IRIS_TEST_HEAP": str(heap)}
    environment |= {"IRIS_TEST_TURN": turn} if turn else {}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += ["--no-python", sys.executable, "-m", "pytest", "-m", args.marks, "-q", "-p", "no:cacheprovider"]
    command += share.files
    begin = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = process.wait(args.time_limit * (2 if turn else 1))
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun ends its ranks
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
            code = None
    text = log.read_text(errors="replace")
    summary = re.findall(r"(\d+ (?:passed|failed|skipped|errors?)\b.*?) in [\d.]+s", text) or ["no result"]
    failed = sorted(set(re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.M)))
    failed += list(dict.fromkeys(re.findall(r"^E  .*", text, re.M)))[:_REASONS]
    # of a file with fewer tests than shares
    empty = share.number > 1 and not failed and re.search(r"no tests ran|^\d+ deselected in", text, re.M) is not None
    if code and not failed and not empty:  # all tests passed, and then a rank did not end as it should
        failed = [f"exit code {code}", *[line for line in text.splitlines() if line.strip()][-_REASONS:]]
    outcome = f"not done after {args.time_limit:.0f} s" if code is None else summary[0]
    line = f"{share}: {outcome}, {time.monotonic() - begin:.0f} s{', waiting for the others included' if turn else ''}"
    return "\n    ".join([line, *failed]), code == 0 or empty


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
    parallel, alone = shares(args)
    count = len(parallel) + len(alone)
    where = "" if torch.cuda.is_available() else ", on CPUs, for no GPU is here"
    print(f"{count} shares, {args.jobs} at a time, {args.ranks} ranks each{where}", flush=True)
    heap, whole = heap_of(args.ranks, max(args.jobs, _LEAST_SHARES)), heap_of(args.ranks, _LEAST_SHARES)

    def reported(running: list[Future[tuple[str, bool]]]) -> int:
        """How many of them went wrong, with a line for each as it ends."""
        failed = 0
        for done in as_completed(running):
            line, well = done.result()
            failed += not well
            print(line, flush=True)
        return failed

    with ThreadPoolExecutor(args.jobs) as pool, (logs / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        early = [pool.submit(run, args, logs, heap, share) for share in alone]  # only to compile, whatever comes of it
        first = [pool.submit(run, args, logs, heap, share) for share in parallel]
        last = [pool.submit(run, args, logs, whole, share, turn.name) for share in alone]  # start when a place is free
        wrong += reported(first)
        wait(early)
        fcntl.flock(turn, fcntl.LOCK_UN)
        wrong += reported(last)
    ended = f"{wrong} of {count} shares failed; their logs: {logs}" if wrong else "all passed"
    print(f"{ended}, {time.monotonic() - begin:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
