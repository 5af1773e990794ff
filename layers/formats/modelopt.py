"""The scheme of NVIDIA's ModelOpt, whose configuration is in config.json or in hf_quant_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from iris.errors import CheckpointError
import torch

from ..together import shown
from .fp8 import fp8_weight
from .nvfp4 import nvfp4_weight
from .patterns import excludes_module, patterns_of
from .scheme import Roles, Scheme, needs
from .transformers_schemes import ACTIVATIONS
from .weight_format import QuantisedWeight

CONFIG = "hf_quant_config.json"
_ALGORITHMS = "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"
_SUFFIXES = {
    ".weight": ("weight", ".weight"),
    ".weight_scale": ("scale", ".weight"),
    ".weight_scale_2": ("global", ".weight"),
    ".pre_quant_scale": ("smoothing", ".weight"),
    **ACTIVATIONS,
}


def modelopt(config: Mapping[str, Any]) -> Scheme:
    """Return the scheme of `quant_method: modelopt`. Raises `CheckpointError` for an algorithm that is not read."""
    settings = config.get("quantization", config)
    if not isinstance(settings, dict):
        raise CheckpointError(f"quantization is {shown(repr(settings))}: expected settings by name")
    algorithm = settings.get("quant_algo")
    layers = settings.get("quantized_layers") or {}
    of_cache = settings.get("kv_cache_quant_algo") or settings.get("kv_cache_scheme")
    own = [] if algorithm is None and of_cache else [algorithm]
    used = [*own, *(each.get("quant_algo") if isinstance(each, dict) else None for each in layers.values())]
    if strange := [each for each in used if each not in _ALGORITHMS]:
        raise CheckpointError(f"quant_algo is {shown(repr(strange[0]))}: expected one of {', '.join(_ALGORITHMS)}")
    excluded = patterns_of(settings, "exclude_modules") + patterns_of(settings, "ignore")

    def build(name: str, roles: Roles) -> QuantisedWeight:
        if "smoothing" in roles:
            raise CheckpointError("has a pre_quant_scale, which divides activations: expected a weight without")
        needs(roles, "weight", "scale")
        if roles["weight"].dtype == torch.uint8:
            needs(roles, "global")
            return nvfp4_weight(roles["weight"], roles["scale"], roles["global"], divides=False)
        block = (1, 32) if roles["scale"].dtype == torch.uint8 else (128, 128)  # MXFP8 has bytes
        return fp8_weight(roles["weight"], roles["scale"], block)

    return Scheme("modelopt", _SUFFIXES, build, lambda module: excludes_module(module, excluded))
