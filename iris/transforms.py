"""Refuse tensors of forward-mode differentiation and of torch.func's transforms: kernels see only their memory.

A dual tensor's tangent, and the batch of torch.func.vmap, would be dropped silently. Outside of such transforms a check
costs a call only one test of a level.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from .errors import ArgumentError


def are_under_way() -> bool:
    """Return whether this call runs in a dual level or a transform of torch.func; it takes a fifth of a microsecond."""
    return forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None


def any_hides(*tensors: torch.Tensor | None) -> bool:
    """Return whether one of the tensors has state beyond its memory: a tangent, or the batch of a vmap."""
    return are_under_way() and any(t is not None and _hidden(t) for t in tensors)


def _hidden(t: torch.Tensor) -> str:
    if torch._C._functorch.is_batchedtensor(t):
        return "batch"
    return "tangent" if forward_ad.unpack_dual(t).tangent is not None else ""


def check_plain(call: str, name: str, t: torch.Tensor) -> None:
    """Raise `ArgumentError` for a tensor `t` that has a tangent, or that torch.func batches."""
    if not are_under_way() or torch.compiler.is_compiling():
        return
    hidden = _hidden(t)
    if hidden == "batch":
        raise ArgumentError(f"{call}: {name} is batched by torch.func.vmap; expected the whole batch as one tensor")
    if hidden:
        raise ArgumentError(
            f"{call}: {name} has a tangent; expected none, because this call has no forward-mode derivative"
        )


def check_undifferentiated(call: str, name: str, t: torch.Tensor) -> None:
    """Raise `ArgumentError` for a tensor through which autograd, or a transform of torch.func, differentiates."""
    check_plain(call, name, t)
    if t.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{call}: {name} requires grad; expected a call under torch.no_grad(), because there is no backward"
        )
