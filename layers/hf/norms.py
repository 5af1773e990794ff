"""RMSNorms as one kernel each: torch's, in place of the six that a Hugging Face module spells out.

A module is exchanged only if it is a plain RMSNorm: a copy of it with a random weight is tried beside torch's function.
In bf16 and fp16 torch's function rounds once, where the module rounds twice. A norm that adds one to its weight, as
Gemma's and Qwen3-Next's do, stays, unless the same bits are promised: then both kinds are `iris_ops/local/norm.py`'s.
"""

from __future__ import annotations

import copy
from typing import Any

from iris_ops.local import norm
import torch
from torch import nn
from torch.nn import functional as F

from .styles import is_hooked

_OFFSETS = 0.0, 1.0  # that modules add to their weights


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float, invariant: str | None = None, offset: float = 0.0):
        super().__init__()
        self.weight, self.eps, self.invariant, self.offset = weight, eps, invariant, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:  # under torch.autocast: the wider of both, as of the module before
            return F.rms_norm(x, self.weight.shape, None, self.eps) * (self.weight + self.offset)
        if self.invariant:
            return norm.rms_norm(x, self.weight, self.eps, self.offset)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}" + (f", offset={self.offset}" if self.offset else "")


def fuse_norms(model: nn.Module, invariant: str | None = None) -> int:
    """Exchanges the plain RMSNorms of `model`, which keep their weights; how many there were.

    `invariant`: as in `iris.iris`; norms are then those of `iris_ops/local/norm.py`, in compiled code, too.
    """
    offsets: dict[tuple, float | None] = {}
    found = []
    for parent in model.modules():
        for child, module in parent.named_children():
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            if not type(module).__name__.endswith("RMSNorm") or isinstance(module, RMSNorm) or eps is None:
                continue
            if is_hooked(module):  # which would be lost
                continue
            kind = type(module), eps, *((name, p.shape) for name, p in module.named_parameters())
            if kind not in offsets:
                offsets[kind] = offset_of(module, eps)
            if (offset := offsets[kind]) == 0 or offset and invariant:
                theirs: Any = module
                found.append((parent, child, RMSNorm(theirs.weight, eps, invariant, offset).train(theirs.training)))
    for parent, child, ours in found:
        setattr(parent, child, ours)
    return len(found)


@torch.no_grad()
def offset_of(module: Any, eps: float) -> float | None:
    """What `module` adds to its weight, if it computes what RMSNorm does, seen by trying; None if it does not."""
    parameters = dict(module.named_parameters())
    if list(parameters) != ["weight"] or module.weight.dim() != 1 or list(module.children()):
        return None
    random = torch.Generator("cpu").manual_seed(0)
    here: dict[str, Any] = {"generator": random, "device": "cpu"}  # be torch's default another
    trial = copy.deepcopy(module)
    size = module.weight.shape[0]
    trial.weight = nn.Parameter(torch.randn(size, **here))
    x = torch.randn(3, size, **here) * torch.tensor([[1e-3], [1.0], [1e3]], device="cpu")  # eps counts in the first row
    try:
        result = trial(x)
    except Exception:  # whatever it wants beside its input
        return None
    for offset in _OFFSETS if torch.is_tensor(result) else ():
        if torch.allclose(result, F.rms_norm(x, (size,), trial.weight + offset, eps), 1e-4, 1e-6):
            return offset
    return None
