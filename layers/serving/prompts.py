"""Check an engine's inputs: prompts, as lists or padded to common lengths, and stop tokens.

On the host: a token outside the vocabulary is an error here, where on a GPU it would end the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from iris.errors import ArgumentError
import torch
from torch.nn import functional as F

from ..sharded import is_dtensor
from .arguments import check_tokens


def tokens_of(prompts: Any, words: int) -> list[list[int]]:
    """Return the tokens of each prompt, of a vocabulary of `words` tokens."""
    if is_dtensor(prompts):
        raise ArgumentError("prompts are a DTensor: expected a plain tensor, the same on every rank (full_tensor())")
    try:
        rows = prompts.tolist() if isinstance(prompts, torch.Tensor) else prompts
        rows = [row.tolist() if isinstance(row, torch.Tensor) else list(row) for row in rows]
        tokens = torch.tensor([token for row in rows for token in row], device="cpu")
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.tensor(0.0, device="cpu")
    if tokens.dim() != 1 or (tokens.numel() and tokens.dtype != torch.long):
        raise ArgumentError(
            f"prompts are a {type(prompts).__name__}: expected integers, as a tensor [rows, tokens] or a list for each"
            " row"
        )
    check_tokens("prompts", tokens, words)
    return rows


def padded_before(
    prompts: list[list[int]], new: int, batch_size: int, max_length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return one tensor of `batch_size` left-padded rows, and its mask (None: no padding), if `new` more tokens fit."""
    lengths = [len(row) for row in prompts] or [0]
    longest = max(lengths)
    if not 0 < len(prompts) <= batch_size or not min(lengths):
        raise ArgumentError(
            f"prompts has {len(prompts)} rows of {lengths} tokens: expected 1 to {batch_size} rows (batch_size), none "
            "empty"
        )
    if longest + new > max_length:
        raise ArgumentError(
            f"prompts of {longest} tokens and max_new_tokens of {new} need {longest + new}: expected at most"
            f" {max_length}, the engine's max_length"
        )
    rows = [*prompts, *prompts[:1] * (batch_size - len(prompts))]
    padded = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device="cpu")
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device="cpu")
    return padded, None if mask.all() else mask


def stops(stop: Any, words: int) -> set[int]:
    """Return the tokens after which a row ends; raise for those outside a vocabulary of `words` tokens."""
    try:
        one = not isinstance(stop, Iterable) or (isinstance(stop, torch.Tensor) and stop.dim() == 0)
        several = () if stop is None else (stop,) if one else tuple(stop)
        if isinstance(stop, bytes) or any(isinstance(token, bool) for token in several):
            raise TypeError
        ends = {index(token) for token in several}
    except TypeError:
        raise ArgumentError(f"stop is {stop!r}: expected None, a token, or several") from None
    if outside := sorted(token for token in ends if not 0 <= token < words):
        raise ArgumentError(f"stop has {outside[0]}: expected tokens from 0 to {words - 1}, the vocabulary")
    return ends


def pad_right(
    prompts: torch.Tensor, mask: torch.Tensor | None, length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Right-pad both to [rows, length]; no prompt attends to new tokens. They attend to themselves, to avoid NaN."""
    more = length - prompts.shape[1]
    if more:
        prompts = F.pad(prompts, (0, more))
        mask = None if mask is None else F.pad(mask, (0, more), value=True)
    return prompts, mask


def until(row: list[int], ends: set[int]) -> list[int]:
    """Return the tokens of `row` up to and with the first in `ends`."""
    at = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: at + 1]


def ended(tokens: torch.Tensor, ends: set[int]) -> bool:
    """Return whether each row of `tokens` [rows, length] has one of `ends`."""
    return all(ends.intersection(row) for row in tokens.tolist())
