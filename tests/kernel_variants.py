"""What `compile_kernels.py` compiles for a target: every kernel, in the forms that differ.

A form is a set of the kernel's constants. The forms stand here together, because most share their constants across
kernels, and because the library needs none of them.
"""

from __future__ import annotations

from iris.ccl.accumulate import accumulate_kernel
from iris.ccl.flags import flags_kernel
from iris.ccl.lamport import lamport_kernel
from iris.ccl.ring import ring_kernel
from iris.ccl.transfer import transfer_kernel
from iris.device import copies, sync
from iris.tracing import clock_offset_kernel
from iris_ops.fp8 import lamport_stream, skinny_stream, tile_matmul, weight_stream
from iris_ops.fp8.scaled_matmul import round_rows_kernel
from iris_ops.kernels.gather_matmul import gather_matmul_kernel
from iris_ops.kernels.hopper import lamport_pair, lamport_two_shot
from iris_ops.kernels.hopper.gather_matmul import hopper_gather_matmul_kernel
from iris_ops.kernels.hopper.matmul_gather import hopper_matmul_gather_kernel
from iris_ops.kernels.hopper.matmul_reduce import hopper_matmul_reduce_kernel
from iris_ops.kernels.hopper.mma import MMA_WARPS
from iris_ops.kernels.hopper.operands import MOVER_WARPS, in_rows, layouts
from iris_ops.kernels.lamport_gather_matmul import lamport_gather_matmul_kernel
from iris_ops.kernels.lamport_matmul import lamport_matmul_kernel
from iris_ops.kernels.matmul_gather import matmul_gather_kernel
from iris_ops.kernels.matmul_reduce import matmul_reduce_kernel
from iris_ops.kernels.rmsnorm_epilogue import first_half_kernel
from iris_ops.kernels.tree_matmul import tree_matmul_kernel
from iris_ops.local import gating, norm, skinny_matmul
from iris_ops.local.decode_attention import pipeline_of, stretch_kernel, weigh_kernel
from iris_ops.planning.candidates import fitting, tree_tiles
from iris_ops.planning.machine import machine_named
from iris_ops.planning.tile_model import FP8_TILES
from iris_ops.with_torch import copy_gather
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl

from benchmarks.cases.rma_kernels import block_words, move_kernel
from benchmarks.tiles import move_tiles_kernel
from examples import (
    expert_mixture,
    flash_decode,
    ring_attention,
    rms_norm_gather,
    tile_all_reduce,
    tile_all_reduce_hopper,
)
from tests import gluon_kernels, rma_kernels, tile_kernels
from tests.moe_variants import moe_variants

WORLD_SIZE = 4
# Whose shared memory decides how many stages plans give a tile.
MACHINES = {90: "NVIDIA H200", 100: "NVIDIA H200", "gfx942": "AMD Instinct MI300X", "gfx950": "AMD Instinct MI350X"}
# By what follows the product: block_m, block_k, warps.
LAMPORT = {"all": (16, 256, 4), "owners": (64, 128, 8), "scatter": (64, 128, 4), "gather": (32, 256, 4)}
# Forms that `make test` leaves to `make test-all`. Another form of the same kernel, which it has, differs in that way.
RARE = {
    "": """
    matmul_all_gather_folded lamport_owners_folded lamport_gather_first_folded all_reduce_hopper_folded
    skinny_matmul_gated_64_folded all_reduce_hopper_128_fp8 reduce_scatter_hopper_256_fp8
    traced_matmul_all_gather_tma traced_all_gather_matmul_rows_tma traced_lamport_gather_first
    traced_all_reduce_hopper_256 traced_matmul_all_gather_hopper_128 traced_lamport_fp8_8_3
    lamport_fp8_8_1 lamport_fp8_16_2 lamport_fp8_16_3 skinny_fp8_8_1 skinny_fp8_16_2 skinny_fp8_16_3
    fp8_tiles_32_128 fp8_tiles_64_64 fp8_tiles_128_64 fp8_tiles_128_128 lamport_rounded_128
    skinny_matmul_32 skinny_matmul_32_norm skinny_matmul_64 skinny_matmul_64_norm skinny_matmul_64_narrow
    skinny_matmul_gated skinny_matmul_gated_norm skinny_matmul_gated_32_norm skinny_matmul_gated_64
    moe_gate_up_few_pointers moe_gate_up_one moe_gate_up_large moe_down_sorted moe_down_large_pointers
    moe_lamport_down_one moe_lamport_down_sorted moe_lamport_token moe_lamport_combine_owners
    example_matmul_two_shot example_matmul_scatter example_ring
    all_gather_matmul_k_pointers lamport_gather_folded ccl_reduce_int8
    matmul_all_gather_hopper_256 reduce_scatter_hopper_256 all_reduce_hopper_256_fp8 lamport_two_shot_fp8
    lamport_pair_leaves_64 lamport_pair_leaves_scatter_128 lamport_rounded_64 lamport_fp8_8_2
    """,
    "cuda": "reduce_scatter_pointers matmul_all_gather_pointers all_gather_matmul_rows_pointers",
    "hip": """
    ccl_flags_two_shot_bytes ccl_flags_gather_bytes ccl_flags_exchange_bytes ccl_messages_ragged gluon_tiles
    ccl_lamport_one_shot_of_two ccl_lamport_scatter_of_two tile_reduce_two_shot
    """,
}
TRACED = {
    90: (
        "all_reduce_tma",
        "matmul_all_gather_tma",
        "all_gather_matmul_rows_tma",
        "lamport_owners",
        "lamport_gather_first",
        "lamport_fp8_8_3",
        "all_reduce_hopper_256",
        "matmul_all_gather_hopper_128",
        "all_gather_matmul_hopper_256",
        "lamport_two_shot",
        "lamport_pair_128",
        "lamport_pair_scatter_128",
    ),
    "gfx942": ("all_reduce_pointers",),
    "gfx950": ("all_reduce_pointers",),
}


def is_rare(name: str, target: GPUTarget) -> bool:
    return name in f"{RARE['']} {RARE[target.backend]}".split()


def variants(target: GPUTarget):
    """(name, kernel, options, constants) of everything that is compiled for `target`."""
    cuda = target.backend == "cuda"
    machine = machine_named(MACHINES[target.arch], 1)
    (m, n, k, warps, stages), *_ = fitting(2, machine, few=False)
    block, options = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k), dict(num_warps=warps, num_stages=stages)
    few_stages = {tuple(tile): stages for *tile, stages in fitting(2, machine, few=True)}
    strides = dict(stride_ak=1, stride_bk=1, stride_on=1)
    common = dict(GROUP_M=8, WORLD_SIZE=WORLD_SIZE, HAS_BIAS=True, WAITER=1, B_TRANSPOSED=True, **block, **strides)
    for tma in (True, False) if cuda else (False,):
        kind = "tma" if tma else "pointers"
        loads = dict(TMA_A=tma, TMA_B=tma)
        for all_reduce in (False, True):
            name = f"{'all_reduce' if all_reduce else 'reduce_scatter'}_{kind}"
            flags = dict(BY_COLS=False, ALL_REDUCE=all_reduce)
            yield name, matmul_reduce_kernel, options, {**common, **loads, **flags}
        yield f"matmul_all_gather_{kind}", matmul_gather_kernel, options, {**common, **loads}
        if tma:
            folded = {**common, **loads, "FOLDED": True}
            yield "matmul_all_gather_folded", matmul_gather_kernel, options, folded
            yield "all_reduce_folded", matmul_reduce_kernel, options, folded | flags
        for by_k in (False, True):
            name = f"all_gather_matmul_{'k' if by_k else 'rows'}_{kind}"
            flags = dict(BY_K=by_k, COMM_PROGRAMS=16, PIECES=4, SPLITS=1 if by_k else 2, TMA_G=tma, **loads)
            yield name, gather_matmul_kernel, options, {**common, **flags}
    no_norm = dict.fromkeys(("residual", "weight", "scaled", "squares"))
    no_scales = dict.fromkeys(("a_scales", "b_scales"))
    few = {name: value for name, value in common.items() if name != "GROUP_M"} | dict(BLOCK_N=64, TMA_B=cuda)
    for exchange, (m, k, warps) in LAMPORT.items():
        constants = {**few, "BLOCK_M": m, "BLOCK_K": k, "TMA_A": cuda, "EXCHANGE": exchange, "BY_COLS": False}
        constants["ONE_TILE"] = exchange != "owners"
        stages = few_stages[m, few["BLOCK_N"], k, warps]
        options, constants = dict(num_warps=warps, num_stages=stages), constants | no_scales
        yield f"lamport_{exchange}", lamport_matmul_kernel, options, constants | no_norm
        if cuda and exchange in ("owners", "gather"):
            yield f"lamport_{exchange}_folded", lamport_matmul_kernel, options, constants | no_norm | dict(FOLDED=True)
        if exchange in ("all", "owners"):
            yield f"lamport_{exchange}_norm", lamport_matmul_kernel, options, constants
        if exchange == "all":
            yield "lamport_all_turns", lamport_matmul_kernel, options, constants | no_norm | dict(ONE_TILE=False)
    narrow = dict(BLOCK_M=64, BLOCK_N=32, BLOCK_K=128, TMA_A=cuda, EXCHANGE="all", BY_COLS=False, ONE_TILE=True)
    options = dict(num_warps=4, num_stages=few_stages.get((64, 32, 128, 4), 2))
    of_two = {**few, **narrow, **no_scales, **no_norm, "WORLD_SIZE": 2}
    yield "lamport_narrow_of_two", lamport_matmul_kernel, options, of_two
    # of sums that are the same on any number of ranks: of two ranks, and of three
    two = dict(OWN=4, OWN_ROOTS="0,1,0,2", JOINS="0,1", SOURCES="0,1", PAIR=True, WORLD_SIZE=2)
    three = dict(OWN=3, OWN_ROOTS="0,1;0", JOINS="0,0,1,0,1,2", SOURCES="0,0,1,1,2,2", PAIR=False)
    tree_stages = {tuple(tile): stages for *tile, stages in tree_tiles(256, 2, machine)}
    for name, exchange, tile, ranks in (
        ("all", "all", (16, 64, 256, 4), two),
        ("narrow", "all", (64, 32, 128, 4), two),
        ("owners", "owners", (64, 64, 128, 4), three),
        ("scatter", "scatter", (64, 64, 128, 8), three),
        ("high", "all", (128, 128, 64, 8), three),
    ):
        m, n, k, warps = tile
        constants = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, TMA_A=cuda, EXCHANGE=exchange, MEETS=exchange == "scatter")
        constants |= dict(BY_COLS=False, ONE_TILE=exchange == "all" and m < 128, **ranks)
        options = dict(num_warps=warps, num_stages=tree_stages.get(tile, 2))
        yield f"tree_{name}", tree_matmul_kernel, options, few | constants
    flags = dict(BLOCK_M=16, BLOCK_K=256, PIECE_M=4, PIECE_K=512, TMA_G=cuda, BY_K=False)
    gathering = dict(num_warps=4, num_stages=few_stages[16, few["BLOCK_N"], 256, 4])
    yield "lamport_gather_first", lamport_gather_matmul_kernel, gathering, {**few, **flags}
    if cuda:
        yield "lamport_gather_first_folded", lamport_gather_matmul_kernel, gathering, {**few, **flags, "FOLDED": True}
    yield "first_half", first_half_kernel, dict(num_warps=4), dict(BLOCK_M=16, BLOCK_N=64, stride_on=1)
    for name, without in (("norm", {"residual": None, "total": None}), ("norm_sum", {})):
        constants = dict(OFFSET=0.0, N=4096, BLOCK_M=1, BLOCK_N=4096, **without)
        yield name, norm.rms_norm_kernel, dict(num_warps=8), constants
    yield "gate", gating.gate_kernel, dict(num_warps=8), dict(BLOCK_M=4, BLOCK_N=1024)
    arrival = dict(WORLD_SIZE=WORLD_SIZE, WAITER=3)
    yield "arrived", copy_gather.arrived_kernel, dict(num_warps=1), arrival
    for dtype, dim, flags in (("bf16", 128, [False, True]), ("fp32", 512, [True])):
        rows, stages = pipeline_of(16, dim * (2 if dtype == "bf16" else 4), machine.shared_bytes)
        constants = dict(dtype=dtype, GROUPS=16, DIM=dim, BLOCK=rows, SCAN=256)
        for whole in flags:
            name = "step_wide" if dtype == "fp32" else "step_whole" if whole else "step_stretch"
            yield name, stretch_kernel, dict(num_warps=4, num_stages=stages), {**constants, "WHOLE": whole}
            if name == "step_stretch":
                choice = {**constants, "WHOLE": whole, "FROM_FIRST": True}
                yield f"{name}_from_first", stretch_kernel, dict(num_warps=4, num_stages=stages), choice
    if cuda:  # AMD's e4m3 is another one
        yield "round_rows", round_rows_kernel, dict(num_warps=16), dict(BLOCK=16384)
    if target.arch == 90:
        yield from hopper_variants()
        yield from in_eight_bits()
        for (m, n, k, warps), (stages, _) in FP8_TILES.items():
            constants = dict(few, BLOCK_M=m, BLOCK_N=n, BLOCK_K=2 * k, TMA_A=True, BY_COLS=False)
            constants["EXCHANGE"] = "all" if m == 64 else "scatter"
            constants["ONE_TILE"] = m == 64
            options = dict(num_warps=warps, num_stages=stages)
            yield f"lamport_rounded_{m}", lamport_matmul_kernel, options, constants if m == 64 else constants | no_norm
        for (m, n, k, warps), stages in tile_matmul.TILES.values():
            constants = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, HAS_BIAS=m == 64)
            options = dict(num_warps=warps, num_stages=stages)
            yield f"fp8_tiles_{m}_{n}", tile_matmul.tile_matmul_kernel, options, constants | dict(FOLDED=m == 64)
    for m, n, gated in skinny_matmul.RINGS:
        k, stages = skinny_matmul.depth(machine.shared_bytes, gated, m, n)
        rows = dict(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k)
        name = ("skinny_matmul_gated" if gated else "skinny_matmul") + (f"_{m}" if m > 16 else "")
        name += "_narrow" if n == skinny_matmul.NARROW_N else ""
        constants = dict(HAS_BIAS=True, GATED=gated, TMA_A=cuda and m == 64, TMA_B=cuda, SPANS=128, **rows)
        options = dict(num_warps=4, num_stages=stages)
        yield name, skinny_matmul.skinny_matmul_kernel, options, {**constants, "squares": None}
        yield f"{name}_norm", skinny_matmul.skinny_matmul_kernel, options, constants
        if constants["TMA_A"] and n == skinny_matmul.BLOCK_N:
            yield f"{name}_folded", skinny_matmul.skinny_matmul_kernel, options, constants | dict(FOLDED=True)
    for in_pairs in (False, True):  # as an invariant context has them added
        name, constants = "step_weigh_pairs" if in_pairs else "step_weigh", dict(PARTS=256, COLUMNS=32)
        options = dict(num_warps=4, enable_fp_fusion=not in_pairs)
        yield name, weigh_kernel, options, dict(constants, IN_PAIRS=in_pairs)
    yield from moe_variants(target, machine, WORLD_SIZE)
    yield from collectives()
    yield "clock_offset", clock_offset_kernel, dict(num_warps=1), dict(WORLD_SIZE=WORLD_SIZE)
    yield "device_barrier", sync.device_barrier_kernel, dict(num_warps=1), dict(WORLD_SIZE=WORLD_SIZE)
    for name, kernel in (("copy_wait", copies.wait_kernel), ("copy_signal", copies.signal_kernel)):
        yield name, kernel, dict(num_warps=1), dict(WORLD_SIZE=WORLD_SIZE)
    for name, kernel in rma_kernels.ALL.items():
        yield name, kernel, dict(num_warps=4), dict(WORLD_SIZE=WORLD_SIZE, BLOCK=2048)
        if name in ("rma_load", "rma_store"):
            yield f"{name}_bytes", kernel, dict(num_warps=4), dict(dtype="i8", WORLD_SIZE=WORLD_SIZE, BLOCK=4096)
    for op in ("load", "store", "put"):
        stages = 3 if cuda and op != "store" else 1
        constants = dict(dtype="i32", OP=op, STAGES=stages, BLOCK=block_words(op), WORLD_SIZE=WORLD_SIZE)
        yield f"benchmark_{op}", move_kernel, dict(num_warps=32 if cuda else 16), constants
    for kernel, block, per_thread in (
        (gluon_kernels.gluon_put_and_signal_kernel, 2048, 8),
        (gluon_kernels.gluon_copies_kernel, 2048, 8),
        (gluon_kernels.gluon_recorded_put_kernel, 2048, 8),
        (gluon_kernels.gluon_atomics_kernel, 128, 1),
    ):
        layout = gl.BlockedLayout([per_thread], [target.warp_size], [4], [0])
        name = kernel.__name__.removesuffix("_kernel")
        yield name, kernel, dict(num_warps=4), dict(BLOCK=block, LAYOUT=layout)
    tile, options = dict(M=64, N=128, WORLD_SIZE=WORLD_SIZE), dict(num_warps=4)
    for two_shot in (False, True):
        suffix, constants = "_two_shot" if two_shot else "", tile | dict(TWO_SHOT=two_shot)
        yield f"tile_reduce{suffix}", tile_kernels.tile_reduce_kernel, options, constants | dict(FLAT=False)
        layout = gl.BlockedLayout([1, 8], [target.warp_size // 16, 16], [4, 1], [1, 0])
        yield f"gluon_tiles{suffix}", gluon_kernels.gluon_tiles_kernel, options, constants | dict(LAYOUT=layout)
    for which in ("scatter", "gather", "exchange"):
        kernel = getattr(tile_kernels, f"tile_{which}_kernel")
        yield f"tile_{which}", kernel, options, tile
    yield from examples()


def examples():
    """Kernels of examples, and of one benchmark, that exchange tiles or pass them on."""
    world, options = dict(WORLD_SIZE=WORLD_SIZE), dict(num_warps=4)
    blocks = dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32)
    for name, flags in (("", {}), ("_two_shot", dict(TWO_SHOT=True)), ("_scatter", dict(SCATTER=True))):
        yield f"example_matmul{name}", tile_all_reduce.tile_matmul_kernel, options, world | blocks | flags
    for exchange in (False, True):
        constants = world | dict(ROWS=8, COLUMNS=1024, EXCHANGE=exchange)
        yield f"example_{'exchange' if exchange else 'gather'}", move_tiles_kernel, options, constants
    yield "example_decode", flash_decode.flash_decode_kernel, options, world | dict(D=128, BLOCK=32)
    yield "example_norm", rms_norm_gather.rms_norm_gather_kernel, options, world | dict(ROWS=4, COLUMNS=1024)
    constants = world | dict(dtype="fp32", H=64, F=64, EXPERTS=2, ROWS=16)
    yield "example_mixture", expert_mixture.expert_mixture_kernel, options, constants
    for causal in (False, True):
        constants = world | dict(dtype="fp32", CAUSAL=causal, D=64, BLOCK=32)
        name = "example_ring_causal" if causal else "example_ring"
        yield name, ring_attention.ring_attention_kernel, options, constants


def hopper_variants():
    """Warp-specialised programs, with both tiles that plans take; bias, layout of B, shared tiles in rotation."""
    common = dict(BLOCK_M=128, BLOCK_K=64, GROUP_M=8, WORLD_SIZE=WORLD_SIZE, WAITER=1)
    no_scales = dict(a_scales=None, b_scales=None)
    options = dict(num_warps=MMA_WARPS)
    for n, stages in ((256, 3), (128, 5)):
        known = common | dict(BLOCK_N=n, STAGES=stages, B_TRANSPOSED=n == 256, **layouts(128, n))
        for all_reduce in (False, True):
            name = f"{'all_reduce' if all_reduce else 'reduce_scatter'}_hopper_{n}"
            choice = dict(BY_COLS=n == 128, ALL_REDUCE=all_reduce, HAS_BIAS=all_reduce, SHARED=all_reduce == (n == 128))
            yield name, hopper_matmul_reduce_kernel, options, known | choice | no_scales
        if n == 128:
            folded = known | choice | no_scales | dict(FOLDED=True)
            yield "all_reduce_hopper_folded", hopper_matmul_reduce_kernel, options, folded
        eight = known | choice | dict(FOLDED=n == 256, BLOCK_K=128, B_TRANSPOSED=True, **layouts(128, n, 1))
        yield f"all_reduce_hopper_{n}_fp8", hopper_matmul_reduce_kernel, options, eight
        scattered = eight | dict(ALL_REDUCE=False, HAS_BIAS=n == 256)
        yield f"reduce_scatter_hopper_{n}_fp8", hopper_matmul_reduce_kernel, options, scattered
        gated = n == 256
        choice = dict(HAS_BIAS=True, MOVE=in_rows(MOVER_WARPS, n // 2 if gated else n), GATED=gated)
        yield f"all_gather_matmul_hopper_{n}", hopper_gather_matmul_kernel, options, known | choice
        choice = dict(HAS_BIAS=n == 128, SHARED=n == 256)
        yield f"matmul_all_gather_hopper_{n}", hopper_matmul_gather_kernel, options, known | choice
    swapped = known | dict(WORLD_SIZE=2, PLACES=lamport_pair.PLACES, HAS_BIAS=True, first_leaf=None, blocks=None)
    yield "lamport_pair_128", lamport_pair.lamport_pair_kernel, options, swapped | no_scales
    yield "lamport_pair_folded", lamport_pair.lamport_pair_kernel, options, swapped | no_scales | dict(FOLDED=True)
    eight = swapped | dict(BLOCK_K=128, B_TRANSPOSED=True, **layouts(128, 128, 1))
    yield "lamport_pair_128_fp8", lamport_pair.lamport_pair_kernel, options, eight
    low = swapped | no_scales | dict(BLOCK_M=64, STAGES=8, **layouts(64, 128))
    yield "lamport_pair_64", lamport_pair.lamport_pair_kernel, options, low
    one_group = low | layouts(64, 128, warps=4)
    yield "lamport_pair_64_of_four", lamport_pair.lamport_pair_kernel, dict(num_warps=4), one_group
    scattered = {key: value for key, value in one_group.items() if key != "GROUP_M"}
    yield (
        "lamport_pair_scatter_64_of_four",
        lamport_pair.lamport_pair_scatter_kernel,
        dict(num_warps=4),
        scattered,
    )
    scattered = {key: value for key, value in swapped.items() if key != "GROUP_M"} | no_scales
    yield "lamport_pair_scatter_128", lamport_pair.lamport_pair_scatter_kernel, options, scattered
    for name, kernel, warps, constants in (  # of sums that are the same on any number of ranks
        ("128", lamport_pair.lamport_pair_kernel, MMA_WARPS, swapped | no_scales),
        ("64", lamport_pair.lamport_pair_kernel, 4, one_group),
        ("scatter_128", lamport_pair.lamport_pair_scatter_kernel, MMA_WARPS, scattered),
    ):
        leaves = {key: value for key, value in constants.items() if key not in ("first_leaf", "blocks")}
        yield f"lamport_pair_leaves_{name}", kernel, dict(num_warps=warps), leaves | dict(LEAVES=4)
    example = dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, WORLD_SIZE=WORLD_SIZE, **layouts(128, 128))
    example |= dict(STAGES=tile_all_reduce_hopper.STAGES, PLACES=tile_all_reduce_hopper.PLACES)
    yield "example_matmul_hopper", tile_all_reduce_hopper.tile_matmul_hopper_kernel, options, example
    words = {key: value for key, value in known.items() if key != "GROUP_M"} | dict(HAS_BIAS=True)
    words |= lamport_two_shot.layouts(128, 128, WORLD_SIZE)
    yield "lamport_two_shot", lamport_two_shot.lamport_two_shot_kernel, options, words | no_scales
    words |= dict(BLOCK_K=128, B_TRANSPOSED=True, **layouts(128, 128, 1))
    yield "lamport_two_shot_fp8", lamport_two_shot.lamport_two_shot_kernel, options, words


def in_eight_bits():
    """Products of few rows with weights in eight bits: all tiles, with and without what else they can do."""
    for (rows, tiles), stages in (weight_stream.RINGS[1] | weight_stream.RINGS[3]).items():
        known = dict(BLOCK_M=rows, T=tiles, STAGES=stages, SLICES=weight_stream.WARPS, HAS_BIAS=rows == 8)
        no_norm = {} if tiles == 3 else dict.fromkeys(("residual", "weight", "scaled", "squares"))
        exchange = dict(WORLD_SIZE=WORLD_SIZE, WAITER=1, stride_on=1, **lamport_stream.layouts(rows), **no_norm)
        options = dict(num_warps=weight_stream.WARPS)
        yield f"lamport_fp8_{rows}_{tiles}", lamport_stream.lamport_stream_kernel, options, known | exchange
        choice = dict(GATED=tiles == 2, SPANS=128) | ({} if rows == 8 else dict(squares=None))
        yield f"skinny_fp8_{rows}_{tiles}", skinny_stream.skinny_stream_kernel, options, known | choice


def traced(target: GPUTarget):
    """One variant of each kernel that can record, as it does; on AMD of one kernel."""
    for name, kernel, options, constants in variants(target):
        if name in TRACED.get(target.arch, ()):
            yield f"traced_{name}", kernel, options, {**constants, "TRACING": True}


def collectives():
    """Of `iris.ccl`: each kernel in the forms that differ, on rows that stand apart or on whole tensors."""
    flat = dict(IN_LAYOUT=0, OUT_LAYOUT=0, stride_im=1, stride_om=1)
    rows = dict(IN_LAYOUT=1, OUT_LAYOUT=1)
    common = dict(stride_in=1, stride_on=1, INTERLEAVED=False, TILE_N=1, GROUP_M=4, WORLD_SIZE=WORLD_SIZE, WAITER=6)
    both = dict(SCATTER=True, REDUCE=True, GATHER=True, ONE_OUT=False)
    forms = {
        "one_shot": dict(both, SCATTER=False, GATHER=False),
        "two_shot": both,
        "scatter": dict(both, GATHER=False, ONE_OUT=True),
        "gather": dict(both, SCATTER=False, REDUCE=False, GATHER=False),
        "exchange": dict(both, REDUCE=False, GATHER=False),
    }
    for form, layout in (("one_shot", flat), ("two_shot", rows)):
        yield f"ccl_lamport_{form}", lamport_kernel, dict(num_warps=4), common | forms[form] | layout | dict(BLOCK=1024)
    for form in ("one_shot", "scatter"):
        known = common | forms[form] | flat | dict(BLOCK=2048, WORLD_SIZE=2)
        yield f"ccl_lamport_{form}_of_two", lamport_kernel, dict(num_warps=8), known
    for form, layout in (("two_shot", rows), ("scatter", flat), ("gather", flat), ("exchange", rows)):
        known = common | forms[form] | layout
        yield f"ccl_flags_{form}", flags_kernel, dict(num_warps=8), known | dict(BLOCK=8192)
        if form != "scatter":
            yield f"ccl_flags_{form}_bytes", flags_kernel, dict(num_warps=8), known | dict(BLOCK=16384, dtype="i8")
    others = {
        "ccl_ring": (ring_kernel, dict(RINGS=2)),
        "ccl_atomic": (accumulate_kernel, dict(LOCKED=False)),
        "ccl_spinlock": (accumulate_kernel, dict(LOCKED=True)),
    }
    for name, (kernel, choice) in others.items():
        known = common | flat | choice | dict(BLOCK=4096)
        yield name, kernel, dict(num_warps=8), {key: known[key] for key in kernel.arg_names if key in known}
    moved = dict(ALIGNED=True, WORLD_SIZE=WORLD_SIZE, WAITER=6)
    for name, choice in {
        "messages": dict(REDUCE=False, MESSAGES=2, dtype="i32"),
        "messages_ragged": dict(REDUCE=False, MESSAGES=1, dtype="i32", ALIGNED=False),
        "reduce": dict(REDUCE=True, MESSAGES=4),
        "reduce_int8": dict(REDUCE=True, MESSAGES=1, dtype="i8"),
        "reduce_int64": dict(REDUCE=True, MESSAGES=1, dtype="i64"),
    }.items():
        yield f"ccl_{name}", transfer_kernel, dict(num_warps=8), moved | choice
