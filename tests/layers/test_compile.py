"""Split models under torch.compile: one graph without a break, the logits of the eager model, captured and replayed."""

from __future__ import annotations

import layers
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2], scope="session")]


def compiled(model: nn.Module, ctx):
    """On GPUs what users run; on CPUs its front half, for the back half takes a C++ compiler its time."""
    torch.compiler.reset()
    backend = "inductor" if ctx.device.type == "cuda" else "aot_eager"
    return torch.compile(model, fullgraph=True, backend=backend)


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
def step_body(ctx) -> None:
    """A decode step with a static cache: compiled, and on GPUs captured and replayed with other tokens."""
    model = models.build("tied")
    layers.parallelize(model, ctx)
    tokens = models.prompt().to(ctx.device)

    def step(token, position, cache):
        return model(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits

    def decode(call) -> list[torch.Tensor]:
        cache = layers.engine.static_cache(model.config, 16)
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
        token, position = tokens[:, -1:].clone(), torch.full((2, 1), tokens.shape[1], device=ctx.device)
        found = []
        for _ in range(5):
            logits = call(token, position, cache)
            found.append(logits.clone())
            token.copy_(logits.argmax(-1))
            position += 1
        return found

    def captured():
        """Calls of a step: the first two compile, the third is captured, the others are its replays."""
        run, graph, calls, static = compiled(step, ctx), torch.cuda.CUDAGraph(), 0, None

        def call(token, position, cache):
            nonlocal calls, static
            calls += 1
            if calls < 3:
                return run(token, position, cache)
            if calls == 3:
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    static = run(token, position, cache)
            graph.replay()
            return static

        return call

    eager = decode(step)
    for call in [compiled(step, ctx), *([captured()] if ctx.device.type == "cuda" else [])]:
        for result, expected in zip(decode(call), eager, strict=True):
            assert close(ctx, result, expected)


def test_a_compiled_step_is_the_eager_one(world_size: int) -> None:
    run_ranks(world_size, step_body)


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
