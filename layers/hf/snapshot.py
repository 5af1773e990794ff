"""A model as it is now, to be put back: `Snapshot(model).restore()`.

What is kept are references, so a snapshot copies no weights, but keeps those that the model drops alive while it lives.
It covers what splitting changes: the attributes of each module, children, parameters, buffers and hooks among them, the
data of each parameter and whether it wants a gradient, and the attributes of the model's configurations. Containers are
put back in place, for handles of hooks refer to them.
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
        self._held = [_Held(each) for each in (*model.modules(), *configurations)]
        self._tensors = [(each, each.data, each.requires_grad) for each in model.parameters()]

    def restore(self) -> None:
        for held in self._held:
            held.restore()
        for tensor, data, requires_grad in self._tensors:
            if type(tensor) is nn.Parameter:  # others may have no storage of their own
                tensor.data = data
            tensor.requires_grad = requires_grad


class _Held:
    """The attributes of one object, and what those of them hold that are containers."""

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
