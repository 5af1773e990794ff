"""A model without its weights: the same classes, attributes and names, every tensor on meta.

What is tried on a skeleton costs no memory and leaves the model alone. It has none of the model's hooks, nor forwards
that an instance has in place of its class's: they are the user's, who does not expect a call. It is in eval mode.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

_OWN_CALLS = ("forward", "_compiled_call_impl", "_call_impl")


def skeleton(model: nn.Module) -> nn.Module:
    """A new module like `model`, on meta. Modules and tensors that are shared in it are shared in the skeleton."""
    twins: dict[int, nn.Module] = {}
    for module in model.modules():
        twins[id(module)] = module.__class__.__new__(module.__class__)
    tensors: dict[int, torch.Tensor] = {}
    for module in model.modules():
        vars(twins[id(module)]).update(_attributes(module, twins, tensors))
    return twins[id(model)]


def _attributes(module: nn.Module, twins: dict[int, nn.Module], tensors: dict[int, torch.Tensor]) -> dict[str, Any]:
    def twin(value: Any) -> Any:
        if isinstance(value, nn.Module):
            return twins.get(id(value), value)
        if isinstance(value, torch.Tensor):
            if id(value) not in tensors:
                tensors[id(value)] = _empty(value)
            return tensors[id(value)]
        if isinstance(value, MethodType) and id(value.__self__) in twins:
            return MethodType(value.__func__, twins[id(value.__self__)])
        return value

    attributes = {}
    for key, value in vars(module).items():
        if key in _OWN_CALLS:
            continue
        if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
            attributes[key] = type(value)()
        elif type(value) in (dict, list, set) or key in ("_parameters", "_buffers", "_modules"):
            attributes[key] = value.copy()
            if isinstance(value, dict):
                attributes[key].update((name, twin(each)) for name, each in value.items())
        else:
            attributes[key] = twin(value)
    attributes["training"] = False
    return attributes


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
