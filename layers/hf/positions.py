"""Find how many positions a Hugging Face model has, and which number is the first."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def positions_known(model: Any) -> int | None:
    """Return how many positions a model has that looks them up in a table; None if it computes them."""
    most = getattr(model.config, "max_position_embeddings", None)
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    tables = [each for each in model.modules() if isinstance(each, nn.Embedding) and each is not embedding]
    # some begin after a few for padding
    looked_up = isinstance(most, int) and any(most <= each.num_embeddings <= most + 8 for each in tables)
    return most if looked_up else None


def count_from_zero(model: Any, device: torch.device) -> bool:
    """Return whether transformers' generate() gives a prompt's first token position 0, by trying it."""
    positions = torch.arange(2, device=device)[None]
    try:
        given = model.prepare_inputs_for_generation(positions, position_ids=positions).get("position_ids")
    except Exception:  # for other arguments it needs
        return True
    return given is None or bool((given == positions).all())
