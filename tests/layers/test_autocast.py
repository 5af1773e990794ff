"""torch.autocast: split layers multiply in its dtype, as torch.nn.Linear does, with and without an exchange."""

from __future__ import annotations

from iris.errors import ArgumentError, DtypeError
import layers
from layers import ColumnParallelLinear, RowParallelLinear
from layers.shard import chunk
import pytest
import torch
from torch import nn

from tests.checks import assert_close_to_reference
from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytest.importorskip("transformers")
pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]

N_IN, N_OUT, TOKENS = 24, 16, 6
HALVES = torch.bfloat16, torch.float16


def whole(dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[nn.Linear, torch.Tensor]:
    """A linear of `dtype`, and an input in float32, the same everywhere."""
    torch.manual_seed(0)
    linear = nn.Linear(N_IN, N_OUT)
    nn.init.normal_(linear.bias)
    return linear.to(device, dtype).requires_grad_(False), torch.randn(TOKENS, N_IN).to(device)


def products(ctx, linear: nn.Linear, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the result of each kind of layer for `linear` and `x`, whole or this rank's part."""
    rows, features = (slice(*chunk(size, ctx.num_ranks, ctx.cur_rank)) for size in (TOKENS, N_IN))
    column = {"gathered": {"gather_output": True}, "local": {}, "gathers tokens": {"sequence_parallel": True}}
    row = {"reduced": {}, "partial": {"reduce_results": False}, "scatters tokens": {"sequence_parallel": True}}
    output = {}
    for name, options in column.items():
        layer = ColumnParallelLinear.from_linear(linear, ctx=ctx, **options)
        output[name] = layer(x[rows], tokens=TOKENS) if "tokens" in name else layer(x)
    for name, options in row.items():
        output[name] = RowParallelLinear.from_linear(linear, ctx=ctx, **options)(x[:, features])
    return output


def linears_body(ctx) -> list[str]:
    errors = []
    columns, rows = (slice(*chunk(size, ctx.num_ranks, ctx.cur_rank)) for size in (N_OUT, TOKENS))
    part = {"local": (slice(None), columns), "gathers tokens": (slice(None), columns), "scatters tokens": (rows,)}
    for weights in (torch.float32, *HALVES):
        linear, x = whole(weights, ctx.device)
        reference = x.double() @ linear.weight.double().t() + linear.bias.double()
        for dtype in HALVES:
            with torch.autocast(ctx.device.type, dtype):
                output, torchs = products(ctx, linear, x), linear(x)
            del output["partial"]  # a test of its own sums them
            for name, result in output.items():
                if result.dtype != dtype:
                    errors.append(f"{name} of {weights} in {dtype}: {result.dtype}")
                where = part.get(name, (slice(None),))
                assert_close_to_reference(result.cpu(), reference[where].cpu(), torchs[where].cpu(), 16.0)
    return errors


def test_each_linear_multiplies_in_autocasts_dtype(world_size: int) -> None:
    assert run_ranks(world_size, linears_body) == [[]] * world_size


def partial_body(ctx) -> torch.Tensor:
    linear, x = whole(torch.float32, ctx.device)
    with torch.autocast(ctx.device.type, torch.bfloat16):
        return products(ctx, linear, x)["partial"].cpu()


def test_partial_sums_are_in_autocasts_dtype(world_size: int) -> None:
    linear, x = whole(torch.float32)
    parts = run_ranks(world_size, partial_body)
    assert all(part.dtype == torch.bfloat16 for part in parts)
    torch.testing.assert_close(sum(part.float() for part in parts), linear(x), atol=0.05, rtol=0.05)


def refused_body(ctx) -> None:
    linear, x = whole(torch.float32, ctx.device)
    device = ctx.device.type
    layer = ColumnParallelLinear.from_linear(linear, True, ctx=ctx)
    with torch.autocast(device, torch.bfloat16):
        for exempt in (x.double(), x.long()):  # autocast leaves them as they are, and torch's linear raises
            with pytest.raises(DtypeError, match="expected torch.bfloat16"):
                layer(exempt)
        with torch.autocast(device, enabled=False):
            assert layer(x).dtype == torch.float32
            with pytest.raises(DtypeError, match="expected torch.float32"):
                layer(x.bfloat16())
        assert layer(x).dtype == torch.bfloat16
    with pytest.raises(DtypeError):
        layer(x.bfloat16())


def test_what_autocast_exempts_is_refused_and_an_inner_block_ends_it(world_size: int) -> None:
    run_ranks(world_size, refused_body)


def compiled_body(ctx) -> None:
    linear, x = whole(torch.float32, ctx.device)
    layer = RowParallelLinear.from_linear(linear, input_is_parallel=False, ctx=ctx)
    for backend in ("eager", "aot_eager"):
        compiled = torch.compile(layer, backend=backend, fullgraph=True)
        for dtype in HALVES:
            with torch.autocast(ctx.device.type, dtype), torch.no_grad():
                assert torch.equal(compiled(x), layer(x)) and compiled(x).dtype == dtype
        assert compiled(x).dtype == torch.float32


def test_compiled_layers_follow_autocast(world_size: int) -> None:
    run_ranks(world_size, compiled_body)


def model_body(ctx, name: str) -> list:
    model = models.build(name)
    layers.parallelize(model, ctx)
    results = []
    for dtype in HALVES:
        with torch.autocast(ctx.device.type, dtype):
            results.append(models.logits(model, ctx.device).cpu())
    return results


@pytest.mark.parametrize("name", ["plain", "fused", "qk_norm", "tied"])
@pytest.mark.some(2, on_gpus=4)
def test_a_model_under_autocast_is_the_unsplit_one(world_size: int, name: str) -> None:
    double, _, _ = models.expected(name)
    model = models.build(name)
    ranks = run_ranks(world_size, model_body, name)
    for index, dtype in enumerate(HALVES):
        with torch.autocast("cpu", dtype):
            own = models.logits(model)
        allowed = 4 * (own - double).abs().max()
        for results in ranks:
            assert results[index].dtype == own.dtype and torch.equal(results[index], ranks[0][index])
            assert (results[index] - double).abs().max() <= allowed


def engine_body(ctx) -> None:
    model = models.build("plain")
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, batch_size=2, max_length=16)
    first = engine.generate(models.prompt(), 5)
    with torch.autocast(ctx.device.type, torch.bfloat16):
        for call in (lambda: layers.Engine(model, ctx, 2, 16), lambda: engine.generate(models.prompt(), 5)):
            with pytest.raises(ArgumentError, match=r"autocast to torch.bfloat16 is enabled.*model.to"):
                call()
    assert engine.generate(models.prompt(), 5) == first


def test_an_engine_under_autocast_is_refused(world_size: int) -> None:
    run_ranks(world_size, engine_body)
