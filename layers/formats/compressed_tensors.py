"""The scheme of compressed-tensors: groups of modules, each with a format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from iris.errors import CheckpointError
import torch

from ..checkpoint.files import StoredTensor
from ..together import shown
from .fp8 import fp8_weight
from .mxfp4 import mxfp4_weight
from .nvfp4 import nvfp4_weight
from .packed import packed_weight
from .patterns import patterns_of, targets_module
from .scheme import Roles, Scheme, needs
from .transformers_schemes import ACTIVATIONS, one_of
from .weight_format import QuantisedWeight

_FLOATS = "float-quantized", "naive-quantized", "mxfp8-quantized"
_INTEGERS = "pack-quantized", "int-quantized", "naive-quantized"
_FORMATS = *_FLOATS, "pack-quantized", "int-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized"
_SUFFIXES = {
    ".weight": ("weight", ".weight"),
    ".weight_packed": ("packed", ".weight"),
    ".weight_scale": ("scale", ".weight"),
    ".weight_zero_point": ("zero", ".weight"),
    ".weight_global_scale": ("global", ".weight"),
    ".weight_shape": ("shape", ".weight"),
    ".weight_g_idx": ("order", ".weight"),
    ".input_global_scale": ("activation", ".weight"),
    ".input_zero_point": ("activation", ".weight"),
    **ACTIVATIONS,
}


@dataclass(frozen=True)
class _Group:
    """Modules that are quantised alike."""

    targets: list[str]
    format: str
    bits: int
    is_float: bool
    symmetric: bool
    block: tuple[int, int] | None
    group: int | None
    """How many entries of a row share a scale of integers; None: all."""

    def build(self, name: str, roles: Roles) -> QuantisedWeight:
        if not self.symmetric and "zero" not in roles:
            raise CheckpointError(
                "has no stored zero points: expected them, because the configuration is not symmetric"
            )
        if self.symmetric and "zero" in roles:
            raise CheckpointError("has stored zero points: expected none, because the configuration is symmetric")
        if self.format == "mxfp4-pack-quantized":
            needs(roles, "packed", "scale")
            return mxfp4_weight(roles["packed"], roles["scale"])
        if self.format == "nvfp4-pack-quantized":
            needs(roles, "packed", "scale", "global")
            return nvfp4_weight(roles["packed"], roles["scale"], roles["global"], divides=True)
        if self.is_float:
            needs(roles, "weight", "scale")
            return fp8_weight(roles["weight"], roles["scale"], self.block)
        if "packed" not in roles:
            needs(roles, "weight", "scale")
            renamed = dict(roles)
            weight = renamed["packed"] = renamed.pop("weight")
            return packed_weight(renamed, self.bits, weight.shape, self.group)
        needs(roles, "scale", "shape")
        return packed_weight(roles, self.bits, _values(roles["shape"]), self.group)


def compressed_tensors(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of `quant_method: compressed-tensors`. Raises `CheckpointError` for what is not read."""
    one_of(config, "quantization_status", ("compressed", "frozen"))  # older files that are compressed say "frozen"
    sparsity = config.get("sparsity_config") or {}
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise CheckpointError(f"sparsity_config has the format {shown(repr(sparsity['format']))}: expected none")
    if config.get("moe_sparsity_config"):
        raise CheckpointError("moe_sparsity_config leaves out experts: expected none")
    transforms = config.get("transform_config") or {}
    if transforms.get("config_groups"):
        raise CheckpointError("transform_config rotates weights and activations: expected none")
    given = config.get("config_groups")
    if not isinstance(given, dict) or not (given or config.get("kv_cache_scheme")):
        raise CheckpointError(f"config_groups is {shown(repr(given))}: expected groups by name")
    groups = [_group(name, each, config.get("format")) for name, each in given.items() if not _has_no_weights(each)]
    ignore = patterns_of(config, "ignore")

    def build(name: str, roles: Roles) -> QuantisedWeight:
        return _group_of(name.removesuffix(".weight"), groups).build(name, roles)

    return Scheme("compressed-tensors", _SUFFIXES, build, lambda module: targets_module(module, ignore))


def _group_of(module: str, groups: list[_Group]) -> _Group:
    """Return the group that targets the module: by its name, else by the first pattern in alphabetical order, as
    compressed-tensors does, else by a class, as `Linear`."""
    if len(groups) == 1:
        return groups[0]
    targets = sorted((one.startswith("re:"), one) for each in groups for one in each.targets)
    first = next((one for _, one in targets if targets_module(module, [one])), None)
    of_classes = [each for each in groups if any(one[:1].isupper() for one in each.targets)]  # a module's name is lower
    candidates = of_classes if first is None else [each for each in groups if first in each.targets]
    if not candidates:
        raise CheckpointError("is quantised, and no group of the configuration targets it: expected one")
    if any(each != candidates[0] for each in candidates):
        raise CheckpointError("is targeted by several groups of the configuration: expected one")
    return candidates[0]


def _group(name: str, given: Any, default: Any) -> _Group:
    try:
        return _checked_group(given, default)
    except CheckpointError as error:
        raise CheckpointError(f"config_groups {shown(name)}: {error}") from None


def _has_no_weights(given: Any) -> bool:
    """Return whether a group says that its modules' weights are plain, as that of attention on a quantised cache."""
    return isinstance(given, dict) and "weights" in given and given["weights"] is None


def _checked_group(given: Any, default: Any) -> _Group:
    if not isinstance(given, dict) or not isinstance(given.get("weights"), dict):
        raise CheckpointError(f"is {shown(repr(given))}: expected weights, and their settings")
    weights, format = given["weights"], given.get("format") or default
    if format not in _FORMATS:
        raise CheckpointError(f"the format is {shown(repr(format))}: expected one of {', '.join(_FORMATS)}")
    if given.get("output_activations"):
        raise CheckpointError("output_activations are quantised: expected none")
    kind = one_of(weights, "type", ("int", "float"))
    is_float = kind == "float"
    four = format in ("mxfp4-pack-quantized", "nvfp4-pack-quantized")
    if not four and format not in (_FLOATS if is_float else _INTEGERS):
        raise CheckpointError(
            f"the format is {format!r} and the type of its weights {kind!r}: expected one of "
            f"{', '.join(_FLOATS if is_float else _INTEGERS)} for this type"
        )
    if is_float:
        one_of(weights, "symmetric", (True,))
    bits = one_of(weights, "num_bits", (4,) if four else (8,) if is_float else (8, 4))
    strategy, size = weights.get("strategy"), weights.get("group_size")
    one_of(weights, "strategy", ("channel", "tensor", "group", "block", "tensor_group"))
    if size is not None and (type(size) is not int or not (size == -1 or size > 0)):
        raise CheckpointError(f"group_size is {shown(repr(size))}: expected -1 or a positive integer")
    group = size if strategy in (None, "group") and size != -1 else None
    block = weights.get("block_structure")
    if isinstance(block, str):
        block = [int(each) if each.isdecimal() else 0 for each in block.split("x")]
    if format == "mxfp8-quantized" or (is_float and not four and group):
        block = [1, group or 32]
    if block is not None and (len(block) != 2 or any(type(each) is not int or each < 1 for each in block)):
        raise CheckpointError(f"block_structure is {shown(repr(weights['block_structure']))}: expected two sizes")
    symmetric = one_of(weights, "symmetric", (True, False))
    shape = None if block is None else (block[0], block[1])
    return _Group(patterns_of(given, "targets"), format, bits, is_float, symmetric, shape, group)


def _values(stored: StoredTensor) -> tuple[int, ...]:
    """Return the integers in a small stored tensor."""
    if stored.dtype not in (torch.int64, torch.int32) or len(stored.shape) != 1 or stored.shape[0] > 8:
        raise CheckpointError(f"has weight_shape {stored.dtype} {list(stored.shape)}: expected two integers")
    return tuple(stored[(slice(None),)].tolist())
