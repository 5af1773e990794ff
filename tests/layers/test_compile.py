"""Split models under torch.compile: one graph without a break, the logits of the eager model, captured and replayed."""

from __future__ import annotations

import layers
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2], scope="session")]


def backend(ctx) -> str:
    """On GPUs what users run; on CPUs its front half, for the back half takes a C++ compiler its time."""
    return "inductor" if ctx.device.type == "cuda" else "aot_eager"


def compiled(model: nn.Module, ctx):
    torch.compiler.reset()
    return torch.compile(model, fullgraph=True, backend=backend(ctx))


def close(ctx, result: torch.Tensor, eager: torch.Tensor) -> bool:
    """Bitwise on CPUs, where the same products run; a fused norm on GPUs may round elsewhere."""
    if ctx.device.type == "cpu":
        return torch.equal(result, eager)
    return torch.allclose(result, eager, rtol=1e-3, atol=1e-3 * float(eager.abs().max()))


NINE_HEADS = "nine_heads"  # on three kv heads, as SmolLM2 has them: two ranks' parts differ


@torch.no_grad()
def model_body(ctx) -> torch.Tensor:
    model = models.build(NINE_HEADS)
    layers.parallelize(model, ctx)
    run, tokens = compiled(model, ctx), models.prompt().to(ctx.device)
    torch._dynamo.mark_dynamic(tokens, 1)
    result = run(tokens).logits
    assert close(ctx, result, models.logits(model, ctx.device))
    with torch.compiler.set_stance("fail_on_recompile"):  # of another length, by the same graph
        longer = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(4)).to(ctx.device)
        assert close(ctx, run(longer).logits, model(longer).logits)
    return result


def test_a_split_model_compiles_to_one_graph(world_size: int) -> None:
    for result in run_ranks(world_size, model_body):
        if not UNDER_TORCHRUN:
            models.assert_logits(result, NINE_HEADS)


@torch.no_grad()
def engine_body(ctx) -> None:
    """An engine on a compiled model; on GPUs it captures the compiled step and replays it."""
    model, prompts = models.build("tied"), models.prompt().to(ctx.device)
    layers.parallelize(model, ctx)
    expected = layers.Engine(model, ctx, 2, 32).generate(prompts, 8)
    torch.compiler.reset()
    model.compile(fullgraph=True, backend=backend(ctx))
    for step_attention in (False, True):
        engine = layers.Engine(model, ctx, 2, 32, step_attention=step_attention)
        engine.accept(engine.prefill(prompts))
        engine.decode(1)
        with torch.compiler.set_stance("fail_on_recompile"):  # which a capture could not bear
            engine.decode(6)
        assert engine.output[:, :8].tolist() == expected
        assert engine.generate(prompts, 8) == expected
        assert bool(engine._captured) == (ctx.device.type == "cuda")


def test_an_engine_runs_and_captures_a_compiled_model(world_size: int) -> None:
    run_ranks(world_size, engine_body)


@torch.no_grad()
def sequence_body(ctx) -> None:
    """Between norms on parts of the tokens, gathered and scattered by the linears; 13 tokens, uneven on most worlds."""
    torch.manual_seed(3)
    up, down = nn.Linear(24, 40), nn.Linear(40, 24)
    column = layers.ColumnParallelLinear.from_linear(up, sequence_parallel=True, ctx=ctx)
    row = layers.RowParallelLinear.from_linear(down, sequence_parallel=True, ctx=ctx)

    def block(x):
        return row(torch.relu(column(nn.functional.layer_norm(x, (24,)), tokens=13))) + x

    x = torch.randn(13, 24)
    start, stop = layers.shard.chunk(13, ctx.num_ranks, ctx.cur_rank)
    part = x[start:stop].to(ctx.device)
    result = compiled(block, ctx)(part)
    assert close(ctx, result, block(part))
    whole = down(torch.relu(up(nn.functional.layer_norm(x, (24,))))) + x
    torch.testing.assert_close(result.cpu(), whole[start:stop], rtol=1e-2, atol=1e-2)


def test_sequence_parallel_linears_compile(world_size: int) -> None:
    run_ranks(world_size, sequence_body)
