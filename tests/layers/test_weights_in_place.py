"""Weights of a split model that are changed in place: the model is then the unsplit one, changed in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import iris
import layers
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks
from tests.layers import models

pytestmark = both


def _scale(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.mul_(1.03).add_(0.01)


def _scale_data(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.data.mul_(1.03)


def _copy_data(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.data.copy_(tensor.data * 0.9)


def _new_data(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.data = tensor.data * 0.9


def _task_vector(tensors: dict[str, torch.Tensor]) -> None:
    old = {name: tensor.clone() for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        tensor.add_(0.3 * torch.sin(7 * old[name]))


def _optimize(tensors: dict[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.grad = torch.sign(tensor)
    torch.optim.AdamW(list(tensors.values()), lr=0.02, weight_decay=0.1).step()


CHANGES = {each.__name__: each for each in (_scale, _scale_data, _copy_data, _new_data, _task_vector, _optimize)}
VIEWS: dict[str, Callable[[Any], dict[str, torch.Tensor]]] = {
    "parameters": lambda model: {str(i): each for i, each in enumerate(model.parameters())},
    "named_parameters": lambda model: dict(model.named_parameters()),
    "duplicates": lambda model: dict(model.named_parameters(remove_duplicate=False)),
    "state_dict": lambda model: model.state_dict(),
    "head": lambda model: {"lm_head.weight": model.get_submodule("lm_head").weight},
}


def changed_model(ctx: iris.Iris, name: str, view: str, change: str) -> torch.Tensor:
    model = models.build(name)
    layers.parallelize(model, ctx)
    with torch.no_grad():
        CHANGES[change](VIEWS[view](model))
    return models.logits(model, ctx.device)


CASES = [("parameters", change) for change in CHANGES] + [(view, "_scale") for view in VIEWS if view != "parameters"]
# Tied heads, ranks without a head of their own, a copied kv head, experts, and a weight that is stored transposed.
NAMES = ("tied", "two_heads", "kv1", "mixtral", "transposed")


@pytest.mark.some(12, on_gpus=24)
@pytest.mark.parametrize("view, change", CASES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [each for each in WORLDS if each > 1])
def test_a_change_in_place_is_that_of_the_unsplit_model(world_size: int, name: str, view: str, change: str) -> None:
    results = run_ranks(world_size, changed_model, name, view, change)
    whole = models.build(name)
    with torch.no_grad():
        CHANGES[change](VIEWS[view](whole))
    expected = models.logits(whole)
    for result in results:
        torch.testing.assert_close(result.cpu(), expected, rtol=2e-4, atol=2e-4)


def shared_storage(ctx: iris.Iris, name: str) -> tuple[list[str], int, int, list[str]]:
    model = models.build(name)
    report = layers.parallelize(model, ctx)
    storages: dict[int, list[str]] = {}
    for key, parameter in model.named_parameters():
        if parameter.numel():
            storages.setdefault(parameter.untyped_storage().data_ptr(), []).append(key)
    doubled = [str(names) for names in storages.values() if len(names) > 1]
    held = sum(each.numel() * each.element_size() for each in model.parameters())
    return doubled, held, report.bytes, [key for key, _ in model.named_parameters()]


@pytest.mark.some(6)
@pytest.mark.parametrize("name", [*models.CONFIGS, *models.MORE, *models.MIXTURES])
@pytest.mark.parametrize("world_size", [each for each in WORLDS if each > 1])
def test_no_two_parameters_share_memory(world_size: int, name: str) -> None:
    for doubled, held, reported, keys in run_ranks(world_size, shared_storage, name):
        assert not doubled
        assert held == reported  # each parameter is counted once
        assert not (name == "tied" and "lm_head.weight" in keys)


def states_of_a_tied_model(ctx: iris.Iris) -> None:
    whole, model, other = (models.build("tied") for _ in range(3))
    layers.parallelize(model, ctx)
    head: Any = model.get_submodule("lm_head")
    first = next(model.parameters())
    assert head.weight is first
    assert head.local_weight.data_ptr() == first.data_ptr() + head.parts[0].ranges[0][0] * first.stride(0) * 4
    state = model.state_dict()
    assert set(state) >= {"lm_head.weight", "model.embed_tokens.weight"} <= set(whole.state_dict())
    torch.testing.assert_close(state["lm_head.weight"].cpu(), whole.state_dict()["lm_head.weight"], rtol=0, atol=0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    changed = models.logits(other)
    layers.parallelize(other, ctx)
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(models.logits(model, ctx.device).cpu(), changed, rtol=2e-4, atol=2e-4)
    matrix = torch.randn(121, 36, generator=torch.Generator().manual_seed(1))
    head.load_shard("weight", matrix)
    assert torch.equal(first.cpu(), matrix)
    with pytest.raises(iris.errors.ShapeError, match=r"source of weight has shape \[5, 36\]: expected \[121, 36\]"):
        head.load_shard("weight", matrix[:5])
    model.to(torch.bfloat16)
    assert head.weight.dtype == torch.bfloat16 and head._parameters["weight"] is next(model.parameters())


@pytest.mark.parametrize("world_size", [each for each in WORLDS if each > 1])
def test_the_states_of_a_tied_head_are_the_embeddings(world_size: int) -> None:
    run_ranks(world_size, states_of_a_tied_model)
