"""Layers are for inference: each of them raises a typed error if any gradient is requested."""

from __future__ import annotations

from iris.errors import ArgumentError
import layers
from layers import ColumnParallelLinear, RowParallelLinear
from layers.weight_storage import FORMS
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytest.importorskip("transformers")
pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]


def result(ctx) -> dict[str, nn.Module]:
    """A layer of each kind, for whole inputs."""
    linear = nn.Linear(8, 8).requires_grad_(False)
    column, row = ColumnParallelLinear.from_linear, RowParallelLinear.from_linear
    actual = {
        "column": column(linear, ctx=ctx),
        "gathered": column(linear, True, ctx=ctx),
        "sequence column": column(linear, sequence_parallel=True, ctx=ctx),
        "row": row(linear, False, ctx=ctx),
        "partial row": row(linear, False, False, ctx=ctx),
        "sequence row": row(linear, False, sequence_parallel=True, ctx=ctx),
        "merged": layers.MergedColumnParallelLinear.from_linear([linear, linear], ctx=ctx),
        "qkv": layers.QKVParallelLinear.from_linear([linear, linear, linear], 4, 2, 2, ctx=ctx),
    }
    actual["in fp8"] = column(linear, ctx=ctx)
    actual["in fp8"].store_as(FORMS["fp8"])
    return actual


def layers_body(ctx) -> list[str]:
    accepted = []

    def expect_refusal(name: str, call) -> None:
        try:
            call()
        except ArgumentError as error:
            assert any(word in str(error) for word in ("requires grad", "tangent", "vmap")), error
        else:
            accepted.append(name)

    x = torch.ones(4, 8, device=ctx.device)
    tracked = x.clone().requires_grad_()
    for name, layer in result(ctx).items():
        expect_refusal(name, lambda layer=layer: layer(tracked))
        expect_refusal(f"{name}, torch.func.grad", lambda layer=layer: torch.func.grad(lambda t: layer(t).sum())(x))
        expect_refusal(f"{name}, torch.func.jvp", lambda layer=layer: torch.func.jvp(layer, (x,), (x,)))
        expect_refusal(f"{name}, torch.func.vmap", lambda layer=layer: torch.func.vmap(layer)(x.expand(2, 4, 8)))
        with forward_ad.dual_level():
            expect_refusal(f"{name}, dual", lambda layer=layer: layer(forward_ad.make_dual(x, x)))
        if name != "in fp8":
            for key in ("weight", "bias"):
                getattr(layer, key).requires_grad_()
                expect_refusal(f"{name}, {key}", lambda layer=layer: layer(x))
                with torch.no_grad():
                    layer(tracked)
                getattr(layer, key).requires_grad_(False)
        with torch.inference_mode():
            layer(x)
        layer(x)
    expect_refusal("gated", lambda: result(ctx)["merged"].gated(tracked))
    return accepted


def test_every_layer_refuses_gradients_and_runs_without(world_size: int) -> None:
    assert run_ranks(world_size, layers_body) == [[]] * world_size


def model_body(ctx) -> None:
    for fuse in (True, False):
        model = models.build("plain")
        layers.parallelize(model, ctx, fuse=fuse)
        ids = models.prompt().to(ctx.device)
        expected = model(ids).logits  # with gradients on, for nothing requires one
        assert not expected.requires_grad
        for parameter in model.parameters():
            parameter.requires_grad_()
            with pytest.raises(ArgumentError, match=r"requires grad.*no_grad"):
                model(ids)
            with torch.no_grad():
                assert torch.equal(model(ids).logits, expected)
            parameter.requires_grad_(False)


def test_a_model_whose_parameters_require_grad_is_refused(world_size: int) -> None:
    run_ranks(world_size, model_body)
