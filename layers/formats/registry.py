"""The schemes by the `quant_method` of a configuration: the one table of supported formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import os
from pathlib import Path
from typing import Any

from iris.errors import CheckpointError

from ..checkpoint.folder import read_json
from ..together import shown
from . import modelopt as of_modelopt
from .compressed_tensors import compressed_tensors
from .modelopt import modelopt
from .scheme import Scheme
from .transformers_schemes import awq, fbgemm_fp8, fp8, gptq, mxfp4

SCHEMES: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "compressed-tensors": compressed_tensors,
    "modelopt": modelopt,
    "modelopt_fp4": modelopt,
    "mxfp4": mxfp4,
    "awq": awq,
    "gptq": gptq,
}
_KEYS = "quantization_config", "compression_config"


def scheme_of(folder: Path, raw: Mapping[str, Any]) -> Scheme | None:
    """Return how the checkpoint in `folder`, whose config.json is `raw`, stores its weights; None for plain ones.

    Raises `CheckpointError` for a method or an option that is not read.
    """
    parts = [raw, *(value for value in raw.values() if isinstance(value, dict))]
    given = [(key, part[key]) for part in parts for key in _KEYS if part.get(key)]
    if not given:
        if not os.path.lexists(folder / of_modelopt.CONFIG):
            return None
        given = [(of_modelopt.CONFIG, {"quant_method": "modelopt"} | read_json(folder / of_modelopt.CONFIG))]
    key, config = given[0]
    if any(each != config for _, each in given):
        raise CheckpointError(f"the configuration has several {key} that differ: expected one")
    method = config.get("quant_method") if isinstance(config, dict) else None
    if method is None and isinstance(config, dict) and "config_groups" in config:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in SCHEMES:
        raise CheckpointError(
            f"the weights are quantised ({key}, {shown(repr(method))}): expected bfloat16, float16 or float32 ones, or"
            f" one of {', '.join(SCHEMES)}; load them with transformers (dequantize), and save them once"
        )
    try:
        return SCHEMES[method](config)
    except CheckpointError as error:
        raise CheckpointError(f"{key} of {method}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CheckpointError(f"{key} of {method} cannot be read: {type(error).__name__}: {error}") from error


def without_scheme(config: Any) -> None:
    """Remove from a transformers `config`, and from those within it, the settings of quantised weights."""
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        for key in _KEYS:
            if each is not None and hasattr(each, key):
                delattr(each, key)
