"""Models that cannot be split, and plans that split none of their layers: refused by name, as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iris.errors import ArgumentError, DtypeError, StyleError
import layers
from layers.hf.parallelize import parallelize
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks
from tests.layers import models, test_families
from tests.layers.test_refused_plans import Pair

transformers = pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])


# --- weights that are no plain tensors -------------------------------------------------------------------------------


class Marked(torch.Tensor):
    """A subclass of torch.Tensor, as quantisation libraries define them."""


def special(kind: str) -> torch.Tensor:
    weight = torch.randn(64, 36)
    if kind == "DTensor":
        from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        return distribute_tensor(weight, mesh, [Replicate()])
    return weight.as_subclass(Marked) if kind == "Marked" else weight.to(getattr(torch, kind))


KINDS = {
    "Marked": (StyleError, r"up_proj.weight is a Marked: expected a plain torch.Tensor"),
    "DTensor": (StyleError, r"up_proj.weight is a DTensor: expected a plain torch.Tensor"),
    "float64": (DtypeError, r"up_proj.weight is torch.float64: expected one of torch.bfloat16"),
    "int8": (DtypeError, r"up_proj.weight is torch.int8"),
}


def special_body(ctx) -> torch.Tensor:
    for kind, (error, match) in KINDS.items():
        if kind == "DTensor" and (ctx.num_ranks == 1 or ctx.device.type != "cpu"):
            continue
        model = models.build("plain")
        up = model.model.layers[1].mlp.up_proj
        up.weight = nn.Parameter(special(kind), requires_grad=False)
        with pytest.raises(error, match=r"model.layers.1.mlp." + match):
            parallelize(model, ctx)
        assert all(type(layer.mlp.down_proj) is nn.Linear for layer in model.model.layers)
    up.weight = models.build("plain").model.layers[1].mlp.up_proj.weight
    up.register_buffer("zero_point", torch.zeros(3))
    with pytest.raises(StyleError, match=r"up_proj holds zero_point in addition to its weight"):
        parallelize(model, ctx)
    del up.zero_point
    up.to("meta")
    with pytest.raises(ArgumentError, match=r"model.layers.1.mlp.up_proj.weight is on the meta device"):
        parallelize(model, ctx)
    up.to_empty(device="cpu").load_state_dict(models.build("plain").model.layers[1].mlp.up_proj.state_dict())
    parallelize(model, ctx)
    return models.logits(model, ctx.device)


@two_ranks
def test_weights_that_are_no_plain_tensors_are_refused_by_name(world_size: int) -> None:
    for result in run_ranks(world_size, special_body):
        models.assert_logits(result, "plain")


def odd_body(ctx) -> None:
    plan, x = {"up": "colwise", "down": "rowwise"}, torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    lazy = Pair()
    lazy.extra = nn.LazyLinear(8)
    with pytest.raises(ArgumentError, match="extra.weight has no size yet"):
        parallelize(lazy, ctx, plan=plan)
    with pytest.raises(StyleError, match="the plan gives the model itself style 'colwise'"):
        parallelize(nn.Linear(4, 4), ctx, plan={"": "colwise"})
    torch.manual_seed(0)
    scripted = Pair().requires_grad_(False)
    scripted.act_fn = torch.jit.script(nn.ReLU())
    expected = scripted(x)
    parallelize(scripted, ctx, plan=plan)
    torch.testing.assert_close(scripted(x.to(ctx.device)).cpu(), expected, rtol=1e-4, atol=1e-5)


@two_ranks
def test_modules_that_are_no_plain_ones(world_size: int) -> None:
    run_ranks(world_size, odd_body)


# --- plans that leave the layers whole -------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """As an adapter's wrapper has it: the model further inside, its attributes here."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model["model"], name)


def whole_body(ctx) -> None:
    inside = models.build("plain")
    for wrapper in (Wrapper(inside), torch.compile(inside)):
        kind = type(wrapper).__name__
        with pytest.raises(StyleError, match=f"{kind}'s own plan names no linear that {kind} has.*pass the model that"):
            parallelize(wrapper, ctx)
    with pytest.raises(StyleError, match="own plan, as filter_fn leaves it, names no linear"):
        parallelize(inside, ctx, filter_fn=lambda name, module: False)
    report = parallelize(Wrapper(models.build("plain")), ctx, partial=True)
    assert all(row.op == "-" for row in report.rows)
    with pytest.raises(ArgumentError, match="partial is 1: expected a bool"):
        parallelize(inside, ctx, partial=1)
    parallelize(inside, ctx)
    models.assert_logits(models.logits(inside, ctx.device), "plain")


@two_ranks
def test_a_plan_that_finds_nothing_is_refused(world_size: int) -> None:
    run_ranks(world_size, whole_body)


class HeadOnly(transformers.LlamaForCausalLM):
    """A family whose own plan splits its head only."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._tp_plan = {"lm_head": "colwise_gather_output"}


def head_body(ctx, folder: str) -> dict[str, torch.Tensor]:
    results = {}
    match = "HeadOnly's own plan splits lm_head only: each rank would hold and compute all layers, whole; pass plan="
    with pytest.raises(StyleError, match=match):
        parallelize(head_only(), ctx)
    for options in ({"partial": True}, {"plan": {"lm_head": "colwise_gather_output"}}):
        model = head_only()
        report = parallelize(model, ctx, **options)
        assert [row.name for row in report.rows if row.op != "-"] == ["lm_head"]
        results[str(options)] = models.logits(model, ctx.device)
    hybrid = test_families.build("falcon_h1", HYBRID)  # its own is of the kind, too
    report = parallelize(hybrid, ctx)
    assert report.plan == "the built-in plan of falcon_h1" and sum(row.op != "-" for row in report.rows) > 6
    results["hybrid"] = test_families.logits(hybrid, ctx.device)
    results["loaded"] = test_families.logits(layers.from_pretrained(folder, ctx), ctx.device)
    return results


HYBRID = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}


def head_only() -> nn.Module:
    model = HeadOnly(transformers.LlamaConfig(**models.PLAIN)).eval()
    model.load_state_dict(models.build("plain").state_dict())
    return model


@two_ranks
def test_a_plan_of_the_head_only_is_refused_unless_partial(world_size: int, tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    whole = test_families.build("falcon_h1", HYBRID)
    whole.save_pretrained(folder)
    for results in run_ranks(world_size, head_body, str(folder)):
        for name, result in results.items():
            if name in ("hybrid", "loaded"):
                torch.testing.assert_close(result.cpu(), test_families.logits(whole), rtol=1e-3, atol=1e-4, msg=name)
            else:
                models.assert_logits(result, "plain")
