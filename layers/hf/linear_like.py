"""Find modules that compute what torch.nn.Linear does, under another class, by trying."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_IN, _OUT = 3, 5


def as_linear(module: Any) -> tuple[nn.Linear, bool] | None:
    """Return a torch.nn.Linear of the weights of `module`, and whether that stores the transpose; else None."""
    if type(module) is nn.Linear:
        return module, False
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if (
        not isinstance(weight, nn.Parameter)
        or weight.dim() != 2
        or not (bias is None or isinstance(bias, nn.Parameter))
    ):
        return None
    transposed = _kind_of(_ByClass(module))
    if transposed is None:
        return None
    weight = weight.detach().t() if transposed else weight.detach()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return linear.train(module.training), transposed


class _ByClass:
    """A module that is equal to all of its class, so that its kind is cached by class."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByClass) and type(other.module) is type(self.module)

    def __hash__(self) -> int:
        return hash(type(self.module))


@cache
def _kind_of(held: _ByClass) -> bool | None:
    """Return whether the class of a module stores the transpose; None if it computes something else."""
    random = torch.Generator("cpu").manual_seed(0)
    x, bias = (torch.randn(*size, generator=random, device="cpu") for size in ((4, 2, _IN), (_OUT,)))
    for transposed in (False, True):
        tiny: Any = copy.copy(held.module)
        if list(tiny._modules) or tiny._buffers or set(tiny._parameters) - {"weight", "bias"}:
            return None
        weight = torch.randn(_OUT, _IN, generator=random, device="cpu")
        tiny._parameters = {"weight": nn.Parameter(weight.t().contiguous() if transposed else weight)}
        tiny._parameters["bias"] = None if held.module._parameters.get("bias") is None else nn.Parameter(bias)
        for name, size in (("in_features", _IN), ("out_features", _OUT), ("nx", _IN), ("nf", _OUT)):
            if name in vars(tiny):
                vars(tiny)[name] = size
        expected = F.linear(x, weight, tiny._parameters["bias"])
        try:
            with torch.no_grad():
                given = type(tiny).forward(tiny, x)
        except Exception:  # for other arguments it needs
            continue
        if torch.is_tensor(given) and given.shape == expected.shape and torch.allclose(given, expected, atol=1e-5):
            return transposed
    return None
