"""Collect every private or version-dependent name of triton that this project uses, each with its reason.

Written for triton 3.6 to 3.9. Names that a version lacks are reported once, when iris is imported. A user's own kernel
needs none of this, but for the names in Gluon that changed: `program_barrier`, `async_load`, `reinterpret`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
import inspect
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from .errors import VersionError
from .requirements import SUPPORTED

try:
    # Gluon is experimental, and its modules for NVIDIA GPUs change most.
    from triton._C.libtriton import ir as _ir
    from triton.experimental.gluon import language as _gl
    from triton.experimental.gluon._runtime import GluonJITFunction as GluonFunction
    from triton.experimental.gluon.language._core import shared_memory_descriptor as _shared
    from triton.experimental.gluon.language.nvidia import ampere as _ampere
    from triton.experimental.gluon.language.nvidia import hopper as _hopper
    from triton.experimental.gluon.nvidia import hopper as _hopper_host
    from triton.language import core, standard
    from triton.runtime import interpreter, jit
    from triton.tools import tensor_descriptor as _tensor_descriptor

    # Structs inside kernels, and the type of a field of theirs that may be a tensor or a constant.
    _aggregate, base_value = core._aggregate, core.base_value
    TensorDescriptor, GluonDescriptor = _tensor_descriptor.TensorDescriptor, _hopper_host.TensorDescriptor
    mma_v2, mbarrier, _tma = _ampere.mma_v2, _hopper.mbarrier, _hopper.tma
    warpgroup_mma, warpgroup_mma_init = _hopper.warpgroup_mma, _hopper.warpgroup_mma_init
    warpgroup_mma_wait = _hopper.warpgroup_mma_wait
    # Renamed: in 3.7; in 3.8, the old name raises in 3.9; in 3.9.
    program_barrier = _gl.thread_barrier if hasattr(_gl, "thread_barrier") else _gl.barrier
    async_load = _tma.async_load if hasattr(_tma, "async_load") else _tma.async_copy_global_to_shared
    # Renamed in 3.9: of pointers, by each thread, and what arrives once a thread's copies have.
    copy_async = getattr(_ampere.async_copy, "async_load", _ampere.async_copy.async_copy_global_to_shared)
    arrive_copied, fence_async_shared = _ampere.async_copy.mbarrier_arrive, _hopper.fence_async_shared
    reinterpret = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret
    # Listeners that are called before and after each launch, such as a profiler.
    _launch_enter, _launch_exit = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook

    # `device/interpreter` reads or replaces the rest.
    # A value: a numpy array and its dtype. The operations on values, and the one builder that all kernels share.
    TensorHandle = interpreter.TensorHandle
    InterpreterBuilder, InterpretedFunction = interpreter.InterpreterBuilder, interpreter.InterpretedFunction
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    # Brings two operands to one type and shape.
    Semantic = interpreter.TritonSemantic
    # Reductions and scans, which bypass the builder, and functions that they apply element by element.
    ReduceOps, ReduceScan = interpreter.ReduceOps, interpreter.ReduceScanOpInterface
    XOR, OR = standard._xor_combine, standard._or_combine
    # A launch, which reads the kernel's signature each time, its error, and its conversion of arguments.
    GridExecutor, InterpreterError, implicit = (
        interpreter.GridExecutor,
        interpreter.InterpreterError,
        interpreter._implicit_cvt,
    )
    # Loads, stores and atomics on addresses, in C.
    memory = interpreter._interpreter
    # Options of operations.
    TO_NEAREST, PADDED_WITH_NAN = _ir.ROUNDING_MODE.RTNE, _ir.PADDING_OPTION.PAD_NAN
    FLOAT_ADD, EXCHANGE = _ir.ATOMIC_OP.FADD, _ir.ATOMIC_OP.XCHG
    # Replaced while one of the library's kernels runs: how the language's functions are given the builder, at each
    # launch and call; the numpy dtype of a dtype; types and values, which compute the same again and again.
    _REPLACED = interpreter._patch_attr, interpreter._patch_lang, interpreter._get_np_dtype, interpreter._LangPatchScope
    _REPLACED += core._unwrap_if_constexpr, core.dtype.to_ir, core.block_type.with_element_ty, core.tensor.__init__
except (ImportError, AttributeError) as _error:
    raise VersionError(
        f"triton {triton.__version__} lacks internals that iris uses, of triton 3.6 to 3.9: {_error}. "
        f"Install one of those: pip install '{SUPPORTED}'"
    ) from _error

# Options for each launch of a kernel of this project: a product and a sum become one instruction. Triton's default is
# to change in 3.10, and bits with it.
FUSED = {"enable_fp_fusion": True}


# --- in kernels -------------------------------------------------------------------------------------------------------


def aggregate(cls: type) -> Any:
    """Make `cls` a struct that kernels can hold. Members of plain base classes are copied into it."""
    plain = [base for base in cls.__mro__[1:-1] if not hasattr(base, "__triton_aggregate__")]
    own = {name: value for base in reversed(plain) for name, value in vars(base).items() if not name.startswith("__")}
    own |= {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return _aggregate(type(cls.__name__, tuple(base for base in cls.__bases__ if base not in plain), own))


@core.builtin
def program_threads(_semantic: Any = None) -> Any:
    """Return how many threads a program of the kernel has; a constant. Not in the interpreter."""
    options = _semantic.builder.options
    return core.constexpr(options.num_warps * options.warp_size)


@core.builtin
def warp_specialize(partitions: Any, warps: Any, registers: Any, _semantic: Any = None, _generator: Any = None) -> Any:
    """Run each partition, (function, arguments), in its own warps, as Gluon's function does; skip those of no warps.

    Arguments that are not values of the compiler, such as fields of constants, become constants.
    """
    counts = [core._unwrap_if_constexpr(count) for count in warps]
    some = [i for i, count in enumerate(counts) if count]
    chosen = [
        (function, core.tuple([each if hasattr(each, "_flatten_ir") else core.constexpr(each) for each in arguments]))
        for function, arguments in [partitions[0]] + [partitions[1 + i] for i in some]
    ]
    return _gl.warp_specialize(
        chosen, [counts[i] for i in some], [registers[i] for i in some], _semantic=_semantic, _generator=_generator
    )


def word_descriptor(base: torch.Tensor, block: list[int], layout: Any) -> Any:
    """Return Gluon's descriptor of `base`, whose elements may have 64 bits: 3.9 refuses to make those on the host,
    though its compiler takes them.
    """
    descriptor = object.__new__(GluonDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = base, list(base.shape), list(base.stride())
    descriptor.block_shape, descriptor.layout = block, layout
    return descriptor


# --- launches ---------------------------------------------------------------------------------------------------------


def launch_listeners() -> tuple[list, list]:
    """Return triton's lists of listeners before and after each launch; they fill and empty."""
    return _launch_enter.calls, _launch_exit.calls


class DirectLaunch(NamedTuple):
    """triton's C launcher of a compiled kernel: `call(*grid, stream, *head, *trailing(arguments))`."""

    call: Callable
    current_stream: Callable[[], int]
    head: tuple
    trailing: Callable[[list], tuple]
    maps: list | None
    """How each tensor descriptor becomes a map that the hardware reads."""
    arguments_of: Callable[[Any, Any], list]
    """Converts a tensor descriptor to arguments, by its `maps` entry."""


def direct_launch(compiled: Any, device: torch.device, has_descriptors: bool) -> DirectLaunch | str:
    """Return the direct launcher of `compiled`, a kernel for an NVIDIA GPU; a reason where there is none."""
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        runner = compiled.run
        call = inspect.getclosurevars(runner.launch).nonlocals["launcher"] if has_descriptors else runner.launch
        if runner.global_scratch_size or runner.profile_scratch_size:
            return "the kernel wants scratch memory"
        if getattr(runner, "gsan_enabled", False):
            return "the sanitizer of triton is on"
        scratch = hooks = None, None
        head = compiled.function, runner.launch_cooperative_grid, runner.launch_pdl
        if hasattr(runner, "kernel_signature"):  # from 3.7 on one launcher for all kernels, which takes the types
            head += (compiled.packed_metadata, None, *hooks, *scratch, runner.arg_annotations, runner.kernel_signature)
            trailing = _as_one
        else:
            head += (*scratch, compiled.packed_metadata, None, *hooks)
            trailing = tuple
        if len(inspect.signature(make_tensordesc_arg).parameters) == 3:  # from 3.8 on, for other backends
            described = partial(_described, make_tensordesc_arg)
        else:
            described = make_tensordesc_arg
        stream = partial(triton.runtime.driver.active.get_current_stream, device.index)
        return DirectLaunch(call, stream, head, trailing, compiled.metadata.tensordesc_meta, described)
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        return f"triton {triton.__version__} has another launcher than 3.6 to 3.9 ({error!r})"


def direct_launch_lacks() -> list[str]:
    """Return the names of triton's launcher for NVIDIA GPUs that `direct_launch` needs and this triton lacks."""
    try:
        from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg
    except ImportError as error:
        return [str(error)]
    needed = {"launch", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size"}
    lacking = sorted(needed - {*CudaLauncher.__init__.__code__.co_names})
    if len(inspect.signature(make_tensordesc_arg).parameters) not in (2, 3):
        lacking.append("make_tensordesc_arg of two or three arguments")
    return lacking


def _as_one(arguments: list) -> tuple:
    return (tuple(arguments),)


def _described(make: Callable, descriptor: Any, how: Any) -> list:
    return make(descriptor, how, None)


def name_kernels_alike() -> None:
    """Give a kernel the same name in triton's cache on disk in each process, as triton 3.9 does by itself.

    The name depends on the constants that a kernel and its functions read. Before 3.9, triton read those of a function
    that it had not parsed yet, in vain. So the name depended on what a process had compiled before, and another
    process compiled the kernel once more.
    """
    finder = jit.DependenciesFinder
    collect = finder._update_hash

    def collect_what_is_known(self: Any, function: Any) -> None:
        function.cache_key  # noqa: B018  (reads it)
        collect(self, function)

    finder._update_hash = collect_what_is_known


def compile_target() -> Any:
    """Return triton's compile target: the GPU at hand."""
    return triton.runtime.driver.active.get_current_target()


def compile_without_gpu(target: Any) -> None:
    """Let this process compile for `target` without a GPU. It can launch nothing from then on."""
    driver = SimpleNamespace(get_current_target=lambda: target)
    driver.get_current_device, driver.get_current_stream = lambda: 0, lambda device: 0
    triton.runtime.driver.set_active(driver)


def cache_folder() -> str:
    """Return the folder of triton's cache on disk."""
    return triton.knobs.cache.dir


@contextmanager
def use_cache_folder(folder: str) -> Iterator[None]:
    """Have triton's cache on disk in `folder` inside this block."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        yield


@contextmanager
def launches_replaced(launch: Callable[..., None]) -> Iterator[None]:
    """Call `launch(kernel, *args, grid=, **named)` in place of each launch that has to look its kernel up.

    Nothing is compiled or runs inside this block.
    """
    run = triton.JITFunction.run
    triton.JITFunction.run = lambda kernel, *args, **named: launch(kernel, *args, **named)
    try:
        yield
    finally:
        triton.JITFunction.run = run


def max_shared_bytes(index: int) -> int:
    """Return the bytes of shared memory that a program may take on GPU number `index`; triton refuses more."""
    return triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]


# --- the interpreter --------------------------------------------------------------------------------------------------


def interprets() -> bool:
    """Return whether the interpreter was on when triton was imported."""
    return isinstance(standard.cdiv, interpreter.InterpretedFunction)


def rewritten(jitted: Any) -> Callable:
    """Return a jit function of the interpreter, rewritten to run in the language that its caller has set up."""
    return jitted.rewrite()


def refuse_gluon(refusal: Callable[[], Exception]) -> None:
    """Make each launch of a Gluon kernel raise `refusal()`, where there is no GPU to run it."""
    from triton.experimental.gluon._runtime import GluonJITFunction

    def run(self: Any, *args: Any, **options: Any) -> None:
        raise refusal()

    GluonJITFunction.run = run


def numpy_type(dtype: Any) -> Any:
    """Return the numpy dtype in which the interpreter holds `dtype`: float32 for bfloat16 once `prepare` was called."""
    return interpreter._get_np_dtype(dtype)


def represent_bfloat16() -> None:
    """Let the interpreter hold numbers of bfloat16 as float32."""
    known = interpreter._get_np_dtype
    interpreter._get_np_dtype = lambda dtype: np.dtype(np.float32) if dtype.scalar.name == "bf16" else known(dtype)


def replace_builder(kind: type) -> None:
    """Let `kind` execute the operations of kernels that are launched from now on."""
    interpreter.InterpreterBuilder = kind
    builder.__class__ = kind


@contextmanager
def compile_hooks(kernel: Any) -> Iterator[None]:
    """Run no compile hook of an application while a Gluon kernel compiles.

    Triton describes the kernel to a hook in JSON, and a Gluon kernel's layouts cannot be written so: with vLLM's hook,
    which reports what compiles while it runs, the launch would raise.
    """
    runtime = getattr(triton, "knobs", SimpleNamespace()).__dict__.get("runtime")
    if runtime is None or not isinstance(kernel, GluonFunction):
        yield
        return
    with runtime.scope():
        runtime.jit_cache_hook = runtime.jit_post_compile_hook = None
        yield
