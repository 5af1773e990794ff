"""Refuses gradients of every kind: layers are for inference, and a gradient would be of this rank's part only.

Tensors that torch.func batches are refused, too, because kernels see the memory behind a tensor. Outside of
torch.func's transforms, neither check costs a call more than a look whether there is one.
"""

from __future__ import annotations

from iris.errors import ArgumentError
from iris_ops.checks import check_gradient
import torch
from torch.autograd import forward_ad


def may_differentiate() -> bool:
    """Whether autograd records, or a transform of torch.func is under way; it takes a fifth of a microsecond."""
    return torch.is_grad_enabled() or _is_transformed()


def _is_transformed() -> bool:
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def check_no_gradient(served_by: str, **tensors: torch.Tensor | None) -> None:
    """Raises `ArgumentError` if autograd, or torch.func, differentiates through one of the named `tensors`."""
    for name, t in tensors.items():
        if t is not None:
            check_gradient(served_by, name, t)
            if _is_transformed() and not torch.compiler.is_compiling():
                _check_untransformed(served_by, name, t)


def _check_untransformed(served_by: str, name: str, t: torch.Tensor) -> None:
    if torch._C._functorch.is_batchedtensor(t):
        raise ArgumentError(f"{served_by}: {name} is one of torch.func.vmap's: expected the batch, of any dimensions")
    if forward_ad.unpack_dual(t).tangent is not None:
        raise ArgumentError(f"{served_by}: {name} has a tangent, and layers have no forward-mode derivative")
