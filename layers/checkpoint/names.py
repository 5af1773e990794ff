"""Which parameter of a Hugging Face model each tensor of a checkpoint is: its renames, prefixes and ties.

transformers knows the renames (LayerNorm.gamma, a model's own mapping, the base model's prefix): its functions are
asked. What it would compute from several stored tensors, or split from one, is not read here, and is said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import re

import torch
from torch import nn

from ..together import shown
from .files import StoredTensor

# Computed now, stored in old checkpoints.
_OUTDATED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def find(model: nn.Module, stored: Mapping[str, StoredTensor], strict: bool) -> tuple[dict[str, str], list[str]]:
    """The stored name of each parameter and buffer of the empty `model`, and a line for each problem.

    A tied weight is found under whichever of its names is stored. If both are, it is untied: each is read as its own,
    which is right whether they are equal or not. With `strict`, stored tensors that have no place are problems too.
    """
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    floating = {name: tensor.is_floating_point() for name, tensor in state.items()}
    found, problems = _renamed(model, stored)
    ignored = re.compile("|".join((*_OUTDATED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))))
    for target in [name for name in found if name not in shapes]:
        name = found.pop(target)
        if strict and not ignored.search(name) and not ignored.search(target):
            problems.append(f"{shown(name)} has no place in {type(model).__name__}")
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if target in found and source in found:
            parent, _, key = target.rpartition(".")
            own = torch.empty_like(model.get_parameter(target))
            setattr(model.get_submodule(parent), key, nn.Parameter(own))
            continue
        shapes.pop(target, None)
        if target in found:
            found[source] = found.pop(target)
    for name, shape in shapes.items():
        if name not in found:
            problems.append(f"{name} is missing, expected {list(shape)}")
        elif (given := stored[found[name]].get_shape()) != list(shape):
            problems.append(f"{name} has shape {given}, expected {list(shape)}")
        elif (held := stored[found[name]].dtype).is_floating_point != floating[name]:
            problems.append(
                f"{name} is stored as {held}, expected {'a floating-point' if floating[name] else 'an integer'} dtype"
            )
    return found, problems


def _renamed(model: nn.Module, stored: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    own = getattr(model, "_checkpoint_conversion_mapping", None) or None
    transforms = get_model_conversion_mapping(model, own)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    state = model.state_dict()
    found: dict[str, str] = {}
    problems: list[str] = []
    for name in sorted(stored):  # the order that renames by group rely on
        target, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:  # it has its name already
            target, converted = rename_source_key(name, [], [], model.base_model_prefix, state)
        if converted is not None:
            problems.append(f"{shown(name)} is stored in another layout ({converted}): save it once with transformers")
        elif target in found:
            problems.append(f"{shown(name)} and {shown(found[target])} are both {shown(target)}")
        else:
            found[target] = name
    return found, problems
