"""Linears that share an input, merged: the same model, called in whatever order, loaded under the old names."""

from __future__ import annotations

import copy

from iris.errors import ShapeError
import layers
from layers.hf.merge import Slice
from layers.hf.norms import fuse_norms
from layers.hf.parallelize import parallelize
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytestmark = both
three = pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [3])


def merged_body(ctx, name: str) -> tuple:
    torch.manual_seed(ctx.cur_rank)
    model = models.build(name)
    apart = models.build(name)
    parallelize(apart, ctx, fuse=False)
    report = parallelize(model, ctx)
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for split, others in ((attention, apart.model.layers[1].self_attn), (mlp, apart.model.layers[1].mlp)):
        for child in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            if hasattr(split, child):
                piece, alone = getattr(split, child), getattr(others, child)
                assert isinstance(piece, Slice) and not dict(piece.named_parameters())
                for key in ("weight", "bias"):
                    assert (getattr(alone, key) is None) == (getattr(piece, key) is None)
                    if getattr(alone, key) is not None:
                        assert torch.equal(getattr(alone, key), getattr(piece, key))
                        source = torch.randn(piece.out_features, *([piece.in_features] if key == "weight" else []))
                        backup = getattr(alone, key).clone()
                        for each in (piece, alone):
                            each.load_shard(key, source)
                        assert torch.equal(getattr(alone, key), getattr(piece, key))
                        assert not torch.equal(backup, getattr(piece, key))
                        getattr(piece, key).copy_(backup)
                hidden = torch.randn(2, 3, piece.in_features, device=ctx.device)
                with pytest.raises(ShapeError, match="merged product"):
                    piece(hidden)
                product = getattr(split, "qkv_proj" if child[0] in "qkv" else "gate_up_proj")(hidden)
                torch.testing.assert_close(piece(product), torch.nn.functional.linear(hidden, piece.weight, piece.bias))
    logits = models.logits(model, ctx.device)
    with pytest.raises(Exception, match="."):  # nothing of a failed call is left behind
        attention(torch.zeros(1, 2, attention.q_proj.in_features, device=ctx.device))
    assert torch.equal(models.logits(model, ctx.device), logits)
    rows = {row.name: row for row in report.rows}
    assert "model.layers.0.self_attn.q_proj" not in rows
    return logits, models.generate(model, ctx.device).cpu(), rows["model.layers.0.self_attn.qkv_proj"].style


@three
@pytest.mark.parametrize("name", ["bias", "kv1", "nine_heads", "qk_norm"])
@pytest.mark.some(1, on_gpus=2)
def test_merged_linears_give_the_same_model(world_size: int, name: str) -> None:
    for logits, tokens, style in run_ranks(world_size, merged_body, name):
        models.assert_logits(logits, name)
        assert torch.equal(tokens, models.expected(name)[2])
        assert style == "colwise, merged from q_proj, k_proj, v_proj"


def kept_apart_body(ctx) -> list[str]:
    model = nn.Module()
    model.block = More(12)
    whole = copy.deepcopy(model.block).to(ctx.device)
    plan = {"block.a": "colwise", "block.b": "colwise", "block.down": "rowwise"}
    report = layers.parallelize(model, ctx, plan=plan)
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).to(ctx.device)
    torch.testing.assert_close(model.block(x), whole(x))
    return [row.name for row in report.rows]


class More(nn.Module):
    """Uses its input for something else too."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.down = (nn.Linear(size, size) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.a(x) * self.b(x))


@three
def test_a_module_that_uses_its_input_otherwise_is_left_alone(world_size: int) -> None:
    for names in run_ranks(world_size, kept_apart_body):
        assert names == ["block.a", "block.b", "block.down"]


def norms_body(ctx, name: str, invariant: str | None) -> list[str]:
    ctx.invariant = invariant
    model = models.build(name)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, 0.5, 2)
    whole, apart = models.logits(model), copy.deepcopy(model)
    report = parallelize(model, ctx)
    torch.testing.assert_close(models.logits(model, ctx.device).cpu(), whole, rtol=1e-3, atol=1e-3)
    assert [row.name for row in report.rows if "norm" in row.name] == [n for n, _ in norms_of(apart)]
    return [type(module).__name__ for _, module in norms_of(model)]


def norms_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, module) for name, module in model.named_modules() if name.endswith("norm")]


@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [1])
@pytest.mark.parametrize(
    "name, kind, invariant",
    [("qk_norm", "RMSNorm", None), ("offset_norm", "GemmaRMSNorm", None), ("offset_norm", "RowsAlikeRMSNorm", "batch")],
)
def test_plain_norms_are_exchanged(world_size: int, name: str, kind: str, invariant: str | None) -> None:
    for kinds in run_ranks(world_size, norms_body, name, invariant):
        assert len(kinds) >= 5 and set(kinds) == {kind}


def test_layer_norms_are_exchanged_where_bits_are_promised() -> None:
    from transformers.models.cohere.modeling_cohere import CohereLayerNorm
    from transformers.models.t5.modeling_t5 import T5LayerNorm

    torch.manual_seed(3)
    like = [nn.LayerNorm(64), nn.LayerNorm(64, 1e-3, bias=False), CohereLayerNorm(64)]
    unlike = [
        nn.LayerNorm(64, elementwise_affine=False),
        nn.LayerNorm((2, 64)),
        T5LayerNorm(64),
        CohereLayerNorm((2, 64)),
    ]
    theirs = nn.ModuleList([*like, *unlike])
    for parameter in theirs.parameters():
        nn.init.uniform_(parameter, 0.5, 2)
    alone, promised = copy.deepcopy(theirs), copy.deepcopy(theirs)
    assert fuse_norms(alone) == 0 and fuse_norms(promised, rows_alike=True) == len(like)
    assert list(promised.state_dict()) == list(theirs.state_dict())
    x = torch.randn(5, 2, 64)
    for mine, before in zip(promised, theirs, strict=True):
        assert torch.allclose(mine(x), before(x), atol=1e-5)


@torch.no_grad()
def as_wide_body(ctx, sequence_parallel: int | bool) -> torch.Tensor:
    """Of a model whose merged products are as wide as their inputs, on two ranks."""
    import transformers

    torch.manual_seed(5)
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, num_hidden_layers=2, **sizes)).eval()
    tokens = torch.arange(8).view(1, 8)
    expected = model(tokens).logits
    parallelize(model.to(ctx.device), ctx, sequence_parallel=sequence_parallel)
    layer = model.model.layers[0]
    assert layer.self_attn.qkv_proj.weight.shape == layer.mlp.gate_up_proj.weight.shape == (32, 32)
    hidden = torch.randn(8, 32, device=ctx.device)
    for _ in range(2):
        torch.testing.assert_close(model(tokens.to(ctx.device)).logits.cpu(), expected, rtol=1e-4, atol=1e-5)
        for piece in (layer.self_attn.q_proj, layer.mlp.up_proj):
            with pytest.raises(ShapeError, match="the merged product, which the parent module's call prepares"):
                piece(hidden)
    engine = layers.Engine(model, ctx, 1, 16, compile="eager")
    torch.testing.assert_close(engine.read(tokens.to(ctx.device)).cpu(), expected[:, -1], rtol=1e-4, atol=1e-5)
    return engine.generate(tokens, 4)


@pytest.mark.parametrize("sequence_parallel", [False, 4])
@pytest.mark.some(1)
def test_products_as_wide_as_their_input_are_merged(sequence_parallel: int | bool) -> None:
    """As in Qwen3-32B on two ranks; a slice that receives the unsliced input raises an error."""
    first, second = run_ranks(2, as_wide_body, sequence_parallel)
    assert first == second
