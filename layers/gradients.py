"""Layers are for inference: a gradient, of whatever kind, is refused where it would be this rank's part only."""

from __future__ import annotations

from iris.errors import ArgumentError
from iris_ops.problem import check_gradient
import torch
from torch.autograd import forward_ad


def check_no_gradient(served_by: str, **tensors: torch.Tensor | None) -> None:
    """Raises `ArgumentError` if autograd, or torch.func, differentiates through one of the named `tensors`."""
    if torch.is_grad_enabled():
        for name, t in tensors.items():
            if t is not None:
                check_gradient(served_by, name, t)
    if forward_ad._current_level >= 0 and not torch.compiler.is_compiling():
        for name, t in tensors.items():
            if t is not None and forward_ad.unpack_dual(t).tangent is not None:
                raise ArgumentError(f"{served_by}: {name} has a tangent, and layers have no forward-mode derivative")
