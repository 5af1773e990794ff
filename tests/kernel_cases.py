"""The calls whose kernels are compiled ahead of time: `cases` has a call for each form that a kernel takes.

A call is the library's own on the tensors of a fake GPU (`tests/fake_gpu.py`), so the library chooses kernel, constants
and signature. A case bears the name of the last kernel that its call launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from iris.ccl import Config
from iris_ops import FusedConfig, Scoring
from iris_ops.activation import GPT_OSS
from iris_ops.local import decode_attention, norm, skinny_matmul
from iris_ops.moe.scoring import SIGMOID, SOFTMAX_OF_CHOSEN
from iris_ops.planning.epilogues import GATE
from iris_ops.quantised import packing, restoring, scaled_matmul
from iris_tp.bench.rows import CALLS, Row
import torch
from triton.backends.compiler import GPUTarget

Case = tuple[str, Callable[[Any], None], dict]  # name, call, what kind of rank makes it
WORLD_SIZE = 4
BF16, FP8, FP32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
# Of a portable tile, the stages for which shared memory has room: block_m, block_n, block_k, warps.
TILES = {
    (16, 64, 128, 4): 5, (128, 256, 64, 8): 3, (16, 64, 256, 4): 5, (64, 64, 128, 4): 6, (64, 64, 128, 8): 6,
    (64, 32, 128, 4): 8, (32, 64, 256, 4): 4, (128, 128, 64, 8): 6, (32, 64, 128, 4): 8, (128, 64, 128, 4): 4,
}  # fmt: skip
SHARED = {"gfx942": 64 << 10, "gfx950": 160 << 10}


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def matrix(rows: int, cols: int, dtype: torch.dtype = BF16, transposed: bool = False, pad: int = 0) -> torch.Tensor:
    """[rows, cols], whose rows, or columns if `transposed`, stand `pad` elements apart."""
    shape = (cols, rows) if transposed else (rows, cols)
    found = new(shape[0], shape[1] + pad, dtype=dtype)[:, : shape[1]]
    return found.t() if transposed else found


def fused(
    op: str, M: int = 4096, N: int = 4096, K: int = 4096, form: str = "rows", pad: int = 0, config: Any = None,
    transposed: bool = True, fp8: bool = False, dtype: Any = BF16, **options: Any,
) -> Callable[[Any], None]:  # fmt: skip
    """A call of `ctx.ops.<op>`. M, N, K: as in `iris_tp.bench.rows.Row`."""
    row = Row(next(short for short, name in CALLS.items() if op.startswith(name)), M, N, K, form)

    def call(ctx: Any) -> None:
        n, depth = row.w_shape(ctx.num_ranks)
        rows, cols = row.out_shape(0, ctx.num_ranks)
        out, A = new(rows, cols // (1 + ("gated" in op)), dtype=dtype), row.a_shape(0, ctx.num_ranks)
        tensors = [matrix(*A, dtype, pad=pad), matrix(depth, n, FP8 if fp8 else dtype, transposed, pad)]
        scale = dict(scale=new(n, dtype=FP32)) if fp8 else {}
        if op.endswith("norm"):
            tensors = [new(M, N), new(-(-N // 64), M, dtype=FP32), *tensors, new(M, N), new(N)]
        getattr(ctx.ops, op)(out, *tensors, new(n, dtype=dtype), config=config, **scale, **options)

    return call


def tile(target: GPUTarget, m: int, n: int, k: int, warps: int, algorithm: str = "overlapped", **options: Any) -> Any:
    stages = TILES[m, n, k, warps]
    if target.arch in SHARED:
        stages = max(2, min(stages, SHARED[target.arch] // (2 * (m + n) * k)))
    return FusedConfig(m, n, k, num_warps=warps, num_stages=stages, algorithm=algorithm, **options)


def cases(target: GPUTarget, *others: Callable[[GPUTarget], Iterator[Any]]) -> Iterator[Case]:
    """Yield the cases of a target, and those of `others`."""
    for group in (overlapped, few_rows, local, mixtures, collectives, hopper, *others):
        for name, call, *rank in group(target):
            yield name, call, dict(*rank)


def overlapped(target: GPUTarget) -> Iterator[Any]:
    """Portable kernels whose tiles travel while others are multiplied."""
    cuda, of = target.backend == "cuda", partial(tile, target, 128, 256, 64, 8)
    kind = "tma" if cuda else "pointers"
    yield f"all_reduce_{kind}", fused("matmul_all_reduce", config=of())
    yield f"traced_all_reduce_{kind}", fused("matmul_all_reduce", config=of()), dict(recording=True)
    yield f"reduce_scatter_{kind}", fused("matmul_reduce_scatter", config=of())
    yield f"matmul_all_gather_{kind}", fused("matmul_all_gather", config=of())
    yield f"all_gather_matmul_rows_{kind}", fused("all_gather_matmul", config=of(splits=2))
    yield f"all_gather_matmul_k_{kind}", fused("all_gather_matmul", form="k", config=of())
    if cuda:  # rows that begin between vectors of 16 bytes
        yield "all_reduce_pointers", fused("matmul_all_reduce", config=of(), pad=1)
    if not cuda:  # what ops launch by themselves
        for op, M, dtype in (
            ("matmul_all_reduce", 16, BF16),
            ("matmul_all_reduce", 4096, BF16),
            ("all_gather_matmul", 4096, torch.float16),
            ("matmul_all_gather", 64, BF16),
            ("matmul_reduce_scatter", 2048, FP32),
        ):
            yield f"planned_{op}_{M}", fused(op, M=M, dtype=dtype)


def few_rows(target: GPUTarget) -> Iterator[Any]:
    """Yield cases of the Lamport kernels."""
    one, two = partial(tile, target, algorithm="one_shot"), partial(tile, target, algorithm="two_shot")
    reduce, scatter, gather = "matmul_all_reduce", "matmul_reduce_scatter", "matmul_all_gather"
    low, owners = one(16, 64, 256, 4), two(64, 64, 128, 8)
    yield "lamport_all", fused(reduce, M=16, config=low)
    yield "lamport_all_norm", fused("matmul_all_reduce_norm", M=16, config=low)
    yield "lamport_all_turns", fused(reduce, M=64, N=16384, config=low)
    yield "lamport_owners", fused(reduce, M=256, config=owners)
    yield "lamport_scatter", fused(scatter, M=256, config=one(64, 64, 128, 4))
    yield "lamport_gather", fused(gather, M=128, config=one(32, 64, 256, 4))
    yield "lamport_gather_first", fused("all_gather_matmul", M=256, config=low)
    yield "lamport_narrow_of_two", fused(reduce, M=64, N=2048, config=one(64, 32, 128, 4)), dict(world_size=2)
    yield "first_half", fused("matmul_all_reduce_norm", M=4096, config=tile(target, 128, 256, 64, 8))
    for name, op, M, config, ranks in (
        ("all", reduce, 16, low if target.backend == "cuda" else one(32, 64, 256, 4), 2),
        ("narrow", reduce, 64, one(64, 32, 128, 4), 2),
        ("owners", reduce, 192, two(64, 64, 128, 4), 3),
        ("scatter", scatter, 192, one(64, 64, 128, 8), 3),
    ):
        k_per_rank = dict(k_per_rank=(2048, 2048) if ranks == 2 else (1536, 1024, 1536))
        call = fused(op, M=M, N=2048, K=k_per_rank["k_per_rank"][1], config=config, **k_per_rank)
        yield f"tree_{name}", call, dict(world_size=ranks, invariant="ranks")


def local(target: GPUTarget) -> Iterator[Any]:
    """Kernels without ranks."""
    yield "norm", lambda ctx: norm.normed(new(64, 4096), new(4096), 1e-5)
    yield "norm_sum", lambda ctx: norm.normed(new(64, 4096), new(4096), 1e-5, new(64, 4096))
    yield "gate", fused("all_gather_matmul_gated", config=tile(target, 128, 256, 64, 8))
    for name, length, dtype, dim, equal_splits in (
        ("step_whole", 64, BF16, 128, False),
        ("step_weigh", 4096, BF16, 128, False),
        ("step_weigh_pairs", 65536, BF16, 128, True),
        ("step_wide", 64, FP32, 512, False),
    ):
        yield name, partial(_attend, length, dtype, dim, equal_splits)
    yield "step_stretch", partial(_attend, 4096, BF16, 128, False), dict(launch=0)
    if target.backend == "cuda":  # AMD's e4m3 is another one
        yield "round_rows", lambda ctx: scaled_matmul.round_rows(new(64, 16384))
    for name, rows, outputs, gated, spans in (
        ("", 8, 4096, False, 0),
        ("_norm", 8, 4096, False, 64),
        ("_gated_32", 32, 28672, True, 0),
        ("_gated_64_norm", 64, 28672, True, 64),
        ("_64", 64, 16384, False, 0),
        ("_64_narrow", 64, 8192, False, 64),
    ):
        yield f"skinny_matmul{name}", partial(_skinny, rows, outputs, gated, spans)
    yield "arrived", fused("all_gather_matmul", config=FusedConfig(algorithm="copy_gather"))


def _attend(length: int, dtype: torch.dtype, dim: int, equal_splits: bool, ctx: Any) -> None:
    cache, seen = new(2, 8, length, dim, dtype=dtype), new(2, length, dtype=torch.bool)
    decode_attention.decode_attention(new(2, 32, dim, dtype=dtype), cache, cache, seen, 0.1, equal_splits)


def _skinny(rows: int, outputs: int, gated: bool, spans: int, ctx: Any) -> None:
    squares = new(spans, rows, dtype=FP32) if spans else None
    skinny_matmul.skinny_matmul(
        new(rows, 4096), new(outputs, 4096), new(outputs), epilogue=GATE.name if gated else "", squares=squares
    )


def mixtures(target: GPUTarget) -> Iterator[Any]:
    for name, tokens, transposed, options, launch in (
        ("moe_gate_up_few", 8, True, {}, -1),
        ("moe_gate_up_turns", 8, False, dict(interleaved=True, activation=GPT_OSS), -1),
        ("moe_gate_up_halves", 8192, True, {}, -1),
        ("moe_route", 64, True, {}, 1),
        ("moe_count", 8192, True, {}, 1),
        ("moe_route_counted", 8192, True, {}, 2),
    ):
        yield name, partial(_gate_up, tokens, transposed, options), dict(launch=launch)
    for name, tokens, experts, scoring in (
        ("moe_choose", 1024, 128, Scoring()),
        ("moe_choose_sorted", 64, 128, Scoring(SOFTMAX_OF_CHOSEN, False)),
        ("moe_choose_of_groups", 48, 256, Scoring(SIGMOID, True, 1e-20, 2.5, 8, 4)),
    ):
        yield name, partial(_choose, tokens, experts, scoring), dict(launch=0)
    gpt_oss, streams = dict(interleaved=True, activation=GPT_OSS), target.backend == "cuda" and target.arch == 90
    for name, tokens, coded, options in (
        ("gate_up_fp8", 24, "fp8", {}),
        ("gate_up_fp8_block", 8192, "fp8_block 128", {}),
        ("gate_up_fp8_cut_block", 24, "fp8_block 64", {}),
        ("gate_up_int4", 64, "int4 32", {}),
        ("gate_up_mxfp4", 24, "mxfp4 32", gpt_oss),
        ("gate_up_mxfp4_halves", 8192, "mxfp4 32", {}),
        ("stream_fp8", 8, "fp8", {}),
        ("stream_fp8_block", 16, "fp8_block 128", {}),
        ("stream_fp8_cut_block", 3, "fp8_block 64", {}),
        ("stream_int4", 1, "int4 32", {}),
        ("stream_int4_channel", 4, "int4", {}),
        ("stream_mxfp4", 1, "mxfp4 32", gpt_oss),
        ("stream_mxfp4_many", 16, "mxfp4 32", gpt_oss),
        ("gate_up_nvfp4", 24, "nvfp4 16", gpt_oss),
        ("gate_up_int8", 64, "int8 128", {}),
        ("gate_up_int4_zeros", 24, "int4_zeros 32", {}),
        ("gate_up_int8_zeros_halves", 8192, "int8_zeros 64", {}),
        ("stream_nvfp4", 4, "nvfp4 16", gpt_oss),
        ("stream_int8_channel", 8, "int8", {}),
        ("stream_int4_zeros", 16, "int4_zeros 128", {}),
        ("stream_int8_zeros", 1, "int8_zeros 32", {}),
        ("stream_int4_16", 2, "int4 16", {}),
    ):
        if streams or not name.startswith("stream"):
            yield f"moe_{name}", partial(_gate_up, tokens, True, options, coded=coded)
    for name, tokens, coded in (("mxfp4", 1, "mxfp4 32"), ("fp8", 4, "fp8"), ("int4", 4, "int4")):
        down = partial(_down, "moe_down_all_reduce", tokens, coded=coded)
        yield f"moe_lamport_down_{name}", down, dict(world_size=2)
    for name, op, tokens, ranks, launch in (
        ("moe_lamport_token", "moe_down_all_reduce", 1, 2, -1),
        ("moe_lamport_token_four_ranks", "moe_down_all_reduce", 1, 4, -1),
        ("moe_lamport_combine_all", "moe_down_all_reduce", 1024, 2, -1),
        ("moe_down_sorted", "moe_down_all_reduce", 1024, 2, -2),
        ("moe_lamport_combine_owners", "moe_down_all_reduce", 1024, 4, -1),
    ):
        yield name, partial(_down, op, tokens), dict(world_size=ranks, launch=launch)
    few, torch_ = tile(target, 16, 64, 128, 4, "one_shot"), FusedConfig(algorithm="sequential")
    first = dict(world_size=2, number=0)  # which adds the bias
    yield "moe_lamport_down_few", partial(_down, "moe_down_all_reduce", 8, config=few, bias=(128, 2048)), first
    yield "moe_combine", partial(_down, "moe_down_all_reduce", 64, config=torch_), dict(kernel="moe_combine_kernel")


def _coded(coded: str, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Experts [128, K, N] in a format, and their scales."""
    if not coded:
        return new(128, N, K).transpose(1, 2), None
    name, _, group = coded.partition(" ")
    weight, scale = (new(128, *shape, dtype=dtype).squeeze(-1) for shape, dtype in
                     packing.PACKINGS[name].stored(N, K, int(group) if group else None))  # fmt: skip
    return weight.transpose(1, 2), scale


def _gate_up(tokens: int, transposed: bool, options: dict, ctx: Any, coded: str = "") -> None:
    B, scale = _coded(coded, 2048, 2048) if transposed else (new(128, 2048, 2048), None)
    options = options | dict(scale=scale)
    ctx.ops.moe_gate_up(new(tokens * 8, 1024), new(tokens, 2048), B, new(tokens, 8, dtype=torch.int32), **options)


def _choose(tokens: int, experts: int, scoring: Scoring, ctx: Any) -> None:
    bias = new(experts, dtype=FP32) if scoring.kind == SIGMOID else None
    ctx.ops.moe_choose(new(tokens, experts), 8, scoring, bias)


def _down(op: str, tokens: int, ctx: Any, coded: str = "", bias: Any = (), **options: Any) -> None:
    out = new(tokens // (ctx.num_ranks if "scatter" in op else 1), 2048)
    experts, weights, shared = new(tokens, 8, dtype=torch.int32), new(tokens, 8, dtype=FP32), new(tokens, 2048)
    B, options["scale"] = _coded(coded, 2048, 1024)
    options["bias"] = new(*bias) if bias else None
    getattr(ctx.ops, op)(out, new(tokens * 8, 1024), B, experts, weights, shared=shared, **options)


def collectives(target: GPUTarget) -> Iterator[Any]:
    def call(op: str, rows: int, dtype: torch.dtype = BF16, gap: int = 0, block: int = 0, **config: Any) -> Callable:
        def made(ctx: Any) -> None:
            out = matrix(rows * (ctx.num_ranks if op == "all_gather" else 1), 4096, dtype, pad=gap)
            inp = matrix(rows * (ctx.num_ranks if op == "reduce_scatter" else 1), 4096, dtype, pad=gap)
            given = dict(block_size_m=1, block_size_n=block) if block else {}
            getattr(ctx.ccl, op)(out, inp, config=Config(**given, **config))

        return made

    reduce, scatter, one, two = "all_reduce", "reduce_scatter", dict(all_reduce_variant="one_shot"), "two_shot"
    lamport, flags, of_two = dict(protocol="lamport"), dict(protocol="flags"), dict(world_size=2)
    yield "ccl_lamport_one_shot", call(reduce, 64, block=1024, **lamport, **one)
    yield "ccl_lamport_two_shot", call(reduce, 64, gap=64, block=1024, **lamport, all_reduce_variant=two)
    yield "ccl_lamport_one_shot_of_two", call(reduce, 64, block=2048, **lamport, **one), of_two
    yield "ccl_lamport_scatter_of_two", call(scatter, 64, block=2048, **lamport), of_two
    yield "ccl_flags_two_shot", call(reduce, 4096, gap=64, block=8192, **flags, all_reduce_variant=two)
    yield "ccl_flags_scatter", call(scatter, 4096, block=8192, **flags)
    yield "ccl_flags_gather", call("all_gather", 4096, block=8192, **flags)
    yield "ccl_flags_gather_bytes", call("all_gather", 4096, torch.uint8, block=16384, **flags)
    yield "ccl_flags_exchange", call("all_to_all", 4096, gap=64, block=8192, **flags)
    yield "ccl_ring", call(reduce, 4096, all_reduce_variant="ring", all_reduce_num_rings=2)
    for variant in ("atomic", "spinlock"):
        yield f"ccl_{variant}", call(reduce, 64, all_reduce_variant=variant)
    yield "ccl_messages", lambda ctx: ctx.ccl.broadcast(new(64, 4096, dtype=torch.int32), src=1)
    yield "ccl_reduce", lambda ctx: ctx.ccl.reduce(new(64, 4096), dst=1)
    yield "device_barrier", lambda ctx: ctx.device_barrier()


def hopper(target: GPUTarget) -> Iterator[Any]:
    """Warp-specialised kernels, and weights in fp8."""
    if target.arch != 90:
        return
    of, reduce, scatter = partial(FusedConfig, warp_specialised=True), "matmul_all_reduce", "matmul_reduce_scatter"
    wide, narrow = of(128, 256, 64, num_stages=3), of(128, 128, 64, num_stages=5, splits=2)
    yield "all_reduce_hopper_256", fused(reduce, config=wide)
    yield "traced_all_reduce_hopper_256", fused(reduce, config=wide), dict(recording=True)
    yield "all_reduce_hopper_128", fused(reduce, config=narrow)
    yield "all_reduce_hopper_128_fp8", fused(reduce, config=narrow, fp8=True)
    yield "reduce_scatter_hopper_256", fused(scatter, config=wide, transposed=False)
    yield "matmul_all_gather_hopper_128", fused("matmul_all_gather", config=narrow)
    for n, op, stages in ((128, "all_gather_matmul", 5), (256, "all_gather_matmul_gated", 3)):
        brought = of(128, n, 64, num_stages=stages, algorithm="copy_gather")
        yield f"all_gather_matmul_hopper_{n}", fused(op, config=brought)
    pair, two = partial(of, algorithm="one_shot"), dict(world_size=2)
    high, low = pair(128, 128, 64, num_stages=4), pair(64, 128, 64, num_warps=4, num_stages=8)
    for prefix, kind in (("", two), ("traced_", dict(two, recording=True))):
        yield f"{prefix}lamport_pair_128", fused(reduce, M=1024, config=high), kind
        yield f"{prefix}lamport_pair_scatter_128", fused(scatter, M=1024, config=high), kind
    yield "lamport_pair_64_of_four", fused(reduce, M=1024, config=low), two
    yield "lamport_pair_128_fp8", fused(reduce, M=1024, config=high, fp8=True), two
    leaves = fused(reduce, M=1024, K=2048, config=high, k_per_rank=(2048, 2048))
    yield "lamport_pair_leaves_128", leaves, dict(two, invariant="ranks")
    shots = fused(reduce, M=1024, config=of(128, 128, 64, num_stages=5, algorithm="two_shot"))
    yield "lamport_two_shot", shots
    yield "traced_lamport_two_shot", shots, dict(recording=True)
    streamed = FusedConfig(16, 64, 128, num_warps=4, num_stages=4, algorithm="one_shot")
    yield "lamport_fp8", fused(reduce, M=8, config=streamed, fp8=True)
    columns = partial(new, 16384, dtype=FP32)
    fp8 = partial(new, 16384, 4096, dtype=FP8)
    yield "skinny_fp8", lambda ctx: skinny_matmul.skinny_matmul(new(16, 4096), fp8(), new(16384), scale=columns())
    for name, (form, group) in STREAMED.items():
        yield f"skinny_{name}", partial(_skinny_stored, form, group, 16, False)
        if name in STREAMED_BETWEEN_RANKS:
            yield f"lamport_{name}", partial(_lamport_stored, form, group)
            yield f"lamport_{name}_1", partial(_lamport_stored, form, group, rows=1)
            for rows in LOCAL_ROWS:
                yield f"skinny_{name}_{rows}", partial(_skinny_stored, form, group, rows, False)
    yield "skinny_gated_mxfp4", partial(_skinny_stored, packing.MXFP4, 32, 16, True)
    for name in STREAMED_BETWEEN_RANKS:
        yield f"skinny_gated_{name}_32", partial(_skinny_stored, *STREAMED[name], 32, True)
    rounded = FusedConfig(64, 64, 64, num_warps=4, num_stages=6, algorithm="one_shot")
    yield "lamport_rounded_64", fused(reduce, M=128, config=rounded, fp8=True)
    yield "fp8_tiles", lambda ctx: scaled_matmul.product(new(64, 4096), fp8(), columns(), None)
    for name, rows, config, kind in (
        ("all_reduce_hopper_256", 4096, wide, {}),
        ("all_reduce_hopper_128", 4096, narrow, {}),
        ("lamport_pair_128", 1024, high, two),
        ("lamport_rounded_32", 24, None, two),
        ("lamport_rounded_64", 64, None, two),
    ):
        call = partial(_lamport_stored, packing.FP8_BLOCK, 128, rows=rows, config=config)
        yield f"{name}_fp8_block", call, kind
    for name in STREAMED:
        yield f"many_rows_{name}", partial(_many_rows, *STREAMED[name])
    widened = of(128, 128, 128, num_stages=3)
    for name in ("fp8_block_32", "int4_32", "int4_channel", "mxfp4"):
        yield f"all_reduce_hopper_{name}", partial(_lamport_stored, *STREAMED[name], rows=4096, config=widened)


# Formats with scales of groups: packing, group.
STREAMED = {
    "fp8_block_128": (packing.FP8_BLOCK, 128), "fp8_block_32": (packing.FP8_BLOCK, 32),
    "int4_32": (packing.INT4, 32), "int4_128": (packing.INT4, 128), "int4_channel": (packing.INT4, None),
    "mxfp4": (packing.MXFP4, 32), "nvfp4": (packing.NVFP4, 16), "int8_128": (packing.INT8, 128),
    "int4_zeros_16": (packing.INT4_ZEROS, 16), "mxfp4_16": (packing.MXFP4, 16),
    "int4_zeros_128": (packing.INT4_ZEROS, 128), "int8_zeros_32": (packing.INT8_ZEROS, 32),
}  # fmt: skip
STREAMED_BETWEEN_RANKS = "fp8_block_128", "int4_32", "mxfp4"
LOCAL_ROWS = 32, 64  # of products without ranks


def _stored(form: packing.Packing, group: int | None, N: int, K: int) -> list[torch.Tensor]:
    return [new(*shape, dtype=dtype) for shape, dtype in form.stored(N, K, group)]


def _lamport_stored(
    form: packing.Packing, group: int | None, ctx: Any, rows: int = 8, config: Any = None
) -> None:  # fmt: skip
    N = 4096 if rows == 8 else 8192
    weight, scale = _stored(form, group, N, 4096)
    ctx.ops.matmul_all_reduce(new(rows, N), new(rows, 4096), weight.t(), scale=scale, config=config)


def _skinny_stored(form: packing.Packing, group: int | None, rows: int, gated: bool, ctx: Any) -> None:
    weight, scale = _stored(form, group, 16384, 4096)
    skinny_matmul.skinny_matmul(new(rows, 4096), weight, new(16384), scale=scale, epilogue=GATE.name if gated else "")


def _many_rows(form: packing.Packing, group: int | None, ctx: Any) -> None:
    restoring.product(new(512, 4096), *_stored(form, group, 8192, 4096), new(8192))
