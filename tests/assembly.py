"""What the compilers make of every kernel, and checks that read it: each returns what is wrong with the assembly.

`tests/compile_kernels.py` compiles in processes of its own, a target once, from the first test on: with a lower
priority, while ranks of other tests wait for each other. Kernels that are broken on purpose (`tests/rma_kernels.py`)
show that each check can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
import fcntl
import itertools
import os
from pathlib import Path
import queue
import re
import subprocess
import sys
import threading
import time

from tests.processes import ROOT, python_path
from tests.untraced import copy_untraced

CUDA, HIP = ("sm_90", "sm_100"), ("gfx942", "gfx950")
UNTRACED = "sm_90 without tracing"
ENV_KERNELS = "IRIS_TEST_KERNELS"
FUSED = ("reduce_scatter", "all_reduce", "matmul_all_gather", "all_gather_matmul")
# Whose data says itself whether it has arrived: reductions, in which all ranks sum the same, and gathers.
REDUCTIONS = ("lamport_all_turns", "lamport_owners", "lamport_owners_norm", "lamport_scatter")
KEPT = ("lamport_all", "lamport_all_norm")  # reductions whose own part stays in registers
OF_TWO = ("lamport_narrow_of_two", "tree_all", "tree_narrow")
TREES = ("tree_owners", "tree_scatter", "tree_high")  # which take one root after the other
EXCHANGES = (*REDUCTIONS, *TREES, *KEPT, *OF_TWO, "lamport_gather", "lamport_gather_first")
WORLD_SIZE = 4  # of kernel_variants.py
_PROCESSES = {"sm_90": 2}  # which has as many kernels as two others
_LEAST_LIMIT_S, _TIMES_THE_SLOWEST = 300.0, 20.0  # of one kernel's compilation


@dataclass(frozen=True)
class Kernel:
    name: str
    text: str
    shared: int

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.text, re.MULTILINE))

    @property
    def lines(self) -> list[str]:
        """Instructions and labels, without what debuggers read."""
        stripped = (line.split("//")[0].split(" ; ")[0].strip() for line in self.text.splitlines())
        return [line for line in stripped if line and not re.match(r"\.loc|\$L__tmp|\.Ltmp|;|\{|\}|\.reg", line)]

    @property
    def instructions(self) -> list[str]:
        """The lines before the first source file's name, with which the tables for debuggers begin."""
        return list(itertools.takewhile(lambda line: not line.startswith(".file"), self.lines))


Kernels = dict[str, Kernel]


class Compilation:
    """Of a target's name, its kernels by name; those of `UNTRACED` are without any call that records events.

    Without those that are rare, unless `whole`; only those whose names match the environment's `IRIS_TEST_KERNELS`,
    where it is set: for tests of these.

    Test processes that share `folder` compile for a target once. Triton's cache keeps what was compiled before, by the
    hashes of its sources and of triton.
    """

    def __init__(self, folder: Path, whole: bool) -> None:
        self.whole = whole or ENV_KERNELS in os.environ  # whose pattern says what is wanted
        self._folder = folder
        self._processes: list[subprocess.Popen] = []
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._found: dict[str, Future[Kernels]] = {}

    def start(self, target: str) -> None:
        """Begins to compile for a target."""
        if target not in self._found:
            self._found[target] = self._pool.submit(self._compiled, target)

    def __call__(self, target: str) -> Kernels:
        self.start(target)
        return self._found[target].result()

    def _compiled(self, target: str) -> Kernels:
        folder = self._folder / target.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # which ends with its process
            if not (folder / "complete").exists():
                self._compile(target, folder)
                (folder / "complete").touch()
        return {path.stem: _read(path) for path in sorted(folder.iterdir()) if path.suffix in (".ptx", ".amdgcn")}

    def _compile(self, target: str, folder: Path) -> None:
        source, name = ROOT, target
        if target == UNTRACED:
            name, source = "sm_90", folder / "source"
            copy_untraced(source)
        pattern = os.environ.get(ENV_KERNELS, "" if self.whole else "-")
        command = [sys.executable, "-m", "tests.compile_kernels", name, str(folder), pattern]
        # the path is for what `copy_untraced` leaves here
        environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": python_path()}
        for begun in folder.glob("*.begun"):  # by processes that were ended
            begun.unlink()
        errors = folder / "errors"
        with errors.open("w") as said:
            started = [
                subprocess.Popen(command, cwd=source, env=environment, stdout=subprocess.PIPE, stderr=said, text=True)
                for _ in range(_PROCESSES.get(name, 1))
            ]
            self._processes += started
            with ThreadPoolExecutor(len(started)) as following:
                stuck = list(following.map(_followed, started))
        assert not any(stuck), f"{target}: {', '.join(stuck)}"
        assert not any(process.returncode for process in started), errors.read_text()[-4000:]

    def close(self) -> None:
        """Ends what nobody waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in self._processes:
            process.kill()


def _followed(process: subprocess.Popen) -> str:
    """Waits for a process that prints the name of each kernel before it compiles it. Says which one is stuck, if any.

    How long one may take follows from the slowest before it, so a machine that is slow or busy meets no limit.
    """
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line.strip())
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    name, slowest, begin = "starting", _LEAST_LIMIT_S / _TIMES_THE_SLOWEST, time.monotonic()
    while True:
        limit = max(_LEAST_LIMIT_S, _TIMES_THE_SLOWEST * slowest)
        try:
            line = lines.get(timeout=limit)
        except queue.Empty:
            process.kill()
            return f"{name} has not been compiled in {limit:.0f} s, the slowest before took {slowest:.0f} s"
        now = time.monotonic()
        name, slowest, begin = line, max(slowest, now - begin), now
        if not line:
            process.wait()
            return ""


def _read(path: Path) -> Kernel:
    return Kernel(path.stem, path.read_text(), int(path.with_suffix(".shared").read_text()))


def sound(kernels: Kernels) -> list[Kernel]:
    return [kernel for name, kernel in kernels.items() if not name.startswith(("broken_", "gluon_atomics"))]


def fused(kernels: Kernels) -> list[Kernel]:
    found = [kernel for name, kernel in kernels.items() if name.startswith(FUSED)]
    assert {prefix for prefix in FUSED for kernel in found if kernel.name.startswith(prefix)} == set(FUSED)
    return found


def all_complaints(kernels: list[Kernel], check: Callable[[Kernel], list[str]]) -> list[str]:
    return [f"{kernel.name}: {complaint}" for kernel in kernels for complaint in check(kernel)]


# --- PTX -------------------------------------------------------------------------------------------------------------

# Between programs of one GPU: the next tile of a common count; which program reports a failed wait; that one failed;
# the next recorded event.
CAS_A_REPORT = 2  # of `bounded.report`, by the second of these
LOCAL = (
    "atom.global.gpu.relaxed.add.u32",
    "atom.global.acq_rel.gpu.cas.b32",
    "atom.global.relaxed.gpu.cas.b32",
    "ld.global.gpu.relaxed.b32",
    "atom.global.gpu.relaxed.add.u64",
    "atom.global.gpu.relaxed.add.u64",  # the next record of a trace
    "red.global.gpu.relaxed.add.u32",  # that a program has read the counts of messages
)
# That all programs of this rank have put what arrived into the one gathered matrix.
AMONG_PROGRAMS = ("atom.global.gpu.acq_rel.add.u32", "atom.global.gpu.release.exch.b32")
ORDERED = re.compile(r"\b(?:atom|red|ld|st)\.[a-z0-9_.]*(?:release|acquire|acq_rel|relaxed)[a-z0-9_.]*")
BLOCK_BORDER = re.compile(r"\$L__BB\S*:|.*\bbra\b")


def unordered_releases(kernel: Kernel) -> list[str]:
    """Releases to peers that no barrier of the program precedes directly: nothing is stored in between."""
    found, lines = [], kernel.lines
    for index, line in enumerate(lines):
        if not re.search(r"\b(atom|red|st)\.\S*(release|acq_rel)", line) or LOCAL[1] in line:
            continue
        for before in reversed(lines[:index]):
            if before.startswith("bar.sync"):
                break
            if BLOCK_BORDER.match(before) or re.search(r"\b(st|atom|red)\.(?!shared)|cp\.async|\.func", before):
                found.append(f"{line} after {before}")
                break
        else:
            found.append(f"{line} without a barrier")
    return found


def narrow_scopes(kernel: Kernel) -> list[str]:
    """Ordered accesses that stop short of the system, other than the known local ones."""
    accesses = {match.group() for match in ORDERED.finditer(kernel.text)}
    local = {*LOCAL, *(AMONG_PROGRAMS if "lamport_gather_first" in kernel.name else ())}
    if "moe_lamport_down" in kernel.name:  # programs that have multiplied some columns
        local.add(AMONG_PROGRAMS[0])
    return sorted(access for access in accesses if ".sys" not in access and access not in local)


def narrow_stores(kernel: Kernel) -> list[str]:
    """Stores to global memory of other than 16 bytes, but for the words of sync blocks and failure records.

    And for where `out` lies, which is told to every peer, and how far each peer's lies from this rank's, which is kept.
    """
    kinds = re.findall(r"\bst\.(?:volatile\.)?global[a-z0-9_.:]*", kernel.text)
    reports = kernel.text.count(LOCAL[1]) // CAS_A_REPORT
    allowed = {"st.global.v4.b32": len(kinds), "st.global.b32": 3, "st.global.b64": 6 * reports + 2 * (WORLD_SIZE - 1)}
    if "_hopper_" in kernel.name:  # parts of shared tiles, kept by this rank as accumulators lie in registers
        allowed["st.global.v2.b32"] = 64
    return [
        f"{kinds.count(kind)} times {kind}" for kind in sorted(set(kinds)) if kinds.count(kind) > allowed.get(kind, 0)
    ]


def unbounded_waits(kernel: Kernel) -> list[str]:
    """A wait looks at its flag once, and then again and again between two looks at the clock, one of them before.

    Not meant are waits on an `mbarrier`: for loads, or for warps of the same program, whose own waits are looked at.
    """
    clocks = kernel.count(r"%globaltimer;|\bs_memrealtime\b")
    if kernel.name.removesuffix("_folded") in EXCHANGES:  # what is polled is data, by loads of several words
        return [f"{clocks} looks at the clock"] if clocks < 2 else []
    looks = kernel.count(r"\bld\.global\.sys\.acquire") + len(hip_acquires(kernel))
    return [f"{looks} acquires and {clocks} looks at the clock"] if clocks < looks else []


def unfenced_loads(kernel: Kernel) -> list[str]:
    """TMA loads after an acquire with no proxy fence in between."""
    found, acquired = [], False
    for line in kernel.lines:
        if ".acquire" in line:
            acquired = True
        elif line.startswith("fence.proxy.async.global"):
            acquired = False
        elif "cp.async.bulk.tensor" in line and acquired:
            found.append(line)
    return found


def unguarded_hand_overs(kernel: Kernel) -> list[str]:
    """Of warp-specialised programs: shared memory that is given on without a barrier of the warps that used it.

    That is the operands' place in the ring, of which the next load may begin when both groups of warps have multiplied,
    and the finished tile, of which one thread says that all have stored or read it.
    """
    steps = [line for line in kernel.lines if re.search(r"wgmma\.wait_group|bar\.sync|expect_tx", line)]
    read = [index for index, line in enumerate(steps) if re.search(r"wait_group\S*\s+1;", line)]
    found = [f"{steps[index + 1]} after {steps[index]}" for index in read if "bar.sync" not in steps[index + 1]]
    uses = [
        line
        for line in kernel.lines
        if re.search(r"\b(st|ld)\.shared|stmatrix|bar\.sync|mbarrier\.arrive\.shared", line)
    ]
    given = [index for index, line in enumerate(uses) if "mbarrier.arrive" in line]
    found += [f"{uses[index]} after {uses[index - 1]}" for index in given if "bar.sync" not in uses[index - 1]]
    return found if read and given else ["nothing is handed over"]


def registers(kernel: Kernel, folder: Path) -> int:
    """How many registers a thread has, by NVIDIA's assembler, which works in `folder`."""
    from triton.backends.nvidia.compiler import get_ptxas  # iris comes before triton

    source = folder / "kernel.ptx"
    source.write_text(kernel.text)
    command = [get_ptxas(90).path, "-v", "-arch", "sm_90a", source, "-o", folder / "kernel.cubin"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return int(re.search(r"Used (\d+) registers", said)[1])


# --- AMD -------------------------------------------------------------------------------------------------------------


def hip_acquires(kernel: Kernel) -> list[str]:
    """Looks at what peers signal: loads, or the additions of 0 that they are written as, which triton 3.9 leaves so."""
    lines = kernel.lines
    return [
        line
        for index, line in enumerate(lines)
        if re.match(r"global_(load_dword|atomic_add) .*sc0 sc1", line)
        and "buffer_inv sc0 sc1" in lines[index + 1 : index + 4]
        and not _released(lines[:index])
    ]


def _released(lines: list[str]) -> bool:
    """Whether a write-back to the system stands behind the last store or label of these."""
    for before in reversed(lines):
        if before.startswith("buffer_wbl2 sc0 sc1"):
            return True
        if re.match(r"(global|flat|buffer)_(store|atomic)|\.LBB", before):
            return False
    return False


def undrained_signals(kernel: Kernel) -> list[str]:
    """Signals to peers without, in this order and nothing stored in between: all stores drained, the program's barrier,
    the write-back to the system, the atomic. A program of one wave has no barrier.
    """
    found, lines = [], kernel.lines
    barrier = [] if kernel.count(r"\.max_flat_workgroup_size: 64$") else ["s_barrier"]
    for index, line in enumerate(lines):
        if not re.match(r"global_atomic_(swap|add) .* sc1", line):
            continue
        if "sc0 sc1" in line and not _released(lines[:index]):
            continue  # a look, see `hip_acquires`
        missing = ["buffer_wbl2 sc0 sc1", *barrier, "s_waitcnt vmcnt(0)"]
        for before in reversed(lines[:index]):
            if missing and before.startswith(missing[0]):
                missing.pop(0)
            if not missing:
                break
            if re.match(r"(global|flat|buffer)_(store|atomic)|\.LBB", before):
                found.append(f"{line}: no {missing[0]} after {before}")
                break
    return found


def narrow_hip_stores(kernel: Kernel) -> list[str]:
    return sorted(set(re.findall(r"(?:global|flat)_store_(?:short|byte)\w*", kernel.text)))
