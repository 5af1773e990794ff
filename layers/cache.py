"""An engine's cache: transformers' `StaticCache`, of one length in all layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from iris.errors import ArgumentError


def has_windows(config) -> bool:
    """Whether some layers attend to the latest tokens only."""
    from transformers import StaticCache

    return any(StaticCache(config, 1).is_sliding)


def static_cache(config, max_length: int):
    """A cache of `max_length` tokens in every layer, allocated at first use with the heads that are here then."""
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

    cache = StaticCache(config, max_length)
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise ArgumentError(f"model has a cache layer of {type(layer).__name__}: expected attention layers only")
        cache.layers[index] = StaticLayer(max_length)
    return cache


def fits(cache, batch_size: int, max_length: int) -> bool:
    """Whether `cache` is another engine's, of these sizes. It has a batch size once it is filled."""
    layers = getattr(cache, "layers", [])
    wide = [each for each in layers if each.is_initialized and each.keys.shape[0] != batch_size]
    return {each.max_cache_len for each in layers} == {max_length} and not wide


@contextmanager
def known_empty(cache) -> Iterator[None]:
    """Inside, masks are made for a cache that is empty, as the host knows: what is on the device, it would wait for."""
    cache.get_query_offset = lambda layer=0: 0
    try:
        yield
    finally:
        del cache.get_query_offset
