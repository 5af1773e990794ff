"""An engine's cache: transformers' `StaticCache`, of one length in all layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

from iris.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import StaticCache


def has_windows(config: Any) -> bool:
    """Whether some layers attend to the latest tokens only."""
    from transformers import StaticCache

    return any(StaticCache(config, 1).is_sliding)


def shape_of(model: Any, ranks: int) -> tuple:
    """What two models that are split over so many `ranks` must have alike to share a cache."""
    text = model.config.get_text_config()
    sizes = "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"
    return (*(getattr(text, size, None) for size in sizes), model.dtype, ranks)


def cache_bytes(model: Any, ranks: int, batch_size: int, max_length: int) -> int:
    """What a rank's cache of these sizes takes, or less: as if the ranks shared its heads."""
    text = model.config.get_text_config()
    heads, groups, width, hidden, layers = (
        size if isinstance(size := getattr(text, name, None), int) else 0
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "num_hidden_layers")
    )
    local = -(-(groups or heads) // ranks)
    per_token = 2 * layers * local * (width or hidden // max(heads, 1)) * model.dtype.itemsize
    return per_token * batch_size * max_length


def static_cache(model: Any, ranks: int, max_length: int) -> StaticCache:
    """A cache of `max_length` tokens in every layer, allocated at first use with the heads that are here then.

    Whose batch it holds says its `holder`.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    cache = StaticCache(model.config, max_length)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise ArgumentError(f"model has a cache layer of {type(layer).__name__}: expected attention layers only")
        cache.layers[index] = StaticLayer(max_length)
    cache.shape, cache.holder = shape_of(model, ranks), None
    return cache


def cache_name(model: Any) -> str:
    """What the forward of `model`, or the one it passes on to, calls its cache: transformers 5.24 has renamed it."""
    classes: tuple[Any, ...] = type(model).__mro__
    of_classes = (signature(each.forward).parameters for each in classes if "forward" in vars(each))
    return next((name for had in of_classes for name in ("cache", "past_key_values") if name in had), "past_key_values")


def fits(cache: Any, shape: tuple, batch_size: int, max_length: int) -> bool:
    """Whether `cache` is another engine's, of these sizes. It has a batch size once it is filled."""
    if getattr(cache, "shape", None) != shape:
        return False
    layers = cache.layers
    wide = [each for each in layers if each.is_initialized and each.keys.shape[0] != batch_size]
    return {each.max_cache_len for each in layers} == {max_length} and not wide


def room_of(cache: Any) -> int | None:
    """How many tokens a cache of transformers has room for; None if it grows, or keeps the latest ones only."""
    fixed = [layer for layer in getattr(cache, "layers", ()) if not getattr(layer, "is_sliding", False)]
    return min((most for each in fixed if (most := getattr(each, "max_cache_len", 0))), default=None)


@contextmanager
def known_empty(cache: Any) -> Iterator[None]:
    """Inside, masks are made for a cache that is empty, as the host knows: what is on the device, it would wait for."""
    cache.get_query_offset = lambda layer=0: 0
    try:
        yield
    finally:
        del cache.get_query_offset
