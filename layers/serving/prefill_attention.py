"""Attention of a prompt, causal, by cuDNN through torch on Hopper and Blackwell.

cuDNN makes a plan for each shape, which takes some 50 ms, and a server meets a new length with almost every prompt. So
lengths have a grid, eight to an octave. A length between two steps is padded at its end, which no token of the prompt
attends to. For short prompts, and between the first steps of the grid, padding would take longer than cuDNN saves. Then
flash attention is used, which has no plans but takes 1.2 to 2 times as long. The choice depends on shapes alone, so a
prompt gives the same bits whenever it comes.

A mask would disable cuDNN's causal attention, and it would cover all places of a cache, however few are filled. So
prompts with padding are reordered first: tokens that are seen come before those that are not. Then no token of a
prompt attends to padding, either.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from iris import platform
from iris_ops.operators import OPERATORS
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# In torch's order of preference on Hopper, with the function that tells whether the user has disabled one.
_BACKENDS: dict[Any, Callable[[], bool]] = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
_CUDNN = 91500  # below it torch prefers flash attention, and cuDNN is wrong at some lengths
_LEAST_STEP, _STEPS = 64, 8
_PADDED_TOKENS, _MOST_PADDED = 768, 9 / 8  # least tokens of a batch for padding; longest padded length over length


def length_on_grid(length: int, least_step: int = _LEAST_STEP) -> int:
    """Return the least length on the grid from `length` on: eight steps, of `least_step` or more, per power of two."""
    octave = 1 << (max(1, length) - 1).bit_length()  # not less than `length`
    step = max(least_step, octave // 2 // _STEPS)
    return -(-length // step) * step


def places_of(seen: torch.Tensor) -> torch.Tensor:
    """Return a [B, 1, 3, T] int64 tensor in place of a mask, for prompts with padding; `seen` [B, T] is False there.

    Its rows: the token of each place once all seen tokens come first, in order; the place of each token; `seen`.
    """
    place = torch.where(seen, seen.cumsum(1), seen.sum(1, keepdim=True) + (~seen).cumsum(1)) - 1
    order = torch.empty_like(place).scatter_(1, place, torch.arange(seen.shape[1], device=seen.device).expand_as(place))
    return torch.stack((order, place, seen.long()), 1).unsqueeze(1)


def is_places(mask: torch.Tensor | None) -> bool:
    """Return whether `mask` is a result of `places_of`."""
    return mask is not None and mask.dtype == torch.long and mask.dim() == 4 and mask.shape[2] == 3


def mask_of_places(places: torch.Tensor) -> torch.Tensor:
    """Return the mask [B, 1, T, T] that `places` represent."""
    length = places.shape[3]
    causal = torch.ones(length, length, dtype=torch.bool, device=places.device).tril()
    return causal & places[:, :, 2:].bool()


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, places: torch.Tensor | None = None,
    by_flash: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return [B, T, H, D] of queries q [B, H, T, D] over k, v [B, KV, L, D]: token t over the first t + 1 of them.

    With `places`, over the seen ones; tokens that are not seen get finite, meaningless numbers. `by_flash`: always by
    flash attention, whose blocks depend on the place of a token alone.
    """
    batch, heads, length, _ = q.shape
    rows = [each[:, :, :length].transpose(1, 2) for each in (q, k, v)]  # a projection's layout: [B, T, heads, D]
    more = length_on_grid(length) - length
    by_cudnn = more == 0 or (batch * length >= _PADDED_TOKENS and length + more <= _MOST_PADDED * length)
    by_cudnn = by_cudnn and not by_flash
    more = more if by_cudnn else 0
    if places is not None:
        row = torch.arange(batch, device=q.device)[:, None]
        order, place = F.pad(places[:, 0, 0], (0, more)), places[:, 0, 1]
        rows = [each[row, order] for each in rows]
    elif more:
        rows = [F.pad(each, (0, 0, 0, 0, 0, more)) for each in rows]
    with _backends(by_cudnn) if _has_plans(q.device) else nullcontext():
        query, key, value = (each.transpose(1, 2) for each in rows)
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=heads != k.shape[1]
        ).transpose(1, 2)
    return (out[:, :length] if places is None else out[row, place]).contiguous()


def _backends(by_cudnn: bool) -> AbstractContextManager:
    """Return a block in which torch prefers cuDNN, or excludes it, among the enabled backends."""
    enabled_backends = [each for each, enabled in _BACKENDS.items() if enabled()]
    without_cudnn = [each for each in enabled_backends if each is not SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel(enabled_backends if by_cudnn or not without_cudnn else without_cudnn, set_priority=True)


def supports(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict
) -> bool:
    """Return whether it computes the same as transformers, and faster, over prompts of many lengths."""
    return (
        mask is None
        and query.shape[2] > 1
        and key.shape[2] >= query.shape[2]
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and query.shape[3] == key.shape[3] == value.shape[3] <= 256
        and query.dtype == key.dtype == value.dtype
        and query.dtype in (torch.bfloat16, torch.float16)
        and (getattr(module, "is_causal", True) if options.get("is_causal") is None else options["is_causal"])
        and not options.get("dropout")
        and _has_plans(query.device)
    )


@platform.constant
def _has_plans(device: torch.device) -> bool:
    known = platform.compute_capability(device) in (platform.HOPPER, platform.BLACKWELL)
    return known and (torch.backends.cudnn.version() or 0) > _CUDNN


# A compiler would choose one backend for all lengths.
OPERATORS.add(
    "prefill_attention(Tensor q, Tensor k, Tensor v, float scale, Tensor? places=None, bool by_flash=False) -> Tensor",
    prefill_attention,
    lambda q, k, v, *_: q.new_empty(*q.transpose(1, 2).shape[:3], v.shape[3]),
)
