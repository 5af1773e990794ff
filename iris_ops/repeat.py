"""Launching again what was launched before, addresses included: a model calls its layers with the same tensors, or with
others at the same addresses, over and over.

Triton's own way to launch a compiled kernel asks every argument for its address and encodes every tensor descriptor
anew. Here all of that is done once, and a call is Triton's C launcher with a list of numbers.
"""

from __future__ import annotations

from collections.abc import Callable
import inspect

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


def address(t: torch.Tensor | None) -> tuple | None:
    """All of a tensor that an op's checks and its launch depend on."""
    if t is None:
        return None
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.get_device(), t.requires_grad


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
        enter, leave = triton.knobs.runtime.launch_enter_hook.calls, triton.knobs.runtime.launch_exit_hook.calls
        current_stream = triton.runtime.driver.active.get_current_stream
    except (ImportError, AttributeError, KeyError, TypeError):
        return None
    arguments: list[object] = []
    for value in values:
        if isinstance(value, TensorDescriptor):
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


def _descriptors(values: list) -> bool:
    return any(isinstance(value, TensorDescriptor) for value in values)
