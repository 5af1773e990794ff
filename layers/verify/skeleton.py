"""A model without its weights: the same classes, attributes and names, every tensor on meta.

A run of a skeleton costs no memory and does not touch the model. It has none of the model's hooks, nor forwards that
replace the class's on one instance: they belong to the user, who does not expect a call. It is in eval mode, and its
attention uses ops that run on meta, which a Hugging Face model calls as it calls other kernels.
Equal layers of a list are one module in it, so a deep model's skeleton is as quick to make and change.
"""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import nn

_OWN_CALLS = ("forward", "_compiled_call_impl", "_call_impl")
_ATTENTION = "_attn_implementation"  # the setting of a Hugging Face configuration
_PLACES = ("idx", "index", "layer_id")  # what settings that say where in the model a layer is end with


def skeleton(model: nn.Module) -> nn.Module:
    """Return a new module like `model`, on meta. Modules and tensors that are shared in it are shared there, too."""
    return _Skeleton(model).twin(model)


def kind_of(module: nn.Module) -> tuple:
    """Return a key that equal modules share: classes, sizes and settings except their place."""
    kind = []
    for name, each in module.named_modules():
        settings = [
            (key, value)
            for key, value in vars(each).items()
            if isinstance(value, (int, float, str, bool)) and not key.endswith(_PLACES)
        ]
        tensors = (*each.named_parameters(recurse=False), *each.named_buffers(recurse=False))
        sizes = [(key, tensor.shape, tensor.dtype) for key, tensor in tensors]
        kind.append((name, type(each), tuple(settings), tuple(sizes)))
    return tuple(kind)


class _Skeleton:
    def __init__(self, model: nn.Module) -> None:
        self._twins: dict[int, nn.Module] = {}
        self._configurations: dict[int, Any] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._inside = {id(module) for module in model.modules()}
        self._first: dict[int, nn.Module] = {}  # for each module of a list, the first that is like it
        for modules in [each for each in model.modules() if isinstance(each, nn.ModuleList)]:
            kinds: dict[tuple, nn.Module] = {}
            for module in modules:
                self._first[id(module)] = kinds.setdefault(kind_of(module), module)

    def twin(self, value: Any) -> Any:
        """Return the skeleton's counterpart of `value`: itself, unless it is a module or a tensor, or refers to one."""
        if isinstance(value, nn.Module):
            copied = id(value) in self._inside and not isinstance(value, torch.jit.ScriptModule)
            return self._module(value) if copied else value
        if isinstance(value, torch.Tensor):
            if id(value) not in self._tensors:
                self._tensors[id(value)] = _empty(value)
            return self._tensors[id(value)]
        if hasattr(value, _ATTENTION):
            if id(value) not in self._configurations:
                self._configurations[id(value)] = _configuration(value)
            return self._configurations[id(value)]
        if isinstance(value, MethodType) and id(value.__self__) in self._inside:
            owner: Any = value.__self__
            return MethodType(value.__func__, self._module(owner))
        return value

    def _module(self, module: nn.Module) -> nn.Module:
        module = self._first.get(id(module), module)
        if id(module) not in self._twins:
            self._twins[id(module)] = module.__class__.__new__(module.__class__)
            vars(self._twins[id(module)]).update(self._attributes(module))
        return self._twins[id(module)]

    def _attributes(self, module: nn.Module) -> dict[str, Any]:
        attributes: dict[str, Any] = {}
        for key, value in vars(module).items():
            if key in _OWN_CALLS:
                continue
            if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and isinstance(value, dict):
                attributes[key] = type(value)()
            elif isinstance(value, dict):
                attributes[key] = value.copy()
                attributes[key].update((name, self.twin(each)) for name, each in value.items())
            elif type(value) in (list, tuple):
                attributes[key] = type(value)(map(self.twin, value))
            else:
                attributes[key] = value.copy() if type(value) is set else self.twin(value)
        attributes["training"] = False
        return attributes


def _configuration(configuration: Any) -> Any:
    own = copy.deepcopy(configuration)
    if getattr(own, _ATTENTION) not in (None, "eager", "sdpa"):
        setattr(own, _ATTENTION, "eager")
    return own


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
