"""Run a type's tiny model in `layers.Engine`, on prompts of one length and of two lengths.

The logits of a few tokens are compared with those of the unsplit model without a cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import inspect
from typing import Any

from iris.errors import IrisError
import layers
from layers.serving.cache import cache_name
import torch

from tests.coverage_of_models.compare import NONE
from tests.coverage_of_models.tiny import build

NEW = 3
LENGTHS = {"of one length": (6, 6), "padded": (6, 4)}


@dataclass(frozen=True)
class Served:
    """What the engine gave: by kind of prompts, each row's words and [NEW, rows, vocabulary] logits; or why not."""

    answers: dict[str, tuple[list[list[int]], torch.Tensor]]
    refusals: dict[str, str]
    failure: str = ""


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    drawn = torch.randint(2, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(3)).tolist()
    return [row[:length] for row, length in zip(drawn, lengths, strict=True)]


def served_body(ctx: Any, model_type: str, others: Mapping[str, Any] = NONE) -> Served:
    """On a rank."""
    model = build(model_type, **others)
    layers.parallelize(model, ctx)
    answers: dict[str, tuple[list[list[int]], torch.Tensor]] = {}
    refusals: dict[str, str] = {}
    kind = next(iter(LENGTHS))
    try:
        engine = layers.Engine(model, ctx, batch_size=2, max_length=16)
        for kind, lengths in LENGTHS.items():
            try:
                answers[kind] = _answer(engine, prompts(lengths))
            except IrisError as error:
                refusals[kind] = f"{type(error).__name__}: {error}"
    except IrisError as error:
        refusals[kind] = f"{type(error).__name__}: {error}"
    except Exception as error:  # told, so that the ranks go on with other types
        return Served(answers, refusals, f"{kind}: {type(error).__name__}: {error}")
    return Served(answers, refusals)


def _answer(engine: layers.Engine, rows: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    engine.reset()
    longest, device = max(map(len, rows)), engine.tokens.device
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device=device)
    logits = [engine.prefill(tokens, None if mask.all() else mask)]
    engine.accept(logits[0])
    while len(logits) < NEW:
        logits.append(engine.step())
    generated = engine.output[:, :NEW].tolist()
    return generated, torch.stack([each.cpu() for each in logits])


@torch.no_grad()
def stepped(model: Any, rows: list[list[int]], words: list[list[int]]) -> torch.Tensor:
    """As `expected`, by steps over a cache of transformers' own."""
    logits_of_steps, name = [], cache_name(model)
    for row, more in zip(rows, words, strict=True):
        result = model(torch.tensor([row]), use_cache=True)
        logits = [result.logits[0, -1]]
        for word in more[: NEW - 1]:
            result = model(torch.tensor([[word]]), use_cache=True, **{name: result[name]})
            logits.append(result.logits[0, -1])
        logits_of_steps.append(torch.stack(logits))
    return torch.stack(logits_of_steps, dim=1)


@torch.no_grad()
def expected(model: Any, rows: list[list[int]], words: list[list[int]]) -> torch.Tensor:
    """Logits [NEW, rows, vocabulary] of the unsplit model for the same words, each by a call on all before it."""
    options = {"use_cache": False} if "use_cache" in inspect.signature(type(model).forward).parameters else {}
    logits_of_steps = []
    for row, more in zip(rows, words, strict=True):
        known = [torch.tensor([row + more[:generated]]) for generated in range(NEW)]
        logits_of_steps.append(torch.stack([model(each, **options).logits[0, -1] for each in known]))
    return torch.stack(logits_of_steps, dim=1)


def judge(model_type: str, outcomes: list[Served], others: Mapping[str, Any] = NONE) -> str:
    """ "yes", "one length" where padding is refused, "no: why", or "wrong: how"."""
    first = outcomes[0]
    if failed := next((each.failure for each in outcomes if each.failure), ""):
        return f"wrong: fails, {failed}"
    if any(each.refusals != first.refusals for each in outcomes):
        return "wrong: ranks differ in what they refuse"
    single, double = (build(model_type, **others) for _ in range(2))
    if hasattr(double, "set_experts_implementation"):
        double.set_experts_implementation("eager")
    try:
        double = double.double()
        double(torch.tensor([[1, 2]]))
    except RuntimeError:  # code that does not run in float64
        double = single
    for kind, (words, logits) in first.answers.items():
        rows = prompts(LENGTHS[kind])
        wrong = _differs(outcomes, kind, *(expected(each, rows, words) for each in (double, single)))
        if wrong and not _differs_from_steps(outcomes, kind, double, single):
            wrong = ""  # the model itself computes steps otherwise than prompts (Nemotron-H: it bounds their time)
        if wrong:
            return f"wrong: {kind}, {wrong}"
        for rank, outcome in enumerate(outcomes):
            if not torch.equal(outcome.answers[kind][1], logits) or outcome.answers[kind][0] != words:
                return f"wrong: {kind}, rank {rank}'s logits differ from rank 0's"
    if not first.answers:
        return f"no: {next(iter(first.refusals.values()))}"
    return "one length" if first.refusals else "yes"


def _differs_from_steps(outcomes: list[Served], kind: str, double: Any, single: Any) -> str:
    rows, words = prompts(LENGTHS[kind]), outcomes[0].answers[kind][0]
    try:
        return _differs(outcomes, kind, *(stepped(each, rows, words) for each in (double, single)))
    except Exception as error:  # of a model that takes no steps
        return f"{type(error).__name__}: {error}"


def _differs(outcomes: list[Served], kind: str, exact: torch.Tensor, own: torch.Tensor) -> str:
    scale = exact.abs().max().item()
    allowed = 4 * (own - exact).abs().max().item() + 2e-5 * scale
    for rank, outcome in enumerate(outcomes):
        error = (outcome.answers[kind][1] - exact).abs().max().item()
        if not error <= allowed:
            return f"rank {rank}'s logits are off by {error:.1e}, of {scale:.1e}, allowed {allowed:.1e}"
    return ""
