"""Refuses gradients of every kind: layers are for inference, and a gradient would be of this rank's part only."""

from __future__ import annotations

from iris import transforms
from iris_ops.checks import check_gradient
import torch


def may_differentiate() -> bool:
    """Whether autograd records, or a transform of torch.func is under way; it takes a fifth of a microsecond."""
    return torch.is_grad_enabled() or transforms.are_under_way()


def check_no_gradient(served_by: str, **tensors: torch.Tensor | None) -> None:
    """Raises `ArgumentError` if autograd, or torch.func, differentiates through one of the named `tensors`."""
    for name, t in tensors.items():
        if t is not None:
            check_gradient(served_by, name, t)
