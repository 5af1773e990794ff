"""Read a row again where it passes a length, for models whose rotary embedding changes there.

LongRoPE, of Phi-3, rotates by one set of factors up to `original_max_position_embeddings` tokens, and by another
from there on. The keys in a cache were rotated by the first, and queries of the second do not match them. So
transformers' `generate` drops the cache of such a model (Phi-3, Phi-3.5-MoE, Phi-4 multimodal) at that length, and the
next call reads all tokens anew. An engine does the same: it keeps the tokens of the batch, and the step that would pass
the length becomes a prompt. The longest row decides for the batch, whose rows share the factors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from .cache import cache_name


class RopeSwitch:
    """The tokens of a batch [rows, at most max_length], which are read again once a row passes `length`."""

    def __init__(self, length: int, like: torch.Tensor) -> None:
        self.length, self.tokens = length, torch.zeros_like(like)
        self._mask: torch.Tensor | None = None
        self._count = self._longest = 0  # tokens of a row, with padding, and those of the longest row without

    @staticmethod
    def of(model: Any, like: torch.Tensor) -> RopeSwitch | None:
        """Return the switch of `model`, or None where `generate` keeps the cache at all lengths of `like`."""
        length = switch_length(model)
        return None if length is None or length >= like.shape[1] else RopeSwitch(length, like)

    def begin(self, prompts: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Keep a new batch's prompts [rows, length]; `mask` is False, or 0, where padded."""
        self._count, self._mask = prompts.shape[1], None if mask is None else mask.bool()
        self.tokens[:, : self._count] = prompts
        self._longest = self._count if self._mask is None else int(self._mask.sum(-1).max())

    def passes(self, tokens: torch.Tensor) -> bool:
        """Keep the `tokens` [rows, 1] of the next step; return whether it is the first past the length."""
        self.tokens[:, self._count : self._count + 1] = tokens
        self._count, self._longest = self._count + 1, self._longest + 1
        return self._longest == self.length + 1

    def all_tokens(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return all tokens [rows, length] of the batch, and their mask."""
        mask = self._mask
        more = 0 if mask is None else self._count - mask.shape[1]
        return self.tokens[:, : self._count], None if mask is None else F.pad(mask, (0, more), value=True)


def switch_length(model: Any) -> int | None:
    """Return the length past which `generate` drops the cache of `model`, by trying; None if it never does."""
    length = getattr(model.config, "original_max_position_embeddings", None)
    if not isinstance(length, int) or not any(_changes(module) for module in model.modules()):
        return None
    return length if _drops_cache(model, length) else None


def _changes(module: Any) -> bool:
    """Return whether `module` is a rotary embedding with two sets of factors."""
    kinds = getattr(module, "rope_type", None)
    return "longrope" in (kinds.values() if isinstance(kinds, dict) else (kinds,))


def _drops_cache(model: Any, length: int) -> bool:
    from transformers import DynamicCache

    cache: Any = DynamicCache(config=model.config)
    cache.get_seq_length = lambda *_: length
    tokens = torch.zeros(1, length + 1, dtype=torch.long, device=model.device)
    try:
        inputs = model.prepare_inputs_for_generation(
            tokens, **{cache_name(model): cache}, attention_mask=torch.ones_like(tokens), next_sequence_length=1
        )
    except Exception:  # for other arguments it needs; reading the row again is always right
        return True
    return all(inputs.get(name) is not cache for name in ("cache", "past_key_values"))
