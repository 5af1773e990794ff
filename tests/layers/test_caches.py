"""Caches and tensors that a split model cannot take: refused at entry, on every rank."""

from __future__ import annotations

from iris.errors import ArgumentError
import layers
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

transformers = pytest.importorskip("transformers")
pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]


def caches_body(ctx) -> None:
    model, whole = models.build("kv2"), models.build("kv2").to(ctx.device)
    layers.parallelize(model, ctx)
    ids = models.prompt().to(ctx.device)
    config = model.config

    def static(heads: int):
        cache = transformers.StaticCache(config, max_cache_len=16)
        cache.early_initialization(2, heads, config.head_dim, torch.float32, ctx.device)
        return cache

    filled = transformers.DynamicCache(config=config)
    whole(ids[:, :-1], past_key_values=filled)
    per_rank = ", ".join(["1"] * 2) if ctx.num_ranks == 2 else r"\d.*"
    for cache in (static(2), filled):
        for call in (
            lambda cache=cache: model.generate(ids, past_key_values=cache, max_new_tokens=2),
            lambda cache=cache: model(ids[:, -1:], past_key_values=cache),
            lambda cache=cache: model.model(ids[:, -1:], past_key_values=cache),
        ):
            with pytest.raises(
                ArgumentError, match=rf"of 2 heads in layer 0: expected 1 of the 2, .*by rank: {per_rank}\)"
            ):
                call()
    expected = whole.generate(ids, max_new_tokens=3, do_sample=False)
    options = {"max_new_tokens": 3, "do_sample": False}
    assert torch.equal(model.generate(ids, past_key_values=static(1), **options), expected)
    own = transformers.DynamicCache(config=config)
    model(ids[:, :-1], past_key_values=own)
    assert torch.equal(model.generate(ids, past_key_values=own, **options), expected)
    last = ctx.cur_rank == ctx.num_ranks - 1
    words = "of 2 heads in layer 0: expected 1"
    with pytest.raises(ArgumentError, match=words if last else f"rank {ctx.num_ranks - 1}: .*{words}"):
        model.generate(ids, past_key_values=static(2 if last else 1), **options)


def test_a_cache_of_all_heads_is_refused(world_size: int) -> None:
    if world_size != 2:
        pytest.skip("has one head a rank on two ranks")
    run_ranks(world_size, caches_body)


def dtensor_body(ctx) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh(ctx.device.type, (ctx.num_ranks,))
    model = models.build("plain")
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, 2, 16)
    ids = distribute_tensor(models.prompt().to(ctx.device), mesh, [Replicate()])
    hidden = distribute_tensor(torch.randn(2, 36, device=ctx.device), mesh, [Replicate()])
    for call, words in [
        (lambda: model(ids), "argument 0|input_ids"),
        (lambda: model(input_ids=ids), "input_ids of the forward is a DTensor with placements"),
        (lambda: model.generate(ids, max_new_tokens=1), "inputs of generate is a DTensor"),
        (lambda: engine.generate(ids, 1), "prompts are a DTensor"),
        (lambda: engine.prefill(ids), "prompts is a DTensor"),
        (lambda: model.lm_head(hidden), "input is a DTensor"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            call()
    assert model.generate(ids.full_tensor(), max_new_tokens=1).shape == (2, 8)


def test_dtensors_are_refused(world_size: int) -> None:
    run_ranks(world_size, dtensor_body)
