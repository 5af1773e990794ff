"""Check a cache that a caller passes to a split model: it must have the heads of this rank, not those of all.

Two caches look right and are wrong: one that the unsplit model has filled, and a static one whose
`early_initialization` took the configuration's number of heads. torch would raise at the first update, with an error
about shapes on some ranks, while ranks that happen to have as many heads go on and wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iris.errors import ArgumentError
from torch import nn

from ..shard import HeadSplit

_HELD = "_cached_heads"  # of an attention instance: heads in its cache, (of this rank, of all, of each rank)
NAMES = "past_key_values", "cache"  # transformers 5.24 renamed it


def remember_heads(attention: nn.Module, heads: HeadSplit, by_query_head: bool) -> None:
    """Record how many heads `attention` caches on this rank, for `check_caches`.

    `by_query_head`: whether it caches the keys once for each query head, not for each kv head.
    """
    cached = (heads.num_local_kv_heads, heads.num_kv_heads, heads.kv_counts)
    setattr(attention, _HELD, (heads.num_local_heads, heads.num_heads, heads.counts) if by_query_head else cached)


def check_caches(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise `ArgumentError` for a cache among `arguments` that holds another number of heads than this rank's."""
    for name in NAMES:
        for layers in _layers(arguments.get(name)):
            if any(getattr(layer, "is_initialized", False) for layer in layers):
                _check(name, layers, model)


def _layers(cache: Any) -> Iterator[list[Any]]:
    """Yield the layers of a cache of transformers; of an encoder and a decoder, the decoder's."""
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if isinstance(layers, list):
        yield layers


def _check(name: str, layers: list[Any], model: nn.Module) -> None:
    for attention in model.modules():
        cached, index = getattr(attention, _HELD, None), getattr(attention, "layer_idx", None)
        if cached is None or not isinstance(index, int) or not index < len(layers):
            continue
        layer = layers[index]
        keys = getattr(layer, "keys", None) if getattr(layer, "is_initialized", False) else None
        if keys is None or keys.dim() != 4:
            continue
        held, (own, whole, counts) = keys.shape[1], cached
        # any other number is the model's own, as in a latent attention or an indexer
        if held == whole and any(count != whole for count in counts):
            raise ArgumentError(
                f"{name} is a {type(layers[index]).__name__} of {held} heads in layer {index}: expected {own} of the"
                f" {whole}, as this rank holds (by rank: {', '.join(map(str, counts))}); make a new cache, and"
                " let the split model initialize and fill it"
            )
