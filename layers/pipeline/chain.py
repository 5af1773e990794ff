"""Check that a model's decoder layers form a chain: each takes the output of the one before, and no other layer's.

Only hidden states cross the border of a stage. A model whose layers pass anything else to each other would be wrong
without an error. So its forward is tried on a skeleton, which has no weights, and what each layer is given is compared
with what the others return.
"""

from __future__ import annotations

from typing import Any

from iris.errors import StyleError
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..together import one_line
from ..verify.skeleton import skeleton

_TOKENS = 3


def check_chain(model: Any, stack: str) -> None:
    """Raise `StyleError` unless the layers in the list `stack` of `model` form a chain, as its forward shows."""
    twin: Any = skeleton(model)
    layers: Any = twin.get_submodule(stack)
    calls: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def look(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        calls.append((_tensors((args, kwargs)), _tensors(output)))

    for layer in dict.fromkeys(layers):  # layers that are alike are one module in a skeleton
        layer.register_forward_hook(look, with_kwargs=True)
    name = type(model).__name__
    try:
        with torch.no_grad(), torch.device("meta"), _Values():
            twin(input_ids=torch.zeros(1, _TOKENS, dtype=torch.long, device="meta"))
    except Exception as error:
        raise StyleError(
            f"{name} cannot be run without weights, which would show what its layers pass on: 'pp' cannot divide it "
            f"({type(error).__name__}: {one_line(error)[:200]})"
        ) from error
    if len(calls) != len(layers):
        raise StyleError(f"{name} calls {len(calls)} layers of the {len(layers)} in {stack}: 'pp' cannot divide it")
    earlier: dict[int, int] = {}  # by identity of a tensor, the layer that returned it; `calls` keeps all of them
    for index, (given, returned) in enumerate(calls):
        sources = [earlier[id(each)] for each in given if id(each) in earlier]
        if sources != [index - 1] * (index > 0):
            raise StyleError(
                f"layer {index} of {name} takes outputs of the layers {sources}: expected one, of layer {index - 1}: "
                f"only hidden states cross the border of a stage ('pp')"
            )
        earlier |= {id(each): index for each in returned}


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]


class _Values(TorchDispatchMode):
    """Return 1, or True, where a forward reads the value of a tensor on meta."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        return func(*args, **(kwargs or {}))
