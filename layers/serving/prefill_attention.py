"""Attention of a prompt, each token over those before it, by cuDNN through torch on Hopper and Blackwell.

cuDNN makes a plan for each shape, which takes some 50 ms, and a server meets a new length with almost every prompt. So
lengths have a grid, eight to an octave. A length between two steps is padded behind, where no token of the prompt
looks. For short prompts, and between the first steps of the grid, padding would take longer than cuDNN saves. Then
flash attention serves, which has no plans but takes 1.2 to 2 times as long. The choice depends on shapes alone, so a
prompt gives the same bits whenever it comes.

A mask would take cuDNN's causal attention away, and it would cover all places of a cache, however few are filled. So
prompts with padding are put in order first: tokens that are seen stand before those that are not. Then no token of a
prompt looks at padding, either.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from iris import platform
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# As torch prefers them on Hopper, and whether a user has switched one off.
_BACKENDS: dict[Any, Callable[[], bool]] = {
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
_CUDNN = 91500  # before, torch prefers flash attention, and cuDNN errs at some lengths
_LEAST_STEP, _STEPS = 64, 8
_PADDED_TOKENS, _MOST_PADDED = 768, 9 / 8  # of a batch, from so many on; lengths, to so many times as long


def length_on_grid(length: int, least_step: int = _LEAST_STEP) -> int:
    """The least length of the grid from `length` on: eight between two powers of two, `least_step` apart or more."""
    octave = 1 << (max(1, length) - 1).bit_length()  # not less than `length`
    step = max(least_step, octave // 2 // _STEPS)
    return -(-length // step) * step


def places_of(seen: torch.Tensor) -> torch.Tensor:
    """Of prompts with padding, `seen` [B, T] where they are none: [B, 1, 3, T] in place of a mask, in int64.

    What stands in each place once all tokens that are seen come first, in their order; the place of each token; `seen`.
    """
    place = torch.where(seen, seen.cumsum(1), seen.sum(1, keepdim=True) + (~seen).cumsum(1)) - 1
    order = torch.empty_like(place).scatter_(1, place, torch.arange(seen.shape[1], device=seen.device).expand_as(place))
    return torch.stack((order, place, seen.long()), 1).unsqueeze(1)


def is_places(mask: torch.Tensor | None) -> bool:
    """Whether `mask` is what `places_of` gives."""
    return mask is not None and mask.dtype == torch.long and mask.dim() == 4 and mask.shape[2] == 3


def mask_of_places(places: torch.Tensor) -> torch.Tensor:
    """The mask [B, 1, T, T] that `places` stand for."""
    length = places.shape[3]
    causal = torch.ones(length, length, dtype=torch.bool, device=places.device).tril()
    return causal & places[:, :, 2:].bool()


def prefill_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, places: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:  # fmt: skip
    """[B, T, H, D] of queries q [B, H, T, D] over k, v [B, KV, L, D]: token t over the first t + 1 of them.

    With `places`, over those of them that are seen; what is not seen gets finite numbers that mean nothing.
    `invariant`: always by flash attention, whose blocks go by the place of a token alone.
    """
    batch, heads, length, _ = q.shape
    rows = [each[:, :, :length].transpose(1, 2) for each in (q, k, v)]  # as a projection leaves them: [B, T, heads, D]
    more = length_on_grid(length) - length
    by_cudnn = more == 0 or (batch * length >= _PADDED_TOKENS and length + more <= _MOST_PADDED * length)
    by_cudnn = by_cudnn and not invariant
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
    """A block in which torch prefers cuDNN, or does without, of the backends that are switched on."""
    found = [each for each, enabled in _BACKENDS.items() if enabled()]
    others = [each for each in found if each is not SDPBackend.CUDNN_ATTENTION]
    return sdpa_kernel(found if by_cudnn or not others else others, set_priority=True)


def serves(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, options: dict
) -> bool:
    """Whether it attends as transformers would, and is the faster one over prompts of many lengths."""
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


# One opaque operator for compilers, which would choose a backend for all lengths.
_library = torch.library.Library("iris_ops", "FRAGMENT")
_library.define(
    "prefill_attention(Tensor q, Tensor k, Tensor v, float scale, Tensor? places=None, bool invariant=False) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
_library.impl("prefill_attention", prefill_attention, "CompositeExplicitAutograd")
torch.library.register_fake(
    "iris_ops::prefill_attention",
    lambda q, k, v, *_: q.new_empty(*q.transpose(1, 2).shape[:3], v.shape[3]),
    lib=_library,
)
