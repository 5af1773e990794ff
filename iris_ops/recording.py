"""Detect calls that are recorded into a graph: by torch.compile, torch.export or torch.jit.trace."""

from __future__ import annotations

import torch


def is_recording() -> bool:
    """Return whether calls are recorded now, so that they must go through operators that graphs can hold."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def is_leaving_torch() -> bool:
    """Return whether the graph is made by torch.export or torch.jit.trace: one for all lengths, without guards."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def row_count(x: torch.Tensor) -> int:
    """Return the number of rows of `x` [..., K], as a graph can hold it: `Size.numel` would fix the number in one."""
    count = 1
    for size in x.shape[:-1]:
        count = count * size
    return count
