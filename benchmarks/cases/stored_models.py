"""A split model with its weights rounded to a format, and the numbers that its codes stand for, as the truth to compare
with.

It shares with the model that it was rounded from whatever stays in bf16. gpt-oss is rounded as it is published: its
experts only.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from benchmarks.cases.truth import Convert
from benchmarks.cases.whole_models import Draws, config_of, empty_model, share_buffers

EXPERTS_ONLY = {"mxfp4"}  # of a mixture


def rounded(split: nn.Module, ctx, weights: str, least_shared: int | bool = False) -> nn.Module:
    """Return the same split model with weights rounded to `weights`, a format of `layers.parallelize`.

    `least_shared`: its `sequence_parallel`.
    """
    from layers.checkpoint.load import _compute_buffers

    model = _empty(split, ctx, weights, least_shared)
    for name, module in model.named_modules():
        _take(module, split.get_submodule(name), weights)
    share_buffers(model, split)
    _compute_buffers(model, ctx.device)
    return model.eval()


def drawn(
    name: str, depth: int | None, ctx, dtype: torch.dtype, weights: str
) -> tuple[nn.Module, nn.Module]:  # fmt: skip
    """Return a split model of a shape with random weights in a format, whose bf16 copy may not fit, and one without
    those weights, which shares the others."""
    import layers
    from layers.checkpoint.load import _compute_buffers

    exact = empty_model(config_of(name, depth), dtype)
    layers.parallelize(exact, ctx, sequence_parallel=False)
    model, draws = _empty(exact, ctx, weights), Draws(ctx)
    for name, module in list(exact.named_modules()):
        draws.fill(module)
        kept = _take(model.get_submodule(name), module, weights)
        for key in [each for each in module._parameters if each not in kept and module._parameters[each] is not None]:
            setattr(module, key, nn.Parameter(getattr(module, key).to("meta"), requires_grad=False))
    draws.finish(exact)
    share_buffers(model, exact)
    for each in (exact, model):
        _compute_buffers(each, ctx.device)
    return model.eval(), exact.eval()


def _empty(split: nn.Module, ctx, weights: str, least_shared: int | bool = False) -> nn.Module:
    import layers
    from layers.experts import SplitExperts

    model = empty_model(copy.deepcopy(split.config), split.dtype)
    has_experts = any(isinstance(module, SplitExperts) for module in split.modules())
    of_linears = None if has_experts and weights in EXPERTS_ONLY else weights
    layers.parallelize(model, ctx, weights=of_linears, sequence_parallel=least_shared)
    return model


def _take(module: nn.Module, whole: nn.Module, weights: str) -> set[str]:
    """Give a module the parameters of `whole`, or round them. Return the names of those that both share."""
    from layers.experts import SplitExperts
    from layers.shard import Shard
    from layers.sharded import ShardedLinear
    from layers.weight_storage import Quantised

    is_stored = isinstance(module, ShardedLinear) and isinstance(module.storage, Quantised)
    own = set(module.storage.tensors) if is_stored else set()
    if isinstance(module, SplitExperts):
        module.coded.clear()
    shared = {key for key in module._parameters if hasattr(whole, key)} - own
    for key in shared:
        setattr(module, key, getattr(whole, key))
    if is_stored:
        size = whole.weight.shape[module.dim]
        module.storage.fill(module, 0, Shard(size, ((0, size),)), whole.weight.detach())
    elif isinstance(module, SplitExperts):
        module.store({}, weights)
        shared -= set(module.coded)
    return shared


def numbers_of(split: nn.Module, stored: nn.Module) -> Convert:
    """Return a function that gives, for a parameter of `split`, the numbers that `stored` has in its place."""
    from layers.expert_storage import coded_weight
    from layers.sharded import ShardedLinear
    from layers.weight_storage import Quantised

    counterparts = {module: stored.get_submodule(name) for name, module in split.named_modules()}

    def convert(module: nn.Module, name: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        own = counterparts[module]
        if isinstance(own, ShardedLinear) and name == "weight" and isinstance(own.storage, Quantised):
            return own.numbers(0, parameter.shape[0], dtype)
        if (coded := coded_weight(own, name)) is not None:
            return torch.stack([coded.numbers(expert, dtype) for expert in range(coded.experts)])
        return parameter.to(dtype)

    return convert
