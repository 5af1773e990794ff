"""Map each tensor of a checkpoint to a parameter of a Hugging Face model: renames, prefixes and ties.

The renames (LayerNorm.gamma, a model's own mapping, the base model's prefix) come from functions of transformers.
Several stored tensors that it would stack or concatenate are read as one (see `composed`). Tensors that it would
compute in another way, or split from one, are not read here: each is a problem in the list.
"""

from __future__ import annotations

from collections.abc import Mapping
import re
from typing import Any

import torch
from torch import nn

from ..formats.weight_format import QuantisedWeight, Turned, quantised_weights
from ..hf.linear_like import as_linear
from ..together import shown
from .composed import Source, compose

# Computed now, stored in old checkpoints.
_OUTDATED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
MISSING = " is missing, expected"


def find(model: nn.Module, stored: Mapping[str, Source], strict: bool) -> tuple[dict[str, Source], list[str]]:
    """Return the source of each parameter and buffer of the empty `model`, and a line for each problem.

    A tied weight may be stored under any of its names. If both are, it is untied: each is read as its own, which is
    right whether they are equal or not. With `strict`, stored tensors that have no place are problems too.
    """
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    floating = {name: tensor.is_floating_point() for name, tensor in state.items()}
    labels, problems = _renamed(model, stored)
    sources: dict[str, Source] = {target: source for target, (_, source) in labels.items()}
    ignored = re.compile("|".join((*_OUTDATED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))))
    for target in [name for name in sources if name not in shapes]:
        del sources[target]
        name = labels[target][0]
        if strict and not ignored.search(name) and not ignored.search(target) and not _adds_zero(name, stored):
            problems.append(f"{shown(name)} has no place in {type(model).__name__}")
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        if target in sources and source in sources:
            parent, _, key = target.rpartition(".")
            own = torch.empty_like(model.get_parameter(target))
            setattr(model.get_submodule(parent), key, nn.Parameter(own))
            continue
        shapes.pop(target, None)
        if target in sources:
            sources[source] = sources.pop(target)
    for name, each in sources.items():
        if isinstance(each, QuantisedWeight) and _stores_transposed(model, name):
            sources[name] = Turned(each)
    for name, shape in shapes.items():
        if name not in sources:
            problems.append(f"{name}{MISSING} {list(shape)}")
        elif (given := sources[name].get_shape()) != list(shape):
            problems.append(f"{name} has shape {given}, expected {list(shape)}")
        elif (held := sources[name].dtype).is_floating_point != floating[name]:
            problems.append(
                f"{name} is stored as {held}, expected {'a floating-point' if floating[name] else 'an integer'} dtype"
            )
    return sources, problems


def _stores_transposed(model: nn.Module, name: str) -> bool:
    """Return whether `name` is a linear's weight that its module stores as [K, N], as GPT-2's does."""
    parent, _, key = name.rpartition(".")
    linear = as_linear(model.get_submodule(parent)) if key == "weight" else None
    return linear is not None and linear[1]


def _adds_zero(name: str, stored: Mapping[str, Source]) -> bool:
    """Return whether `name` is a bias of zeros of a quantised weight, which AutoGPTQ stored for layers without one."""
    weight = stored.get(f"{name.removesuffix('bias')}weight")
    if not name.endswith(".bias") or weight is None or not quantised_weights(weight):
        return False
    values = torch.empty(stored[name].shape, device="cpu")
    stored[name].copy_to(values)
    return not values.any()


def _renamed(model: Any, stored: Mapping[str, Source]) -> tuple[dict[str, tuple[str, Source]], list[str]]:
    """Return a stored name, for messages, and the source of each tensor by the model's names; and the problems."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    own = getattr(model, "_checkpoint_conversion_mapping", None) or None
    transforms = get_model_conversion_mapping(model, own)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict()
    by_name: dict[str, tuple[str, Source]] = {}
    composed: dict[str, dict[str, list[str]]] = {}  # by the model's name and the pattern
    problems: list[str] = []
    for name in sorted(stored):  # the order that renames by group rely on
        target, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:  # it has its name already
            target, converted = rename_source_key(name, [], [], model.base_model_prefix, state)
        if converted is not None and target in state:
            composed.setdefault(target, {}).setdefault(converted, []).append(name)
        elif converted is not None and len(by_pattern[converted].target_patterns) == 1:
            by_name[name] = name, stored[name]  # of a module that the model lacks, as a layer that predicts more tokens
        elif converted is not None:
            problems.append(_elsewhere(name, converted))
        elif target in by_name:
            problems.append(f"{shown(name)} and {shown(by_name[target][0])} are both {shown(target)}")
        else:
            by_name[target] = name, stored[name]
    for target, names in composed.items():
        pattern = next(iter(names))
        converter = by_pattern[pattern]
        first = names[pattern][0]
        if target in by_name:
            problems.append(f"{shown(first)} and {shown(by_name[target][0])} are both {shown(target)}")
            continue
        columns = [
            [stored[name] for name in sorted(names[each], key=dot_natural_key)]
            for each in converter.source_patterns
            if each in names
        ]
        source = compose(converter.operations, columns) if len(converter.target_patterns) == 1 else None
        if source is None:
            problems.append(_elsewhere(first, pattern))
        else:
            by_name[target] = first, source
    return by_name, problems


def _elsewhere(name: str, pattern: str) -> str:
    remedy = "load it with transformers, and save it once with save_original_format=False"
    return f"{shown(name)} is stored in another layout ({pattern}): {remedy}"
