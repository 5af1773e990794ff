"""Attention of a served transformers model: `decode_attention` for a step, torch's cuDNN for a prompt.

`use(model)` registers this as an attention implementation with transformers and sets it on the model. A prompt without
padding has no mask then, even while a CUDA graph is captured, where transformers would make one. It uses
`prefill_attention`. All other calls use transformers' `sdpa` as before.
"""

from __future__ import annotations

from functools import partial
import inspect
import sys
from typing import Any

from iris_ops.local import decode_attention
from iris_ops.recording import is_recording
import torch
from torch import nn

from . import prefill_attention
from .cache import has_windows
from .host_attention import host_attention

NAME, ALIKE, EAGER = "iris_step", "iris_step_rows_alike", "iris_eager"
OWN = "sdpa", NAME, ALIKE  # what `attend` may compute
_UNSUPPORTED = ("softcap", "s_aux", "position_bias", "cache")  # options of some models


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, rows_alike: bool = False, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Attend as transformers' attention functions do: query [B, H, T, D], key and value [B, KV, L, D].

    `rows_alike`: a row has the same bits in any batch.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    here = torch.ops.iris_ops if is_recording() else None
    padded = prefill_attention.is_places(attention_mask)
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    plain = not needs_gradient and all(options.get(name) is None for name in _UNSUPPORTED)
    if plain and rows_alike and query.device.type == "cpu":
        seen = prefill_attention.mask_of_places(attention_mask) if padded else attention_mask
        width = key.shape[2] if seen is None else seen.shape[3]
        call = here.host_attention if here else host_attention
        return call(query, key[:, :, :width], value[:, :, :width], scale, seen), None
    if plain:
        if padded or prefill_attention.supports(module, query, key, value, attention_mask, options):
            call = here.prefill_attention if here else prefill_attention.prefill_attention
            return call(query, key, value, scale, attention_mask, rows_alike), None
        if _decode_supports(query, key, value, attention_mask):
            call = here.decode_attention if here else decode_attention.decode_attention
            return call(query[:, :, 0], key, value, attention_mask[:, 0, 0], scale, rows_alike).unsqueeze(1), None
    if padded:
        attention_mask = prefill_attention.mask_of_places(attention_mask)
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[3] != 1:
        key, value = (each[:, :, : attention_mask.shape[3]] for each in (key, value))  # the mask's width
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


def _decode_supports(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return (
        mask is not None
        and mask.dtype == torch.bool
        and mask.shape[0] == query.shape[0]
        and mask.shape[1] == query.shape[2] == 1
        and mask.shape[3] == key.shape[2]
        and mask.stride(3) == query.stride(3) == key.stride(3) == value.stride(3) == 1
        and key.shape == value.shape
        and query.dtype == key.dtype == value.dtype
    )


def mask_of(**arguments: Any) -> torch.Tensor | None:
    """Return transformers' mask; that of a prompt, whose cache is empty, no wider than the prompt.

    Where torch's own causal mask is equal, return None, or `places_of` the tokens that are seen.
    """
    from transformers.masking_utils import sdpa_mask

    window, first, length = arguments.get("local_size"), arguments.get("q_offset", 0), arguments["q_length"]
    if not isinstance(first, int) or first != 0:
        return sdpa_mask(**arguments)
    seen, alone = arguments.get("attention_mask"), length > 1 and not arguments.get("kv_offset", 0)
    if arguments.get("allow_is_causal_skip", True) and (window is None or length <= window):
        if seen is None:
            return None
        if alone and seen.shape == (arguments["batch_size"], length):
            return prefill_attention.places_of(seen.bool())
    mask = sdpa_mask(**arguments)
    return mask[..., :length] if mask is not None and alone else mask


def install(model: Any, ctx: Any, step_attention: bool | None, graphs: bool) -> bool:
    """Let `model` use this library's attention, by default on GPUs and where rows are alike at any number of them.

    Returns whether prompts can be captured, if `graphs` are: transformers' own attention applies masks that are not
    needed then, which takes longer.
    """
    alike = ctx.level.rows_alike
    enabled = torch.device(ctx.device).type == "cuda" or alike if step_attention is None else step_attention
    own = enabled and use(model, alike)
    return graphs and (own or use_own_masks(model))


def takes_step_masks(model: Any) -> bool:
    """Return whether the attention of a step takes the mask of its cache."""
    return model.config._attn_implementation in OWN and not has_windows(model.config)


def use(model: Any, rows_alike: bool = False) -> bool:
    """Let `model` use `attend`; return False, and change nothing, if it does not use transformers' sdpa now.

    Nor does a model change that compares with the name "sdpa" itself, and uses its own attention under others (Falcon).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = ALIKE if rows_alike else NAME
    if model.config._attn_implementation in OWN and not _compares_name(model):
        AttentionInterface.register(name, partial(attend, rows_alike=True) if rows_alike else attend)
        AttentionMaskInterface.register(name, mask_of)
        model.set_attn_implementation(name)
    return model.config._attn_implementation == name


def use_own_masks(model: Any) -> bool:
    """Give a model with eager attention, such as one with sinks, masks that a CUDA graph can capture.

    Those of transformers before 5.24 copy a number from the host. The attention stays the model's own. Returns False,
    and changes nothing, if the model does not attend so.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    places = (sys.modules[type(each).__module__] for each in model.modules() if "Attention" in type(each).__name__)
    functions = {each.eager_attention_forward for each in places if hasattr(each, "eager_attention_forward")}
    name, now = f"{EAGER}_{model.config.model_type}", model.config._attn_implementation
    if now == "eager" and len(functions) == 1 and not _compares_name(model, "eager"):
        AttentionInterface.register(name, functions.pop())
        AttentionMaskInterface.register(name, eager_mask_of)
        model.set_attn_implementation(name)
    return model.config._attn_implementation == name


def eager_mask_of(dtype: torch.dtype = torch.float32, **arguments: Any) -> torch.Tensor | None:
    """Return a mask that eager attention adds to its scores, in transformers' form."""
    from transformers.masking_utils import sdpa_mask

    seen = sdpa_mask(**{**arguments, "allow_is_causal_skip": False})
    return None if seen is None else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def _compares_name(model: Any, name: str = "sdpa") -> bool:
    """Return whether the forward of one of its attentions compares with the name."""
    kinds = {type(module) for module in model.modules() if "attention" in type(module).__name__.lower()}
    forwards = (inspect.unwrap(kind.forward) for kind in kinds)
    return any(
        _has_constant(name, getattr(getattr(forward, "__code__", None), "co_consts", ())) for forward in forwards
    )


def _has_constant(value: str, constants: Any) -> bool:
    """Return whether `value` is among a code's constants, also inside of a tuple or set: `in ("eager", "sdpa")`."""
    inside = [each for each in constants if isinstance(each, (tuple, frozenset))]
    return value in constants or any(_has_constant(value, each) for each in inside)
