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
from iris_ops.kernels import arguments  # noqa: E402
from iris_ops.launch import LAUNCHERS  # noqa: E402
from iris_ops.local import decode_attention  # noqa: E402
from iris_ops.moe import arguments as moe  # noqa: E402
from iris_ops.moe.activation import Activation  # noqa: E402
from iris_ops.operands import Operands  # noqa: E402
from iris_ops.planning.machine import machine_named  # noqa: E402
from iris_ops.planning.plan import plan  # noqa: E402
from iris_ops.planning.workspace_size import workspace_size  # noqa: E402
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, REDUCE_SCATTER, Problem  # noqa: E402
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
    ("lamport_matmul_kernel", "sums"): "bf16",
    ("rms_norm_kernel", "total"): "bf16",
    ("ring_kernel", "staging"): "fp32",
    ("accumulate_kernel", "staging"): "fp32",
}
_FLOAT32 = {"parts", "scales", "a_scales", "b_scales", "squares", "splits", "weights", "most", "total"}

# Parameters that are several values, and names of those that are others in `kernel_variants.py`.
_NONE = object()
_GROUPS: dict[str, Any] = {
    "tile": arguments.Tile,
    "world": arguments.World,
    "strides": arguments.Strides,
    "epilogue": arguments.TileEpilogue,
    "staged": arguments.Staged,
    "lamport": arguments.LamportMemory,
    "tree": arguments.Tree,
    "form": arguments.LamportForm,
    "moves": arguments.Moves,
    "pipeline": arguments.Pipeline,
    "joins": arguments.SharedTiles,
    "step": arguments.PartStep,
    "pieces": arguments.Pieces,
}
_NORMED = {"lamport_matmul_kernel", "lamport_stream_kernel", "skinny_stream_kernel"}
_SCALED = {
    "lamport_matmul_kernel",
    "lamport_stream_kernel",
    "skinny_stream_kernel",
    "tile_matmul_kernel",
    "hopper_matmul_reduce_kernel",
    "lamport_pair_kernel",
}
_SCALED |= {"lamport_pair_scatter_kernel", "lamport_two_shot_kernel"}
_FIELDS = {("strides", each): f"stride_{each}" for each in arguments.Strides._fields}
_FIELDS |= {("step", "rows"): "row_step", ("step", "cols"): "col_step"}
_FIELDS |= {("gathered", "data"): "gathered", ("bias", "data"): "bias", ("bias", "stride"): "stride_bias"}
_MOE_GROUPS: dict[str, Any] = {
    "strides": moe.ExpertStrides,
    "bias": moe.ExpertBias,
    "choice": moe.Choice,
    "combine": moe.Combine,
    "between": moe.Between,
    "activation": Activation,
}
for strides in (moe.ExpertStrides, decode_attention.CacheStrides):
    _FIELDS |= {("strides", each): f"stride_{each}" for each in strides._fields}

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
    messages = constants.pop("MESSAGES", 1)  # of a table
    folded = constants.pop("FOLDED", False)  # of A's descriptor, see `iris_ops.tiles.first_row`
    constants = {name: p.default for name, p in declared.items() if p.default is not p.empty} | constants
    absent = set() if constants.pop("HAS_BIAS", True) else {"bias"}
    if "epilogue" in declared:
        has_norm = kernel.fn.__name__ in _NORMED and "OWN" not in constants
        has_scales = kernel.fn.__name__ in _SCALED and "OWN" not in constants
        absent |= set() if has_norm else {"residual", "weight", "scaled", "squares"}
        absent |= set() if has_scales else {"a_scales", "b_scales"}
        absent |= {"a_scales"} if "SLICES" in constants else set()  # of weights alone
        if "SPANS" in constants:  # a norm's second half
            absent |= {"residual", "weight", "scaled"} | ({"squares"} & {*constants})
            absent -= {"squares"} - {*constants}
    if "first_root" in declared and "OWN" not in constants:
        absent |= {"first_leaf", "first_root"}
    constants |= dict.fromkeys(absent)
    constants |= dict(PROGRAMS=constants.pop("COMM_PROGRAMS")) if "COMM_PROGRAMS" in constants else {}
    groups = {name: group for name in declared if (group := _group(kernel, name, constants))}
    grouped = {name: list(group.values()) for name, group in groups.items() if isinstance(group, dict)}
    parameters = {leaf for name in declared for leaf in grouped.get(name, [name])}
    described = {"TMA_A": "a_tile" if "a_tile" in parameters else "a", "TMA_B": "b", "TMA_G": "gathered_tile"}
    tma = {name for flag, name in described.items() if constants.get(flag)}
    only_described = "ACC" in constants or kernel in _DESCRIBED
    tma |= {"a", "b"} | ({"gathered"} & {*parameters}) if only_described else set()
    in_lines = "SLICES" in constants  # of words, as `weight_stream.py` takes them
    tma |= {"a", "b"} if in_lines else set()
    in_eight_bits = "a_scales" in parameters and "a_scales" not in constants  # both operands
    alike = {p.name for p in kernel.params if p.do_not_specialize}  # compiled once, whatever they are multiples of
    backend = make_backend(target)
    pointer = backend.parse_attr(backend.get_tensor_specialization(torch.empty(0), align=True))

    def leaf(name: str) -> tuple[Any, list]:
        """(type, what is known of the value) of an argument that is no constant."""
        if name in tma and in_lines:
            bits, rows = (64, constants["BLOCK_M"]) if name == "a" else (32, 16)
            layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=3)
            return f"tensordesc<i{bits}[{constants['SLICES']},{rows},32],{layout!r}>", []
        if name in tma:
            kind = gl.float8e4nv if in_eight_bits else gl.bfloat16
            operand = kind.name if in_eight_bits else dtype
            sizes = {"B_TRANSPOSED": _DESCRIBED.get(kernel, True)} | constants
            block = _block(name, sizes, folded and name in ("a", "gathered_tile"), kernel.is_gluon() and kind)
            return f"tensordesc<{operand}[{block}", []
        if name in ("sends", "takes"):  # messages: an address, how many elements, ... where to
            return (("i64", *["i32"] * 6, "i64"),) * messages, []
        if name == "own":
            return "i64", []
        if name in ("scale", "eps"):
            return "fp32", []
        if name == "digest":
            return "i64", []
        if name in {"mask"} | _DATA | _INT32 | _INT64 | _FLOAT32:
            pointee = "i32" if name in _INT32 else "fp32" if name in _FLOAT32 else dtype if name in _DATA else "i64"
            pointee = "i1" if name == "mask" else pointee
            return f"*{_POINTEES.get((kernel.fn.__name__, name), pointee)}", pointer
        return "i32", [] if name in {"rank", "peer", "num_members"} | alike else [["tt.divisibility", 16]]

    signature, attrs, known = {}, {}, {}
    for index, name in enumerate(declared):
        group = groups.get(name)
        if isinstance(group, dict):  # a named tuple
            kinds = {}
            for place, (field, flat) in enumerate(group.items()):
                if flat in constants:
                    kinds[field], known[index, place] = "constexpr", constants[flat]
                else:
                    kinds[field], attrs[index, place] = leaf(flat)
            signature[name] = _kind(kernel, name)(**kinds)
        elif group is not None or name in constants:
            signature[name] = "constexpr"
            known[(index,)] = constants[name] if group is None else None if group is _NONE else group
        else:
            signature[name], attrs[(index,)] = leaf(name)
    triton.runtime.driver.set_active(_Driver(target))
    of = GluonASTSource if kernel.is_gluon() else ASTSource
    source = of(kernel, signature=signature, constexprs=known, attrs={k: v for k, v in attrs.items() if v})
    return triton.compile(source, target=target, options=FUSED | options)


def _kind(kernel, name: str) -> Any:
    """The group that a parameter is."""
    if name == "gathered":
        return {"gather_matmul_kernel": arguments.Gathered, "lamport_gather_matmul_kernel": arguments.Rows}.get(
            kernel.fn.__name__
        )
    function = kernel.fn.__name__
    if function == "split_kernel":
        return dict(strides=decode_attention.CacheStrides, form=decode_attention.SplitForm).get(name)
    if function.startswith("moe_"):
        forms = dict(moe_matmul_kernel=moe.GroupedForm, moe_lamport_down_kernel=moe.DownForm,
                     moe_lamport_token_kernel=moe.TokenForm)  # fmt: skip
        kind = _MOE_GROUPS.get(name)
        return kind or (forms.get(function) if name == "form" else _GROUPS.get(name))
    if name == "form" and ("stream" in kernel.fn.__name__ or "reduce" in kernel.fn.__name__):
        return arguments.StreamForm if "stream" in kernel.fn.__name__ else arguments.ReduceForm
    return _GROUPS.get(name)


def _group(kernel, name: str, constants: dict) -> Any:
    """Of a parameter that is several values: its fields and their names in `constants`, or the constant."""
    kind = _kind(kernel, name)
    if kind is None or name in constants and not hasattr(kind, "_fields"):
        return None
    if hasattr(kind, "_fields"):
        group = {field: _FIELDS.get((name, field), field) for field in kind._fields}
        return _NONE if name == "tree" and "OWN" not in constants else group
    if kind is Activation:
        kept = {"kind": "KIND", "alpha": "ALPHA", "limit": "LIMIT", "shift": "SHIFT"}
        return Activation(**{k: constants[v] for k, v in kept.items()}) if constants["KIND"] else _NONE
    if name == "form" and "OWN" in constants:
        constants = constants | dict(SUMS=_constant(arguments.TreeSums, constants))
    return _constant(kind, constants)


def _constant(kind: type, constants: dict) -> Any:
    return kind(**{field: constants[field] for field in kind.__dataclass_fields__ if field in constants})


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
        launcher = LAUNCHERS[config.kernel]
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
