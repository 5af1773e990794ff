"""Schemes of transformers' own configurations: `fp8`, `fbgemm_fp8`, `mxfp4`, `awq` and `gptq`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from iris.errors import CheckpointError
import torch

from ..together import shown
from .awq import awq_weight
from .fp8 import fp8_weight
from .gptq import gptq_weight
from .mxfp4 import mxfp4_weight
from .patterns import names_module, patterns_of
from .scheme import Roles, Scheme, needs
from .weight_format import QuantisedWeight, Turned

Config = Mapping[str, Any]
# Ends of the names of scales of activations, which are read past: activations are not quantised.
ACTIVATIONS = {
    end: ("activation", ".weight")
    for end in (".activation_scale", ".input_scale", ".input_scale_ub", ".act_scale", ".qscale_act")
}
_FP8 = {
    ".weight": ("weight", ".weight"),
    ".weight_scale_inv": ("scale", ".weight"),
    ".weight_scale": ("scale", ".weight"),
    ".scale": ("scale", ".weight"),
    ".qscale_weight": ("scale", ".weight"),
    "_scale_inv": ("scale", ""),
    "_activation_scale": ("activation", ""),
    **ACTIVATIONS,
}


def fp8(config: Config) -> Scheme:
    """Return the scheme of `quant_method: fp8`: blocks, or one scale; experts of DeepSeek V4 in fp4."""
    one_of(config, "activation_scheme", ("dynamic", "static"))
    one_of(config, "scale_fmt", ("float", "ue8m0"))
    one_of(config, "fmt", ("e4m3", "float8_e4m3fn"))
    one_of(config, "expert_dtype", ("fp8", "fp4"))
    given = config.get("weight_block_size", (128, 128))
    by_tensor = given is None
    block = (128, 128) if by_tensor else tuple(given) if isinstance(given, (list, tuple)) else ()
    if len(block) != 2 or any(type(each) is not int or each < 1 for each in block):
        raise CheckpointError(f"weight_block_size is {shown(repr(given))}: expected two positive integers")

    def build(name: str, roles: Roles) -> QuantisedWeight:
        needs(roles, "weight", "scale")
        if roles["weight"].dtype in (torch.int8, torch.uint8):
            return mxfp4_weight(roles["weight"], roles["scale"])
        weight, scale = roles["weight"], roles["scale"]
        fused = name.endswith("gate_up_proj")  # of experts: a linear's name ends in .weight, and its blocks begin once
        if fused and by_tensor and scale.shape in ((2,), (2, 1)) and len(weight.shape) == 2:
            return fp8_weight(weight, scale.reshaped((2, 1)), (weight.shape[0] // 2, weight.shape[1]))
        return fp8_weight(weight, scale, block, fused)

    return Scheme("fp8", _FP8, build, _exclusion(config, "modules_to_not_convert", "ignored_layers"))


def fbgemm_fp8(config: Config) -> Scheme:
    """Return the scheme of `quant_method: fbgemm_fp8`: one scale for each row."""

    def build(name: str, roles: Roles) -> QuantisedWeight:
        needs(roles, "weight", "scale")
        return fp8_weight(roles["weight"], roles["scale"], None)

    suffixes = {".weight": ("weight", ".weight"), ".weight_scale": ("scale", ".weight"), **ACTIVATIONS}
    return Scheme("fbgemm_fp8", suffixes, build, _exclusion(config, "modules_to_not_convert"))


def mxfp4(config: Config) -> Scheme:
    """Return the scheme of `quant_method: mxfp4`: gpt-oss's experts, whose modules hold [K, N]."""

    def build(name: str, roles: Roles) -> Any:
        needs(roles, "blocks", "scale")
        return Turned(mxfp4_weight(roles["blocks"], roles["scale"]))

    suffixes = {"_blocks": ("blocks", ""), "_scales": ("scale", "")}
    return Scheme("mxfp4", suffixes, build, _exclusion(config, "modules_to_not_convert"))


_INTEGERS = {
    ".qweight": ("packed", ".weight"),
    ".qzeros": ("zero", ".weight"),
    ".scales": ("scale", ".weight"),
}


def awq(config: Config) -> Scheme:
    """Return the scheme of `quant_method: awq` in its layout `gemm`."""
    for key in ("version", "format", "checkpoint_format"):  # of AutoAWQ, transformers and GPTQModel
        if str(config.get(key) or "gemm").lower() != "gemm":
            raise CheckpointError(f"{key} is {shown(repr(config[key]))}: expected 'gemm'")
    one_of(config, "bits", (4,))
    one_of(config, "zero_point", (True,))
    group = _group(config)

    def build(name: str, roles: Roles) -> QuantisedWeight:
        needs(roles, "packed", "zero", "scale")
        return awq_weight(roles, group)

    return Scheme("awq", _INTEGERS, build, _exclusion(config, "modules_to_not_convert"))


def gptq(config: Config) -> Scheme:
    """Return the scheme of `quant_method: gptq`, its two formats, with and without order by activation."""
    bits, group = one_of(config, "bits", (4, 8)), _group(config)
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"checkpoint_format is {shown(repr(layout))}: expected 'gptq' or 'gptq_v2'")
    one_of(config, "pack_dtype", ("int32",))
    one_of(config, "is_marlin_format", (False,))
    one_of(config, "desc_act", (False, True))
    for key in ("adapter", "rotation"):
        one_of(config, key, ("",))
    dynamic = config.get("dynamic") or {}
    if own := [each for each in dynamic if not str(each).startswith("-:")]:
        raise CheckpointError(
            f"dynamic gives {shown(repr(own[0]))} separate settings: expected the same for all modules"
        )

    def build(name: str, roles: Roles) -> QuantisedWeight:
        needs(roles, "packed", "zero", "scale")
        return gptq_weight(roles, bits, group, layout == "gptq")

    suffixes = {**_INTEGERS, ".g_idx": ("order", ".weight")}
    return Scheme("gptq", suffixes, build, _exclusion(config, "modules_to_not_convert"))


def one_of(config: Config, key: str, allowed: tuple) -> Any:
    """Return `config[key]`, the first of `allowed` by default. Raises `CheckpointError` for any other value."""
    value = config.get(key)
    if value is None:
        return allowed[0]
    if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
        raise CheckpointError(f"{key} is {shown(repr(value))}: expected {' or '.join(map(repr, allowed))}")
    return value


def _exclusion(config: Config, *keys: str) -> Any:
    patterns = [each for key in keys for each in patterns_of(config, key)]
    return lambda module: names_module(module, patterns)


def _group(config: Config) -> int:
    group = config.get("group_size", 128)
    if type(group) is not int or not (group == -1 or (group >= 8 and group % 8 == 0)):
        raise CheckpointError(f"group_size is {shown(repr(group))}: expected -1 or a multiple of 8")
    return group
