"""Run a tiny model's prompts and steps in an engine, captured on GPUs, and compare them with the unsplit model."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
import inspect
from typing import Any

import layers
from layers.serving.cache import cache_name
import torch
from torch import nn

from tests.harness import ON_GPU

STEPS, BATCHES = 4, 2

Batch = tuple[torch.Tensor, list[list[int]]]  # logits [1 + STEPS, rows, vocabulary], and the words of each row


def prompts(device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of 7 tokens, the first two of the second padding, and the mask of it."""
    tokens = torch.randint(2, 90, (2, 7), generator=torch.Generator().manual_seed(3)).to(device)
    mask = torch.ones_like(tokens)
    mask[1, :2] = 0
    return tokens, mask


def placed(model: Any, places: torch.Tensor) -> dict[str, torch.Tensor]:
    """The positions of tokens, for a model that takes some: Bamba does not count what is in its cache."""
    takes = "position_ids" in inspect.signature(type(model).forward).parameters
    return {"position_ids": places.clamp(min=0)} if takes else {}


def exact_convolutions() -> AbstractContextManager:
    """Inside, cuDNN convolves in float32, not in TF32, which is its default."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


def exact(model: Any) -> nn.Module:
    """`model`, which is changed, in float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the only one in float64
    return model.double()


def served(ctx, model: nn.Module) -> list[Batch]:
    """Generate for one batch repeatedly on a rank, with replayed steps where possible."""
    generated = []
    layers.parallelize(model, ctx)
    with exact_convolutions():
        engine = layers.Engine(model, ctx, batch_size=2, max_length=64)
        for _ in range(BATCHES):
            engine.reset()
            tokens, mask = prompts(ctx.device)
            logits = [engine.prefill(tokens, mask.bool())]
            engine.accept(logits[0])
            for _ in range(STEPS):
                engine.decode()
                logits.append(engine.logits.clone())
            generated.append((torch.stack(logits).cpu(), engine.output[:, :STEPS].tolist()))
    assert len(engine.steps) == int(ON_GPU), "steps are captured on GPUs"
    return generated


def judge(outcomes: Sequence[list[Batch]], whole: nn.Module, double: nn.Module) -> None:
    """Check that each rank's logits are about as close to `double`'s, in float64, as `whole`'s are in float32."""
    tokens, mask = prompts("cpu")
    rows = [row[mask[index].bool()].tolist() for index, row in enumerate(tokens)]
    double = exact(double)
    for batch in range(BATCHES):
        _, words = outcomes[0][batch]
        single, expected = (_stepped(model, rows, words) for model in (whole, double))
        allowed = 4 * (single - expected).abs().max() + 2e-5 * expected.abs().max()
        for rank, outcome in enumerate(outcomes):
            logits, own = outcome[batch]
            assert own == words, f"rank {rank} made other tokens"
            error = (logits - expected).abs().max()
            assert error <= allowed, f"batch {batch}, rank {rank}: off by {error:.1e}, allowed {allowed:.1e}"


@torch.no_grad()
def _stepped(model: Any, rows: list[list[int]], words: list[list[int]]) -> torch.Tensor:
    """Logits [1 + STEPS, rows, vocabulary] of the unsplit model, each row by itself over a cache of transformers."""
    logits_of_steps, name = [], cache_name(model)
    for row, more in zip(rows, words, strict=True):
        result = model(torch.tensor([row]), use_cache=True)
        logits = [result.logits[0, -1]]
        for number, word in enumerate(more, len(row)):
            options = {name: result[name], **placed(model, torch.tensor([[number]]))}
            result = model(torch.tensor([[word]]), use_cache=True, **options)
            logits.append(result.logits[0, -1])
        logits_of_steps.append(torch.stack(logits))
    return torch.stack(logits_of_steps, dim=1)
