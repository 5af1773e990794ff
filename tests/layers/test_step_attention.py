"""Attention of one token over a cache, against float64: grouped heads, odd sizes, holes in the mask, any part of it."""

from __future__ import annotations

import iris  # noqa: F401  (before triton: it may set up the interpreter)
import layers
from layers import step_attention
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytestmark = both
DEVICE = "cuda" if UNDER_TORCHRUN and torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def reference(q, k, v, mask, scale):
    groups = q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(groups, 1) for each in (k, v))
    scores = torch.einsum("bhd,bhnd->bhn", q.double(), k) * scale
    return torch.einsum("bhn,bhnd->bhd", scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "batch, heads, kv_heads, length, dim, programs",
    [(1, 4, 1, 130, 64, 1), (2, 6, 2, 200, 8, 3), (1, 3, 3, 64, 80, 8), (3, 32, 1, 257, 16, 100)],
)
@pytest.mark.parametrize("shared", [1 << 40, 2048], ids=["much shared memory", "little"])
def test_one_token_over_a_cache(monkeypatch, dtype, batch, heads, kv_heads, length, dim, programs, shared) -> None:
    monkeypatch.setattr(step_attention.platform, "num_programs", lambda device: programs)
    monkeypatch.setattr(step_attention.platform, "shared_bytes", lambda device: shared)
    torch.manual_seed(length)
    # as a model hands them over: heads cut out of a row, a cache that is fuller than the mask says
    q = torch.randn(batch, 1, heads + 2, dim, dtype=dtype, device=DEVICE)[:, :, 1:-1].transpose(1, 2)[:, :, 0]
    k, v = (torch.randn(batch, kv_heads, length, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    mask = torch.rand(batch, length, device=DEVICE) < 0.7
    mask[:, 0] = False
    mask[0, 64:] = False
    mask[:, 5] = True
    k[~mask[:, None].expand(k.shape[:3])] = 1e4  # would stand out
    out = step_attention.step_attention(q, k, v, mask, 0.3)
    expected = reference(q, k, v, mask, 0.3)
    assert (out - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    shifted = reference(q, k, v, mask.roll(1, 1), 0.3)
    assert (out - shifted).abs().max() > 10 * TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_a_prompt_has_no_mask_where_torchs_causal_one_is_the_same() -> None:
    from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

    asked = {"batch_size": 2, "q_length": 7, "kv_length": 16, "q_offset": 0, "kv_offset": 0}
    causal = torch.ones(7, 7, dtype=torch.bool).tril()
    for window in (None, 4, 6, 7, 20):
        seen = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
        asked |= {"mask_function": seen, "local_size": window}
        made = sdpa_mask(**asked, allow_is_causal_skip=False)
        same = torch.equal(made[0, 0, :, :7], causal) and not made[..., 7:].any()
        assert (step_attention.mask_of(**asked) is None) == same, window
        assert step_attention.mask_of(**asked, attention_mask=torch.ones(2, 7, dtype=torch.bool)[:, :6]) is not None
        assert step_attention.mask_of(**asked, allow_is_causal_skip=False) is not None
        assert step_attention.mask_of(**asked | {"q_offset": torch.tensor(3)}) is not None


def engine_body(ctx, name: str) -> tuple[list, str]:
    model = models.build(name)
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, batch_size=2, max_length=16, step_attention=True)
    prompts = models.prompt().tolist()
    tokens = engine.generate(prompts, 5), engine.generate([prompts[0], prompts[1][2:]], 5)
    assert torch.equal(models.generate(model, ctx.device).cpu(), models.expected(name)[2]), "generate() as before"
    return tokens, model.config._attn_implementation


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [3])
@pytest.mark.parametrize("name", ["kv2", "sliding"])
def test_the_engine_makes_the_same_tokens_by_it(world_size: int, name: str) -> None:
    whole, padded = (models.generate(models.build(name), padded=padded)[:, 7:].tolist() for padded in (False, True))
    for tokens, implementation in run_ranks(world_size, engine_body, name):
        assert implementation == step_attention.NAME
        assert tokens == (whole, padded)
