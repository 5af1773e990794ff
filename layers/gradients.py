"""Refuse gradients of every kind: layers are for inference, and a gradient would be of this rank's shard only."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from iris import transforms
from iris_ops.checks import check_gradient
import torch

_Method = TypeVar("_Method", bound=Callable)


def may_differentiate() -> bool:
    """Return whether autograd records, or a transform of torch.func is active; takes a fifth of a microsecond."""
    return torch.is_grad_enabled() or transforms.are_under_way()


def check_no_gradient(op: str, **tensors: torch.Tensor | None) -> None:
    """Raise `ArgumentError` if autograd, or torch.func, differentiates through one of the named `tensors`."""
    for name, t in tensors.items():
        if t is not None:
            check_gradient(op, name, t)


def untracked(method: _Method) -> _Method:
    """Return `method` without gradients and outside inference mode, whose tensors could not be changed later."""
    return torch.inference_mode(False)(torch.no_grad()(method))
