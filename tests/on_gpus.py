"""All tests that run on GPUs, in shares beside each other: `python -m tests.on_gpus --ranks 2` (or `make test-gpu`).

Most of their time is compilation on CPU cores, so several torchruns share the GPUs, each with a share of one file's
tests. Their kernels take turns on the GPUs, which also shows what only goes wrong when a rank is late. With
IRIS_SHARE_GPUS=1 there may be more ranks than GPUs. One line a share as it ends, and what failed; the logs stay in a
folder that is named at the end if anything did.
"""

import argparse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
import os
from pathlib import Path
import re
import subprocess
import sys
import tempfile
import time

from iris import platform
import torch

# Seconds that a test takes there, about, most of them for compilation; and what a share should take.
_SECONDS = {"test_ccl.py": 16, "test_warp_roles.py": 20, "test_fuzz.py": 13, "test_compile.py": 10, "test_ops.py": 5}
_OTHERS, _SHARE_SECONDS = 2, 80
# rounds, and waits of 0.3 s, need all ranks on their GPUs at the same time, offsets beyond 4 GiB a heap for themselves
_ALONE = "test_litmus.py", "test_epoch.py", "test_far.py"
_MOST_HEAP, _LEAST_SHARES = 16 << 30, 6  # a test that fails keeps its heap while the next one has its own
_REASONS = 6  # lines of what went wrong, at most
_GRACE_S = 60.0  # for torchrun, which kills ranks that do not end in 30


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    gpus = torch.cuda.device_count()
    ranks = max(2, gpus) if platform.sharing_gpus() else gpus or 2
    parser.add_argument("--ranks", type=int, default=ranks, help="default: all GPUs, or two that share one")
    parser.add_argument("--jobs", type=int, help="shares at a time; default: by CPU cores, at most 16")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds that a share may take")
    parser.add_argument("paths", nargs="*", default=["tests"], help="files or folders; default: all")
    args = parser.parse_args()
    args.jobs = args.jobs or max(1, min(16, (os.cpu_count() or 1) // args.ranks))
    return args


def shares(args: argparse.Namespace) -> list[tuple[str, int, int]]:
    """(file, share, of how many), those that take longest first."""
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": str(args.ranks), "LOCAL_RANK": "0"}  # as under torchrun
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *args.paths]
    listed = subprocess.run(command, env=environment, capture_output=True, text=True)
    if listed.returncode:
        sys.exit(listed.stdout + listed.stderr)
    files = Counter(line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line)
    seconds = {file: count * _SECONDS.get(Path(file).name, _OTHERS) for file, count in files.items()}
    cuts = {file: min(files[file], -(-seconds[file] // _SHARE_SECONDS)) for file in files}
    longest = sorted(files, key=lambda file: -seconds[file] / cuts[file])
    return [(file, share, cuts[file]) for file in longest for share in range(1, cuts[file] + 1)]


def run(args: argparse.Namespace, logs: Path, heap: int, file: str, share: int, cut: int) -> tuple[str, bool]:
    """The line that says what became of a share, and whether all went well."""
    name = f"{file} {share}/{cut}" if cut > 1 else file
    log = logs / f"{file.removesuffix('.py').replace('/', '-')}-{share}.txt"
    environment = os.environ | {"IRIS_TEST_SHARE": f"{share}/{cut}", "IRIS_TEST_HEAP": str(heap)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
    command += ["--no-python", sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", file]
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
    line = f"{name}: {outcome}, {time.monotonic() - begin:.0f} s"
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
    todo, wrong = shares(args), 0
    where = "" if torch.cuda.is_available() else ", on CPUs, for no GPU is here"
    print(f"{len(todo)} shares, {args.jobs} at a time, {args.ranks} ranks each{where}", flush=True)
    alone = [each for each in todo if each[0].endswith(_ALONE)]
    for several, jobs in (([each for each in todo if each not in alone], args.jobs), (alone, 1)):
        with ThreadPoolExecutor(jobs) as pool:
            heap = heap_of(args.ranks, max(jobs, _LEAST_SHARES))
            for done in as_completed([pool.submit(run, args, logs, heap, *each) for each in several]):
                line, well = done.result()
                wrong += not well
                print(line, flush=True)
    print(f"{wrong} of {len(todo)} shares failed; their logs: {logs}" if wrong else "all passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
