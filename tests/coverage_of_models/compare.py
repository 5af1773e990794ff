"""One model type, split and unsplit: logits and greedy tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import inspect
from types import MappingProxyType
from typing import Any

from iris.errors import IrisError
import layers
from layers.checkpoint.save import _held
import torch
from torch import nn

from tests.coverage_of_models.tiny import build

BATCH, TOKENS, NEW = 2, 6, 2
NONE: Mapping[str, Any] = MappingProxyType({})  # of a type's settings are others


@dataclass(frozen=True)
class Answer:
    """What a model gives for the same tokens. `words` are the tokens it would go on with; None: it has no generate."""

    logits: torch.Tensor
    words: list[list[int]] | None


@dataclass(frozen=True)
class Outcome:
    """What became of a type on one rank: an answer and the share of parameters that is split, or a refusal."""

    answer: Answer | None
    share: float
    refusal: str = ""
    failure: str = ""  # what a call of the split model raised
    report: str = ""


@torch.no_grad()
def answer(model: Any, device: torch.device | str = "cpu") -> Answer:
    rows = max(BATCH, getattr(model.config, "num_codebooks", 0))  # which are rows of one prompt
    tokens = torch.randint(2, 90, (rows, TOKENS), generator=torch.Generator().manual_seed(3)).to(device)
    options = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    logits = model(tokens, **options).logits.cpu()
    words = [logits[:, -1].argmax(-1)]
    for _ in range(NEW):
        tokens = torch.cat([tokens, words[-1][: len(tokens), None].to(device)], dim=1)
        words.append(model(tokens, **options).logits[:, -1].argmax(-1).cpu())
    return Answer(logits, torch.stack(words).tolist())


def split_body(ctx: Any, model_type: str, others: Mapping[str, Any] = NONE) -> Outcome:
    """On a rank: the type's tiny model, with `others` of its settings, split by what `parallelize` takes by default."""
    model = build(model_type, **others)
    try:
        report = layers.parallelize(model, ctx)
    except IrisError as error:
        return Outcome(None, 0.0, f"{type(error).__name__}: {error}")
    try:
        return Outcome(answer(model, ctx.device), split_share(model), report=str(report))
    except Exception as error:  # told, so that the ranks go on with other types
        return Outcome(None, 0.0, failure=f"{type(error).__name__}: {error}")


def split_share(model: Any) -> float:
    """The share of a split model's parameters, its word embeddings left out, that a rank has only a part of."""
    words = model.get_input_embeddings()
    left_out = {id(words.weight)} if words is not None and hasattr(words, "weight") else set()
    whole = split = 0
    parameters = dict(model.named_parameters())
    for name, held in _held(model):
        if name not in parameters and held.shard is None or id(parameters.get(name)) in left_out:
            continue
        size = torch.Size(held.shape).numel()
        whole += size
        split += size if held.shard is not None else 0
    return split / whole


def reference(model_type: str, others: Mapping[str, Any] = NONE) -> tuple[Answer, Answer, str]:
    """The unsplit model's answers in float32 and in float64, and why the second is in float32 if it is."""
    model: Any = build(model_type, **others)
    single = answer(model)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    try:
        return single, answer(model.double()), ""
    except RuntimeError as error:
        return single, single, f"its code does not run in float64 ({str(error).splitlines()[0]})"


def judge(single: Answer, double: Answer, outcomes: list[Outcome]) -> str:
    """What is wrong with the ranks' answers; empty if nothing is."""
    scale = double.logits.abs().max().item()
    own = (single.logits - double.logits).abs().max().item()
    allowed = 4 * own + 2e-5 * scale
    for rank, outcome in enumerate(outcomes):
        if outcome.answer is None:
            return f"rank {rank}'s call fails: {outcome.failure}"
        error = (outcome.answer.logits - double.logits).abs().max().item()
        if not error <= allowed:
            return f"rank {rank}'s logits are off by {error:.1e}, of {scale:.1e} at most; allowed are {allowed:.1e}"
        if outcome.answer.words != double.words and single.words == double.words:
            return f"rank {rank} goes on with {outcome.answer.words}, the unsplit model with {double.words}"
        if not torch.equal(outcome.answer.logits, outcomes[0].answer.logits):
            return f"rank {rank}'s logits differ from rank 0's"
    return ""


def is_split(module: nn.Module) -> bool:
    return hasattr(module, "load_shard")
