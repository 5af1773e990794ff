"""The PTX of the kernels for NVIDIA Hopper: MMA and mover warps, weights in fp8."""

from __future__ import annotations

import itertools
import re

import iris  # noqa: F401  (before triton: it may set up the interpreter)
from iris_ops.quantised import stream_form
from iris_ops.quantised.packing import FP8_BLOCK, INT4, INT4_ZEROS, INT8, INT8_ZEROS, LINE, MXFP4, NVFP4
import pytest

from tests.assembly import (
    CAS_A_REPORT,
    LOCAL,
    WORLD_SIZE,
    hand_overs_without_barriers,
    looks_at_values,
    narrow_scopes,
    registers,
    system_releases,
    unguarded_hand_overs,
)

pytestmark = pytest.mark.compile

# Formats with scales of groups, by the names of their cases: packing, group.
STREAMED = {
    "fp8_block_128": (FP8_BLOCK, 128), "fp8_block_32": (FP8_BLOCK, 32), "int4_32": (INT4, 32), "int4_128": (INT4, 128),
    "int4_channel": (INT4, None), "mxfp4": (MXFP4, 32), "nvfp4": (NVFP4, 16), "int8_128": (INT8, 128),
    "int4_zeros_128": (INT4_ZEROS, 128), "int8_zeros_32": (INT8_ZEROS, 32),
}  # fmt: skip
BETWEEN_RANKS = "fp8_block_128", "int4_32", "mxfp4"


def test_ptx_of_a_store_warp(compiled) -> None:
    """Warps that multiply and warps that store: loads by TMA, 16-byte stores to every rank, barriers in between."""
    kernel = compiled("sm_90")["example_store_warp"]
    assert (
        kernel.count(r"setmaxnreg\.inc") >= 2 and kernel.count(r"wgmma\.mma_async") and kernel.count(r"cp\.async\.bulk")
    )
    assert kernel.count(r"\bst\.global\.v4\.b32") == WORLD_SIZE * 4 * 8  # ranks, parts of a tile, 16 bytes of a thread
    assert not unguarded_hand_overs(kernel)


def test_ptx_of_warp_specialised_programs(compiled) -> None:
    """Eight warps multiply asynchronously; four move tiles, to each rank 16 bytes of a thread at a time."""
    lamport, specialised = re.compile("^(traced_)?lamport_"), re.compile("_hopper_|lamport_pair_|lamport_two_shot_")
    every = {name: k for name, k in compiled("sm_90").items() if specialised.search(name)}
    stored = {name: k for name, k in every.items() if re.search("_fp8_block|_int[48]|_mxfp4", name)}
    assert len(stored) == 11
    for name, kernel in stored.items():  # weights in codes or blocks: their tiles are handed over alike
        assert kernel.count(r"wgmma\.mma_async") and not unguarded_hand_overs(kernel), name
        assert hand_overs_without_barriers(kernel) >= 3, name
    kernels = {name: kernel for name, kernel in every.items() if name not in stored and not lamport.match(name)}
    untraced = [name for name in kernels if not name.startswith("traced_")]
    assert len(untraced) == 7 and len(kernels) > len(untraced)
    for name, kernel in kernels.items():
        for change in ("dec", "inc"):  # of those that multiply, of those that move
            assert kernel.count(rf"setmaxnreg\.{change}\S*\s+168;") == 1, name
        # one step of a tile's product is under way while the next begins; all have ended once, when it is handed over
        assert kernel.count(r"wgmma\.mma_async") == 64 // 16 == 128 // 32, name
        assert kernel.count(r"wgmma\.wait_group\S*\s+1;") == kernel.count(r"wgmma\.wait_group\S*\s+0;") == 1, name
        assert not unguarded_hand_overs(kernel), name
        assert hand_overs_without_barriers(kernel) >= 3, name
        gathers, own = "gather" in name, "all_gather_matmul" in name
        # operands that were loaded, a tile to move (in reductions also to sum), its place in shared memory
        assert kernel.count(r"mbarrier\.try_wait") == (3 if gathers else 4), name
        ranks = 1 if own else WORLD_SIZE if gathers else 1 + WORLD_SIZE if "all_reduce" in name else 2
        held = 2 if own and name.endswith("256") else 4  # of 32 elements of a part that are a thread's; gated
        assert kernel.count(r"\bst\.global\.v4\.b32") >= ranks * held, name


def test_ptx_of_lamport_values_from_warp_specialised_programs(compiled) -> None:
    """Tiles, and sums, go out written through, to each rank 16 bytes of a thread at a time; nothing is released."""
    kernels = [compiled("sm_90")[name] for name in ("lamport_two_shot", "traced_lamport_two_shot")]
    for kernel in kernels:
        assert kernel.count(r"wgmma\.mma_async") == 64 // 16 and not unguarded_hand_overs(kernel), kernel.name
        # operands that were loaded, a tile to send, its place in shared memory
        assert kernel.count(r"mbarrier\.try_wait") == 3, kernel.name
        assert kernel.count(r"\bst\.global\.wt\.v4\.b32") == 2 * 4 * WORLD_SIZE, kernel.name  # of 32 elements each
        assert not kernel.count(r"\bst\.global\.wt\.(?!v4\.b32)|\bld\.volatile\.global\.(?!v4\.b32)"), kernel.name
        # failure records
        assert CAS_A_REPORT * system_releases(kernel) == kernel.count(LOCAL[1].replace(".", r"\.")), kernel.name
        assert not kernel.count(r"sys\.acquire") and not narrow_scopes(kernel), kernel.name
        # three blocks of values are polled: each until it is late, and one thread marks that
        assert kernel.count(r"%globaltimer;") >= 6 and kernel.count(LOCAL[2].replace(".", r"\.")) >= 3, kernel.name
    # what is recorded: product, push, sum, push of sums, and each wait
    assert [kernel.count(r"%smid;") for kernel in kernels] == [0, 4 + 3]


def test_ptx_of_lamport_values_that_two_ranks_exchange(compiled) -> None:
    """A tile goes out written through, 16 bytes of a thread at a time; the peer's is looked at before it is sent."""
    names = [f"lamport_pair_{name}" for name in ("128", "128_fp8", "64_of_four", "scatter_128")]
    traced = ["traced_lamport_pair_128", "traced_lamport_pair_scatter_128"]
    kernels = {name: compiled("sm_90")[name] for name in names + traced}
    for name, kernel in kernels.items():
        if name.endswith("four"):  # of eight warps each thread begins with more registers than it is to have
            assert kernel.count(r"setmaxnreg\.dec\S*\s+232;") == 1 and kernel.count("m64n128k16") == 4, name
        else:
            for change in ("dec", "inc"):
                assert kernel.count(rf"setmaxnreg\.{change}\S*\s+168;") == 1, name
        assert kernel.count(r"wgmma\.mma_async") == 64 // 16 and not unguarded_hand_overs(kernel), name
        # operands that were loaded, a tile to send, its place in shared memory
        assert kernel.count(r"mbarrier\.try_wait") == 3, name
        assert kernel.count(r"\bst\.global\.wt\.v4\.b32") == 4, name  # of 32 elements of a part that are a thread's
        parts = 2 if "64" in name else 4
        # later one part is polled, asked who did not send it, and the next looked at anew
        assert looks_at_values(kernel) == [4 * parts, 4 * (parts + 3)], name
        narrow = [kernel.count(rf"\b{access}\.(?!v4\.b32)") for access in (r"st\.global\.wt", r"ld\.volatile\.global")]
        # who scatters ends with a word that tells the peer: looked at, polled, asked who did not send it
        assert narrow == ([1, 3] if "scatter" in name else [0, 0]), name
        # failure records
        assert CAS_A_REPORT * system_releases(kernel) == kernel.count(LOCAL[1].replace(".", r"\.")), name
        assert not kernel.count(r"sys\.acquire") and not narrow_scopes(kernel), name
        assert kernel.count(r"%globaltimer;") >= 2 and kernel.count(LOCAL[2].replace(".", r"\.")) >= 1, name
    # product, push, sum, wait, of scattered values two
    assert [kernels[name].count(r"%smid;") for name in traced] == [4, 5]
    assert not any(kernels[name].count(r"%smid;") for name in names)


def test_ptx_of_fp8_weights(compiled) -> None:
    """Lines come by TMA, registers load whole vectors, no weight is converted, and all programs fit."""
    for name, rows, tiles in (("lamport_fp8", 8, 2), ("skinny_fp8", 16, 2)):
        kernel = compiled("sm_90")[name]
        resident = 3 if (rows, tiles) in stream_form.RINGS[3] else 1
        stages = stream_form.RINGS[resident][rows, tiles]
        shared = stream_form.shared_bytes(rows, tiles, stages)
        assert 0 <= kernel.shared - shared <= 512, name  # barriers, and what sums of squares take
        loads = stages * (1 + tiles) + 1 + tiles  # of A and of the weights, before and in the loop
        assert kernel.count(r"cp\.async\.bulk\.tensor\.3d") == loads, name
        steps = 2 * 4 * (rows // 8) * tiles  # of 16 along K, bytes, 8 rows, tiles
        assert kernel.count(r"mma\.sync\S*m16n8k16\S*\.bf16\.bf16") == steps, name
        assert kernel.count(r"ld\.shared\.v4\.b32") >= 4 * tiles and not kernel.count(r"cvt\S*\.e4m3"), name
        released = system_releases(kernel)
        if name.startswith("skinny"):
            assert not released and not kernel.count(r"\.sys\b|volatile"), name
        else:
            assert kernel.count(r"\bst\.global\.wt\.") == WORLD_SIZE == kernel.count(r"\bld\.volatile\.global") // 3, (
                name
            )
            assert not kernel.count(r"\bst\.global\.wt\.(?!v[24]\.b32|b32)|sys\.acquire"), name
            assert CAS_A_REPORT * released == kernel.count(LOCAL[1].replace(".", r"\.")), name
            assert not narrow_scopes(kernel), name
        assert registers(kernel) <= (stream_form.registers(3) if resident == 3 else 255), name
    room = 228 << 10  # of a multiprocessor; each program's takes a KiB of its own
    for resident, rings in stream_form.RINGS.items():
        for (rows, tiles), stages in rings.items():
            taken = stream_form.shared_bytes(rows, tiles, stages) + 512 + 1024
            assert resident * taken <= room < (resident + 1) * taken or (resident == 3 and 3 * taken <= room)


def test_ptx_of_rounded_rows(compiled) -> None:
    """Both operands go from memory to tensor cores as they are: by TMA, and nothing converts them."""
    rounded = re.compile("lamport_rounded|fp8_tiles|(hopper|lamport_(pair|two_shot)).*_fp8$")
    kernels = [kernel for name, kernel in compiled("sm_90").items() if rounded.search(name)]
    assert len(kernels) == 6
    for kernel in kernels:
        assert kernel.count(r"wgmma\.mma_async\S*\.f32\.e4m3\.e4m3"), kernel.name
        assert kernel.count(r"cp\.async\.bulk\.tensor") >= 2 and not kernel.count(r"cvt\S*e4m3"), kernel.name


def test_ptx_of_weights_with_scales_of_groups(compiled) -> None:
    """Each product of a line is multiplied once, scales come by TMA, and no number moves between threads."""
    kernels = {f"skinny_{name}": (16, 16384, form) for name, form in STREAMED.items()}
    kernels |= {f"lamport_{name}": (8, 4096, STREAMED[name]) for name in BETWEEN_RANKS}
    kernels |= {f"lamport_{name}_1": (1, 8192, STREAMED[name]) for name in BETWEEN_RANKS}
    for name, rows in itertools.product(BETWEEN_RANKS, (32, 64)):
        kernels[f"skinny_{name}_{rows}"] = rows, 16384, STREAMED[name]
    for name, (rows, N, (form, group)) in kernels.items():
        kernel, bits = compiled("sm_90")[name], 4 if form.per_element > 1 else 8
        groups = 0 if group is None else LINE // group
        scales = groups * form.stored(1, LINE, group)[1][1].itemsize * (1 + form.zeros)
        tile, loaded = stream_form.choice(4 * bits, scales, rows, N, 132), stream_form.loaded_rows(rows, bits == 4)
        slices, columns = tile.WARPS // tile.COLUMN_WARPS, tile.COLUMNS // tile.COLUMN_WARPS
        blocks, turns = max(1, loaded // 8), tile.LINES // slices
        # products of what a group's sum begins with, for all columns; of many rows it is added to each weight
        offsets = 8 if form in (INT4, INT8) and rows <= 16 or form.zeros else 0
        products = (8 * columns // 16 + offsets) * blocks * turns
        assert kernel.count(r"mma\.sync\S*m16n8k16\S*\.bf16\.bf16") == products, name
        if form in (INT8, INT8_ZEROS):  # two of the least of bf16's numbers, below 0: it is no zero
            assert kernel.count("-2139062144") == 1, name
        stage = stream_form.stage_bytes(
            loaded, tile.COLUMNS, 4 * bits, stream_form.scale_bytes(tile.LINES, scales), tile.LINES
        )
        stages, rest = divmod(kernel.shared - slices * tile.COLUMNS * 8 * blocks * 4, stage)
        assert 2 <= stages <= 12 and rest <= 1024, (name, stages, rest)
        # a block of A and one of the weights, before and in the loop
        assert kernel.count(r"cp\.async\.bulk\.tensor\.3d") == 2 * (stages + 1), name
        assert kernel.count(r"cp\.async\.bulk\.tensor\.2d") == (stages + 1 if scales else 0), name
        if bits == 4:  # rows by whole matrices, a thread's words at once
            assert kernel.count(r"ldmatrix\.sync\.aligned\.m8n8\.x4") == 4 * blocks * turns, name
            assert kernel.count(r"prmt\.b32 ") <= columns * turns, name
        assert not kernel.count(r"cvt\S*\.(e4m3|e2m1)"), name
        if name.startswith("skinny"):
            assert not kernel.count(r"shfl\.(?!sync\.idx)"), name  # but of which warp it is
            # fused: a group's sum, times its scale, on those before; and its zero point
            fused = kernel.count(r"fma\.rn\.f32") - 4 * groups * (1 + form.zeros) * blocks * turns * columns // 16
            assert 0 <= fused <= 16, name  # and the bias
        assert registers(kernel) <= 255, name
