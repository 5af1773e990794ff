"""The PTX of every kernel: what x86 and small tests cannot show about ordering, and how wide its accesses are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import re

import pytest

from tests import fresh
from tests.assembly import (
    AMONG_PROGRAMS,
    CAS_A_REPORT,
    CUDA,
    EXCHANGES,
    FUSED,
    KEPT,
    LOCAL,
    OTHERS,
    REDUCTIONS,
    TREES,
    WORLD_SIZE,
    Kernel,
    accesses_before_the_wait,
    all_complaints,
    changes_before_the_wait,
    fused,
    machine_steps,
    narrow_scopes,
    narrow_stores,
    registers,
    sound,
    steps_of_launching,
    system_releases,
    unbounded_waits,
    unfenced_loads,
    unordered_releases,
)

pytestmark = pytest.mark.compile


@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("check", [unordered_releases, narrow_scopes, unbounded_waits], ids=lambda f: f.__name__)
def test_ptx_orders_signals(compiled, target: str, check: Callable[[Kernel], list[str]]) -> None:
    assert not all_complaints(sound(compiled(target)), check)


@pytest.mark.parametrize("target", CUDA)
def test_ptx_has_signals_and_waits(compiled, target: str) -> None:
    """So that the checks above do not look at nothing."""
    for kernel in fused(compiled(target)):
        if "all_gather_matmul_hopper" not in kernel.name:  # for which barriers and copies signal
            # on entering a call, a lane to each peer
            assert kernel.count(r"atom\.global\.sys\.release\.exch\.b32") >= 1, kernel.name
            assert kernel.count(r"atom\.global\.sys\.acq_rel\.add\.u32") == 1, (
                kernel.name
            )  # programs that have finished
        # at all peers at once, or else at one, at tiles and parts of tiles
        looks = r"atom\.global\.sys\.acquire\.add\.u32|ld\.global\.sys\.acquire\.b32"
        assert kernel.count(looks) >= 2, kernel.name
    assert compiled(target)["rma_put_and_signal"].count(r"sys\.release\.exch\.b32") == 1


@pytest.mark.parametrize("target", CUDA)
def test_ptx_acquires_at_every_look_at_a_flag(compiled, target: str) -> None:
    """Also in the loop of a wait, at a lock, and among the programs of one GPU that gather rows together."""
    kernels = compiled(target)
    relaxed = r"\b(?:atom|ld)\.global\.(?:sys\.relaxed|relaxed\.sys)\.(?:add\.|cas\.|exch\.)?[bu]32"
    for name, kernel in kernels.items():
        if name.startswith((*FUSED, "ccl_", "lamport_")):
            assert not kernel.count(relaxed), name
    assert kernels["ccl_spinlock"].count(r"\batom\.global\.acquire\.sys\.cas\.b32")
    for access in AMONG_PROGRAMS:
        assert kernels["lamport_gather_first"].count(re.escape(access)) == 1, access


@pytest.mark.parametrize("target", CUDA)
def test_ptx_of_kernels_that_are_launched_beside_others(compiled, target: str) -> None:
    """They wait before anything else, and let the next one in when they have multiplied. Others do neither."""
    offenders = [
        kernel
        for kernel in compiled(target).values()
        if re.search(
            "^(traced_)?lamport_(?!pair|two_shot)|^tree_|step_|skinny_|fp8_tiles|^gate$|^norm|^first_half$|^round_rows$|^moe_",
            kernel.name,
        )
    ]
    assert len(offenders) >= 15
    for kernel in offenders:
        steps = steps_of_launching(kernel)
        streamed = kernel.count(r"\.entry moe_(?:stream|widened)_")  # whose warps part first, and make their barriers
        assert (steps["waits"], steps["leads"]) == (1, 1), kernel.name
        first = not accesses_before_the_wait(kernel) if streamed else steps["first"] == "griddepcontrol.wait"
        assert first, kernel.name
        # tensor cores: sums, fp32, gates
        plain = {"step_weigh", "step_weigh_pairs", "step_wide", "gate", "norm", "norm_sum", "first_half", "round_rows"}
        plain |= {"moe_choose", "moe_choose_sorted", "moe_choose_of_groups"}
        plain |= {"moe_route", "moe_route_counted", "moe_count", "moe_lamport_token", "moe_lamport_token_columns"}
        plain |= {"moe_lamport_token_four_ranks"}
        without = kernel.name in plain or "combine" in kernel.name
        assert steps["multiplies"] != without, kernel.name
        # LLVM puts the loop over an expert's rows behind the rest, where a look at the order of lines does not follow
        # the stream of experts lets the next one in before its last item, the product by widened codes before its last
        # tile
        late = streamed or kernel.name.startswith("moe_lamport_down_")
        assert not steps["multiplies_late"] or late, kernel.name
    by_tiles = re.compile("^example_|^gluon_tiles|^tile_|^rma_tiles$")
    wait = r"griddepcontrol\.wait"
    waiting = [kernel for name, kernel in compiled(target).items() if by_tiles.match(name) and kernel.count(wait)]
    assert waiting
    for kernel in waiting:  # which may look up the context before, and change nothing
        assert kernel.count(wait) == 1 and not changes_before_the_wait(kernel), kernel.name
    for kernel in compiled(target).values():
        assert kernel in offenders or kernel in waiting or not kernel.count("griddepcontrol"), kernel.name


@pytest.mark.parametrize(
    "name", ["lamport_all_norm", "lamport_fp8", "lamport_gather_first", "skinny_matmul_norm", "step_weigh"]
)
def test_the_assembler_moves_nothing_before_the_wait(compiled, name: str) -> None:
    steps = machine_steps(compiled("sm_90")[name])
    assert (steps["first"], steps["waits"], steps["leads"]) == ("ACQBULK", 1, 1)
    assert steps["loads"], "loads are known by their names"


def test_kernels_for_gpus_before_hopper_neither_wait_nor_lead(tmp_path: Path) -> None:
    """It runs in a separate process, because the interpreter must be off."""
    compiling = (
        "from pathlib import Path\n"
        "from tests import compile_kernels, fake_gpu\n"
        "fake_gpu.TARGETS['sm_90'] = fake_gpu.GPUTarget('cuda', 89, 32)\n"
        f"compile_kernels.main('sm_90', {str(tmp_path)!r}, '^step_(weigh|stretch)$')"
    )
    done = fresh.run(compiling, TRITON_INTERPRET="0")
    codes = [path.read_text() for path in tmp_path.glob("*.ptx")]
    assert len(codes) == 2 and all(".target sm_89" in code for code in codes), done.stderr[-4000:]
    assert not any("griddepcontrol" in code for code in codes)


@pytest.mark.parametrize("target", CUDA)
def test_ptx_accesses_peers_by_16_bytes(compiled, target: str) -> None:
    kernels = compiled(target)
    stores = [*fused(kernels), *(kernels[f"rma_{name}"] for name in ("store", "store_bytes", "put_and_signal"))]
    assert not all_complaints(stores, narrow_stores)
    for kernel in stores:
        assert kernel.count(r"\bst\.global\.v4\.b32"), kernel.name
    for name in ("all_reduce_tma", "matmul_all_gather_tma"):
        # each value goes to every peer
        assert kernels[name].count(r"\bst\.global\.v4\.b32") >= WORLD_SIZE, name
    for name in ("rma_load", "rma_load_bytes", "rma_get", "rma_context_get", "rma_put_and_signal"):
        loads = kernels[name].tally(r"\bld\.global[a-z0-9_.]*").keys()
        narrow = {"ld.global.b8", "ld.global.b16", "ld.global.v2.b32"}
        assert "ld.global.v4.b32" in loads and not loads & narrow, (name, loads)
    # rows that a table names, of which only the hint says that they are whole
    assert kernels["rma_hinted_store"].count(r"\bst\.global\.v4\.b32") and not narrow_stores(
        kernels["rma_hinted_store"]
    )
    assert kernels["rma_volatile_load"].count(r"\bld\.volatile\.global\.v4\.b32"), "without the modifier it is given"
    values = kernels["rma_tiles"]
    assert values.count(r"ld\.volatile\.global\.v4\.b32") and values.count(r"st\.global\.wt\.v4\.b32")


@pytest.mark.parametrize("target", CUDA)
def test_ptx_of_benchmarks_moves_16_bytes_at_a_time(compiled, target: str) -> None:
    kernels = compiled(target)
    for name in ("benchmark_store", "benchmark_put"):
        assert not narrow_stores(kernels[name])
        assert kernels[name].count(r"\bst\.global\.v4\.b32") == 4, name
    for name in ("benchmark_put",):
        ahead = 2 * 4  # two blocks before the loop, and as many words in it for the next
        assert kernels[name].count(r"cp\.async\.cg\.shared\.global .*0x10") >= ahead, name


@pytest.mark.parametrize("target", CUDA)
def test_ptx_uses_tensor_cores_and_tma(compiled, target: str) -> None:
    product = {"sm_90": r"wgmma\.mma_async\S*\.f32\.bf16\.bf16", "sm_100": r"tcgen05\.mma\S*kind::f16"}[target]
    fp8_product = product.replace("bf16", "e4m3")
    for kernel in fused(compiled(target)):
        rounded = kernel.name.endswith(("fp8", "fp8_block"))
        assert kernel.count(fp8_product if rounded else product), kernel.name
        assert bool(kernel.count(r"cp\.async\.bulk\.tensor")) != kernel.name.endswith("pointers"), kernel.name
    for name in ("step_stretch", "step_whole"):
        step = compiled(target)[name]
        assert step.count(r"mma.sync.*bf16") and step.count(r"ld.global.*v4.b32"), "attention of a step reads 16 bytes"
        assert step.count(r"cp\.async\.c[ag]\.shared\.global.*0x10"), "keys and values are under way ahead of products"
    products = re.compile(r"skinny_matmul(_gated)?(_\d+)?(_narrow)?(_norm|_folded)?$")
    products = [kernel for name, kernel in compiled(target).items() if products.match(name)]
    assert len(products) == 6
    for step in products:
        many = "_64" in step.name
        assert step.count(product), step.name
        assert step.count(r"cp\.async\.bulk\.tensor") >= 1 + many, step.name
        fetched = step.count(r"cp\.async\.c[ag]\.shared\.global.*0x10")
        assert bool(fetched) != many, f"{step.name}: few rows are fetched by 16 bytes, many by TMA"
    rounding = compiled(target)["round_rows"]
    assert rounding.count(r"cvt\.rn\.satfinite\.e4m3x2") and rounding.count(r"ld\.global\.v4\.b32")


@pytest.mark.parametrize("target", CUDA)
def test_ptx_fences_tma_loads_of_what_peers_stored(compiled, target: str) -> None:
    forms = ("rows_tma", "k_tma", *(("hopper_128", "hopper_256") if target == "sm_90" else ()))
    gathers = [compiled(target)[f"all_gather_matmul_{form}"] for form in forms]
    assert not all_complaints(gathers, unfenced_loads)
    assert all(kernel.count(r"fence\.proxy\.async\.global") >= 1 for kernel in gathers)


@pytest.mark.parametrize("target", CUDA)
def test_ptx_exchanges_lamport_values_without_fence_or_flag(compiled, target: str) -> None:
    """Lamport values go out written through and are read as volatile, 16 bytes at a time; no release to a peer."""
    for name in EXCHANGES:
        kernel = compiled(target)[name]
        others = OTHERS.get(name, WORLD_SIZE - 1)
        peers = (
            others + 1 if name in REDUCTIONS + TREES else others
        )  # where all sum the same, its own words too, or kept
        stores = kernel.count(r"\bst\.global\.wt\.v4\.b32")
        assert stores >= peers and (name not in KEPT or stores == others), name
        if target == "sm_90":  # 8 bytes where a share has few rows, and one word that says that a rank is in the call
            assert kernel.count(r"\bst\.global\.wt\.(?!v[24]\.b32)") in (0, others), name
        assert kernel.count(r"\bld\.volatile\.global\.v[24]\.b32") >= (2 if name in TREES else peers), name
        # only failure records
        assert CAS_A_REPORT * system_releases(kernel) == kernel.count(LOCAL[1].replace(".", r"\.")), name
        # only the flag of this rank's own programs that A is gathered
        assert kernel.count(r"sys\.acquire") == (2 if name == "lamport_gather_first" else 0), name
        assert kernel.count(LOCAL[2].replace(".", r"\.")), name  # one thread marks a wait that has failed
        assert not narrow_scopes(kernel)
        assert kernel.count({"sm_90": r"wgmma\.mma_async", "sm_100": r"tcgen05\.mma|mma\.sync"}[target]), name


LAMPORT = {"ccl_lamport_one_shot": WORLD_SIZE - 1, "ccl_lamport_two_shot": WORLD_SIZE}  # stores to ranks
LAMPORT_OF_TWO = {f"ccl_lamport_{form}_of_two": 2 for form in ("one_shot", "scatter")}  # the first, the next
FLAGS = {
    "ccl_flags_two_shot": 2 * WORLD_SIZE,
    "ccl_flags_scatter": WORLD_SIZE,
}
COPIES = dict.fromkeys(("ccl_flags_gather", "ccl_flags_gather_bytes", "ccl_flags_exchange"), 2 * WORLD_SIZE)


@pytest.mark.parametrize("target", CUDA)
def test_ptx_of_collectives_moves_16_bytes_at_a_time(compiled, target: str) -> None:
    """Of rows that stand apart too; Lamport values without fence or flag, and all ranks signalled by one release."""
    kernels = compiled(target)
    for name, stores in (LAMPORT | LAMPORT_OF_TWO).items():
        kernel = kernels[name]
        assert kernel.count(r"\bst\.global\.wt\.v4\.b32") == stores, name
        assert not kernel.count(r"\bst\.global\.wt\.(?!v4\.b32)"), name
        assert kernel.count(r"\bld\.volatile\.global\.v4\.b32") >= (2 if name in LAMPORT_OF_TWO else WORLD_SIZE), name
        assert not kernel.count(r"sys\.acquire|sys\.release\.exch\.b32"), name
    for name, stores in (FLAGS | COPIES).items():
        kernel = kernels[name]
        assert kernel.count(r"\bst\.global\.v4\.b32") >= stores, name
        assert not narrow_stores(kernel), name
        assert not kernel.count(r"\bld\.global\.(?!v4\.b32|b32|b64|cg\.v4|sys|gpu)"), name
        assert kernel.count(r"sys\.release\.exch\.b32") == (1 if name == "ccl_flags_scatter" else 2), name
    for name in COPIES:  # the first unit is on its way before the first look at who has entered, and none is stored
        steps = (r"\bld\.global\.v4", r"sys\.acquire", r"\bst\.global\.v4")
        load, look, store = map(kernels[name].first, steps)
        assert load < look < store, name
    assert kernels["ccl_atomic"].count(r"\b(red|atom)\.global\.sys\.relaxed\.add\S*\.f32"), "no atomic at the system"
    assert not narrow_stores(kernels["ccl_ring"])


@pytest.mark.parametrize("target", CUDA)
def test_ptx_of_messages_moves_16_bytes_at_a_time(compiled, target: str) -> None:
    """Lamport values, and units as they are; also a last one that is not full."""
    for name, stores in {"ccl_messages": {"v2.b64", "v4.b32"}, "ccl_reduce": {"v4.b32"}}.items():
        kernel = compiled(target)[name]
        assert kernel.tally(r"\bst\.global\.wt\.([\w.]+)").keys() == stores, name
        assert kernel.tally(r"\bld\.volatile\.global\.(v\S+)").keys() == stores, name
        assert kernel.count(r"sys\.release\.exch\.b32") == 2, name  # of a unit, and credit to all ranks


def test_messages_go_both_ways_at_once(compiled) -> None:
    """Programs that send and programs that take, 256 threads each, share the multiprocessors."""
    for name in ("ccl_messages", "ccl_reduce"):
        assert 2 * 256 * registers(compiled("sm_90")[name]) <= 65536, name


def test_lamport_values_between_two_leave_room_for_another_call(compiled) -> None:
    """Two programs of 256 threads on each multiprocessor, and as many of a call in another stream."""
    for name in LAMPORT_OF_TWO:
        assert 4 * 256 * registers(compiled("sm_90")[name]) <= 65536, name


# Stores to a peer by a thread: 64 x 128 values of 2 bytes by 128 threads are 8 vectors, times the peers.
TILES = dict.fromkeys(("tile_reduce", "tile_scatter", "tile_gather", "tile_exchange"), 8 * (WORLD_SIZE - 1))
TILES |= {"tile_reduce_two_shot": 10 * WORLD_SIZE, "gluon_tiles": 8 * 4 * (WORLD_SIZE - 1)}  # the sums are a quarter
TILES |= {"gluon_tiles_two_shot": 8 * 3 * (WORLD_SIZE - 1) + 16 * WORLD_SIZE}  # where whole threads have no sum


@pytest.mark.parametrize("target", CUDA)
def test_ptx_of_tiles_moves_16_bytes_at_a_time(compiled, target: str) -> None:
    """In Triton and in Gluon: Lamport values without fence or flag, and results."""
    for name, stores in TILES.items():
        kernel = compiled(target)[name]
        assert kernel.count(r"\bst\.global\.wt\.v4\.b32") == stores, name
        assert not kernel.count(r"\bst\.global\.wt\.(?!v4\.b32)|\bld\.volatile\.global\.(?!v4\.b32)"), name
        assert kernel.count(r"\bld\.volatile\.global\.v4\.b32") >= stores, name
        assert not kernel.count(r"sys\.acquire|sys\.release\.exch\.b32"), name


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
