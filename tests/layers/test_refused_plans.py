"""Plans that could be carried out, and whose model could not be run: refused by name, before anything moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from iris.errors import StyleError
from layers.hf.parallelize import parallelize
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

transformers = pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])


def attention(name: str, columns: list[str], row: str) -> dict[str, str]:
    return {**{f"{name}.{column}": "colwise" for column in columns}, f"{name}.{row}": "rowwise"}


# --- models that read, count or reshape by themselves ----------------------------------------------------------------


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=100)
    return transformers.T5ForConditionalGeneration(config)


def bloom(**changes: Any) -> nn.Module:
    config = transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=100, **changes)
    return transformers.BloomForCausalLM(config)


def mixtral() -> nn.Module:
    sizes = dict(hidden_size=16, intermediate_size=24, num_local_experts=3, num_hidden_layers=2, head_dim=8)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**models.PLAIN, **sizes}))


class Attention(nn.Module):
    """Heads of 8, which it counts by itself, and reshapes to `width`: -1 is whatever there is."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.o(y.reshape(*x.shape[:2], self.width))


class Biased(Attention):
    """Has a bias for each head, of which nobody knows."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("slopes", torch.ones(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2) + self.slopes).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(*x.shape[:2], self.width))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Read(Pair):
    """Read the weight in a function, through another name, if a setting enables it."""

    exact = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        if not self.exact:
            return self.down(y)
        return self.multiply(y)

    def multiply(self, y: torch.Tensor) -> torch.Tensor:
        down = self.down
        return F.linear(y, down.weight[:, : y.shape[-1]], down.bias)


class Masked(Pair):
    """Takes what nobody can guess."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(x * mask[:, None])


class ReadMasked(Masked):
    """Read the weight where no trial run shows it."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x * mask[:, None]))
        return F.linear(y, self.down.weight[:, : y.shape[-1]])


class Summed(Pair):
    """Its second product takes one token's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        return self.down(y) if y.shape[-1] == 64 else self.down(y[:, :1])


class Between(nn.Module):
    """What it does `between` two products would be of the whole width."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], width: int = 64) -> None:
        super().__init__()
        self.between, self.up, self.down = between, nn.Linear(32, 64), nn.Linear(width, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


class CountedHeads(Attention):
    """As many heads as it was made with, be they as wide as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).view(*x.shape[:2], 4, -1).transpose(1, 2) for each in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).flatten(2))


class Slopes(Attention):
    """A bias for each head, by its number among those that are here."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).view(*x.shape[:2], -1, 8).transpose(1, 2) for each in (self.q, self.k, self.v))
        slopes = torch.arange(1, q.shape[1] + 1, device=x.device, dtype=x.dtype)
        scores = q @ k.transpose(-1, -2) + slopes[:, None, None] * torch.arange(x.shape[1], device=x.device)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Steps(Pair):
    """Fits its parts with many tokens, and not with the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 32)

    def forward(self, input_ids: torch.Tensor, past_key_values=None, use_cache: bool = False) -> dict:
        y = torch.relu(self.up(self.embed(input_ids)))
        if past_key_values is not None:
            y = y.view(*input_ids.shape, 64)
        return {"logits": self.down(y), "past_key_values": y if use_cache else None}


def halves(y: torch.Tensor) -> torch.Tensor:
    gate, up = y.chunk(2, -1)
    return torch.sigmoid(gate) * up


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(100, 32), nn.Linear(32, 100)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


PAIR = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}
QKV = attention("layers.*", ["q", "k", "v"], "o")
BLOOM_MLP = attention("transformer.h.*.mlp", ["dense_h_to_4h"], "dense_4h_to_h")
EXACT = {"pretraining_tp": 2, "slow_but_exact": True}
T5_SELF, T5_CROSS = "encoder.block.*.layer.0.SelfAttention", "decoder.block.*.layer.1.EncDecAttention"
# Of each: the model, its plan, and what the error says. "{64}" stands for rank 0's part of 64, "{root of 64}" for
# the first digits of its square root.
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, str], str]] = {
    "a weight read": (lambda: bloom(**EXACT), BLOOM_MLP, r"transformer.h.0.mlp.dense_4h_to_h .* reads its weight"),
    "a weight read that is whole": (
        lambda: bloom(**EXACT),
        {"transformer.h.*.self_attention.dense": "rowwise_split_input"},
        r"transformer.h.0.self_attention.dense .* reads its weight",
    ),
    "a weight read by a method": (lambda: Stack(Read), PAIR, r"layers.0.down .* reads its (weight|bias)"),
    "a weight read where nothing can be run": (
        ReadMasked,
        {"up": "colwise", "down": "rowwise"},
        "down would be split, but a forward around it reads its weight",
    ),
    "a table of biases by head": (
        t5,
        attention(T5_SELF, ["q", "k", "v"], "o"),
        r"encoder.block.0.layer.0.SelfAttention(.o)? would fail in its forward",
    ),
    "a bias by head": (
        lambda: Stack(lambda: Biased(-1)),
        QKV,
        r"layers.0(.o)? would fail in its forward.*(broadcast|input has shape)",
    ),
    "a reshape": (lambda: Stack(lambda: Attention(32)), QKV, r"layers.0 would fail in its forward.*\[11, 13, 32\]"),
    "another shape": (lambda: Stack(Summed), PAIR, r"layers.0 would give \(11, 1, 32\) in place of \(11, 13, 32\)"),
    "a fused gate by columns": (
        lambda: Stack(lambda: Between(halves, 32)),
        PAIR,
        "layers.0 cuts 64 entries, of which a rank has {64}",
    ),
    "a norm between": (
        lambda: Stack(lambda: Between(lambda y: y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))),
        PAIR,
        "layers.0 joins 64 entries, of which a rank has {64}",
    ),
    "a softmax between": (lambda: Stack(lambda: Between(lambda y: y.softmax(-1))), PAIR, "layers.0 joins 64 entries"),
    "two halves in one": (
        lambda: Stack(lambda: Between(lambda y: torch.cat([y, -y], -1), 128)),
        PAIR,
        "layers.0 concatenates 64 x 64 entries, of which a rank has {64} x {64}",
    ),
    "a factor of its width": (
        lambda: Stack(lambda: Between(lambda y: y / y.shape[-1] ** 0.5)),
        PAIR,
        r"layers.0 computes with 8.0, which would be {root of 64}",
    ),
    "heads of any width": (
        lambda: Stack(lambda: CountedHeads(-1)),
        QKV,
        "layers.0 sums over 8 entries, of which a rank has {8}",
    ),
    "heads by number": (lambda: Stack(lambda: Slopes(-1)), QKV, "layers.0 counts 4, of which a rank has {4}"),
    "an activation of experts": (
        mixtral,
        {"model.layers.*.mlp.experts": "moe_tp_experts", "model.layers.*.mlp.experts.act_fn": "colwise"},
        "model.layers.0.mlp.experts.act_fn is a SiLUActivation: style 'colwise' splits a torch.nn.Linear only",
    ),
    "the next token": (Steps, {"up": "colwise", "down": "rowwise"}, "Steps would fail in its forward"),
}


def message_on(match: str, world_size: int) -> str:
    """Return the error message on `world_size` ranks."""
    for whole in (4, 8, 64):
        part = -(-whole // world_size)
        match = match.replace(f"{{{whole}}}", f"{part}").replace(f"{{root of {whole}}}", f"{part**0.5}"[:4])
    return match


def refused_body(ctx, name: str) -> None:
    build, plan, match = REFUSED[name]
    model = build()
    before = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    with pytest.raises(StyleError, match=message_on(match, ctx.num_ranks)):
        parallelize(model, ctx, plan=plan)
    after = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    assert before == after


@two_ranks
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_fail_in_its_first_forward_is_refused_by_name(world_size: int, name: str) -> None:
    if world_size == 1:
        pytest.skip("one rank has all there is")
    run_ranks(world_size, refused_body, name)


def plain_read() -> nn.Module:
    model = Stack(Read)
    for layer in model.layers:
        layer.exact = False
    return model


T5_MLP = attention("encoder.block.*.layer.1.DenseReluDense", ["wi"], "wo")
SERVED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "a read that its settings rule out": (bloom, BLOOM_MLP),
    "a branch that its settings rule out": (plain_read, PAIR),
    "a dtype read": (t5, T5_MLP),
    "heads of another module's states": (t5, T5_MLP | attention(T5_CROSS, ["q", "k", "v"], "o")),
    "a gate in two halves": (
        lambda: Stack(lambda: Between(halves, 32)),
        {"layers.*.up": "packed_colwise", "layers.*.down": "rowwise"},
    ),
    "one by one": (lambda: Stack(lambda: Between(lambda y: F.gelu(y) * 2 + y.sin())), PAIR),
    "heads that are counted": (lambda: Stack(lambda: Attention(-1)), QKV),
}


def served(name: str, ctx=None) -> torch.Tensor:
    build, plan = SERVED[name]
    torch.manual_seed(0)
    model, tokens = build().eval(), models.prompt()
    if ctx is not None:
        parallelize(model, ctx, plan=plan)
        tokens = tokens.to(ctx.device)
    with torch.no_grad():
        result = model(tokens, decoder_input_ids=tokens) if build is t5 else model(tokens)
    return result if torch.is_tensor(result) else result.logits


def served_body(ctx) -> dict[str, torch.Tensor]:
    return {name: served(name, ctx) for name in SERVED}


@two_ranks
def test_what_looks_like_it_is_served(world_size: int) -> None:
    for results in run_ranks(world_size, served_body):
        for name, result in results.items():
            torch.testing.assert_close(result.cpu(), served(name), rtol=1e-4, atol=1e-4, msg=name)


def untried_body(ctx) -> list[str]:
    messages: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ctx, "warning", messages.append)
        parallelize(models.build("plain", "flex_attention"), ctx)  # which meta cannot run: another attention does
        parallelize(Masked(), ctx, plan={"up": "colwise", "down": "rowwise"})
        parallelize(Pair(), ctx, plan={"up": "colwise", "down": "rowwise"})
    return messages


@two_ranks
def test_what_cannot_be_tried_is_said(world_size: int) -> None:
    first, *others = run_ranks(world_size, untried_body)
    assert first == ["Masked cannot be run without weights: that up, down can be split so was not tried"]
    assert not any(others)
