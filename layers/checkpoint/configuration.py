"""The empty model of a checkpoint's folder: from its configuration, on meta, with no more work than its files warrant.

A configuration is not trusted. Code that it names (a model's own, a kernel from the hub) runs only where the caller
allows it. Requests to transformers beyond a plain model (fused modules, other files) are refused by name; `formats`
reads quantised weights. And it may describe a model of any size: counts that exceed what the files can fill are
refused before anything is built, and building stops once the model has far more parameters than there are tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import importlib.util
import os
from pathlib import Path
import re
from typing import Any

from iris.errors import CheckpointError
import torch
from torch import nn
from torch.nn.modules import module as modules

from ..formats.registry import without_scheme
from ..hf.styles import check_version
from ..together import shown
from .files import Checkpoint
from .folder import CONFIG, read_json

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Of models that generate text; the first is taken where a configuration names no architecture.
_AUTO_CLASSES = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForImageTextToText"
_GENERATION_CONFIG = "generation_config.json"
_LAYERS, _COUNTS = re.compile("layers?$"), re.compile("^(num|n)_")
_MOST_COUNTED = 100_000  # of anything in a model but its layers
_SPARE_PARAMETERS, _SPARE_BYTES = 1000, 1 << 30
# The packages that let transformers run these without the hub.
_FLASH = {
    "flash_attention_2": "flash_attn",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}


def read_config(folder: Path) -> dict[str, Any]:
    """Return `config.json` unchanged. Raises `CheckpointError` for keys that no loader should act on."""
    raw = read_json(folder / CONFIG)
    if os.path.lexists(folder / _GENERATION_CONFIG):
        read_json(folder / _GENERATION_CONFIG)  # before transformers opens it, and waits if it is a FIFO
    for key, meaning in [
        ("configuration_files", "other configurations, which are not read"),
        ("fusion_config", "modules that transformers would fuse, which is not done here"),
    ]:
        if raw.get(key):
            raise CheckpointError(f"{CONFIG} has {key}, which names {meaning}: expected none, remove it")
    return raw


def check_counts(raw: Any, tensors: int) -> None:
    """Raise `CheckpointError` where a configuration has more layers or parts than `tensors` stored ones can fill."""
    for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
        if isinstance(value, (dict, list)):
            check_counts(value, tensors)
        elif type(value) is int and isinstance(key, str):
            if _LAYERS.search(key) and value > max(1000, tensors):
                raise CheckpointError(
                    f"{shown(key)} is {shown(str(value))}, and the files hold {tensors} tensors: expected at most "
                    f"{max(1000, tensors)}"
                )
            if _COUNTS.search(key) and value > _MOST_COUNTED:
                raise CheckpointError(f"{shown(key)} is {shown(str(value))}: expected at most {_MOST_COUNTED}")


def empty_model(
    folder: Path, raw: dict[str, Any], checkpoint: Checkpoint, dtype: torch.dtype | None, trust_remote_code: bool
) -> nn.Module:
    """Return the model on meta in `dtype`, by default the configuration's, else the files', as in transformers."""
    from transformers import AutoConfig

    check_counts(raw, len(checkpoint))
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    without_scheme(config)
    for name in getattr(type(config), "extra_files", ()):
        raise CheckpointError(
            f"a {type(config).__name__} also has weights in {name}, which is not read: expected all of them in "
            "safetensors"
        )
    if not trust_remote_code:
        _refuse_kernels(config)
    auto = _auto_class(config)
    dtype = dtype or _used(config, auto).dtype or checkpoint.dtype() or torch.float32
    if dtype not in DTYPES:
        raise CheckpointError(
            f"the configuration's dtype is {dtype}: pass dtype=torch.float32, or another supported dtype"
        )
    with torch.device("meta"), _no_more_parameters(4 * len(checkpoint) + _SPARE_PARAMETERS):
        model = auto.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    check_version(model)
    _keep_in_float32(model, dtype)
    computed = sum(buffer.nbytes for _, buffer in model.named_non_persistent_buffers())
    if computed > checkpoint.nbytes + _SPARE_BYTES:
        raise CheckpointError(
            f"the configuration needs {computed} bytes of buffers: expected at most "
            f"{checkpoint.nbytes + _SPARE_BYTES}, for {checkpoint.nbytes} bytes of weights in the files"
        )
    if model.can_generate():
        model.generation_config = _generation_config(folder)
    return model


def _refuse_kernels(config: Any) -> None:
    """Raise `CheckpointError` for an implementation that transformers would fetch from the hub, and run."""
    for each in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        for what in ("attn_implementation", "experts_implementation"):
            value = getattr(each, f"_{what}", None)
            for name in value.values() if isinstance(value, dict) else [value]:
                if isinstance(name, str) and ("/" in name or _is_fetched(name)):
                    raise CheckpointError(
                        f"{CONFIG} names the {what} {shown(repr(name))}, code from the hub: pass trust_remote_code=True"
                        " to allow it, or name another"
                    )


def _is_fetched(name: str) -> bool:
    package = _FLASH.get(name.removeprefix("paged|"))
    return package is not None and not importlib.util.find_spec(package.partition(".")[0])


def _auto_class(config: Any) -> Any:
    """Return the auto class of transformers for the architecture that `config` names, else one that knows its type.

    A type may have several models that generate text: BART's has a decoder alone, and an encoder with a decoder.
    """
    import transformers

    classes = [getattr(transformers, name) for name in _AUTO_CLASSES if hasattr(transformers, name)]
    known = [(each, each._model_mapping[type(config)]) for each in classes if type(config) in each._model_mapping]
    named = set(getattr(config, "architectures", None) or ())
    for auto, models in known:
        if named & {each.__name__ for each in (models if isinstance(models, tuple) else (models,))}:
            return auto
    return known[0][0] if known else classes[0]


def _used(config: Any, auto: Any) -> Any:
    """Return the configuration that the model is built from: the text's, where `config` holds several."""
    kind = getattr(auto, "_model_mapping", {}).get(type(config), None)
    of_text = getattr(config, "sub_configs", {}).get("text_config")
    return config.get_text_config() if of_text and getattr(kind, "config_class", None) == of_text else config


@contextmanager
def _no_more_parameters(most: int) -> Iterator[None]:
    """Raise `CheckpointError` in the block once a model has more than `most` parameters, or 8 times as many modules."""
    remaining = {"parameters": most, "modules": 8 * most}

    def count(what: str) -> None:
        remaining[what] -= 1
        if remaining[what] < 0:
            raise CheckpointError(
                f"the configuration's model has far more {what} than the files have tensors: expected"
                " the configuration of these files"
            )

    hooks = [
        modules.register_module_parameter_registration_hook(lambda *_: count("parameters")),
        modules.register_module_module_registration_hook(lambda *_: count("modules")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert to float32 the parameters and buffers that transformers keeps so."""
    plan: Any = getattr(model, "_get_dtype_plan", lambda _: {})(dtype)
    if not plan:
        return
    kept = re.compile("|".join(f"(?:{pattern.replace('*', '.*')})" for pattern in plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point() and kept.search(name):
            tensor.data = tensor.data.float()


def _generation_config(folder: Path) -> Any:
    """Return the folder's generation config, else the settings that older files keep in the configuration."""
    from transformers import GenerationConfig

    if (folder / _GENERATION_CONFIG).exists():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_pretrained(folder, config_file_name=CONFIG, _from_model_config=True)
