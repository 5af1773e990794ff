"""Compiles every kernel ahead of time for one target: `python -m tests.compile_kernels sm_90 DIR [PATTERN] [RECORDED]`.

PATTERN, a regular expression, leaves only the variants whose names it matches; `-` leaves out those that are rare.
With a fourth argument, kernels whose digests are recorded (`tests/record.py`) are not compiled.

Processes of their own, because the interpreter must be off. Several with one empty DIR share the work. Writes
DIR/<kernel>.<ptx or amdgcn>, DIR/<kernel>.digest, and DIR/<kernel>.key of its source; no GPU is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
import contextlib
import functools
from functools import partial
import inspect
import os
from pathlib import Path
import re
import sys
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import triton  # noqa: E402

# Part of triton's keys, though not of the code that it makes; kernels that are imported may be asked for theirs.
_Jitted = getattr(triton.runtime.jit, "JITCallable", triton.runtime.jit.JITFunction)
_Jitted.starting_line_number = property(lambda self: 0, lambda self, line: None)

from iris import platform, triton_private  # noqa: E402
from iris.triton_private import FUSED  # noqa: E402
from iris_ops.fp8 import tile_matmul  # noqa: E402
from iris_ops.operands import Operands  # noqa: E402
from iris_ops.planning.machine import machine_named  # noqa: E402
from iris_ops.planning.plan import plan, way_named, workspace_size  # noqa: E402
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem  # noqa: E402
from iris_ops.steps import named  # noqa: E402
import torch  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from examples import tile_all_reduce, tile_all_reduce_hopper  # noqa: E402
from examples.all_scatter import fused_store_warp  # noqa: E402
from tests import record  # noqa: E402
from tests.kernel_variants import MACHINES, WORLD_SIZE, is_rare, traced, variants  # noqa: E402

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
ALL_BUT_RARE = "-"  # in place of a pattern
_INT32 = {"flags", "passed", "sync", "members", "sent", "arrived", "count", "left", "order", "offsets", "counts"}
_INT32 |= {"space", "calls"}
_INT64 = {"ctx_ptr", "words", "heap_bases", "sums", "times", "step", "results", "digests", "chosen"}
_DATA = {"q", "k", "v", "a", "b", "bias", "out", "staging", "gathered", "a_tile", "gathered_tile", "src", "dst", "inp"}
_DATA |= {"residual", "weight", "scaled", "both", "products", "shared"}
_DATA |= {"kv", "x", "came", "wanted", "done", "back", "up", "down"}
_POINTEES = {
    ("round_rows_kernel", "out"): "fp8e4nv",
    ("expert_mixture_kernel", "sent"): "fp32",
    ("expert_mixture_kernel", "chosen"): "fp32",
    ("lamport_two_shot_kernel", "staging"): "i16",
    ("lamport_pair_kernel", "staging"): "i16",
    ("lamport_pair_scatter_kernel", "staging"): "i16",
    ("lamport_matmul_kernel", "staging"): "i16",
    ("moe_lamport_down_kernel", "staging"): "i16",
    ("moe_lamport_token_kernel", "staging"): "i16",
    ("moe_lamport_combine_kernel", "staging"): "i16",
    ("lamport_stream_kernel", "staging"): "i16",
    ("lamport_gather_matmul_kernel", "staging"): "i16",
    ("lamport_kernel", "staging"): "i16",
    ("tree_matmul_kernel", "staging"): "i16",
    ("tree_matmul_kernel", "sums"): "bf16",
    ("rms_norm_kernel", "total"): "bf16",
    ("ring_kernel", "staging"): "fp32",
    ("accumulate_kernel", "staging"): "fp32",
}
_FLOAT32 = {"parts", "scales", "a_scales", "b_scales", "squares", "stretches", "weights", "most", "total"}

# Kernels whose operands are always descriptors: whether b is one of B transposed.
_DESCRIBED = {
    tile_matmul.tile_matmul_kernel: True,
    tile_all_reduce.tile_matmul_kernel: False,
    tile_all_reduce_hopper.tile_matmul_hopper_kernel: False,
}

# Products by rows, N = K = 4096, of which is compiled what their plans have launched.
PLANNED = (
    (ALL_REDUCE, 16, torch.bfloat16),
    (ALL_REDUCE, 4096, torch.bfloat16),
    (GATHER_MATMUL, 4096, torch.float16),
    (MATMUL_GATHER, 64, torch.bfloat16),
    (REDUCE_SCATTER, 2048, torch.float32),
)


class _Driver:
    """Stands in for the GPU driver, which kernels ask only for the target, and where they are launched."""

    def __init__(self, target: GPUTarget) -> None:
        self.get_current_target = lambda: target
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0


class _Digest(Exception):
    """Raised in place of compiling, with the digest of what would be compiled."""


class _NoCache:
    """Stands in for triton's cache: has nothing and keeps nothing."""

    def __init__(self, key: str) -> None: ...

    def get_group(self, filename: str) -> None: ...

    def put(self, data: Any, filename: str) -> None: ...


def key_of(source: ASTSource, target: GPUTarget, options: Any) -> str:
    """Of all that triton's front end makes a kernel from: as triton's cache has it, but for the lines it is on."""
    constants = repr(_keys(sorted(source.constants.items())))
    return record.digest(make_backend(target).hash(), options.hash(), source.hash(), constants, _unknown_to_triton())


@functools.cache
def _unknown_to_triton() -> str:
    """What else kernels depend on, but for lines: what is replaced in triton, and what asks for the platform."""
    return "".join(ast.dump(ast.parse(inspect.getsource(module))) for module in (triton_private, platform))


def _keys(given: Any) -> Any:
    """Constants, with keys in place of functions."""
    if isinstance(given, tuple | list):
        return [_keys(each) for each in given]
    return getattr(given, "cache_key", given)


@contextlib.contextmanager
def _known_sources(known: dict[str, str], found: list[str]) -> Iterator[None]:
    """Of sources whose keys are in `known` the front end makes nothing. All keys go to `found`."""

    def stopping(make_ir: Callable) -> Callable:
        def instead(self: ASTSource, target: GPUTarget, options: Any, *others: Any) -> Any:
            found.append(key_of(self, target, options))
            if found[-1] in known:
                raise _Digest(known[found[-1]])
            return make_ir(self, target, options, *others)

        return instead

    kept = {kind: kind.make_ir for kind in (ASTSource, GluonASTSource)}
    for kind, make_ir in kept.items():
        kind.make_ir = stopping(make_ir)
    try:
        yield
    finally:
        for kind, make_ir in kept.items():
            kind.make_ir = make_ir


def digest_of(make: Callable[[], Any], known: dict[str, str]) -> tuple[str, str]:
    """(key, digest) of the kernel that `make()` would compile: by what triton's front end hands to its compiler.

    `known`: digests by the keys of what the front end would make them from.
    """
    found: list[str] = []
    with _known_sources(known, found):
        digest = _digest_of(make)
    return found[-1], digest


def _digest_of(make: Callable[[], Any]) -> str:

    def stopping(backend: Any = None, stages: Any = None, options: Any = None, *others: Any) -> tuple[str, str]:
        def stop(module: Any, metadata: dict) -> None:
            raise _Digest(record.digest(backend.hash(), options.hash(), module.str_nodebug()))

        if stages is not None:
            stages.update(dict.fromkeys(stages, stop))
        return "digest", "digest"  # parts of the key that it would be cached by

    cache = triton.knobs.cache.manager_class
    triton.knobs.runtime.add_stages_inspection_hook, triton.knobs.cache.manager_class = stopping, _NoCache
    try:
        make()
    except _Digest as digest:
        return str(digest)
    finally:
        triton.knobs.runtime.add_stages_inspection_hook, triton.knobs.cache.manager_class = None, cache
    raise AssertionError("nothing was to be compiled")


def compile_kernel(kernel, target: GPUTarget, options: dict, dtype: str = "bf16", **constants):
    """The compiled kernel, for tensors of `dtype`, below 2 GiB, whose sizes and addresses are multiples of 16."""
    declared = inspect.signature(kernel.fn).parameters
    parameters = list(declared)
    messages = constants.pop("MESSAGES", 1)  # of a table
    folded = constants.pop("FOLDED", False)  # of A's descriptor, see `iris_ops.tiles.first_row`
    constants = {name: p.default for name, p in declared.items() if p.default is not p.empty} | constants
    described = {"TMA_A": "a_tile" if "a_tile" in parameters else "a", "TMA_B": "b", "TMA_G": "gathered_tile"}
    tma = {name for flag, name in described.items() if constants.get(flag)}
    only_described = "ACC" in parameters or kernel in _DESCRIBED
    tma |= {"a", "b"} | ({"gathered"} & {*parameters}) if only_described else set()
    in_lines = "SLICES" in parameters  # of words, as `weight_stream.py` takes them
    tma |= {"a", "b"} if in_lines else set()
    in_eight_bits = "a_scales" in parameters and "a_scales" not in constants  # both operands
    alike = {p.name for p in kernel.params if p.do_not_specialize}  # compiled once, whatever they are multiples of
    backend = make_backend(target)
    pointer = backend.parse_attr(backend.get_tensor_specialization(torch.empty(0), align=True))
    signature, attrs = {}, {}
    for index, name in enumerate(parameters):
        if name in constants:
            signature[name] = "constexpr"
        elif name in tma and in_lines:
            bits, rows = (64, constants["BLOCK_M"]) if name == "a" else (32, 16)
            layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=3)
            signature[name] = f"tensordesc<i{bits}[{constants['SLICES']},{rows},32],{layout!r}>"
        elif name in tma:
            kind = gl.float8e4nv if in_eight_bits else gl.bfloat16
            operand = kind.name if in_eight_bits else dtype
            sizes = {"B_TRANSPOSED": _DESCRIBED.get(kernel, True)} | constants
            block = _block(name, sizes, folded and name in ("a", "gathered_tile"), kernel.is_gluon() and kind)
            signature[name] = f"tensordesc<{operand}[{block}"
        elif name in ("sends", "takes"):  # messages: an address, how many elements, ... where to
            signature[name] = (("i64", *["i32"] * 6, "i64"),) * messages
        elif name == "own":
            signature[name] = "i64"
        elif name in ("scale", "eps"):
            signature[name] = "fp32"
        elif name == "digest":
            signature[name] = "i64"
        elif name in {"mask"} | _DATA | _INT32 | _INT64 | _FLOAT32:
            pointee = "i32" if name in _INT32 else "fp32" if name in _FLOAT32 else dtype if name in _DATA else "i64"
            pointee = "i1" if name == "mask" else pointee
            signature[name] = f"*{_POINTEES.get((kernel.fn.__name__, name), pointee)}"
            attrs[(index,)] = pointer
        else:
            signature[name] = "i32"
            if name not in {"rank", "peer", "num_members"} | alike:
                attrs[(index,)] = [["tt.divisibility", 16]]
    triton.runtime.driver.set_active(_Driver(target))
    of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = of(kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=target, options=FUSED | options)


def _block(name: str, constants: dict, folded: bool, in_gluon) -> str:
    """Of a descriptor, behind its dtype: what it loads at a time and, in Gluon, how that lies in shared memory.

    `in_gluon`: the dtype there, or False. `folded`: of rows that are.
    """
    m, n, k = (constants[f"BLOCK_{axis}"] for axis in "MNK")
    block = ([n, k] if constants["B_TRANSPOSED"] else [k, n]) if name == "b" else [m, k]
    if name == "b" and in_gluon and constants.get("GATED"):
        block = [2, n // 2, k]
    if name == "b" and "SEARCHED" in constants:  # of one expert, gate and up in turn or not
        n *= 2 if constants.get("GATE") == "turns" else 1
        n = [2, n] if constants.get("TOGETHER") else [n]
        block = [1, *n, k] if constants["B_TRANSPOSED"] else [1, k, *n]
    if folded:
        block = [2, m // 2, k]
    sizes = ",".join(map(str, block))
    return f"{sizes}],{gl.NVMMASharedLayout.get_default_for(block, in_gluon)!r}>" if in_gluon else f"{sizes}]>"


def planned(target: GPUTarget):
    """(name, what compiles it) of what ops would launch on an AMD GPU, with the arguments that they would give it."""
    machine = machine_named(MACHINES[target.arch], 1)
    problems = [Problem(op, "" if op == ALL_REDUCE else "rows", M, 4096, 4096, WORLD_SIZE, d) for op, M, d in PLANNED]
    plans = [plan(problem, machine) for problem in problems]
    torch.version.hip, platform.num_programs = "6.4", lambda device: machine.num_programs
    triton.runtime.driver.set_active(_Driver(target))
    context = _meta(torch.int64, 64)
    ctx = SimpleNamespace(device=context.device, cur_rank=0, get_device_context=lambda: context)
    for problem, config in zip(problems, plans, strict=True):
        flags, *areas = workspace_size(problem, config, machine.num_programs)
        staging, exchange = (_meta(torch.uint8, nbytes) for nbytes in areas)
        words = {name: _meta(torch.int32, size) for name, size in dict(flags=flags, sync=64, exchange_sync=4).items()}
        workspace = SimpleNamespace(staging=staging, exchange=exchange, **words)
        whole, part, dtype = problem.M, problem.M // WORLD_SIZE, problem.dtype
        out = _meta(dtype, part if problem.op == REDUCE_SCATTER else whole, problem.N)
        A = _meta(dtype, part if problem.op in (GATHER_MATMUL, MATMUL_GATHER) else whole, problem.K)
        B, bias = _meta(dtype, problem.N, problem.K).t(), _meta(dtype, problem.N)
        launcher = named(way_named(config.kernel).launcher)
        kernel, grid, args = launcher(ctx, workspace, problem, config, Operands(out, A, B, bias))
        options = FUSED | dict(num_warps=config.num_warps, num_stages=config.num_stages)
        yield f"planned_{problem.op}_{problem.M}", partial(kernel.warmup, **args, **options, grid=grid)


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_store_warp(target: GPUTarget):
    """The example whose warps do different work; its operands are Gluon's descriptors."""
    kernel, m, n, k = fused_store_warp.store_warp_kernel, 128, 256, 64
    shared = {rows: gl.NVMMASharedLayout.get_default_for([rows, k], gl.bfloat16) for rows in (m, n)}
    types = {"a": f"tensordesc<bf16[{m},{k}],{shared[m]!r}>", "b": f"tensordesc<bf16[{n},{k}],{shared[n]!r}>"}
    types |= {"out": "*bf16", "sync_words": "*i32", "ctx_ptr": "*i64"}
    constants = fused_store_warp.constants(WORLD_SIZE, 8)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    whole = [(i,) for i, name in enumerate(kernel.arg_names) if name not in ("a", "b", *constants)]
    attrs = {place: [["tt.divisibility", 16]] for place in whole}
    triton.runtime.driver.set_active(_Driver(target))
    source = GluonASTSource(kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=target, options=FUSED | dict(num_warps=fused_store_warp.WARPS))


def wanted_variants(target: GPUTarget, pattern: str, folder: Path):
    """(name, what compiles it) of all variants that `pattern` leaves and no other process with `folder` has begun.

    Prints each name before it is compiled.
    """

    def begun(name: str) -> bool:
        try:
            (folder / f"{name}.begun").touch(exist_ok=False)
        except FileExistsError:
            return True
        print(name, flush=True)
        return False

    whole = pattern in ("", ALL_BUT_RARE)
    for name, kernel, options, constants in [*variants(target), *traced(target)]:
        wanted = not is_rare(name, target) if pattern == ALL_BUT_RARE else re.search(pattern, name)
        if wanted and not begun(name):
            yield name, partial(compile_kernel, kernel, target, options, **constants)
    if target.backend == "hip" and whole and not begun("planned"):
        yield from planned(target)
    if target.arch == 90 and whole and not begun("example_store_warp"):
        yield "example_store_warp", partial(compile_store_warp, target)


def main(target_name: str, folder: str, pattern: str = "", recorded: str = "") -> None:
    os.nice(5)  # other tests run meanwhile
    target = TARGETS[target_name]
    known = record.read(target_name) if recorded else {}
    if target.backend == "hip":
        platform.keep_addresses_whole()
    sources = record.read_sources(target_name)
    for name, make in wanted_variants(target, pattern, Path(folder)):
        key, digest = "", ""
        if record.is_of_this_triton(target_name) or record.WRITING:
            key, digest = digest_of(make, sources)
        Path(folder, f"{name}.digest").write_text(digest)
        Path(folder, f"{name}.key").write_text(key)
        if name in known and known[name].digest == digest:
            continue
        compiled = make()
        kind = "ptx" if target.backend == "cuda" else "amdgcn"
        Path(folder, f"{name}.{kind}").write_text(compiled.asm[kind])
        Path(folder, f"{name}.shared").write_text(str(compiled.metadata.shared))


if __name__ == "__main__":
    main(*sys.argv[1:])
