"""Attention of one token over a cache, against float64: grouped heads, odd sizes, holes in the mask, any part of it."""

from __future__ import annotations

from types import SimpleNamespace

import iris  # noqa: F401  (before triton: it may set up the interpreter)
from iris_ops.local import decode_attention
import layers
from layers.serving import attention
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
@pytest.mark.parametrize("shared, scanned", [(1 << 40, 4096), (2048, 64)], ids=["much shared memory", "little"])
def test_one_token_over_a_cache(monkeypatch, dtype, batch, heads, kv_heads, length, dim, programs, shared, scanned):
    monkeypatch.setattr(decode_attention.platform, "num_programs", lambda device: programs)
    monkeypatch.setattr(decode_attention.platform, "shared_bytes", lambda device: shared)
    monkeypatch.setattr(decode_attention, "_MOST_SCANNED", scanned)
    torch.manual_seed(length)
    # as a model hands them over: heads cut out of a row, a cache that is fuller than the mask says
    q = torch.randn(batch, 1, heads + 2, dim, dtype=dtype, device=DEVICE)[:, :, 1:-1].transpose(1, 2)[:, :, 0]
    k, v = (torch.randn(batch, kv_heads, length, dim, dtype=dtype, device=DEVICE) for _ in range(2))
    mask = torch.rand(batch, length, device=DEVICE) < 0.7
    mask[:, 0] = False
    mask[0, 64:] = False
    mask[:, 5] = True
    k[~mask[:, None].expand(k.shape[:3])] = 1e4  # would stand out
    out = decode_attention.decode_attention(q, k, v, mask, 0.3)
    expected = reference(q, k, v, mask, 0.3)
    assert (out - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    shifted = reference(q, k, v, mask.roll(1, 1), 0.3)
    assert (out - shifted).abs().max() > 10 * TOLERANCE[dtype] * expected.abs().max()


@pytest.mark.parametrize("seen", [[(150, 151)], [(31, 33)], [(0, 1), (299, 300)], [(70, 90), (160, 170), (250, 290)]])
@pytest.mark.parametrize("programs", [1, 100], ids=["whole", "stretches"])
def test_any_part_of_a_cache_may_be_seen(monkeypatch, seen, programs: int) -> None:
    monkeypatch.setattr(decode_attention.platform, "num_programs", lambda device: programs)
    torch.manual_seed(1)
    pairs = 6 if programs == 1 else 2
    q, k, v = (torch.randn(pairs, *size, 32, device=DEVICE) for size in ((3,), (1, 300), (1, 300)))
    mask = torch.zeros(pairs, 300, dtype=torch.bool, device=DEVICE)
    for first, beyond in seen:
        mask[:, first:beyond] = True
    k[~mask[:, None]] = v[~mask[:, None]] = 1e4
    assert (decode_attention.splits_of(pairs, 300, 32, programs)[0] == 1) == (programs == 1)
    out, expected = decode_attention.decode_attention(q, k, v, mask, 0.5), reference(q, k, v, mask, 0.5)
    assert (out - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()


def test_masks_of_another_shape_are_left_to_torch() -> None:
    """One row of a mask for all rows of queries; fewer columns than the cache has."""
    q, k, v = (torch.randn(2, heads, length, 16, device=DEVICE) for heads, length in ((2, 1), (1, 40), (1, 40)))
    mask = torch.zeros(2, 1, 1, 40, dtype=torch.bool, device=DEVICE)
    mask[0, ..., :10] = mask[1, ..., 20:] = True
    module = SimpleNamespace(is_causal=True, num_key_value_groups=2)
    for given in (mask, mask[:1]):
        out = attention.attend(module, q, k, v, given, 0.2)[0][:, 0]
        expected = reference(q[:, :, 0], k, v, given[:, 0, 0].expand(2, 40), 0.2)
        assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
    supports = attention._decode_supports
    assert not supports(q, k, v, mask[:1]) and not supports(q, k, v, mask[..., :39])
    assert supports(q, k, v, mask) and supports(q, k, v, mask[:1].expand(2, 1, 1, 40))


def engine_body(ctx, name: str) -> tuple[list, str]:
    model = models.build(name)
    layers.parallelize(model, ctx)
    engine = layers.Engine(model, ctx, batch_size=2, max_length=16, step_attention=True)
    prompts = models.prompt().tolist()
    tokens = engine.generate(prompts, models.NEW), engine.generate([prompts[0], prompts[1][2:]], models.NEW)
    assert torch.equal(models.generate(model, ctx.device).cpu(), models.expected(name)[2]), "generate() as before"
    return tokens, model.config._attn_implementation


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [3])
@pytest.mark.parametrize("name", ["kv2", "sliding"])
@pytest.mark.some(1)
def test_the_engine_makes_the_same_tokens_by_it(world_size: int, name: str) -> None:
    whole, padded = (models.generate(models.build(name), padded=padded)[:, 7:].tolist() for padded in (False, True))
    for tokens, implementation in run_ranks(world_size, engine_body, name):
        assert implementation == attention.NAME
        assert tokens == (whole, padded)
