"""Refuse model types that an engine's cache, or padding, does not suit, by trying each type (`python -m
tests.coverage_of_models --engine`).

A static cache is longer than its contents, and places of later tokens are masked. Padding precedes shorter prompts,
masked too, and positions are passed as numbers. Some models ignore one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
import inspect
from typing import Any

from iris.errors import ArgumentError, IrisError
import torch
from torch import nn

from ..hf.plans.bert import PLANS as BERT

_BY_LENGTH = "an attention to the latest tokens, located by the length of its cache"
# Types that would run, and be wrong.
UNSERVED = {
    **dict.fromkeys(("gpt_neo", "inkling_text", "inkling_model"), _BY_LENGTH),
    **dict.fromkeys(
        ("camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"),
        "positions that begin after the padding index",
    ),
}
_COUNTS, _TAKES_IN = "counts positions by the cache, padding included", "takes padding into its state"
UNPADDED = {
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "git", "marian", "mbart", "mvp", "pegasus",
         "plbart", "trocr"), _COUNTS
    ),
    "recurrent_gemma": _TAKES_IN,
}  # fmt: skip
_INTO_CONVOLUTION = ("in_proj", "q_proj", "k_proj", "v_proj")
_INSTEAD = "use its generate()"
# What a model may raise that a static cache, or a mask of its length, does not suit.
_UNSUITED = (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)


def check_served(model: Any) -> None:
    """Raise `ArgumentError` for a model whose results over a static cache are wrong."""
    name, kind = type(model).__name__, getattr(model.config, "model_type", None)
    known = getattr(model, "_supports_default_dynamic_cache", None)
    if known is not None and not known():
        raise ArgumentError(f"model is a {name}, which keeps its own cache: {_INSTEAD}")
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if embedding is not None and not hasattr(embedding, "weight"):
        raise ArgumentError(f"model is a {name}, which has several word embeddings: {_INSTEAD}")
    if kind in BERT and getattr(model.config, "is_decoder", None) is False:
        raise ArgumentError(
            f"model is a {name}, whose tokens attend to later ones: expected is_decoder=True in its"
            f" configuration, or {_INSTEAD}"
        )
    if kind in UNSERVED:
        raise ArgumentError(f"model is a {name}, which has {UNSERVED[kind]}: {_INSTEAD}")


def check_padding(model: Any, mask: torch.Tensor | None, max_length: int) -> None:
    """Raise `ArgumentError` for padding before prompts of a model that does not ignore it.

    `max_length`: the tokens that fit into the cache.
    """
    if mask is None or bool(mask.all()):
        return
    reason = UNPADDED.get(getattr(model.config, "model_type", ""))
    if reason is None and (biased := _biased_before_convolution(model)):
        reason = f"{_TAKES_IN}, for {biased} has a bias"
    if reason is None and (first := _scaled_from(model)) <= max_length:
        reason = f"scales queries by their places in the cache, padding included, from token {first} on"
    if reason is not None:
        raise ArgumentError(
            f"prompts are padded to one length, but {type(model).__name__} {reason}: expected prompts of one length in"
            " a call"
        )


def _scaled_from(model: Any) -> float:
    """Return the first token whose query Llama 4 scales, in layers without rotary embedding; infinite if none."""
    tuned = (each for each in model.modules() if getattr(each, "attn_temperature_tuning", False))
    return min((each.floor_scale for each in tuned if not each.use_rope), default=float("inf"))


def _biased_before_convolution(model: Any) -> str:
    """Return the first projection with a bias before a convolution along the tokens; "" if there is none.

    transformers sets padding to 0 before the projection, so the convolution reads the bias there.
    """
    for name, module in model.named_modules():
        inside = dict(module.named_children())
        if any(isinstance(each, nn.Conv1d) for each in inside.values()):
            for child, linear in inside.items():
                if child.startswith(_INTO_CONVOLUTION) and getattr(linear, "bias", None) is not None:
                    return f"{name}.{child}"
    return ""


def needs_full_masks(model: Any) -> bool:
    """Return whether the model makes biases of its mask (ALiBi), which then has to be [rows, cache length]."""
    return getattr(model.config, "model_type", None) == "bloom" or bool(getattr(model.config, "alibi", False))


def check_compilable(model: Any, cache: Any, backend: str) -> None:
    """Raise `ArgumentError` where a layer of an engine's cache keeps more than keys and values."""
    states = "has_previous_state", "indexer_keys"
    for index, layer in enumerate(cache.layers):
        if not hasattr(layer, "max_cache_len") or any(hasattr(layer, state) for state in states):
            raise ArgumentError(
                f"compile is {backend!r}, but layer {index} of {type(model).__name__} keeps a {type(layer).__name__}:"
                " expected False"
            )


@contextmanager
def first_call(model: Any, cache: Any) -> Iterator[None]:
    """Run a model's first call over a cache in the block; raise `ArgumentError` with the remedy where it fails."""
    try:
        yield
        _check_filled(model, cache)
    except IrisError:
        raise
    except Exception as error:
        if isinstance(error, _UNSUITED) or type(error) is RuntimeError:
            lines = str(error).strip().splitlines() or [""]
            raise ArgumentError(
                f"model is a {type(model).__name__}, which cannot be run over a static cache ({type(error).__name__}:"
                f" {lines[0][:200]}): {_INSTEAD}"
            ) from error
        raise


def _check_filled(model: Any, cache: Any) -> None:
    flags = ("is_conv_states_initialized", "is_recurrent_states_initialized")
    filled = (
        getattr(layer, "is_initialized", False) or any(any(getattr(layer, flag, {}).values()) for flag in flags)
        for layer in cache.layers
        if type(layer).__name__ != "DummyLayer"  # which holds nothing, though marked as initialized
    )
    if not any(filled):
        raise ArgumentError(f"{type(model).__name__} stores nothing in the cache that it receives: {_INSTEAD}")


def keeps_any_logits(model: Any) -> bool:
    """Return whether `model` takes a tensor of the positions whose logits it computes."""
    known = inspect.signature(model.forward).parameters.get("logits_to_keep")
    return known is not None and "Tensor" in str(known.annotation)
