"""Check the assembly of every compiled kernel; each check returns the faulty instructions.

A check depends on nothing but the kernel's name and code, so its answer can be recorded (`tests/compilation.py`). What
the expected answer is in the tests. Kernels that are broken on purpose (`tests/rma_kernels.py`) show that each
check can fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
import itertools
from pathlib import Path
import re
import subprocess
import tempfile
from typing import Any

CUDA, HIP = ("sm_90", "sm_100"), ("gfx942", "gfx950")
FUSED = ("reduce_scatter", "all_reduce", "matmul_all_gather", "all_gather_matmul")
# Whose data says itself whether it has arrived: reductions, in which all ranks sum the same, and gathers.
REDUCTIONS = ("lamport_all_turns", "lamport_owners", "lamport_scatter")
KEPT = ("lamport_all", "lamport_all_norm")  # reductions whose own part stays in registers
OF_TWO = ("lamport_narrow_of_two", "tree_all", "tree_narrow")
TREES = ("tree_owners", "tree_scatter")  # which take one root after the other
OTHERS = dict.fromkeys(OF_TWO, 1) | dict.fromkeys(TREES, 2)  # peers, of fewer ranks than the rest
EXCHANGES = (*REDUCTIONS, *TREES, *KEPT, *OF_TWO, "lamport_gather", "lamport_gather_first")
WORLD_SIZE = 4  # of most of kernel_cases.py


class Kernel:
    """The compiled code of a kernel, and what tests ask of it: answers are JSON, for the record keeps them."""

    def __init__(self, name: str, text: str, shared: int) -> None:
        self.name, self.shared, self._text = name, shared, text

    def ask(self, question: str, work: Callable[[Kernel], Any]) -> Any:
        """The answer of `work(self)`; `question` names it."""
        return work(self)

    def count(self, pattern: str) -> int:
        return self.ask(f"count {pattern}", lambda self: len(re.findall(pattern, self.text, re.MULTILINE)))

    def tally(self, pattern: str) -> dict[str, int]:
        """How often each text stands there that the pattern matches, or that its one group does."""
        return self.ask(f"tally {pattern}", lambda self: dict(sorted(Counter(re.findall(pattern, self.text)).items())))

    def first(self, pattern: str) -> int:
        """The number of the first line that has it."""
        return self.ask(
            f"first {pattern}", lambda self: next(i for i, line in enumerate(self.lines) if re.search(pattern, line))
        )

    @property
    def text(self) -> str:
        """The assembly. Only what `ask` is given should look at it: of a recorded kernel it is compiled then."""
        return self._text

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
Check = Callable[[Kernel], Any]


def question(check: Check) -> Check:
    """Has a recorded kernel answer what it answered before."""

    @wraps(check)
    def requested(kernel: Kernel) -> Any:
        return kernel.ask(check.__name__, check)

    return requested


def sound(kernels: Kernels) -> list[Kernel]:
    return [kernel for name, kernel in kernels.items() if not name.startswith(("broken_", "gluon_atomics"))]


def fused(kernels: Kernels) -> list[Kernel]:
    fused = [kernel for name, kernel in kernels.items() if name.startswith(FUSED)]
    assert {prefix for prefix in FUSED for kernel in fused if kernel.name.startswith(prefix)} == set(FUSED)
    return fused


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


@question
def unordered_releases(kernel: Kernel) -> list[str]:
    """Releases to peers that no barrier of the program precedes directly: nothing is stored in between."""
    wrong, lines = [], kernel.lines
    for index, line in enumerate(lines):
        if not re.search(r"\b(atom|red|st)\.\S*(release|acq_rel)", line) or LOCAL[1] in line:
            continue
        for before in reversed(lines[:index]):
            if before.startswith("bar.sync"):
                break
            if BLOCK_BORDER.match(before) or re.search(r"\b(st|atom|red)\.(?!shared)|cp\.async|\.func", before):
                wrong.append(f"{line} after {before}")
                break
        else:
            wrong.append(f"{line} without a barrier")
    return wrong


@question
def releases_without_barriers(kernel: Kernel) -> list[str]:
    """Return releases that no barrier precedes, as `unordered_releases` reports them."""
    text = re.sub(r"^\s*bar\.sync.*\n", "", kernel.text, flags=re.MULTILINE)
    return unordered_releases(Kernel(kernel.name, text, kernel.shared))


@question
def narrow_scopes(kernel: Kernel) -> list[str]:
    """Ordered accesses that stop short of the system, other than the known local ones."""
    accesses = {match.group() for match in ORDERED.finditer(kernel.text)}
    local = {*LOCAL, *(AMONG_PROGRAMS if "lamport_gather_first" in kernel.name else ())}
    if "moe_lamport_down" in kernel.name or "moe_stream_down" in kernel.name:  # programs that have multiplied columns
        local.add(AMONG_PROGRAMS[0])
    return sorted(access for access in accesses if ".sys" not in access and access not in local)


@question
def narrow_stores(kernel: Kernel) -> list[str]:
    """Return stores to global memory that are not 16 bytes wide, except in sync blocks and failure records.

    Also except the offset of `out`, which every peer receives, and the kept distances to the peers' `out`.
    """
    kinds = re.findall(r"\bst\.(?:volatile\.)?global[a-z0-9_.:]*", kernel.text)
    reports = kernel.text.count(LOCAL[1]) // CAS_A_REPORT
    allowed = {"st.global.v4.b32": len(kinds), "st.global.b32": 3, "st.global.b64": 6 * reports + 2 * (WORLD_SIZE - 1)}
    if "_hopper_" in kernel.name:  # parts of shared tiles, kept by this rank as accumulators lie in registers
        allowed["st.global.v2.b32"] = 64
        if kernel.name.endswith("_fp8_block"):  # whose columns lie apart
            allowed["st.global.b32"] += 64
    return [
        f"{kinds.count(kind)} times {kind}" for kind in sorted(set(kinds)) if kinds.count(kind) > allowed.get(kind, 0)
    ]


@question
def unbounded_waits(kernel: Kernel) -> list[str]:
    """A wait looks at its flag once, and then again and again between two looks at the clock, one of them before.

    Not meant are waits on an `mbarrier`: for loads, or for warps of the same program, whose own waits are looked at.
    """
    clocks = kernel.count(r"%globaltimer;|\bs_memrealtime\b")
    if kernel.name.removesuffix("_folded") in EXCHANGES:  # what is polled is data, by loads of several words
        return [f"{clocks} looks at the clock"] if clocks < 2 else []
    looks = kernel.count(r"\bld\.global\.sys\.acquire") + hip_acquires(kernel)
    return [f"{looks} acquires and {clocks} looks at the clock"] if clocks < looks else []


@question
def unfenced_loads(kernel: Kernel) -> list[str]:
    """TMA loads after an acquire with no proxy fence in between."""
    wrong, acquired = [], False
    for line in kernel.lines:
        if ".acquire" in line:
            acquired = True
        elif line.startswith("fence.proxy.async.global"):
            acquired = False
        elif "cp.async.bulk.tensor" in line and acquired:
            wrong.append(line)
    return wrong


@question
def unguarded_hand_overs(kernel: Kernel) -> list[str]:
    """Return where a warp-specialised program passes on shared memory without a barrier of the warps that used it.

    That is the operands' place in the ring, of which the next load may begin when both groups of warps have multiplied,
    and the finished tile, of which one thread says that all have stored or read it.
    """
    steps = [line for line in kernel.lines if re.search(r"wgmma\.wait_group|bar\.sync|expect_tx", line)]
    read = [index for index, line in enumerate(steps) if re.search(r"wait_group\S*\s+[1-9];", line)]
    wrong = [f"{steps[index + 1]} after {steps[index]}" for index in read if "bar.sync" not in steps[index + 1]]
    uses = [
        line
        for line in kernel.lines
        if re.search(r"\b(st|ld)\.shared|stmatrix|bar\.sync|mbarrier\.arrive\.shared", line)
    ]
    given = [index for index, line in enumerate(uses) if "mbarrier.arrive" in line]
    wrong += [f"{uses[index]} after {uses[index - 1]}" for index in given if "bar.sync" not in uses[index - 1]]
    return wrong if read and given else ["nothing is handed over"]


@question
def registers(kernel: Kernel) -> int:
    """How many registers a thread has, by NVIDIA's assembler."""
    return int(re.search(r"Used (\d+) registers", _assembled(kernel)[0])[1])


@question
def machine_steps(kernel: Kernel) -> dict[str, Any]:
    """Of the machine code: the first step that waits, leads or touches memory; how often it waits, leads and loads."""
    memory = r"LD|ST|LDG\w*|STG|ATOM\w*|RED\w*|UTM\w+|UBLK\w+|CCTL\w*"
    steps = re.findall(rf"\b(?:ACQBULK|PREEXIT|{memory}|BRA|EXIT)\b", _assembled(kernel)[1])
    loads = sum(bool(re.search("LDG|UTM", step)) for step in steps)
    return dict(first=steps[0], waits=steps.count("ACQBULK"), leads=steps.count("PREEXIT"), loads=loads)


def _assembled(kernel: Kernel) -> tuple[str, str]:
    """Return the report of NVIDIA's assembler for a kernel, and its machine code."""
    import triton  # iris comes before triton
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\w+)", kernel.text, re.MULTILINE)[1]
    with tempfile.TemporaryDirectory() as folder:
        source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(kernel.text)
        command = [get_ptxas(90).path, "-v", "-arch", target, source, "-o", binary]
        message = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        shown = [triton.knobs.nvidia.nvdisasm.path, "-c", binary]
        return message, subprocess.run(shown, check=True, capture_output=True, text=True).stdout


@question
def steps_of_launching(kernel: Kernel) -> dict[str, Any]:
    """Of kernels that run beside others: the first step; how often they wait for the kernel before and let in the next;
    whether they multiply, and whether they do so after they have let it in.
    """
    wait, lead = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    touches = r"ld|st|atom|red|cp|mbarrier|fence|prefetchu?|tensormap|discard|applypriority"
    any_step = rf"{wait}|{lead}|\b(?:{touches})\.[a-z]\w*|\b(?:bra|ret|call|exit)\b|mma"  # no way around the wait
    code = re.sub("//.*", "", kernel.text)
    steps = [step for step in re.findall(any_step, code) if step not in ("ld.param", "ld.shared")]
    late = steps[steps.index(lead) :] if lead in steps else []
    answers = dict(first=steps[0], waits=steps.count(wait), leads=steps.count(lead))
    return answers | dict(multiplies="mma" in steps, multiplies_late="mma" in late)


@question
def changes_before_the_wait(kernel: Kernel) -> list[str]:
    """Stores to memory, and atomics, before a kernel waits for the one before it."""
    before, *_ = re.sub("//.*", "", kernel.text).split("griddepcontrol.wait")
    return re.findall(r"\b(?:st|atom|red)\.(?!shared)[a-z]\w*", before)


@question
def accesses_before_the_wait(kernel: Kernel) -> list[str]:
    """Accesses to memory of any kind, and copies from it, before a kernel waits for the one before it."""
    before, *_ = re.sub("//.*", "", kernel.text).split("griddepcontrol.wait")
    return re.findall(r"\b(?:(?:ld|st|atom|red)\.(?:[a-z]+\.)*global|cp\.async|prefetchu?)\b[.a-z0-9_:]*", before)


@question
def system_releases(kernel: Kernel) -> int:
    return sum("release" in line and ".sys" in line for line in kernel.lines)


@question
def looks_at_values(kernel: Kernel) -> list[int]:
    """How many vectors of Lamport values a program looks at before it sends its own, and in all."""
    looks = [i for i, line in enumerate(kernel.lines) if "ld.volatile.global.v4.b32" in line]
    sent = next(i for i, line in enumerate(kernel.lines) if "st.global.wt.v4.b32" in line)
    return [sum(i < sent for i in looks), len(looks)]


@question
def hand_overs_without_barriers(kernel: Kernel) -> int:
    """How many complaints there would be if no barrier stood there."""
    return len(unguarded_hand_overs(Kernel(kernel.name, kernel.text.replace("bar.sync", "nothing"), kernel.shared)))


@question
def waits_at_the_end_of_a_product(kernel: Kernel) -> list[str]:
    """Between the last tensor-core instruction and the next look at the clock."""
    lines = kernel.lines
    last = max(index for index, line in enumerate(lines) if "wgmma.mma_async" in line)
    end = next(index for index, line in enumerate(lines) if index > last and "%globaltimer" in line)
    return [line for line in lines[last:end] if "wgmma.wait_group" in line]


@question
def looks_around_a_copy(kernel: Kernel) -> dict[str, Any]:
    """Of a recorded copy: looks at the place on the chip, at the clock before the first load and behind the last store,
    and steps of ordering in between.
    """
    place, clock, load, store = {
        True: ("%smid;", "%globaltimer;", r"\bld\.global\.v4", r"\bst\.global\.v4"),
        False: ("HW_REG_XCC_ID", "s_memrealtime", "global_load_dwordx4", "global_store_dwordx4"),
    }[".target sm" in kernel.text]
    lines = kernel.lines
    clocks, loads, stores = (
        [index for index, line in enumerate(lines) if re.search(pattern, line)] for pattern in (clock, load, store)
    )
    ends = [index for index in clocks if index > stores[-1]]
    starts = [index for index in clocks if index < loads[0]]
    within = lines[starts[0] : ends[0]] if starts and ends else []
    ordering = sum("atom." in line or "bar." in line for line in within)
    places = sum(place in line for line in lines)
    return dict(places=places, starts=len(starts), ends=len(ends), ordering=ordering)


# --- AMD -------------------------------------------------------------------------------------------------------------


@question
def hip_acquires(kernel: Kernel) -> int:
    """How many looks at what peers signal: loads, or additions of 0, as which they are written and 3.9 leaves them."""
    lines = kernel.lines
    return sum(
        bool(re.match(r"global_(load_dword|atomic_add) .*sc0 sc1", line))
        and "buffer_inv sc0 sc1" in lines[index + 1 : index + 4]
        and not _released(lines[:index])
        for index, line in enumerate(lines)
    )


def _released(lines: list[str]) -> bool:
    """Return whether a write-back to the system follows the last store or label."""
    for before in reversed(lines):
        if before.startswith("buffer_wbl2 sc0 sc1"):
            return True
        if re.match(r"(global|flat|buffer)_(store|atomic)|\.LBB", before):
            return False
    return False


@question
def undrained_signals(kernel: Kernel) -> list[str]:
    """Signals to peers without, in this order and nothing stored in between: all stores drained, the program's barrier,
    the write-back to the system, the atomic. A program of one wave has no barrier.
    """
    wrong, lines = [], kernel.lines
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
                wrong.append(f"{line}: no {missing[0]} after {before}")
                break
    return wrong


@question
def narrow_hip_stores(kernel: Kernel) -> list[str]:
    return sorted(set(re.findall(r"(?:global|flat)_store_(?:short|byte)\w*", kernel.text)))
