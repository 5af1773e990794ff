"""Attention of prompts against float64: lengths on and off cuDNN's grid, grouped heads, caches that hold more."""

from __future__ import annotations

from types import SimpleNamespace

import iris  # noqa: F401  (before triton: it may set up the interpreter)
import layers
from layers.serving import attention, prefill_attention
import pytest
import torch
import torch._inductor.config

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models
from tests.layers.test_compile import compilations
from tests.layers.test_families import FAMILIES, build

pytestmark = both
DEVICE = "cuda" if UNDER_TORCHRUN and torch.cuda.is_available() else "cpu"


def reference(q, k, v, scale: float, seen: torch.Tensor | None = None) -> torch.Tensor:
    """[B, T, H, D] in float64; of what is `seen` [B, T]."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (each[:, :, :length].double().repeat_interleave(groups, 1) for each in (k, v))
    allowed = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    allowed = allowed if seen is None else allowed & seen[:, None, None]
    scores = (q.double() @ k.mT * scale).masked_fill(~allowed, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def tensors(batch: int, heads: int, kv_heads: int, length: int, dim: int) -> list[torch.Tensor]:
    """Queries, keys and values as a model hands them over: cut out of a row, and out of a cache that holds more."""
    torch.manual_seed(length)
    like = {"dtype": torch.bfloat16, "device": DEVICE}
    q = torch.randn(batch, length, heads + 1, dim, **like)[:, :, 1:].transpose(1, 2)
    cache = [torch.randn(batch, kv_heads, length + 37, dim, **like) for _ in range(2)]
    for each in cache:
        each[:, :, length:] = float("nan")  # what another batch left
    return [q, *cache]


@pytest.mark.parametrize("length", [2, 63, 64, 200, 500, 704, 768, 801, 1500])
@pytest.mark.parametrize("batch, heads, kv_heads, dim", [(1, 4, 1, 64), (2, 3, 3, 80), (2, 4, 2, 128)])
@pytest.mark.some(5, on_gpus=8)
def test_any_length(batch: int, heads: int, kv_heads: int, dim: int, length: int) -> None:
    q, k, v = tensors(batch, heads, kv_heads, length, dim)
    out, expected = prefill_attention.prefill_attention(q, k, v, 0.2), reference(q, k, v, 0.2)
    assert out.shape == (batch, length, heads, dim) and out.is_contiguous()
    assert (out - expected).norm() <= 2**-7 * expected.norm()
    assert (out - reference(q, k.roll(1, 2).nan_to_num(), v, 0.2)).norm() > 0.1 * expected.norm()
    assert torch.equal(prefill_attention.prefill_attention(q, k, v, 0.2), out)
    torch.library.opcheck(torch.ops.iris_ops.prefill_attention, (q, k, v, 0.2))


@pytest.mark.parametrize("length", [9, 40, 200, 500, 801])
@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 1, 64), (3, 3, 80)])
@pytest.mark.some(4)
def test_prompts_with_padding(heads: int, kv_heads: int, dim: int, length: int) -> None:
    """Padding before and after the prompts, with holes, and none; padded positions may hold any finite value."""
    q, k, v = tensors(4, heads, kv_heads, length, dim)
    seen = torch.rand(4, length, device=DEVICE) < 0.6
    seen[0], seen[2] = torch.arange(length, device=DEVICE) >= length // 3, True
    seen[1] = torch.arange(length, device=DEVICE) <= length // 2
    seen[3, -1] = True
    k[:, :, :length][~seen[:, None].expand(-1, kv_heads, -1)] = 1e4  # would stand out
    places = prefill_attention.places_of(seen)
    assert prefill_attention.is_places(places) and not prefill_attention.is_places(seen[:, None, None])
    allowed = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril() & seen[:, None, None]
    assert torch.equal(prefill_attention.mask_of_places(places), allowed)
    out, expected = prefill_attention.prefill_attention(q, k, v, 0.2, places), reference(q, k, v, 0.2, seen)
    assert out.shape == (4, length, heads, dim) and out.is_contiguous() and out.isfinite().all()
    assert (out - expected)[seen].norm() <= 2**-7 * expected[seen].norm()
    assert (out - reference(q, k.nan_to_num(), v.nan_to_num(), 0.2))[seen].norm() > 0.1 * expected[seen].norm()
    torch.library.opcheck(torch.ops.iris_ops.prefill_attention, (q, k, v, 0.2, places))


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("biased", [False, True], ids=["with a gradient", "with an option"])
def test_gradients_and_options_are_left_to_transformers(tokens: int, biased: bool) -> None:
    """Here values are wider than keys."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, tokens, 16, requires_grad=not biased), torch.randn(2, 2, 9, 16)
    v, seen = torch.randn(2, 2, 9, 24), torch.ones(2, tokens, dtype=torch.bool)
    seen[1, : tokens // 2] = False
    mask = torch.arange(9) < 5 if tokens == 1 else prefill_attention.places_of(seen)
    mask = mask.expand(2, 1, 1, 9) if tokens == 1 else mask
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2)
    option = {"position_bias": torch.zeros(2, 4, tokens, 9 if tokens == 1 else tokens)} if biased else {}
    out, _ = attention.attend(module, q, k, v, mask, 0.2, **option)
    assert out.shape == (2, tokens, 4, 24) and out.requires_grad == q.requires_grad
    given = [each.repeat_interleave(2, 1).double() for each in (k, v)]
    allowed = mask if tokens == 1 else prefill_attention.mask_of_places(mask)
    width = allowed.shape[3]
    scores = (q.double() @ given[0][:, :, :width].mT * 0.2).masked_fill(~allowed, -torch.inf)
    expected = (scores.softmax(-1) @ given[1][:, :, :width]).transpose(1, 2)
    rows = seen if tokens > 1 else torch.ones_like(seen)
    assert (out - expected)[rows].norm() <= 1e-5 * expected[rows].norm()
    if tokens > 1 and not biased:
        ours, _ = attention.attend(module, q.detach(), k, v, mask, 0.2)
        assert torch.allclose(ours[rows], out[rows], 1e-5, 1e-6)
        torch.library.opcheck(torch.ops.iris_ops.prefill_attention, (q.detach(), k, v, 0.2, mask))


KINDS = [(1, 100, "flash"), (1, 128, "cudnn"), (1, 700, "flash"), (1, 801, "cudnn"), (2, 2048, "cudnn")]
KINDS += [(2, 500, "cudnn"), (20, 70, "flash")]


def engine_body(ctx, name: str) -> tuple[list, list]:
    model = models.build(name).bfloat16()
    layers.parallelize(model, ctx)
    calls, own = [], prefill_attention.prefill_attention

    def counted(*given):
        calls.append(given[0].shape[2])
        return own(*given)

    def tokens(**options) -> list:
        engine = layers.Engine(model, ctx, batch_size=2, max_length=16, **options)
        return engine.generate(models.prompt().tolist(), models.NEW)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_attention, "prefill_attention", counted)
        patch.setattr(prefill_attention, "_has_plans", lambda device: False)
        plain = tokens(step_attention=True, graphs=False)
        assert not calls
        patch.setattr(prefill_attention, "_has_plans", lambda device: True)
        eager = tokens(step_attention=True, graphs=False)
    assert calls == [7] * model.config.num_hidden_layers
    assert model.config._attn_implementation == attention.NAME
    return plain, eager


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
@pytest.mark.parametrize("name", ["kv2", "qk_norm"])
def test_the_engine_reads_prompts_by_it(world_size: int, name: str) -> None:
    for plain, eager in run_ranks(world_size, engine_body, name):
        assert eager == plain


@torch.no_grad()
@torch._inductor.config.patch(shape_padding=False)  # which asks, of odd widths, whether rows are few
def compiled_body(ctx, name: str) -> None:
    """In compiled layers it is one operator, whatever the length; with windows torch's, of as many columns."""
    model = models.build(name).bfloat16()
    layers.parallelize(model, ctx)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_attention, "_has_plans", torch.compiler.assume_constant_result(lambda device: True))
        backend = "inductor" if ON_GPU else "aot_eager"
        engines = [
            layers.Engine(model, ctx, 2, 64, step_attention=True, graphs=False, compile=by) for by in (False, backend)
        ]
        for length, padded in ((7, False), (12, False), (33, False), (7, True), (21, True), (64, True), (64, False)):
            prompt, mask = models.prompt().repeat(1, 10)[:, :length].to(ctx.device), None
            if padded:
                mask = torch.ones_like(prompt, dtype=torch.bool)
                mask[1, : length // 2] = False
            before = compilations()
            with torch.profiler.profile() as trace:
                eager, compiled = (each.prefill(prompt, mask) for each in engines)
            assert length not in (21, 33) or compilations() == before, "for any length"
            assert (eager - compiled).norm() <= 2**-5 * eager.norm()
            called = [each.count for each in trace.key_averages() if each.key == "iris_ops::prefill_attention"]
            assert sum(called) >= model.config.num_hidden_layers or name == "sliding"
            for each in engines:
                each.reset()


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
@pytest.mark.parametrize("name", ["kv2", "sliding"])
@pytest.mark.slow
def test_compiled_layers_read_prompts_by_it(world_size: int, name: str) -> None:
    run_ranks(world_size, compiled_body, name)


@torch.no_grad()
@pytest.mark.skipif(DEVICE != "cpu", reason="needs no ranks")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(5, on_gpus=len(FAMILIES))
def test_padded_prompts_of_every_family(family: str) -> None:
    """As by transformers' masks, also where some layers have windows and others none."""
    model = build(family, FAMILIES[family])
    if model.config._attn_implementation != "sdpa":
        pytest.skip("does not attend by sdpa")
    tokens = torch.randint(2, 100, (3, 9), generator=torch.Generator().manual_seed(4))
    seen = torch.ones_like(tokens)
    seen[0, :4] = seen[1, :1] = 0
    given = {"input_ids": tokens, "attention_mask": seen}
    expected, continued = model(**given).logits, model.generate(**given, max_new_tokens=3, do_sample=False)
    assert attention.use(model)
    assert torch.allclose(model(**given).logits[seen.bool()], expected[seen.bool()], 1e-4, 1e-5)
    assert torch.equal(model.generate(**given, max_new_tokens=3, do_sample=False), continued)
