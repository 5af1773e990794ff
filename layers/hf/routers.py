"""Let one kernel choose the experts of a mixture's tokens, where a router's own code is a product and a known scoring.

    router(hidden) -> logits, weights, experts      as `ctx.ops.moe_choose` computes them from the logits

Routers of transformers differ in dtype, scoring, groups and norm. So a copy with few and random weights is called, and
its results are compared with those of each `Scoring`. A router that none of them reproduces stays as it is. One that is
known becomes an instance of a subclass of its class: names of parameters stay, and so does what looks for the class.
"""

from __future__ import annotations

from collections.abc import Iterator
import copy
from dataclasses import dataclass
import functools
import inspect
from itertools import product
from typing import Any

from iris_ops.moe.router_ops import choose_experts
from iris_ops.moe.scoring import KINDS, SIGMOID, SOFTMAX, Scoring
import torch
from torch import nn
from torch.nn import functional as F

from ..experts import SplitExperts
from ..verify.skeleton import kind_of
from .styles import is_hooked

_HIDDEN, _TOKENS = 8, 64  # of the trial copy
_ROLES = ("logits", "weights", "experts")
_GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))
_EPSILONS = (1e-20, 0.0)  # the first avoids 0 / 0, and else changes no bit


@dataclass(frozen=True)
class Rule:
    """What a router computes. Names are those of its parameters and buffers."""

    top_k: int
    scoring: Scoring
    bias: str
    """Added to the product; "" for none."""
    correction: str
    """Added to scores for the choice; "" for none."""
    wide_logits: bool
    """Whether the product is one of float32, whatever the dtype of hidden states."""
    wide_weights: bool
    order: tuple[str, ...]
    """The roles of its results."""


def fuse_routers(model: nn.Module) -> int:
    """Let `ctx.ops.moe_choose` serve the routers of split experts, where that is right; return how many."""
    rules: dict[tuple, Rule | None] = {}
    count = 0
    for block in list(model.modules()):
        experts = dict(block.named_children()).get("experts")
        if not isinstance(experts, SplitExperts) or is_hooked(experts):
            continue
        for router in (each for each in block.children() if _may_be_router(each)):
            kind = kind_of(router)
            if kind not in rules:
                rules[kind] = rule_of(router)
            if (rule := rules[kind]) is not None:
                fuse(router, rule, experts)
                count += 1
    return count


def fuse(router: Any, rule: Rule, experts: SplitExperts) -> None:
    """Make `router` choose by `rule`, and leave the order of tokens to `experts`."""
    base: Any = type(router)
    router.__class__ = _fused_class(base)
    router._rule, router._experts = rule, (experts,)  # in a tuple: a child of the block only


@functools.cache
def _fused_class(base: Any) -> Any:
    def forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recorded = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        if args or kwargs or recorded or hidden.is_meta or torch.is_autocast_enabled(hidden.device.type):
            return base.forward(self, hidden, *args, **kwargs)
        rule, (experts,) = self._rule, self._experts
        logits = _logits(self, rule.bias, rule.wide_logits, hidden)
        correction = getattr(self, rule.correction) if rule.correction else None
        choice = choose_experts(experts.ctx, logits, rule.top_k, rule.scoring, correction, rule.wide_weights)
        experts.choice = choice
        results = {"logits": logits, "weights": choice.weights, "experts": choice.experts}
        return tuple(results[role] for role in rule.order)

    def reduced(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _new, (base,), self.__dict__

    names = dict(__module__=base.__module__, __qualname__=base.__qualname__, __doc__=base.__doc__)
    return type(base.__name__, (base,), {"forward": forward, "__reduce_ex__": reduced, **names})


def _new(base: Any) -> Any:
    """Return an empty instance of the subclass of `base`, for pickles and copies, which cannot find it by its name."""
    cls = _fused_class(base)
    return cls.__new__(cls)


def _logits(router: Any, bias: str, wide: bool, hidden: torch.Tensor) -> torch.Tensor:
    x, weight, added = hidden.reshape(-1, hidden.shape[-1]), router.weight, getattr(router, bias) if bias else None
    if wide:
        x, weight, added = x.float(), weight.float(), None if added is None else added.float()
    return F.linear(x, weight, added)


def _may_be_router(module: Any) -> bool:
    """Return whether it has a weight [E, H], else at most vectors [E], and only its class's forward."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    weight = tensors.pop("weight", None)
    if is_hooked(module) or weight is None or weight.dim() != 2 or list(module.children()):
        return False
    return weight.is_floating_point() and all(each.shape == weight.shape[:1] for each in tensors.values())


@torch.no_grad()
def rule_of(router: Any) -> Rule | None:
    """Return what a router computes, by trying; None for one that `moe_choose` does not reproduce."""
    generator = torch.Generator("cpu").manual_seed(0)
    tiny, half = (_tiny(router, generator, dtype) for dtype in (torch.float32, torch.bfloat16))
    x = torch.randn(_TOKENS, _HIDDEN, generator=generator, device="cpu")
    answer, in_half, far = _call(tiny, x), _call(half, x.bfloat16()), _call(tiny, x * 1e3)
    if answer is None or in_half is None or far is None:
        return None
    experts, top_k = answer["logits"].shape[1], answer["experts"].shape[1]
    vectors = [name for name, each in _tensors(tiny).items() if each.dim() == 1]
    wide_logits = in_half["logits"].dtype == torch.float32
    for bias in ("", *vectors):
        logits = _logits(half, bias, wide_logits, x.bfloat16())
        if torch.equal(logits, in_half["logits"]) and _close(_logits(tiny, bias, True, x), answer["logits"]):
            break
    else:
        return None
    for correction in ("", *(name for name in vectors if name != bias)):
        added = getattr(tiny, correction) if correction else None
        for scoring in _scorings(router):
            if scoring.refusal(experts, top_k) is None and all(
                _alike(each, scoring, added, exact) for each, exact in ((answer, True), (far, False))
            ):
                wide_weights = in_half["weights"].dtype == torch.float32
                if not wide_weights and in_half["weights"].dtype != logits.dtype:
                    return None
                return Rule(top_k, scoring, bias, correction, wide_logits, wide_weights, tuple(answer))
    return None


def _scorings(router: Any) -> Iterator[Scoring]:
    """Yield the scorings that a router with these settings may have, the simplest first."""
    settings = {key: value for key, value in vars(router).items() if type(value) in (int, float)}
    scales = dict.fromkeys((1.0, *(value for value in settings.values() if type(value) is float and value > 0)))
    groups = [(1, 1, 2)]
    for several, kept in _GROUPS:
        if several in settings and 1 <= settings.get(kept, 0) <= settings[several] and settings[several] > 1:
            groups += [(settings[several], settings[kept], best) for best in (2, 1)]
    for (several, kept, best), scale, kind, normalised in product(groups, scales, KINDS, (True, False)):
        for epsilon in _EPSILONS if normalised else (0.0,):
            yield Scoring(kind, normalised, epsilon, scale, several, kept, best)


def by_torch(
    logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (experts, weights), both [T,k], as `moe_choose` does, in plain torch: equal scores by falling index."""
    x = logits.float()
    scores = x.sigmoid() if scoring.kind == SIGMOID else x
    values = scores if bias is None else scores + bias
    if scoring.groups > 1:
        grouped = values.view(len(values), scoring.groups, -1)
        of_groups = grouped.sort(dim=-1, descending=True)[0][..., : scoring.group_best].sum(-1)
        kept = of_groups.sort(dim=-1, descending=True, stable=True)[1][:, : scoring.kept_groups]
        mask = torch.zeros_like(of_groups, dtype=torch.bool).scatter(1, kept, True)
        values = grouped.masked_fill(~mask.unsqueeze(-1), float("-inf")).reshape(values.shape)
    experts = values.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = scores.softmax(-1) if scoring.kind == SOFTMAX else scores
    weights = weights.gather(1, experts)
    if scoring.kind not in (SOFTMAX, SIGMOID):
        weights = weights.softmax(-1)
    if scoring.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + scoring.epsilon)
    return experts, weights * scoring.scale


def _alike(answer: dict[str, torch.Tensor], scoring: Scoring, bias: torch.Tensor | None, exact: bool) -> bool:
    """Return whether a scoring gives the experts and weights of `answer`; without `exact`, where scores are equal
    because they are so far apart, only the weights.
    """
    experts, weights = by_torch(answer["logits"], answer["experts"].shape[1], scoring, bias)
    if not exact:
        return _close(weights.sort(-1)[0], answer["weights"].sort(-1)[0])
    orders = experts.argsort(-1), answer["experts"].argsort(-1)
    pairs = [(experts.gather(1, orders[0]), answer["experts"].gather(1, orders[1]))]
    pairs += [(weights.gather(1, orders[0]), answer["weights"].gather(1, orders[1]))]
    return torch.equal(*pairs[0]) and _close(*pairs[1])


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one.float(), other.float(), 1e-4, 1e-6, equal_nan=True)


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _tiny(router: Any, generator: torch.Generator, dtype: torch.dtype) -> Any:
    """Return a copy of `router` on the CPU with random weights for few entries of hidden states."""
    tiny, (experts, hidden) = copy.copy(router), router.weight.shape
    for key, value in vars(router).items():
        if type(value) is int and value == hidden and "hidden" in key:
            setattr(tiny, key, _HIDDEN)
    shapes = {name: (experts, _HIDDEN) if each.dim() == 2 else (experts,) for name, each in _tensors(router).items()}
    drawn = {name: torch.randn(shape, generator=generator, device="cpu") for name, shape in shapes.items()}
    tiny._parameters = {
        name: nn.Parameter(drawn[name].to(dtype), requires_grad=False)
        for name, each in router._parameters.items()
        if each is not None
    }
    tiny._buffers = {name: drawn[name] for name, each in router._buffers.items() if each is not None}
    return tiny


def _call(router: Any, hidden: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """Return the results by role, in the router's order; None for a router with other results or arguments."""
    try:
        results = inspect.unwrap(type(router).forward)(router, hidden)
    except Exception:  # for other arguments it needs
        return None
    if not isinstance(results, tuple) or len(results) != len(_ROLES):
        return None
    roles: dict[str, torch.Tensor] = {}
    count = router.weight.shape[0]
    for each in results:
        if not isinstance(each, torch.Tensor) or each.dim() != 2 or each.shape[0] != hidden.shape[0]:
            return None
        role = "logits" if each.shape[1] == count else "weights" if each.is_floating_point() else "experts"
        roles[role] = each
    return roles if set(roles) == set(_ROLES) and roles["weights"].shape == roles["experts"].shape else None
