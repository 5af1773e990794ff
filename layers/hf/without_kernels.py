"""A split skeleton that computes shapes only: its layers launch no kernel and exchange nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..sharded import ShardedLinear
from . import sequence
from .mixture import is_split_experts


def drop_kernels(skeleton: nn.Module) -> None:
    """Make every split layer of `skeleton`, whose tensors are on meta, return an empty tensor of its result's shape."""
    sharing = sequence.sharing_of(skeleton)
    if sharing is not None:
        sharing.world = 1  # a few tokens only, which no rank shares
    for module in skeleton.modules():
        if isinstance(module, ShardedLinear):
            _return_empty(module)
        elif is_split_experts(module):
            _return_like_tokens(module)


def _return_empty(layer: Any) -> None:
    layer.exchanged = lambda op, x, size: x.new_empty(size)
    layer.local_product = lambda x, biased=True: x.new_empty(*x.shape[:-1], layer.local_shape[0])
    layer.gated = lambda x: x.new_empty(*x.shape[:-1], layer.local_shape[0] // 2)


def _return_like_tokens(experts: Any) -> None:
    """Make experts return their tokens' shape, both the whole module and a rank's part of it."""
    experts.forward = lambda hidden, *args, **kwargs: torch.empty_like(hidden)
