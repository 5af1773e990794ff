"""Restore a model to an earlier state: `Snapshot(model).restore()`.

A snapshot holds references, so it copies no weights, but keeps alive those that the model drops. It covers what
splitting changes: the attributes of each module, children, parameters, buffers and hooks among them, the data of each
parameter and whether it requires a gradient, and the attributes of the model's configurations. Containers are restored
in place, for handles of hooks refer to them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

_CONTAINERS = dict, set, list
_CONFIGURATIONS = "config", "generation_config"


class Snapshot:
    """The state of `model`, to which `restore` returns it."""

    def __init__(self, model: nn.Module) -> None:
        configurations = [vars(model)[key] for key in _CONFIGURATIONS if hasattr(vars(model).get(key), "__dict__")]
        self._objects = [_Attributes(each) for each in (*model.modules(), *configurations)]
        self._tensors = [(each, each.data, each.requires_grad) for each in model.parameters()]

    def restore(self) -> None:
        for each in self._objects:
            each.restore()
        for tensor, data, requires_grad in self._tensors:
            if type(tensor) is nn.Parameter:  # others may have no storage of their own
                tensor.data = data
            tensor.requires_grad = requires_grad


class _Attributes:
    """The attributes of one object, and the contents of those that are containers."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._attributes = owner, dict(vars(owner))
        self._contents = [
            (value, value.copy()) for value in self._attributes.values() if isinstance(value, _CONTAINERS)
        ]

    def restore(self) -> None:
        attributes = vars(self._owner)
        attributes.clear()
        attributes.update(self._attributes)
        for container, content in self._contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
