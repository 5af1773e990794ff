"""An engine's cache: transformers' `StaticCache`, of one length in all layers that attend.

Layers that keep a state of fixed size (state spaces, linear attentions, convolutions) have transformers' own there: it
is changed in place, at one address. Tokens cannot be taken out of such a state again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError
import torch

if TYPE_CHECKING:
    from transformers import StaticCache


# Layers of transformers' static caches by class: with keys and values, with these and a state, with none of them.
_ATTENDING = ("StaticLayer", "StaticSlidingWindowLayer")
_INDEXED = "StaticIndexedLayer"  # with keys of an indexer, too, which chooses the tokens that are attended to
_BOTH = ("LinearAttentionAndStaticFullAttentionLayer", "LinearAttentionAndStaticSlidingWindowAttentionLayer")
_WITHOUT = ("LinearAttentionLayer", "DummyLayer")


def has_windows(config: Any) -> bool:
    """Return whether some layers attend to the latest tokens only."""
    from transformers import StaticCache

    return any(StaticCache(config, 1).is_sliding)


def shape_of(model: Any, ranks: int) -> tuple:
    """Return the properties that two models, split over `ranks`, must share to share a cache."""
    text = model.config.get_text_config()
    sizes = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"
    return (*(_of_all_layers(text, size) for size in sizes), model.dtype, ranks)


def _of_all_layers(config: Any, name: str) -> Any:
    """Return a setting of `config`; None if there is none, or layers differ in it, for which transformers raises."""
    try:
        return getattr(config, name, None)
    except Exception:  # AmbiguousGlobalPerLayerAttributeError, which older releases do not have
        return None


def cache_bytes(model: Any, ranks: int, batch_size: int, max_length: int) -> int:
    """Return a lower bound of the bytes of a rank's cache of these sizes, as if the ranks divided its heads."""
    text = model.config.get_text_config()
    heads, groups, width, hidden, layers = (
        size if isinstance(size := _of_all_layers(text, name), int) else 0
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers")
    )
    local = -(-(groups or heads) // ranks)
    per_token = 2 * layers * local * (width or hidden // max(heads, 1)) * model.dtype.itemsize
    return per_token * batch_size * max_length


def static_cache(model: Any, ranks: int, max_length: int) -> StaticCache:
    """Return a cache of `max_length` tokens in every attending layer, allocated at first use with this rank's heads.

    Its `holder` is the engine whose batch it holds. Raises `ArgumentError` for a layer that keeps anything else.
    """
    with torch.device("cpu"):  # the layers' counts go to the device of the keys later; the default may hold no values
        cache = _with_our_layers(model, max_length)
    cache.shape, cache.holder = shape_of(model, ranks), None
    return cache


def _with_our_layers(model: Any, max_length: int) -> StaticCache:
    from transformers import StaticCache, cache_utils

    try:
        cache = StaticCache(model.config, max_length)
    except KeyError as kind:
        raise ArgumentError(
            f"{type(model).__name__} has layers of {kind}, of which transformers has no static cache: use the model's"
            " generate()"
        ) from kind
    for index, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        if kind in _BOTH:
            both = getattr(cache_utils, _BOTH[0])
            cache.layers[index] = both(max_length, number_of_states=layer.number_of_states)
        elif kind == _INDEXED:
            cache.layers[index] = type(layer)(max_length)
        elif kind in _ATTENDING:
            cache.layers[index] = cache_utils.StaticLayer(max_length)
        elif kind not in _WITHOUT:
            raise ArgumentError(
                f"layer {index} of {type(model).__name__} keeps a {kind}: expected layers that attend to all tokens, "
                "to the latest or to those that an indexer chooses, or that keep a state of fixed size; use the "
                "model's generate()"
            )
    return cache


def attending(cache: Any) -> list[Any]:
    """Return the layers of an engine's cache that keep keys and values."""
    return [layer for layer in cache.layers if hasattr(layer, "max_cache_len")]


def drop_last_tokens(cache: Any, tokens: torch.Tensor) -> None:
    """Remove the last `tokens` [1] of each row from an engine's cache."""
    counts = ("cumulative_length", "indexer_cumulative_length")
    lengths = [getattr(layer, count) for layer in attending(cache) for count in counts if hasattr(layer, count)]
    over = tokens.to(lengths[0].dtype)
    torch._foreach_sub_(lengths, [over.view_as(each) for each in lengths])


def recurrent(cache: Any) -> list[Any]:
    """Return the layers of an engine's cache that keep a state of fixed size, with keys and values or alone."""
    return [layer for layer in cache.layers if hasattr(layer, "has_previous_state")]


def cache_name(model: Any) -> str:
    """Return the name of the cache in the forward of `model` or of the one it calls: transformers 5.24 renamed it."""
    classes: tuple[Any, ...] = type(model).__mro__
    of_classes = (signature(each.forward).parameters for each in classes if "forward" in vars(each))
    return next((name for had in of_classes for name in ("cache", "past_key_values") if name in had), "past_key_values")


def is_compatible(cache: Any, shape: tuple, batch_size: int, max_length: int) -> bool:
    """Return whether `cache` is another engine's, of these sizes. It has a batch size once it is filled."""
    if getattr(cache, "shape", None) != shape:
        return False
    layers = attending(cache)
    wide = [each for each in layers if each.is_initialized and each.keys.shape[0] != batch_size]
    return {each.max_cache_len for each in layers} == {max_length} and not wide


def room_of(cache: Any) -> int | None:
    """Return how many tokens fit into a cache of transformers; None if it grows, or keeps the latest ones only."""
    fixed = [layer for layer in getattr(cache, "layers", ()) if not getattr(layer, "is_sliding", False)]
    return min((most for each in fixed if (most := getattr(each, "max_cache_len", 0))), default=None)


@contextmanager
def known_empty(cache: Any) -> Iterator[None]:
    """Make masks for an empty cache inside the block; otherwise the host would wait for a count on the device."""
    cache.get_query_offset = lambda layer=0: 0
    try:
        yield
    finally:
        del cache.get_query_offset
