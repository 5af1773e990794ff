"""Split models under torch.compile: one graph without a break, the logits of the eager model, captured and replayed.

Whole models, and the decoder layers that an engine compiles: once for all of them, and with whose ops they are served.
"""

from __future__ import annotations

from collections import Counter

from iris.errors import ArgumentError
from iris_ops.ops import Ops
import layers
import pytest
import torch
from torch import nn

from benchmarks.cases import engines
from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
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


# Nine heads on three kv heads, as SmolLM2 has them: two ranks' parts differ. Whole models take long to compile.
WHOLE = models.ONE_LAYER


@torch.no_grad()
def model_body(ctx) -> torch.Tensor:
    model = models.build(WHOLE)
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
            models.assert_logits(result, WHOLE)


@torch.no_grad()
def engine_body(ctx) -> None:
    """An engine on a compiled model; on GPUs it captures the compiled step and replays it."""
    model, prompts = models.build(WHOLE), models.prompt().to(ctx.device)
    layers.parallelize(model, ctx)
    count = 8 if ON_GPU else 4
    expected = layers.Engine(model, ctx, 2, 32).generate(prompts, count)
    torch.compiler.reset()
    model.compile(fullgraph=True, backend=backend(ctx))
    for step_attention in (False, True) if ON_GPU else (True,):
        engine = layers.Engine(model, ctx, 2, 32, step_attention=step_attention)
        engine.accept(engine.prefill(prompts))
        engine.decode(1)
        with torch.compiler.set_stance("fail_on_recompile"):  # which a capture could not bear
            engine.decode(count - 2)
        assert engine.output[:, :count].tolist() == expected
        for _ in range(2 if ON_GPU else 0):  # the cache has tokens, so prompts are compiled anew and then captured
            assert engine.generate(prompts, count) == expected
        assert len(engine.steps) == (ctx.device.type == "cuda")
        assert len(engine.prompts) == (ctx.device.type == "cuda" and step_attention)


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


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@torch.no_grad()
def hooked_norm_body(ctx) -> None:
    """Hooks on the norm of one layer, before it is compiled and later, run once a call and count; on GPUs eagerly."""
    model, prompts = models.build("kv2"), models.prompt().to(ctx.device)
    layers.parallelize(model, ctx)
    first, second = (layer.input_layernorm for layer in model.model.layers)
    engines, calls = [], []

    def hook(module, args, output):
        calls.append(module)
        return output.flip(0)

    def logits(engine) -> torch.Tensor:
        engine.reset()
        return engine.prefill(prompts)

    for norm in (None, second, first, None):
        handle = norm and norm.register_forward_hook(hook)
        eager = logits(layers.Engine(model, ctx, 2, 18, graphs=False))
        engines.append(layers.Engine(model, ctx, 2, 18, compile=backend(ctx), graphs=False, step_attention=True))
        for engine in engines:
            calls.clear()
            assert close(ctx, logits(engine), eager)
            assert calls == ([norm] if norm else [])
        if handle:
            handle.remove()


@pytest.mark.slow
def test_hooks_on_a_layer_s_norm_count(world_size: int) -> None:
    run_ranks(world_size, hooked_norm_body)


@torch.no_grad()
def shared_tokens_body(ctx) -> None:
    """Of layers that share out the tokens, too, one compilation serves prompts of any length, and one the steps."""
    model, rows = models.build("kv2"), models.prompt().tolist()
    layers.parallelize(model, ctx, sequence_parallel=4)
    batches = [[row[:6] for row in rows], [row + row[1:] + row[:3] for row in rows]]
    expected = [layers.Engine(model, ctx, 2, 24).generate(batch, 2) for batch in batches]
    engine = layers.Engine(model, ctx, 2, 24, compile=backend(ctx), step_attention=True)
    before = compilations()
    assert [engine.generate(batch, 2) for batch in batches] == expected
    assert compilations() - before == 3  # of them one for the rotary embedding
    with torch.compiler.set_stance("fail_on_recompile"):
        engine.generate([row + row[:5] for row in rows], 2)


@pytest.mark.some(0, on_gpus=1)
def test_layers_that_share_tokens_are_compiled_once_for_all_lengths(world_size: int) -> None:
    run_ranks(world_size, shared_tokens_body)


class Counting:
    def __init__(self, ops):
        self.ops, self.calls = ops, Counter()

    def __getattr__(self, name: str):
        self.calls[name] += 1
        return getattr(self.ops, name)


def contexts_body(ctx) -> None:
    """Compiled layers call the ops of the context that they have now, whatever they were compiled with."""
    model, prompts = models.build("nine_heads"), models.prompt()
    layers.parallelize(model, ctx)
    ours, nccl = Counting(ctx.ops), Counting(engines.NcclOps())
    ctx._components[Ops] = ours
    other = engines._Context(ctx, "counted", nccl)
    expected = layers.Engine(model, ctx, 2, 16).generate(prompts, 2)
    engine = layers.Engine(model, ctx, 2, 16, compile=backend(ctx), graphs=False)
    for context in (ctx, other, ctx):
        engines.serve(model, context)
        ours.calls.clear()
        nccl.calls.clear()
        assert engine.generate(prompts, 2) == expected
        called, idle = (ours, nccl) if context is ctx else (nccl, ours)
        assert called.calls["matmul_all_reduce"] == 2 * 2 * 2  # of two layers, in two passes
        assert not idle.calls


@pytest.mark.slow
def test_compiled_layers_call_the_ops_of_the_context_that_they_have(world_size: int) -> None:
    run_ranks(world_size, contexts_body)


class Undecided(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum().item() > 1e9 else nn.functional.silu(x)


def refused_body(ctx) -> None:
    model, prompts = models.build("plain"), models.prompt()
    layers.parallelize(model, ctx)
    with pytest.raises(ArgumentError, match="compile is 'nonsense': expected a bool or a backend of torch: .*inductor"):
        layers.Engine(model, ctx, 2, 16, compile="nonsense")
    expected = layers.Engine(model, ctx, 2, 16).generate(prompts, 4)
    for layer in model.model.layers:
        layer.mlp.act_fn = Undecided()
    engine = layers.Engine(model, ctx, 2, 16, compile=backend(ctx))
    with pytest.raises(ArgumentError, match="expected False for layers of type LlamaDecoderLayer"):
        engine.generate(prompts, 4)
    assert layers.Engine(model, ctx, 2, 16, graphs=False).generate(prompts, 4) == expected, "nothing is left of it"
    del model.model.layers[1].self_attn.layer_idx
    with pytest.raises(ArgumentError, match="no list of 2 decoder layers"):
        layers.Engine(model, ctx, 2, 16, compile=True)


@pytest.mark.some(on_gpus=0)
def test_what_cannot_be_compiled_is_refused(world_size: int) -> None:
    run_ranks(world_size, refused_body)


def kernels_body(ctx) -> None:
    """Return the kernels of one step, and the memory that it allocates."""
    model, prompts, length = models.build("kv2"), models.prompt().to(ctx.device), 1 << 15
    layers.parallelize(model, ctx)
    kernels, taken = [], []
    for compile in (False, True):
        engine = layers.Engine(model, ctx, 2, length, compile=compile)
        engine.accept(engine.prefill(prompts))
        engine.decode(2)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.step()
        torch.cuda.synchronize()
        taken.append(torch.cuda.max_memory_allocated() - before)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            engine.step()
            torch.cuda.synchronize()
        kernels.append(sum(each.count for each in trace.key_averages()))
    model.to(torch.bfloat16)
    engine = layers.Engine(model, ctx, 2, 16, compile=True)
    engine.accept(engine.prefill(prompts))
    engine.decode(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        engine.step()
        torch.cuda.synchronize()
    names = [each.key for each in trace.key_averages()]
    assert any("lamport" in name for name in names) and not any("rms_norm" in name for name in names), names
    keys = engine.cache.layers[0].keys
    assert taken[1] <= taken[0] + keys.nbytes / 2, f"{taken}: a copy of a layer's keys takes {keys.nbytes} bytes"
    assert kernels[1] <= kernels[0] - 12 * len(model.model.layers), kernels


@pytest.mark.skipif(not ON_GPU, reason="kernels are counted on GPUs")
def test_a_compiled_step_has_few_kernels_and_copies_no_cache(world_size: int) -> None:
    run_ranks(world_size, kernels_body)
