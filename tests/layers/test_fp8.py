"""Weights in fp8: what rounding costs, that split models use exactly the rounded weights, loading and saving them."""

from __future__ import annotations

from pathlib import Path

from iris.errors import ArgumentError
import layers
from layers import fp8
from layers.linear import FP8_LOCAL
from layers.parallelize import parallelize
import pytest
import torch
from torch import nn

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks
from tests.layers import models

pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_a_rounded_weight_is_off_by_a_sixteenth_and_rounding_it_again_changes_nothing() -> None:
    weight = torch.randn(40, 64) * torch.logspace(-6, 4, 40)[:, None]
    weight[3], weight[4, 0] = 0, 448.0
    rounded, scale = fp8.quantised(weight)
    back = fp8.restored(rounded, scale, torch.float32)
    smallest = scale[:, None] * 2.0**-10  # half of the smallest number but zero
    assert rounded.dtype == fp8.FP8 and torch.equal(torch.frexp(scale)[0], torch.full_like(scale, 0.5))
    assert ((back - weight).abs() <= weight.abs() / 16 + smallest).all()
    assert torch.equal(back[3], weight[3]) and rounded[4].float().abs().max() <= fp8.LARGEST
    largest = rounded.float().abs().amax(1)
    assert ((largest > 200) | (weight.abs().amax(1) == 0)).all(), "a scale leaves range unused"
    again, same = fp8.quantised(back.to(torch.bfloat16).float())
    assert torch.equal(fp8.restored(again, same, torch.float32), back), "bfloat16 holds a rounded weight exactly"


def product_body(ctx) -> tuple[float, str]:
    torch.manual_seed(7)
    linear = nn.Linear(256, 192).to(torch.bfloat16).requires_grad_(False)
    x = torch.randn(5, 3, 256).to(torch.bfloat16)
    layer = layers.ColumnParallelLinear.from_linear(linear, ctx=ctx)
    whole = layer.weight.nbytes
    layer.store_as_fp8()
    assert layer.weight.nbytes * 2 == whole
    with pytest.raises(ArgumentError, match="the layer is served by"):
        layer.store_as_fp8()
    out = layer(x.to(ctx.device)).cpu().double()
    part = layer.parts[0].ranges[0]
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())[..., slice(*part)]
    return ((out - exact).norm() / exact.norm()).item(), layer.op


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_a_product_is_off_by_what_rounding_costs(world_size: int) -> None:
    for error, op in run_ranks(world_size, product_body):
        # one rounding to three bits is off by 2.6 % in the mean; on GPUs the input is rounded too
        assert (op == FP8_LOCAL) == ON_GPU
        assert 0.01 < error < (0.045 if ON_GPU else 0.032), error


def exact_body(ctx) -> None:
    random = torch.Generator().manual_seed(5 + ctx.cur_rank)
    for m, n, k in [(5, 32, 64), (3, 48, 4208)]:
        # what e4m3 holds exactly, at another scale in each row: the largest, 14 * 2**e, becomes 448
        few_bits = torch.randint(-8, 9, (m, k), generator=random).float()
        few_bits[:, k - 1] = 14
        x = (few_bits * 2.0 ** torch.arange(-9, m - 9)[:, None]).to(torch.bfloat16).to(ctx.device)
        rounded, scale = fp8.round_rows(x)
        assert torch.equal(rounded.float() * scale, x.float())
        assert torch.equal(rounded[:, k - 1].float(), torch.full((m,), fp8.LARGEST, device=ctx.device))
        weight, by = fp8.quantised(torch.randn(n, k, generator=random).to(ctx.device))
        bias = torch.randn(n, generator=random).to(torch.bfloat16).to(ctx.device)
        out = fp8.product(x, weight, by, bias, in_fp8=True).double()
        exact = x.double() @ fp8.restored(weight, by, torch.float64).t() + bias.double()
        assert (out - exact).norm() / exact.norm() < 2**-7, (m, n, k)


@pytest.mark.parametrize("world_size", WORLDS[:1])
def test_a_product_in_fp8_is_exact_where_nothing_needs_rounding(world_size: int) -> None:
    run_ranks(world_size, exact_body)


def rounded_twin(name: str, local: list[str]) -> nn.Module:
    """The unsplit model with the weights that the split one uses."""
    model = models.build(name)
    for module_name, module in model.named_modules():
        if any(module_name.endswith(end) for end in local):
            module.weight.data = fp8.restored(*fp8.quantised(module.weight.data), torch.float32)
    return model


LOCAL = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


def model_body(ctx, folder: str, name: str) -> torch.Tensor:
    model = models.build(name)
    with pytest.raises(ArgumentError, match="weights is 'int4': expected None or 'fp8'"):
        parallelize(model, ctx, weights="int4")
    with pytest.raises(ArgumentError, match="sequence_parallel leaves no colwise product without an exchange"):
        parallelize(model, ctx, weights="fp8", sequence_parallel=True)
    with pytest.raises(ArgumentError, match="Phi3ForCausalLM's plan leaves no colwise product"):
        parallelize(models.build("fused"), ctx, weights="fp8")
    report = parallelize(model, ctx, weights="fp8")
    assert sum("converted from fp8" in row.op for row in report.rows) == 4  # float32: never multiplied in fp8
    model.save_pretrained(f"{folder}/{name}")
    again = layers.from_pretrained(f"{folder}/{name}", ctx, weights="fp8")
    state, loaded = model.state_dict(), again.state_dict()
    for key, value in loaded.items():
        assert value.dtype == state[key].dtype, key
        if value.dtype == fp8.FP8:  # a row may be rounded to half the range: twice the weight, half the scale
            value = fp8.restored(value, loaded[key + "_scale"], torch.float32)
            assert torch.equal(value, fp8.restored(state[key], state[key + "_scale"], torch.float32)), key
        elif not key.endswith("weight_scale"):
            assert torch.equal(value, state[key]), key
    assert again.parallel_report.bytes == report.bytes
    return models.logits(again, ctx.device)


@two_ranks
@pytest.mark.parametrize("name", ["plain", "bias"])
def test_a_split_model_uses_the_rounded_weights_and_saves_them(world_size: int, tmp_path: Path, name: str) -> None:
    import transformers

    folder = agreed(tmp_path)
    results = run_ranks(world_size, model_body, str(folder), name)
    twin = rounded_twin(name, LOCAL)
    state = transformers.AutoModelForCausalLM.from_pretrained(folder / name).state_dict()
    for key, value in twin.state_dict().items():
        assert torch.equal(state[key], value), key
    single, double = models.logits(twin), models.logits(twin.double())
    own = (single - double).abs().max()
    for result in results:
        assert (result.cpu() - double).abs().max() <= 4 * own
    exact = models.expected(name)[0]
    assert 0.01 < ((double - exact).norm() / exact.norm()) < 0.25, "what rounding costs a model of two layers"
