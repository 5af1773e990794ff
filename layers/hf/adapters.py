"""Refuse models with adapters, LoRA and others of peft, until they are merged; the error gives the way to merge.

An adapter wraps a linear in a separate module. A plan names the linear, so it would match the wrapper, or split the
linear without the adapter's product.
"""

from __future__ import annotations

from collections.abc import Iterator

from iris.errors import StyleError
from torch import nn

_MERGE = "merge_and_unload()"
_WRAPPED = "base_layer", "original_module"  # peft's names of a module that it adapts, or has a trained copy of


def refuse_adapters(model: nn.Module) -> None:
    """Raise `StyleError` for a model with adapter layers, with their names, and for any other model of peft's."""
    names = list(_adapted(model))
    wraps = _is_of_peft(model)
    kind = type(model).__name__
    if names:
        rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
        merge = f"pass what its {_MERGE} returns" if wraps else f"merge it by peft's {_MERGE}, then split the model"
        raise StyleError(
            f"{kind} has an adapter that is not merged into its layers, in {', '.join(names[:3])}{rest}: expected"
            f" plain linears; {merge}"
        )
    if wraps:
        raise StyleError(
            f"{kind} has an adapter that peft cannot merge into the model's layers, such as a learned prompt: expected"
            f" one that {_MERGE} merges; get_base_model() returns the model inside, without the adapter"
        )


def _adapted(model: nn.Module) -> Iterator[str]:
    """Yield the outermost modules that wrap a layer in an adapter."""
    outermost = ""
    for name, module in model.named_modules():
        if outermost and name.startswith(f"{outermost}."):
            continue
        if name and any(isinstance(getattr(module, child, None), nn.Module) for child in _WRAPPED):
            outermost = name
            yield name


def _is_of_peft(model: nn.Module) -> bool:
    return any(each.__module__.partition(".")[0] == "peft" for each in type(model).__mro__)
