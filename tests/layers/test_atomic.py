"""A split that fails, wherever and on whichever rank, leaves the model as it was and is an error on every rank."""

from __future__ import annotations

import copy
import sys
from typing import Any

from iris.errors import ArgumentError, HeapExhausted, PlatformError, StyleError
from layers.hf.parallelize import parallelize
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytest.importorskip("transformers")
pytestmark = both
splitting = sys.modules[parallelize.__module__]
two_ranks = pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])


def state(model: nn.Module) -> dict[str, Any]:
    """All that a split could change: modules and what they hold, the parameters' data, the configurations."""
    held: dict[str, Any] = {}
    for name, module in model.named_modules():
        held[name] = id(module), type(module), dict(vars(module))
        for key, value in vars(module).items():
            if isinstance(value, dict):
                held[f"{name}: {key}"] = id(value), list(value.items())
    for name, parameter in model.named_parameters():
        held[f"{name}: data"] = id(parameter), parameter.data_ptr(), parameter.requires_grad, parameter.device
    held["config"] = copy.deepcopy(model.config.to_dict()), copy.deepcopy(model.generation_config.to_dict())
    return held


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def alike(a: Any, b: Any) -> bool:
        return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and _equal(a, b))

    def _equal(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
        if isinstance(a, (list, tuple)):
            return len(a) == len(b) and all(alike(*pair) for pair in zip(a, b, strict=True))
        return bool(a == b)

    return alike(one, other)


# The last thing that each part of the work does, by its name in `layers.parallelize`.
STEPS = "head_split", "_split", "set_local_heads", "merge_siblings", "fuse_norms", "guard", "wrap_save_pretrained"


def failing_body(ctx, step: str) -> None:
    model = models.build("tied").train().requires_grad_(True)
    handle = model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: None)
    before, real = state(model), getattr(splitting, step)
    for error in (RuntimeError("out of memory"), HeapExhausted("heap: no room"), KeyboardInterrupt()):
        at = 0 if isinstance(error, KeyboardInterrupt) else 1  # an interrupt is for the process that gets it
        calls = []

        def fails(*args, error=error, at=at, calls=calls, **kwargs):
            result = real(*args, **kwargs)
            calls.append(args)
            weights = isinstance(args[0], nn.Module) and not next(args[0].parameters()).is_meta
            if (weights or step == "head_split") and (ctx.cur_rank >= at):
                raise error
            return result

        own = ctx.cur_rank >= at
        kind = type(error) if own or not isinstance(error, RuntimeError) else PlatformError
        match = str(error) if own else f"rank 1: (RuntimeError: )?{error}"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(kind, match=match):
            patch.setattr(splitting, step, fails)
            parallelize(model, ctx)
        assert calls and same(state(model), before), (step, error)
    handle.remove()
    assert not model.model.layers[0].input_layernorm._forward_hooks, "a hook that is there can be removed"
    parallelize(model, ctx)
    models.assert_logits(models.logits(model, ctx.device), "tied")


@two_ranks
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.some(4, on_gpus=len(STEPS))
def test_a_split_that_fails_leaves_the_model_as_it_was(world_size: int, step: str) -> None:
    if world_size != 2:
        pytest.skip("written for two ranks")
    run_ranks(world_size, failing_body, step)


def differing_body(ctx) -> None:
    model = models.build("plain")
    before, first = state(model), ctx.cur_rank == 0
    mlp = {f"model.layers.*.mlp.{key}": "rowwise" if key == "down_proj" else "colwise" for key in
           ("gate_proj", "up_proj", "down_proj")}  # fmt: skip
    for options, match in (
        (
            {"plan": mlp if first else "auto"},
            r"plan is one of 6 modules \(\w+\) on rank 0 and one of \d+ modules \(\w+\) on",
        ),
        ({"fuse": first, "sequence_parallel": False}, "fuse is True on rank 0 and False on rank 1"),
        ({"sequence_parallel": 4 if first else 8}, r"sequence_parallel is \(True, 4\) on rank 0 and \(True, 8\)"),
        ({"filter_fn": (lambda name, _: "mlp" in name) if first else None}, "plan is"),
    ):
        with pytest.raises(ArgumentError, match=match):
            parallelize(model, ctx, **options)
        assert same(state(model), before)
    with pytest.raises(ArgumentError, match=r"model is .* on rank 0 and .* on rank 1: expected the same"):
        parallelize(models.build("plain" if first else "bias"), ctx)
    rescaled = models.build("plain")
    rescaled.config.rms_norm_eps *= 1 + ctx.cur_rank
    with pytest.raises(ArgumentError, match=r"config.rms_norm_eps is 1e-0\d on rank 0 and 2e-0\d on rank 1: expected"):
        parallelize(rescaled, ctx)
    drawn = models.build("plain")
    nn.init.normal_(drawn.lm_head.weight, generator=torch.Generator().manual_seed(ctx.cur_rank))
    with pytest.raises(ArgumentError, match=r"a sample of the model's weights is one with checksum \w+ on rank 0 and"):
        parallelize(drawn, ctx)
    with pytest.raises(StyleError, match=r"the plan is empty" if first else r"rank 0: the plan is empty"):
        parallelize(model, ctx, plan={} if first else "auto")
    assert same(state(model), before)


@two_ranks
def test_ranks_that_ask_for_other_splits_all_hear_of_it(world_size: int) -> None:
    if world_size != 2:
        pytest.skip("written for two ranks")
    run_ranks(world_size, differing_body)


def again_body(ctx) -> None:
    model = models.build("plain")
    parallelize(model, ctx)
    before = state(model)
    for options in ({}, {"plan": {"lm_head": "colwise_gather_output"}}):
        for each in (model, nn.Sequential(model)):
            if each is model or options:
                name = "0.lm_head" if each is not model else "lm_head"
                plan = {"plan": {name: "colwise_gather_output"}} if options else {}
                with pytest.raises(StyleError, match="expected a model that is not split yet"):
                    parallelize(each, ctx, **plan)
    assert same(state(model), before)
    models.assert_logits(models.logits(model, ctx.device), "plain")


@two_ranks
def test_a_split_model_is_not_split_again(world_size: int) -> None:
    run_ranks(world_size, again_body)
