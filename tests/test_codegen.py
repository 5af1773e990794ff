"""What the compilers make of every kernel, for each target: what x86 and small tests cannot show about ordering.

`tests/compile_kernels.py` compiles in a process of its own. The checks below read the assembly and return what is wrong
with it; kernels that are broken on purpose (`tests/rma_kernels.py`) show that each check can fail.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
import itertools
import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

from tests.harness import ROOT

pytestmark = pytest.mark.compile

SHARED_LIMIT = {"sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
CUDA, HIP = ("sm_90", "sm_100"), ("gfx942", "gfx950")
FUSED = ("reduce_scatter", "all_reduce", "matmul_all_gather", "all_gather_matmul")
EXCHANGES = ("few_rows_all", "few_rows_owners", "few_rows_scatter", "few_rows_gather", "few_rows_gather_first")
WORLD_SIZE = 4  # of compile_kernels.py


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


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Kernels]:
    """Of a target's name, its kernels by name; each target is compiled once."""
    known: dict[str, Kernels] = {}

    def kernels(target: str) -> Kernels:
        if target not in known:
            known[target] = _compile(target, tmp_path_factory.mktemp(target))
        return known[target]

    return kernels


def _compile(target: str, folder: Path, source: Path = ROOT) -> Kernels:
    command = [sys.executable, "-m", "tests.compile_kernels", target, str(folder)]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return {path.stem: _read(path) for path in sorted(folder.iterdir()) if path.suffix in (".ptx", ".amdgcn")}


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
LOCAL = (
    "atom.global.gpu.relaxed.add.u32",
    "atom.global.acq_rel.gpu.cas.b32",
    "atom.global.relaxed.gpu.cas.b32",
    "ld.global.gpu.relaxed.b32",
    "atom.global.gpu.relaxed.add.u64",
    "atom.global.gpu.relaxed.add.u64",  # the next record of a trace
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
    local = {*LOCAL, *(AMONG_PROGRAMS if kernel.name.endswith("few_rows_gather_first") else ())}
    return sorted(access for access in accesses if ".sys" not in access and access not in local)


def narrow_stores(kernel: Kernel) -> list[str]:
    """Stores to global memory of other than 16 bytes, but for the words of sync blocks and failure records."""
    kinds = re.findall(r"\bst\.(?:volatile\.)?global[a-z0-9_.:]*", kernel.text)
    reports = kernel.text.count(LOCAL[1])
    allowed = {"st.global.v4.b32": len(kinds), "st.global.b32": 3, "st.global.b64": 6 * reports}
    return [
        f"{kinds.count(kind)} times {kind}" for kind in sorted(set(kinds)) if kinds.count(kind) > allowed.get(kind, 0)
    ]


def unbounded_waits(kernel: Kernel) -> list[str]:
    """A wait looks at its flag once, and then again and again between two looks at the clock, one of them before."""
    clocks = kernel.count(r"%globaltimer;|\bs_memrealtime\b")
    if kernel.name in EXCHANGES:  # what is polled is data, by loads of several words
        return [f"{clocks} looks at the clock"] if clocks < 2 else []
    looks = kernel.count(r"\bld\.global\.sys\.acquire|^\s*global_load_dword .*sc0 sc1")
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


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("check", [unordered_releases, narrow_scopes, unbounded_waits], ids=lambda f: f.__name__)
def test_ptx_orders_signals(compiled, target: str, check: Callable[[Kernel], list[str]]) -> None:
    assert not all_complaints(sound(compiled(target)), check)


@pytest.mark.parametrize("target", CUDA)
def test_ptx_has_signals_and_waits(compiled, target: str) -> None:
    """So that the checks above do not look at nothing."""
    for kernel in fused(compiled(target)):
        # on entering a call, to each peer
        assert kernel.count(r"atom\.global\.sys\.release\.exch\.b32") >= WORLD_SIZE - 1, kernel.name
        assert kernel.count(r"atom\.global\.sys\.acq_rel\.add\.u32") == 1, kernel.name  # programs that have finished
        assert kernel.count(r"ld\.global\.sys\.acquire\.b32") >= 2 * (WORLD_SIZE - 1), kernel.name
    assert compiled(target)["rma_put_and_signal"].count(r"sys\.release\.exch\.b32") == 1


@pytest.mark.parametrize("target", CUDA)
def test_ptx_accesses_peers_by_16_bytes(compiled, target: str) -> None:
    kernels = compiled(target)
    stores = [*fused(kernels), kernels["rma_store"], kernels["rma_put_and_signal"]]
    assert not all_complaints(stores, narrow_stores)
    for kernel in stores:
        assert kernel.count(r"\bst\.global\.v4\.b32"), kernel.name
    for name in ("all_reduce_tma", "matmul_all_gather_tma"):
        # each value goes to every peer
        assert kernels[name].count(r"\bst\.global\.v4\.b32") >= WORLD_SIZE, name
    for name in ("rma_load", "rma_put_and_signal"):
        loads = set(re.findall(r"\bld\.global[a-z0-9_.]*", kernels[name].text))
        assert "ld.global.v4.b32" in loads and not loads & {"ld.global.b16", "ld.global.v2.b32"}, (name, loads)


@pytest.mark.parametrize("target", CUDA)
def test_ptx_of_benchmarks_moves_16_bytes_at_a_time(compiled, target: str) -> None:
    kernels = compiled(target)
    for name in ("benchmark_store", "benchmark_put"):
        assert not narrow_stores(kernels[name])
        assert kernels[name].count(r"\bst\.global\.v4\.b32") == 4, name
    for name in ("benchmark_load", "benchmark_put"):
        ahead = 2 * 4  # two blocks before the loop, and as many words in it for the next
        assert kernels[name].count(r"cp\.async\.cg\.shared\.global .*0x10") >= ahead, name


def test_ptx_of_a_store_warp(compiled) -> None:
    """Warps that multiply and warps that store: loads by TMA, 16-byte stores to every rank, barriers in between."""
    kernel = compiled("sm_90")["example_store_warp"]
    assert (
        kernel.count(r"setmaxnreg\.inc") >= 2 and kernel.count(r"wgmma\.mma_async") and kernel.count(r"cp\.async\.bulk")
    )
    assert kernel.count(r"\bst\.global\.v4\.b32") == WORLD_SIZE * 4 * 8  # ranks, parts of a tile, 16 bytes of a thread
    # the other warpgroup, too, has read the operands that the next loads overwrite
    loop = [line for line in kernel.lines if re.search(r"wgmma\.wait_group|bar\.sync|expect_tx", line)]
    waits = [index for index, line in enumerate(loop) if re.search(r"wait_group\S*\s+1;", line)]
    assert waits and all("bar.sync" in loop[index + 1] for index in waits), loop


@pytest.mark.parametrize("target", CUDA)
def test_ptx_uses_tensor_cores_and_tma(compiled, target: str) -> None:
    product = {"sm_90": r"wgmma\.mma_async\S*\.f32\.bf16\.bf16", "sm_100": r"tcgen05\.mma\S*kind::f16"}[target]
    for kernel in fused(compiled(target)):
        assert kernel.count(product), kernel.name
        assert bool(kernel.count(r"cp\.async\.bulk\.tensor")) != kernel.name.endswith("pointers"), kernel.name
    step = compiled(target)["step_stretch"]
    assert step.count(r"mma.sync.*bf16") and step.count(r"ld.global.*v4.b32"), "attention of a step reads 16 bytes"
    rounding = compiled(target)["round_rows"]
    assert rounding.count(r"cvt\.rn\.satfinite\.e4m3x2") and rounding.count(r"ld\.global\.v4\.b32")


@pytest.mark.parametrize("target", CUDA)
def test_ptx_fences_tma_loads_of_what_peers_stored(compiled, target: str) -> None:
    gathers = [compiled(target)[f"all_gather_matmul_{form}_tma"] for form in ("rows", "k")]
    assert not all_complaints(gathers, unfenced_loads)
    assert [kernel.count(r"fence\.proxy\.async\.global") >= 1 for kernel in gathers] == [True, True]


@pytest.mark.parametrize("target", CUDA)
def test_ptx_exchanges_words_without_fence_or_flag(compiled, target: str) -> None:
    """Sealed words go out written through and are read as volatile, 16 bytes at a time; no release to a peer."""
    for name in EXCHANGES:
        kernel = compiled(target)[name]
        peers = WORLD_SIZE if name in EXCHANGES[:3] else WORLD_SIZE - 1  # where all sum the same, its own words too
        assert kernel.count(r"\bst\.global\.wt\.v4\.b32") >= peers, name
        if target == "sm_90":  # 8 bytes where a share has few rows, and one word that says that a rank is in the call
            assert kernel.count(r"\bst\.global\.wt\.(?!v[24]\.b32)") in (0, WORLD_SIZE - 1), name
        assert kernel.count(r"\bld\.volatile\.global\.v[24]\.b32") >= peers, name
        released = [line for line in kernel.lines if "release" in line and ".sys" in line]
        assert len(released) == kernel.count(LOCAL[1].replace(".", r"\.")), (name, released)  # only failure records
        # only the flag of this rank's own programs that A is gathered
        assert kernel.count(r"sys\.acquire") == (2 if name == "few_rows_gather_first" else 0), name
        assert kernel.count(LOCAL[2].replace(".", r"\.")), name  # one thread marks a wait that has failed
        assert not narrow_scopes(kernel)
        assert kernel.count({"sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma|mma\.sync"}[target]), name


WORDS = {"ccl_words_one_shot": WORLD_SIZE, "ccl_words_two_shot": 1 + WORLD_SIZE}  # stores to ranks
FLAGS = {"ccl_flags_two_shot": 2 * WORLD_SIZE, "ccl_flags_scatter": WORLD_SIZE, "ccl_flags_gather": WORLD_SIZE}


@pytest.mark.parametrize("target", CUDA)
def test_ptx_of_collectives_moves_16_bytes_at_a_time(compiled, target: str) -> None:
    """Of rows that stand apart too; words without fence or flag, and all ranks signalled by one release."""
    kernels = compiled(target)
    for name, stores in WORDS.items():
        kernel = kernels[name]
        assert kernel.count(r"\bst\.global\.wt\.v4\.b32") == stores, name
        assert not kernel.count(r"\bst\.global\.wt\.(?!v4\.b32)"), name
        assert kernel.count(r"\bld\.volatile\.global\.v4\.b32") >= WORLD_SIZE, name
        assert not kernel.count(r"sys\.acquire|sys\.release\.exch\.b32"), name
    for name, stores in FLAGS.items():
        kernel = kernels[name]
        assert kernel.count(r"\bst\.global\.v4\.b32") >= stores, name
        assert not narrow_stores(kernel), name
        assert not kernel.count(r"\bld\.global\.(?!v4\.b32|b32|b64|cg\.v4|sys|gpu)"), name
        assert kernel.count(r"sys\.release\.exch\.b32") == (1 if name == "ccl_flags_scatter" else 2), name
    assert kernels["ccl_atomic"].count(r"\b(red|atom)\.global\.sys\.relaxed\.add\S*\.f32"), "no atomic at the system"
    assert not narrow_stores(kernels["ccl_ring"])


@pytest.mark.parametrize("target", CUDA)
def test_ptx_of_gluon_is_wide_and_reaches_the_system(compiled, target: str) -> None:
    kernels = compiled(target)
    copies, message, atomics = (kernels[f"gluon_{name}"] for name in ("copies", "put_and_signal", "atomics"))
    assert not narrow_stores(copies) and not narrow_stores(message)
    accesses = 2 * 4  # 2048 elements of 2 bytes by 128 threads are two of 16 bytes each, four times
    assert copies.count(r"\bst\.global\.v4\.b32") == copies.count(r"\bld\.global\.v4\.b32") == accesses
    assert message.count(r"sys\.release\.exch\.b32") == 1 and message.count(r"ld\.global\.sys\.acquire\.b32")
    for op in ("add.u32", "xor.b32", "and.b32", "or.b32", "min.s32", "max.s32"):
        assert atomics.count(re.escape(f"atom.global.sys.acq_rel.{op}")) == 1, op
    assert atomics.count(r"atom\.global\.acq_rel\.sys\.cas\.b32") == 1
    # as asked for
    assert atomics.count(r"sys\.relaxed\.exch\.b32") == atomics.count(r"gpu\.release\.add\.u32") == 1


# --- tracing ---------------------------------------------------------------------------------------------------------


def _without_tracing(source: str) -> str:
    """The source with `pass` in place of every statement that only serves to record events."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        call = getattr(node, "value", None) if isinstance(node, ast.Assign | ast.Expr) else None
        if isinstance(call, ast.Call) and re.search(
            r"\.record_event_(start|end)$|^tile_bytes$", ast.unparse(call.func)
        ):
            lines[node.lineno - 1] = " " * node.col_offset + "pass"
            lines[node.lineno : node.end_lineno] = [""] * (node.end_lineno - node.lineno)
    return "\n".join(lines) + "\n"


def test_tracing_that_is_off_leaves_no_instruction(compiled, tmp_path: Path) -> None:
    """Every kernel is the same as one from sources without the calls that record; with the flag, they are there."""
    changed = 0
    for package in ("iris", "iris_ops", "tests"):
        for path in (ROOT / package).rglob("*.py"):
            source = path.read_text()
            stripped = _without_tracing(source) if package != "tests" else source
            changed += stripped != source
            copy = tmp_path / "source" / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(stripped)
    assert changed >= 3
    with_calls, without = compiled("sm_90"), _compile("sm_90", tmp_path, tmp_path / "source")
    assert with_calls.keys() == without.keys()
    for name, kernel in with_calls.items():
        assert len(kernel.instructions) > 20, name
        same = kernel.instructions == without[name].instructions
        assert same != name.startswith("traced_"), name
    traced = [name for name in with_calls if name.startswith("traced_")]
    assert len(traced) >= 5
    for name in traced:
        kernel, bare = with_calls[name], without[name]
        spans = 2  # at least a product and a push, each with two looks at the clock and its place on the chip
        assert kernel.count("%globaltimer;") >= bare.count("%globaltimer;") + 2 * spans
        assert kernel.count("%smid;") >= spans and not bare.count("%smid;")
        assert kernel.count(r"atom\.global\.gpu\.relaxed\.add\.u64") == kernel.count("%smid;")


def test_a_traced_product_ends_when_it_is_complete(compiled) -> None:
    """Between the last tensor-core instruction and the look at the clock that ends its span stands the wait for it."""
    kernel = compiled("sm_90")["traced_all_reduce_tma"]
    lines = kernel.lines
    last = max(index for index, line in enumerate(lines) if "wgmma.mma_async" in line)
    end = next(index for index, line in enumerate(lines) if index > last and "%globaltimer" in line)
    waits = [line for line in lines[last:end] if "wgmma.wait_group" in line]
    assert waits and waits[-1].endswith(" 0;"), waits


@pytest.mark.parametrize("name", ["rma_recorded_put", "gluon_recorded_put"])
@pytest.mark.parametrize("target", CUDA + HIP)
def test_a_span_holds_the_work_alone(compiled, target: str, name: str) -> None:
    """The clock is read after all else that starts an event and before all else that ends it."""
    place, clock, load, store = {
        True: ("%smid;", "%globaltimer;", r"\bld\.global\.v4", r"\bst\.global\.v4"),
        False: ("HW_REG_XCC_ID", "s_memrealtime", "global_load_dwordx4", "global_store_dwordx4"),
    }[target in CUDA]
    lines = compiled(target)[name].lines
    assert any(place in line for line in lines)
    clocks, loads, stores = (
        [index for index, line in enumerate(lines) if re.search(pattern, line)] for pattern in (clock, load, store)
    )
    ends = [index for index in clocks if index > stores[-1]]
    starts = [index for index in clocks if index < loads[0]]
    assert starts and len(ends) == 1
    if target in CUDA:  # LLVM moves AMD's blocks about
        assert len(starts) == 1 and not any("atom." in line or "bar." in line for line in lines[starts[0] : ends[0]])


# --- AMD -------------------------------------------------------------------------------------------------------------


def undrained_signals(kernel: Kernel) -> list[str]:
    """Signals to peers without, in this order and nothing stored in between: all stores drained, the program's barrier,
    the write-back to the system, the atomic. A program of one wave has no barrier.
    """
    found, lines = [], kernel.lines
    barrier = [] if kernel.count(r"\.max_flat_workgroup_size: 64$") else ["s_barrier"]
    for index, line in enumerate(lines):
        if not re.match(r"global_atomic_(swap|add) .* sc1", line):
            continue
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


@pytest.mark.parametrize("target", HIP)
@pytest.mark.parametrize("check", [undrained_signals, unbounded_waits], ids=lambda f: f.__name__)
def test_amd_orders_signals(compiled, target: str, check: Callable[[Kernel], list[str]]) -> None:
    assert not all_complaints(sound(compiled(target)), check)
    for kernel in fused(compiled(target)):
        assert kernel.count(r"global_atomic_swap .* sc1") >= WORLD_SIZE - 1, kernel.name
        assert kernel.count(r"global_load_dword .*sc0 sc1") >= 2 * (WORLD_SIZE - 1), kernel.name


@pytest.mark.parametrize("target", HIP)
def test_amd_exchanges_words_past_its_caches(compiled, target: str) -> None:
    for name in EXCHANGES:
        kernel = compiled(target)[name]
        assert kernel.count(r"global_store_dword\w* .*sc0 sc1") >= WORLD_SIZE - 1, name
        assert kernel.count(r"global_load_dword\w* .*sc0 sc1") >= 2 * (WORLD_SIZE - 1), name


@pytest.mark.parametrize("target", HIP)
def test_amd_invalidates_what_it_acquired(compiled, target: str) -> None:
    for kernel in fused(compiled(target)):
        lines = kernel.lines
        for index, line in enumerate(lines):
            if re.match(r"global_load_dword .*sc0 sc1", line):
                after = lines[index + 1 : index + 4]
                assert "s_waitcnt vmcnt(0)" in after and "buffer_inv sc0 sc1" in after, (kernel.name, after)


@pytest.mark.parametrize("target", HIP)
def test_amd_uses_matrix_cores_and_wide_stores(compiled, target: str) -> None:
    kernels = compiled(target)
    stores = [*fused(kernels), kernels["rma_store"], kernels["rma_put_and_signal"]]
    assert not all_complaints(stores, narrow_hip_stores)
    for kernel in fused(kernels):
        assert kernel.count(r"v_mfma_f32_\w*bf16"), kernel.name
    for kernel in stores:
        assert kernel.count(r"global_store_dwordx4"), kernel.name
    assert kernels["rma_load"].count(r"global_load_dwordx4")


@pytest.mark.parametrize("target", HIP)
def test_amd_of_gluon_is_wide_and_reaches_the_system(compiled, target: str) -> None:
    kernels = compiled(target)
    copies, message, atomics = (kernels[f"gluon_{name}"] for name in ("copies", "put_and_signal", "atomics"))
    for kernel in (copies, message):
        assert kernel.count("global_store_dwordx4") and not narrow_hip_stores(kernel)
    assert copies.count("global_load_dwordx4") == copies.count("global_store_dwordx4") == 4
    assert message.count(r"global_atomic_swap .* sc1") == 1
    # at system scope LLVM makes loops around cmpswap of what PCIe does not offer: xor, and, or, min, max
    kinds = re.findall(r"global_atomic_(\w+) .*sc1", atomics.text)
    assert sorted(kinds) == ["add", *6 * ["cmpswap"], "swap"]
    assert atomics.count("global_atomic_") == len(kinds) + 1  # the one that was asked for at gpu scope


# --- all targets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", CUDA + HIP)
def test_kernels_fit_in_shared_memory_and_never_trap(compiled, target: str) -> None:
    for kernel in sound(compiled(target)):
        assert kernel.shared <= SHARED_LIMIT[target], (kernel.name, kernel.shared)
        assert not kernel.count(r"^\s*(trap|s_trap|brkpt)\b"), kernel.name


@pytest.mark.parametrize("target", CUDA + HIP)
@pytest.mark.parametrize(
    "name, cuda_check, hip_check",
    [
        ("no_barrier", unordered_releases, undrained_signals),
        ("late_store", unordered_releases, undrained_signals),
        ("gpu_scope", narrow_scopes, None),
        ("endless_wait", unbounded_waits, unbounded_waits),
        ("narrow_store", narrow_stores, narrow_hip_stores),
    ],
)
def test_the_checks_see_broken_kernels(compiled, target: str, name: str, cuda_check, hip_check) -> None:
    kernel = compiled(target)[f"broken_{name}"]
    check = cuda_check if target in CUDA else hip_check
    if check is None:
        assert not kernel.count("buffer_wbl2 sc0 sc1")  # the write-back that undrained_signals looks for
    else:
        assert check(kernel), kernel.text


def test_a_missing_fence_is_seen() -> None:
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier [%r1], [%rd1];"
    look, fence = "@%p1 ld.global.sys.acquire.b32 %r1, [%rd1];", "fence.proxy.async.global;"
    assert unfenced_loads(Kernel("", "\n".join([fence, look, load]), 0)) == [load]
    assert unfenced_loads(Kernel("", "\n".join([load, look, fence, load]), 0)) == []
