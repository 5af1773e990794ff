"""Check a call of `Engine.generate` and compare it between ranks before anything runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..digests import facts
from ..pipeline.stage import run_on_stages
from ..sharded import positive
from ..together import checked
from .arguments import check_no_autocast, check_sampling, words_of
from .prompts import padded_before, stops, tokens_of
from .served import check_padding


@dataclass(frozen=True)
class Request:
    """`count` prompts as tokens [batch_size, length], a mask that is False in padding, and tokens that end a row."""

    count: int
    prompts: torch.Tensor
    mask: torch.Tensor | None
    ends: set[int]


def checked_request(
    engine: Any, prompts: Any, max_new_tokens: Any, temperature: Any, top_p: Any, seed: Any, stop: Any
) -> Request:
    """Return the request to an `Engine`, on its device. Collective.

    Raises `ArgumentError` on every rank for bad arguments on one of them, and for arguments that differ between ranks:
    all but `seed`, where rank 0's is used.
    """
    vocabulary, device = words_of(engine.model), engine.tokens.device

    def check() -> tuple[list[list[int]], Request]:
        positive(max_new_tokens=max_new_tokens)
        check_sampling(temperature, top_p, seed)
        check_no_autocast(device.type)
        tokens = tokens_of(prompts, vocabulary)
        rows, mask = padded_before(tokens, max_new_tokens, engine.batch_size, engine.max_length)
        check_padding(engine.model, mask, engine.max_length)
        return tokens, Request(len(tokens), rows, mask, stops(stop, vocabulary))

    def facts_of(result: tuple[list[list[int]], Request]) -> dict[str, str]:
        tokens, request = result
        options = {"temperature": float(temperature), "top_p": float(top_p), "stop": sorted(request.ends)}
        options |= {"batch_size": engine.batch_size, "max_length": engine.max_length}
        lengths = [len(row) for row in tokens]
        return facts(lengths=lengths, max_new_tokens=max_new_tokens, **options, tokens=tokens)

    call = "Engine.generate"
    _, request = run_on_stages(engine.model, call, lambda: checked(engine.ctx, call, check, facts_of), facts_of)
    mask = None if request.mask is None else request.mask.to(device)
    return Request(request.count, request.prompts.to(device), mask, request.ends)
