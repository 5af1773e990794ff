"""Attentions with one projection for q, k and v, and biases by head: split by whole heads, right, and saved as whole.

One body runs all families on a number of ranks. Norms and biases are drawn at random, too.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from iris.errors import StyleError
import layers
from layers.hf.fused_heads import BLOCKS, BY_GROUP, BY_HEAD, BY_SHARD, fused_parts, layout_of
from layers.hf.parallelize import parallelize
from layers.shard import split_heads
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = both

TINY: dict[str, Any] = {"vocab_size": 100, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
_FALCON = {"hidden_size": 48, "num_hidden_layers": 1, "num_attention_heads": 6, "bias": True}
_GPT = {"n_embd": 48, "n_layer": 1, "n_head": 6, "n_positions": 64}
_OLD = {**_FALCON, "multi_query": False, "parallel_attn": False}
# name: (type of model, its configuration, the kv heads of six that it caches in all)
FAMILIES: dict[str, tuple[str, dict[str, Any], int]] = {
    "bloom": ("Bloom", {"hidden_size": 48, "n_layer": 1, "n_head": 6}, 6),
    "falcon_rw": ("Falcon", {**_OLD, "alibi": True}, 6),
    "falcon_rw_eager": ("Falcon", {**_OLD, "alibi": True, "attn_implementation": "eager"}, 6),
    "falcon_7b": ("Falcon", _FALCON, 1),
    "falcon_40b": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}, 6),
    "falcon_alibi": ("Falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "alibi": True}, 6),
    "mpt": ("Mpt", {"d_model": 48, "n_heads": 6, "n_layers": 1, "max_seq_len": 64,
                    "attn_config": {"clip_qkv": 1.5, "attn_type": "multihead_attention"}}, 6),
    "codegen": ("CodeGen", {**_GPT, "n_embd": 64, "n_head": 8, "rotary_dim": 4}, 8),
    "codegen_odd": ("CodeGen", {**_GPT, "rotary_dim": 8}, 6),  # heads lie in two of the four parts
    "starcoder": ("GPTBigCode", {**_GPT, "multi_query": True}, 1),
    "santacoder": ("GPTBigCode", {**_GPT, "multi_query": False}, 6),
}  # fmt: skip

RARE = {"falcon_rw", "falcon_40b", "codegen"}  # beside which others do the same and one thing more
if not UNDER_TORCHRUN:
    RARE |= {"falcon_rw_eager", "santacoder"}  # whose layouts others have, too

# Before transformers 5.20 or so, CodeGen's attention computes for four parts of all heads, and says so nowhere.
_CODEGEN = transformers.models.codegen.modeling_codegen.CodeGenAttention
OLD_CODEGEN = "mp_num" not in inspect.getsource(_CODEGEN.__init__)
if OLD_CODEGEN:
    FAMILIES = {name: family for name, family in FAMILIES.items() if family[0] != "CodeGen"}


def build(name: str) -> Any:
    """The whole model, the same wherever it is built."""
    kind, changes, _ = FAMILIES[name]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    changes = dict(changes)
    options = {"attn_implementation": changes.pop("attn_implementation", None)}
    config = getattr(transformers, f"{kind}Config")(**{**TINY, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    torch.set_rng_state(state)
    return model


def inputs(device: Any = "cpu") -> dict[str, torch.Tensor]:
    """Two prompts, of which the second begins with padding."""
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, :2] = 0
    tokens = torch.randint(2, 100, (2, 7), generator=torch.Generator().manual_seed(3))
    return {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}


@torch.no_grad()
def answers(model: Any, device: Any = "cpu") -> tuple[torch.Tensor, torch.Tensor, list]:
    """Logits without and with padding, and greedy tokens that are found with a cache."""
    given = inputs(device)
    plain = model(given["input_ids"]).logits.cpu()
    padded = model(**given).logits[:, 2:].cpu()
    words = model.generate(**given, max_new_tokens=3, do_sample=False)[:, 7:].tolist()
    return plain, padded, words


@torch.no_grad()
def cached(model: Any, device: Any) -> int:
    """How many kv heads a rank keeps."""
    result = model(inputs(device)["input_ids"], use_cache=True)
    cache = result["cache"] if "cache" in result else result["past_key_values"]
    return cache.layers[0].keys.shape[1]


def families_body(ctx: Any, folder: str, names: list[str]) -> dict[str, Any]:
    actual = {}
    for name in names:
        model = build(name)
        report = parallelize(model, ctx)
        layers.save_pretrained(model, f"{folder}/{name}", ctx)
        again = layers.from_pretrained(f"{folder}/{name}", ctx, dtype=torch.float32)
        for key, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], value), f"{name}: {key}"
        rows = [row for row in str(report).splitlines() if "attn" in row or "attention" in row]
        linears = [row for row in rows if "matmul" in row]
        assert len(linears) == 2 and sum(" colwise " in row for row in linears) == 1, report
        assert sum(" rowwise " in row for row in linears) == 1, report
        actual[name] = (*answers(model, ctx.device), cached(model, ctx.device))
    return actual


@pytest.mark.parametrize(
    "world_size", [pytest.param(w, marks=[pytest.mark.slow] * (w != 3 and 3 in WORLDS)) for w in WORLDS]
)
@pytest.mark.parametrize("rare", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_families_with_one_projection_are_split_by_heads(world_size: int, rare: bool, tmp_path: Path) -> None:
    folder, names = agreed(tmp_path), [name for name in FAMILIES if (name in RARE) == rare]
    results = run_ranks(world_size, families_body, str(folder), names)
    for name in names:
        whole, heads = build(name), FAMILIES[name][2]
        single = answers(whole)
        saved = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        for key, value in whole.state_dict().items():
            assert torch.equal(saved.state_dict()[key], value), f"{name}: {key}"
        double = answers(whole.double())
        assert single[2] == double[2], f"{name}: tokens too close to tell"
        groups = {"falcon_40b": 2, "falcon_alibi": 3}.get(name, heads)  # whose k and v are cached for each query head
        for rank, (plain, padded, words, kept) in enumerate(result[name] for result in results):
            for actual, own, exact in zip((plain, padded), single, double, strict=False):
                error, allowed = (actual - exact).abs().max(), (own - exact).abs().max()
                assert error <= 4 * allowed + 1e-5 * exact.abs().max(), f"{name}: {error:.1e}, allowed {allowed:.1e}"
            assert words == single[2], name
            assert kept == split_heads(heads, groups, world_size, rank).num_local_heads, f"{name}, rank {rank}"
        assert heads == 1 or sum(result[name][3] for result in results) == heads


# --- which outputs are a head's --------------------------------------------------------------------------------------


class Takes(nn.Module):
    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        vars(self).update(attributes)


# how a module says how it takes its outputs apart, and where it finds q, k and v of each head, of 6 and of `kv`
def _by_head(x: torch.Tensor, heads: int, kv: int) -> tuple[torch.Tensor, ...]:
    return tuple(x.view(heads, 3, 2).unbind(1))


def _blocks(x: torch.Tensor, heads: int, kv: int) -> tuple[torch.Tensor, ...]:
    return tuple(each.view(-1, 2) for each in x.split([heads * 2, kv * 2, kv * 2]))


def _by_group(x: torch.Tensor, heads: int, kv: int) -> tuple[torch.Tensor, ...]:
    both = x.view(kv, heads // kv + 2, 2)
    return both[:, :-2].reshape(-1, 2), both[:, -2], both[:, -1]


def _by_shard(x: torch.Tensor, heads: int, kv: int, shards: int = 1) -> tuple[torch.Tensor, ...]:
    q, v, k = (each.reshape(-1, 2) for each in x.view(shards, -1).chunk(3, -1))
    return q, k, v


LAYOUTS: dict[str, tuple[str, dict[str, Any], int, Any]] = {
    BY_HEAD: ("query_key_value", {"multi_query": False}, 12, _by_head),
    BLOCKS: ("c_attn", {}, 12, _blocks),
    f"{BLOCKS}, one kv head": ("c_attn", {"multi_query": True}, 1, _blocks),
    BY_GROUP: ("query_key_value", {"new_decoder_architecture": True, "multi_query": True}, 4, _by_group),
    BY_SHARD: ("qkv_proj", {"mp_num": 4}, 12, _by_shard),
    f"{BY_SHARD}, across": ("qkv_proj", {"mp_num": 8}, 12, _by_shard),
}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 12])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_parts_are_what_the_module_finds_of_these_heads(name: str, world_size: int) -> None:
    child, attributes, kv, take = LAYOUTS[name]
    module, outputs = Takes(**attributes), (12 + 2 * kv) * 2
    assert layout_of(module, child) == name.partition(",")[0]
    whole = torch.arange(outputs)
    shards = {"shards": attributes["mp_num"]} if "mp_num" in attributes else {}
    query, key, value = take(whole, 12, kv, **shards)
    for rank in range(world_size):
        heads = split_heads(12, kv, world_size, rank)
        parts = fused_parts(module, child, outputs, heads)
        own, at = torch.full((sum(part.size for part in parts),), -1), 0
        offset = 0
        for part in parts:
            part.fill(own[at : at + part.size], whole[offset : offset + part.total], 0)
            at, offset = at + part.size, offset + part.total
        assert offset == outputs
        q, k, v = take(own, heads.num_local_heads, heads.num_local_kv_heads)
        assert torch.equal(q, query[slice(*heads.q)])
        assert torch.equal(k, key[slice(*heads.kv)]) and torch.equal(v, value[slice(*heads.kv)])


# --- families that use a known name for another layout ---------------------------------------------------------------


class Attends(nn.Module):
    """Attention with four heads of eight; `take` splits the projection's outputs."""

    def __init__(self, child: str, shape: tuple[int, ...], q_at: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.child, self.shape, self.q_at = 4, 8, child, shape, q_at
        self.add_module(child, nn.Linear(32, 96))
        self.dense = nn.Linear(32, 32)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        taken = getattr(self, self.child)(hidden_states).view(*hidden_states.shape[:-1], *self.shape)
        q, k, v = (each.transpose(-2, -3) for each in taken.unbind(self.q_at))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(out.transpose(-2, -3).flatten(-2))


class Model(nn.Module):
    def __init__(self, child: str, shape: tuple[int, ...], q_at: int) -> None:
        super().__init__()
        self.attention = Attends(child, shape, q_at)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x)


def otherwise_body(ctx: Any) -> None:
    for child, shape, q_at, right in (
        ("query_key_value", (-1, 3, 8), -2, True),
        ("query_key_value", (3, -1, 8), -3, False),  # blocks
        ("c_attn", (3, -1, 8), -3, True),
        ("c_attn", (-1, 3, 8), -2, False),  # by head
    ):
        torch.manual_seed(1)
        model = Model(child, shape, q_at).eval().to(ctx.device)
        x, before = torch.randn(2, 5, 32, device=ctx.device), {name: p.clone() for name, p in model.named_parameters()}
        expected = model(x)
        plan = {f"attention.{child}": "colwise", "attention.dense": "rowwise"}
        if right:
            parallelize(model, ctx, plan=plan)
            assert torch.allclose(model(x), expected, 1e-4, 1e-5), (child, shape)
            continue
        with pytest.raises(StyleError, match=rf"attention.{child} would be split by heads, but its module takes its"):
            parallelize(model, ctx, plan=plan)
        assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_a_known_name_of_another_layout_is_refused(world_size: int) -> None:
    run_ranks(world_size, otherwise_body)
