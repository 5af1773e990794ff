"""What a user gives an engine as lists: prompts, and where to stop. Checked on the host.

A token outside the vocabulary is an error here, where on a GPU it would be the end of the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any

from iris.errors import ArgumentError
import torch


def tokens_of(prompts: Any, words: int) -> list[list[int]]:
    """The tokens of each prompt, of a vocabulary of so many `words`."""
    try:
        rows = prompts.tolist() if isinstance(prompts, torch.Tensor) else prompts
        rows = [row.tolist() if isinstance(row, torch.Tensor) else list(row) for row in rows]
        tokens = torch.tensor([token for row in rows for token in row])
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.tensor(0.0)
    if tokens.dim() != 1 or (tokens.numel() and tokens.dtype != torch.long):
        raise ArgumentError(
            f"prompts are a {type(prompts).__name__}: expected integers, as a tensor [rows, tokens] or a list for each"
            " row"
        )
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < words:
        raise ArgumentError(
            f"prompts have tokens from {tokens.min()} to {tokens.max()}: expected 0 to {words - 1}, the vocabulary"
        )
    return rows


def stops(stop: int | Iterable[int] | None) -> set[int]:
    """The tokens after which a row ends."""
    try:
        several = stop if isinstance(stop, Iterable) else () if stop is None else (stop,)
        return {index(token) for token in several}
    except TypeError:
        raise ArgumentError(f"stop is {stop!r}: expected None, a token, or several") from None
