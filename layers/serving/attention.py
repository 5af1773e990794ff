"""How a model of transformers attends while it is served: `decode_attention` for a step, torch's cuDNN for a prompt.

`use(model)` registers this as an attention implementation with transformers and sets it on the model. A prompt without
padding has no mask then, even while a CUDA graph is captured, where transformers would make one. It goes to
`prefill_attention`. Everything else goes to transformers' `sdpa` as before.
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
from .host_attention import host_attention

NAME, INVARIANT, EAGER = "iris_step", "iris_step_invariant", "iris_eager"
_UNSERVED = ("softcap", "s_aux", "position_bias", "cache")  # options of some models


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, invariant: bool = False, **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """An attention function as transformers calls it: query [B, H, T, D], key and value [B, KV, L, D].

    `invariant`: a row has the same bits among any others.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    here = torch.ops.iris_ops if is_recording() else None
    padded = prefill_attention.is_places(attention_mask)
    wants_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    plain = not wants_gradient and all(options.get(name) is None for name in _UNSERVED)
    if plain and invariant and query.device.type == "cpu":
        seen = prefill_attention.mask_of_places(attention_mask) if padded else attention_mask
        width = key.shape[2] if seen is None else seen.shape[3]
        call = here.host_attention if here else host_attention
        return call(query, key[:, :, :width], value[:, :, :width], scale, seen), None
    if plain:
        if padded or prefill_attention.serves(module, query, key, value, attention_mask, options):
            call = here.prefill_attention if here else prefill_attention.prefill_attention
            return call(query, key, value, scale, attention_mask, invariant), None
        if _serves(query, key, value, attention_mask):
            call = here.decode_attention if here else decode_attention.decode_attention
            return call(query[:, :, 0], key, value, attention_mask[:, 0, 0], scale, invariant).unsqueeze(1), None
    if padded:
        attention_mask = prefill_attention.mask_of_places(attention_mask)
    if attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[3] != 1:
        key, value = (each[:, :, : attention_mask.shape[3]] for each in (key, value))  # as wide as `mask_of` made it
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)


def _serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
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


def mask_of(**asked: Any) -> torch.Tensor | None:
    """A mask as transformers asks for it; but of a prompt, which finds an empty cache, no wider than that.

    Where torch's own causal one is the same it is None, or `places_of` the tokens that are seen.
    """
    from transformers.masking_utils import sdpa_mask

    window, first, length = asked.get("local_size"), asked.get("q_offset", 0), asked["q_length"]
    if not isinstance(first, int) or first != 0:
        return sdpa_mask(**asked)
    seen, alone = asked.get("attention_mask"), length > 1 and not asked.get("kv_offset", 0)
    if asked.get("allow_is_causal_skip", True) and (window is None or length <= window):
        if seen is None:
            return None
        if alone and seen.shape == (asked["batch_size"], length):
            return prefill_attention.places_of(seen.bool())
    mask = sdpa_mask(**asked)
    return mask[..., :length] if mask is not None and alone else mask


def use(model: Any, invariant: bool = False) -> bool:
    """Makes `model` attend by this; False, and nothing changes, if it does not attend by transformers' sdpa now.

    Nor if it looks for the name "sdpa" itself, and under any other attends in a way of its own (Falcon).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    name = INVARIANT if invariant else NAME
    if model.config._attn_implementation in ("sdpa", NAME, INVARIANT) and not _asks_by_name(model):
        AttentionInterface.register(name, partial(attend, invariant=True) if invariant else attend)
        AttentionMaskInterface.register(name, mask_of)
        model.set_attn_implementation(name)
    return model.config._attn_implementation == name


def use_own_masks(model: Any) -> bool:
    """Makes masks of a model that attends eagerly, as one with sinks does, such as a CUDA graph can capture.

    Those of transformers before 5.24 copy a number from the host. The attention stays the model's own. False, and
    nothing changes, if the model does not attend so.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    places = (sys.modules[type(each).__module__] for each in model.modules() if "Attention" in type(each).__name__)
    functions = {each.eager_attention_forward for each in places if hasattr(each, "eager_attention_forward")}
    name, now = f"{EAGER}_{model.config.model_type}", model.config._attn_implementation
    if now == "eager" and len(functions) == 1 and not _asks_by_name(model, "eager"):
        AttentionInterface.register(name, functions.pop())
        AttentionMaskInterface.register(name, eager_mask_of)
        model.set_attn_implementation(name)
    return model.config._attn_implementation == name


def eager_mask_of(dtype: torch.dtype = torch.float32, **asked: Any) -> torch.Tensor | None:
    """A mask that eager attention adds to its scores, as transformers asks for it."""
    from transformers.masking_utils import sdpa_mask

    seen = sdpa_mask(**{**asked, "allow_is_causal_skip": False})
    return None if seen is None else torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)


def _asks_by_name(model: Any, name: str = "sdpa") -> bool:
    """Whether the forward of one of its attentions compares with the name."""
    kinds = {type(module) for module in model.modules() if "attention" in type(module).__name__.lower()}
    forwards = (inspect.unwrap(kind.forward) for kind in kinds)
    return any(_has_word(name, getattr(getattr(forward, "__code__", None), "co_consts", ())) for forward in forwards)


def _has_word(word: str, constants: Any) -> bool:
    """Whether it is among a code's constants, those inside of a tuple or a set included: `in ("eager", "sdpa")`."""
    inside = [each for each in constants if isinstance(each, (tuple, frozenset))]
    return word in constants or any(_has_word(word, each) for each in inside)
