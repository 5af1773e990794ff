"""The calls whose kernels are compiled ahead of time, which `kernel_cases.txt` lists.

A call is made on the tensors of a fake GPU (`tests/fake_gpu.py`), so the library chooses kernel, constants and
signature. A case bears the name of the kernel that its call launches last, or as number `launch`.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from iris import platform
from iris.ccl import Config
from iris_ops import FusedConfig, Scoring
from iris_ops.activation import GPT_OSS
from iris_ops.local import decode_attention, norm, skinny_matmul
from iris_ops.quantised import restoring, scaled_matmul
from iris_ops.quantised.packing import PACKINGS
from iris_tp.bench.rows import CALLS, Row
import torch
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.cases import rma_kernels as benchmark_kernels
from examples import tile_all_reduce, tile_all_reduce_hopper
from examples.all_scatter import common, fused_store_warp
from tests import fake_gpu, gluon_kernels, rma_kernels, tile_kernels

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
_TABLE = Path(__file__).with_name("kernel_cases.txt")
_OF_RANK = "world_size", "number", "invariant", "recording", "launch"  # of a case, beside its call's arguments
_OF_CONFIG = "tile", "algorithm", "splits", "warp_specialised"


def cases(name: str) -> Iterator[tuple[str, Callable[[Any], object], dict]]:
    """Yield the cases of a target: name, call, and what kind of rank makes it."""
    target, shared = fake_gpu.TARGETS[name], fake_gpu.GPUS[name][2]
    sections, section = ("all", target.backend, str(target.arch)), ""
    for line in _TABLE.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#") and section in sections:
            case, call, *fields = line.split()
            given = dict(_value(*field.split("=")) for field in fields)
            rank, config = _taken(given, _OF_RANK), _taken(given, _OF_CONFIG)
            if config:
                given["config"] = _config(shared, **config)
            yield case, partial(_CALLS.get(call) or partial(fused, call), **given), rank


def _value(name: str, text: str) -> tuple[str, Any]:
    try:
        return name, literal_eval(text)
    except (ValueError, SyntaxError):  # a word
        return name, getattr(torch, text) if name.endswith("dtype") else text


def _taken(given: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: given.pop(name) for name in names if name in given}


def _config(shared: int, tile: str = "", **more: Any) -> FusedConfig:
    if not tile:
        return FusedConfig(**more)
    m, n, k, warps, stages = map(int, tile.split("x"))
    return FusedConfig(m, n, k, num_warps=warps, num_stages=max(2, min(stages, shared // (2 * (m + n) * k))), **more)


def new(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda:0")


def matrix(rows: int, cols: int, dtype: torch.dtype, pad: int, transposed: bool = False) -> torch.Tensor:
    """[rows, cols], whose rows, or columns if `transposed`, stand `pad` elements apart."""
    if transposed:
        return matrix(cols, rows, dtype, pad).t()
    return new(rows, cols + pad, dtype=dtype)[:, :cols]


def stored(weights: str, N: int, K: int, *experts: int) -> list[torch.Tensor]:
    """A weight [N, K] in a format, such as int4/32, and its scales."""
    packing, _, group = weights.partition("/")
    form = PACKINGS[packing].stored(N, K, int(group) if group else None)
    return [new(*experts, *shape, dtype=dtype) for shape, dtype in form]


def fused(
    op: str, ctx: Any, M: int = 4096, N: int = 4096, K: int = 4096, form: str = "rows", pad: int = 0,
    transposed: bool = True, weights: str = "", dtype: Any = BF16, bias: bool = True, **options: Any,
) -> None:  # fmt: skip
    """Call `ctx.ops.<op>`. M, N, K: as in `iris_tp.bench.rows.Row`."""
    world, K = ctx.num_ranks, options["k_per_rank"][ctx.cur_rank] if "k_per_rank" in options else K
    row = Row(next(short for short, name in CALLS.items() if op.startswith(name)), M, N, K, form)
    (n, depth), (rows, cols) = row.w_shape(world), row.out_shape(0, world)
    A, B = matrix(*row.a_shape(0, world), dtype, pad), matrix(depth, n, dtype, pad, transposed)
    if weights:
        weight, options["scale"] = stored(weights, n, depth)
        B = weight.t()
    tensors = [A, B]
    if op.endswith("norm"):
        tensors = [new(M, N), new(-(-N // 64), M, dtype=FP32), A, B, new(M, N), new(N)]
    out = new(rows, cols // (1 + ("gated" in op)), dtype=dtype)
    getattr(ctx.ops, op)(out, *tensors, new(n, dtype=dtype) if bias else None, **options)


def ccl(ctx: Any, op: str, rows: int, block: int = 0, dtype: torch.dtype = BF16, pad: int = 0, **config: Any) -> None:
    out = matrix(rows * (ctx.num_ranks if op == "all_gather" else 1), 4096, dtype, pad)
    inp = matrix(rows * (ctx.num_ranks if op == "reduce_scatter" else 1), 4096, dtype, pad)
    blocks = dict(block_size_m=1, block_size_n=block) if block else {}
    getattr(ctx.ccl, op)(out, inp, config=Config(**blocks, **config))


def normed(ctx: Any, residual: bool = False) -> None:
    norm.normed(new(64, 4096), new(4096), 1e-5, new(64, 4096) if residual else None)


def skinny(ctx: Any, rows: int, columns: int = 16384, weights: str = "", epilogue: str = "", spans: int = 0) -> None:
    weight, scale = stored(weights, columns, 4096) if weights else (new(columns, 4096), None)
    more = dict(scale=scale, epilogue=epilogue, squares=new(spans, rows, dtype=FP32) if spans else None)
    skinny_matmul.skinny_matmul(new(rows, 4096), weight, new(columns), **more)


def attend(ctx: Any, length: int, dtype: torch.dtype = BF16, dim: int = 128, equal_splits: bool = False) -> None:
    cache, seen = new(2, 8, length, dim, dtype=dtype), new(2, length, dtype=torch.bool)
    decode_attention.decode_attention(new(2, 32, dim, dtype=dtype), cache, cache, seen, 0.1, equal_splits)


def gate_up(
    ctx: Any, tokens: int, weights: str = "", transposed: bool = True, activation: Any = "silu", **options: Any
) -> None:
    weight, options["scale"] = stored(weights, 2048, 2048, 128) if weights else (new(128, 2048, 2048), None)
    options["activation"] = GPT_OSS if activation == "gpt_oss" else activation
    B, chosen = weight.mT if transposed else weight, new(tokens, 8, dtype=INT32)
    ctx.ops.moe_gate_up(new(tokens * 8, 1024), new(tokens, 2048), B, chosen, **options)


def down(ctx: Any, tokens: int, weights: str = "", K: int = 1024, bias: bool = False, **options: Any) -> None:
    weight, options["scale"] = stored(weights, 2048, K, 128) if weights else (new(128, 2048, K), None)
    chosen, factors, shared = new(tokens, 8, dtype=INT32), new(tokens, 8, dtype=FP32), new(tokens, 2048)
    options |= dict(bias=new(128, 2048) if bias else None, shared=shared)
    ctx.ops.moe_down_all_reduce(new(tokens, 2048), new(tokens * 8, K), weight.mT, chosen, factors, **options)


def choose(ctx: Any, tokens: int, experts: int, scoring: tuple = (), bias: bool = False) -> None:
    ctx.ops.moe_choose(new(tokens, experts), 8, Scoring(*scoring), new(experts, dtype=FP32) if bias else None)


def example_hopper(ctx: Any) -> None:
    space = tile_all_reduce_hopper.space_for(ctx, M=4096, N=4096, dtype=BF16)
    tile_all_reduce_hopper.tile_matmul_hopper(ctx, space, *(new(4096, 4096) for _ in range(3)))


def example_store(ctx: Any) -> None:
    fused_store_warp.all_scatter(common.Case(ctx, new(4096, 4096), new(4096, 4096), common.Blocks()))


def example_matmul(ctx: Any) -> None:
    a, b = (TensorDescriptor.from_tensor(new(512, 512), block) for block in ([64, 32], [32, 64]))
    space, sizes = ctx.ccl.tile_space(64, 4096), (512, 512, 512, 64, 64, 32, ctx.num_ranks)
    kernel, options = tile_all_reduce.tile_matmul_kernel[(8,)], platform.pdl_options(ctx.device)
    kernel(ctx.get_device_context(), space, a, b, new(512, 512), *sizes, ONE_TILE=True, **options)


def launch(
    ctx: Any, kernel: str, dtype: torch.dtype = BF16, out_dtype: torch.dtype = FP32, per_thread: tuple = (),
    num_warps: int = 4, **options: Any,
) -> None:  # fmt: skip
    """Launch a kernel of tests or benchmarks, as `module.name` of `name_kernel`, on what its arguments' names say.

    `per_thread`: elements of a thread in the layout of its blocks.
    """
    module, name = kernel.split(".")
    function, lane = getattr(_MODULES[module], f"{name}_kernel"), torch.cuda.get_device_properties(0).warp_size
    known = dict(src=new(1 << 16, dtype=dtype), dst=new(1 << 16, dtype=dtype), inp=new(1 << 16))
    known |= dict(out=new(1 << 16, dtype=out_dtype), flags=new(1 << 12, dtype=INT32), rank=2, peer=3, n=4096)
    known |= dict(sums=new(64, dtype=torch.int64), ctx_ptr=ctx.get_device_context(), num_tiles=16, rows=64)
    known |= dict(first_owner=0, owners=4, heap_bases=ctx.get_heap_bases(), WORLD_SIZE=ctx.num_ranks)
    if len(per_thread) == 2:
        options["LAYOUT"] = gl.BlockedLayout(list(per_thread), [lane // 16, 16], [4, 1], [1, 0])
    elif per_thread:
        options["LAYOUT"] = gl.BlockedLayout(list(per_thread), [lane], [4], [0])
    if "sync" in function.arg_names or "tiles" in name:
        known["sync"] = known["flags"] = ctx.ccl.tile_space(16, 64 * 128, BF16)
    given = {name: known[name] for name in function.arg_names if name in known}
    function[(1,)](**given, num_warps=num_warps, **options)


def benchmark(ctx: Any, op: str) -> None:
    launch(ctx, "benchmark.move", dtype=INT32, **benchmark_kernels.options(op, ctx.device))


_MODULES = dict(rma=rma_kernels, gluon=gluon_kernels, tiles=tile_kernels, benchmark=benchmark_kernels)
_CALLS: dict[str, Callable[..., object]] = {
    each.__name__: each
    for each in (ccl, normed, skinny, attend, gate_up, down, choose, launch, benchmark, example_hopper, example_store)
} | {
    "example_matmul": example_matmul,
    "round_rows": lambda ctx: scaled_matmul.round_rows(new(64, 16384)),
    "fp8_product": lambda ctx: scaled_matmul.product(new(64, 4096), *stored("fp8", 16384, 4096), None),
    "restored": lambda ctx, weights: restoring.product(new(512, 4096), *stored(weights, 8192, 4096), new(8192)),
    "broadcast": lambda ctx: ctx.ccl.broadcast(new(64, 4096, dtype=INT32), src=1),
    "reduce": lambda ctx: ctx.ccl.reduce(new(64, 4096), dst=1),
    "device_barrier": lambda ctx: ctx.device_barrier(),
}
