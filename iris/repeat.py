"""Launching again what was launched before: a model calls its layers with the same tensors, or with others at the same
addresses, over and over.

Triton's own way to launch a compiled kernel asks every argument for its address and encodes every tensor descriptor
anew. Here all of that is done once, and a call is Triton's C launcher with a list of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
import inspect

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

# Bytes: what Triton asks of an address to access it widely, and tensor descriptors of addresses and strides.
ALIGNMENT = 16
_DESCRIPTORS = (TensorDescriptor, GluonDescriptor)


def address(t: torch.Tensor | None) -> tuple | None:
    """All of a tensor that an op's checks and its launch depend on."""
    if t is None:
        return None
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.get_device(), t.requires_grad


def alias(t: torch.Tensor | None, distance: int = 0) -> torch.Tensor | None:
    """`t`'s memory, or what lies `distance` bytes from it, as a tensor that does not keep it.

    For a call that is repeated only when it is given a tensor at this address.
    """
    if t is None:
        return None
    reach = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) + 1 if t.numel() else 0
    storage = torch._C._construct_storage_from_data_pointer(t.data_ptr() + distance, t.device, reach * t.element_size())
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(storage, 0, t.shape, t.stride())


def launch(
    kernels: dict,
    device: torch.device,
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    args: dict,
    **options: int,
) -> Callable[[], bool] | None:
    """Launches `kernel` on `args`, its arguments by name, in the current stream. `options`: num_warps, num_stages.

    `kernels` keeps what was compiled, by all that Triton specialises a kernel on, so that later calls skip Triton's
    own look-up, which costs several times the launch itself. Returns a function that launches the same once more at a
    tenth of the host's time, or None where there is none.
    """
    key = (kernel, *options.values(), *map(_specialization, args.values()))
    known = kernels.get(key)
    first = known is None
    if first:
        compiled = kernel[grid](**args, **options)
        if compiled is None:  # the interpreter compiles nothing
            return None
        known = kernels[key] = compiled, kernel.arg_names
    compiled, names = known
    values = [args[name] for name in names]
    again = prepare(compiled, grid, values, device)
    if not first and (again is None or not again()):
        compiled[grid](*values)
    return again


def launcher(
    kernels: dict,
    device: torch.device,
    kernel: triton.JITFunction,
    grid: tuple[int, int, int],
    args: dict,
    **options: int,
) -> Callable[[], None]:
    """A function that launches the same whenever it is called; see `launch`. It keeps the tensors in `args`."""
    again = None

    def go() -> None:
        nonlocal again
        if again is None or not again():
            again = launch(kernels, device, kernel, grid, args, **options)

    return go


def _specialization(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % ALIGNMENT == 0
    return "descriptor" if isinstance(value, _DESCRIPTORS) else value


def prepare(compiled, grid: tuple[int, int, int], values: list, device: torch.device) -> Callable[[], bool] | None:
    """A function that launches `compiled` on `values` in the current stream, or says False: a profiler listens.

    It holds addresses, not tensors. None where Triton's CUDA launcher is not as this file knows it (triton 3.6).
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        runner = compiled.run
        call = inspect.getclosurevars(runner.launch).nonlocals["launcher"] if _descriptors(values) else runner.launch
        if runner.global_scratch_size or runner.profile_scratch_size:
            return None
        head = compiled.function, runner.launch_cooperative_grid, runner.launch_pdl, None, None
        metadata = iter(compiled.metadata.tensordesc_meta or [None] * len(values))
        enter, leave = listeners()
        current_stream = triton.runtime.driver.active.get_current_stream
    except (ImportError, AttributeError, KeyError, TypeError):
        return None
    arguments: list[object] = []
    for value in values:
        if isinstance(value, _DESCRIPTORS):
            arguments += make_tensordesc_arg(value, next(metadata))
        else:
            arguments.append(value.data_ptr() if isinstance(value, torch.Tensor) else value)
    tail = compiled.packed_metadata, None, None, None, *arguments

    def again() -> bool:
        if enter or leave:
            return False
        call(*grid, current_stream(device.index), *head, *tail)
        return True

    return again


def listeners() -> tuple[list, list]:
    """Who is told before and after each launch, a profiler for one: Triton's own lists, which fill and empty."""
    return triton.knobs.runtime.launch_enter_hook.calls, triton.knobs.runtime.launch_exit_hook.calls


def _descriptors(values: list) -> bool:
    return any(isinstance(value, _DESCRIPTORS) for value in values)
