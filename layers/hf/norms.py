"""Run RMSNorms as one kernel each: torch's, in place of the six of a Hugging Face module.

A module is replaced only if it is a plain RMSNorm: a copy of it with a random weight is compared with torch's function.
In bf16 and fp16 torch's function rounds once, where the module rounds twice. A norm that adds one to its weight, as
Gemma's and Qwen3-Next's do, stays, unless rows are to be alike: then `iris_ops/local/norm.py` computes both kinds, and
layer norms, tried likewise. The order of sums of other code depends on the number of rows on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
import copy
from typing import Any

from iris_ops.local import norm
import torch
from torch import nn
from torch.nn import functional as F

from .styles import is_hooked

_OFFSETS = 0.0, 1.0  # added to weights by modules
_NAMES = "RMSNorm", "LayerNorm"  # ends of their classes' names


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (weight + offset), over the last dimension."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float = 0.0):
        super().__init__()
        self.weight, self.eps, self.offset = weight, eps, offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:  # under torch.autocast: the wider of both, as in the original module
            return F.rms_norm(x, self.weight.shape, None, self.eps) * (self.weight + self.offset)
        return self.normalised(x)

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of `x` in the weight's dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}" + (f", offset={self.offset}" if self.offset else "")


class RowsAlikeRMSNorm(RMSNorm):
    """The same; a row has the same bits among any number of rows, in compiled code, too."""

    def normalised(self, x: torch.Tensor) -> torch.Tensor:
        return norm.rms_norm(x, self.weight, self.eps, self.offset)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension; the same bits among any rows."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, eps: float):
        super().__init__()
        self.weight, self.bias, self.eps = weight, bias, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self.weight.dtype:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return norm.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


def fuse_norms(model: nn.Module, rows_alike: bool = False) -> int:
    """Replace the plain RMSNorms of `model`, which keep their weights; return their number.

    `rows_alike`: whether a row is to have the same bits among any number of rows; norms are then those of
    `iris_ops/local/norm.py`, in compiled code, too, and layer norms are replaced as well.
    """
    makers: dict[tuple, Callable[[Any], nn.Module] | None] = {}
    replacements = []
    for parent in model.modules():
        for child, module in parent.named_children():
            eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
            if not type(module).__name__.endswith(_NAMES) or isinstance(module, (RMSNorm, LayerNorm)) or eps is None:
                continue
            if is_hooked(module):  # which would be lost
                continue
            kind = type(module), eps, *((name, p.shape) for name, p in module.named_parameters())
            if kind not in makers:
                makers[kind] = _replacement(module, eps, rows_alike)
            if make := makers[kind]:
                replacements.append((parent, child, make(module).train(module.training)))
    for parent, child, ours in replacements:
        setattr(parent, child, ours)
    return len(replacements)


def _replacement(module: Any, eps: float, rows_alike: bool) -> Callable[[Any], nn.Module] | None:
    """Return a function that makes our norm from a module of this kind; None where none computes the same."""
    if type(module).__name__.endswith("RMSNorm"):
        if (offset := offset_of(module, eps)) is None or offset and not rows_alike:
            return None
        kind = RowsAlikeRMSNorm if rows_alike else RMSNorm
        return lambda theirs: kind(theirs.weight, eps, offset)
    if not rows_alike or not is_layer_norm(module, eps):
        return None
    return lambda theirs: LayerNorm(theirs.weight, theirs.bias if "bias" in theirs._parameters else None, eps)


@torch.no_grad()
def offset_of(module: Any, eps: float) -> float | None:
    """Return the number that `module` adds to its weight, if it computes an RMSNorm when tried; else None."""
    if (tried := _tried(module, ["weight"])) is None:
        return None
    trial, x, result = tried
    for offset in _OFFSETS:
        if torch.allclose(result, F.rms_norm(x, trial.weight.shape, trial.weight + offset, eps), 1e-4, 1e-6):
            return offset
    return None


@torch.no_grad()
def is_layer_norm(module: Any, eps: float) -> bool:
    """Return whether it computes what LayerNorm does, by trying it."""
    if not (tried := _tried(module, ["weight"]) or _tried(module, ["weight", "bias"])):
        return False
    trial, x, result = tried
    exact = F.layer_norm(x, trial.weight.shape, trial.weight, trial._parameters.get("bias"), eps)
    return torch.allclose(result, exact, 1e-4, 1e-6)


@torch.no_grad()
def _tried(module: Any, names: list[str]) -> tuple[Any, torch.Tensor, torch.Tensor] | None:
    """Return a copy of `module` with random parameters, an input, and the result; None for other parameter names."""
    parameters = dict(module.named_parameters())
    sizes = {p.shape for p in parameters.values()}
    if list(parameters) != names or len(sizes) > 1 or module.weight.dim() != 1 or list(module.children()):
        return None
    random = torch.Generator("cpu").manual_seed(0)
    here: dict[str, Any] = {"generator": random, "device": "cpu"}  # whatever torch's defaults
    trial = copy.deepcopy(module)
    size = module.weight.shape[0]
    for name in names:
        setattr(trial, name, nn.Parameter(torch.randn(size, **here)))
    x = torch.randn(3, size, **here) * torch.tensor([[1e-3], [1.0], [1e3]], device="cpu")  # eps counts in the first row
    try:
        result = trial(x)
    except Exception:  # for other arguments it needs
        return None
    return (trial, x, result) if torch.is_tensor(result) else None
