"""Mixtures of experts and latent attention: split, loaded by slices from both layouts, saved, served; and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iris.errors import CheckpointError, StyleError
import layers
from layers.checkpoint import load
from layers.checkpoint.buffers import Staging
from layers.experts import SplitExperts, part_of_experts
from layers.hf.mixture import form_of
from layers.hf.parallelize import parallelize
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, once, run_ranks
from tests.layers import models

transformers = pytest.importorskip("transformers")
pytestmark = both
three_ranks = pytest.mark.parametrize("world_size", WORLDS[2:3] or WORLDS)
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)


@pytest.mark.parametrize("intermediate", [1, 7, 20, 24, 360, 1408, 2880])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_parts_are_all_of_an_expert_and_as_even_as_units_allow(world_size: int, intermediate: int) -> None:
    parts = [part_of_experts(intermediate, world_size, rank) for rank in range(world_size)]
    assert parts[0][0] == 0 and parts[-1][1] == intermediate
    assert all(first[1] == second[0] for first, second in zip(parts, parts[1:], strict=False))
    unit = 8 if intermediate % 8 == 0 and intermediate >= 8 * world_size else 1
    sizes = {stop - start for start, stop in parts}
    assert max(sizes) - min(sizes) <= unit and all(size % unit == 0 for size in sizes)


@pytest.mark.parametrize("intermediate", [768, 1408, 1536, 2048, 2880, 14336])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_the_largest_part_is_within_two_percent_of_an_even_one(world_size: int, intermediate: int) -> None:
    """Of the intermediate sizes of Qwen3-30B-A3B, DeepSeek-V2-Lite, Qwen3-235B-A22B, DeepSeek-V3, gpt-oss, Mixtral."""
    sizes = [stop - start for start, stop in (part_of_experts(intermediate, world_size, r) for r in range(world_size))]
    assert max(sizes) <= 1.02 * intermediate / world_size


def held_body(ctx) -> tuple[int, int]:
    model = wide()
    whole = sum(each.nbytes for name, each in model.named_parameters() if ".experts." in name)
    parallelize(model, ctx)
    split = [name for name, module in model.named_modules() if isinstance(module, SplitExperts)]
    assert len(split) == 2
    return whole, sum(each.nbytes for name, each in model.named_parameters() if name.startswith(tuple(split)))


def wide() -> nn.Module:
    sizes = dict(hidden_size=16, intermediate_size=1408, num_local_experts=3, num_hidden_layers=2, head_dim=8)
    torch.manual_seed(5)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**models.PLAIN, **sizes}))


@three_ranks
def test_a_rank_holds_its_share_of_the_experts(world_size: int) -> None:
    held = run_ranks(world_size, held_body)
    assert sum(own for _, own in held) == held[0][0], "each byte of the experts is on one rank"
    for whole, own in held:
        assert abs(own * world_size / whole - 1) <= 0.02


# --- a real model, from a checkpoint to text -------------------------------------------------------------------------


class Watched(Staging):
    """Staging that remembers the last one made."""

    last: Staging

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        Watched.last = self


def served_body(ctx, folder: str, name: str) -> dict[str, Any]:
    """Loads by slices, answers, generates by the engine, saves, and loads what was saved."""
    load.Staging = Watched
    try:
        model = layers.from_pretrained(f"{folder}/{name}", ctx)
    finally:
        load.Staging = Staging
    read, held = Watched.last.bytes_read, model.parallel_report.bytes
    twin = models.build(name)
    parallelize(twin, ctx)
    for key, value in twin.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    logits = models.logits(model, ctx.device).cpu()
    words = layers.Engine(model, ctx, batch_size=2, max_length=16).generate(models.prompt(), models.NEW)
    layers.save_pretrained(model, f"{folder}/{name}-again", ctx)
    again = layers.from_pretrained(f"{folder}/{name}-again", ctx)  # experts in one tensor
    for key, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    buffers = sum(buffer.nbytes for key, buffer in model.named_buffers() if key in model.state_dict())
    return {
        "logits": logits,
        "words": words,
        "read": read - buffers,
        "held": held,
        "report": str(model.parallel_report),
    }


@three_ranks
@pytest.mark.parametrize("name", [*models.MIXTURES, "transposed"])
@pytest.mark.some(1)
def test_a_checkpoint_of_single_experts_is_read_by_slices_and_served(
    world_size: int, tmp_path: Path, name: str
) -> None:  # fmt: skip
    folder = agreed(tmp_path)
    whole = models.build(name)
    once(lambda: whole.save_pretrained(folder / name, max_shard_size="20KB"))  # as transformers stores them
    results = run_ranks(world_size, served_body, str(folder), name)
    double = models.logits(_exact(models.build(name)))
    own = (models.logits(whole) - double).abs().max()
    words = models.generate(whole)[:, 7:].tolist()
    for result in results:
        assert (result["logits"] - double).abs().max() <= 4 * own + 1e-5 * double.abs().max()
        assert torch.equal(result["logits"], results[0]["logits"]) and result["words"] == words
        assert result["read"] == result["held"], "each byte of its part is read once, and no other"
        if name in models.MIXTURES:
            assert "moe_gate_up, moe_down_all_reduce" in result["report"]
    if world_size > 1:
        assert results[0]["held"] < 0.8 * sum(each.nbytes for each in whole.parameters())
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name}-again", dtype=torch.float32)
    for key, value in whole.state_dict().items():
        assert torch.equal(saved.state_dict()[key], value), key


def _exact(model: Any) -> nn.Module:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()


def missing_body(ctx, folder: str) -> None:
    with pytest.raises(CheckpointError, match=r"experts.gate_up_proj has shape \[3, 40, 32\], expected \[4, 40, 32\]"):
        layers.from_pretrained(folder, ctx)


@two_ranks
def test_an_expert_that_is_missing_is_named(world_size: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = agreed(tmp_path)

    def write() -> None:
        models.build("mixtral").save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        kept = {key: value for key, value in tensors.items() if ".layers.0.block_sparse_moe.experts.2.w1" not in key}
        kept = {key: value for key, value in kept.items() if ".layers.0.block_sparse_moe.experts.2.w3" not in key}
        assert len(kept) == len(tensors) - 2
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})

    once(write)
    run_ranks(world_size, missing_body, str(folder))


# --- what experts modules compute ------------------------------------------------------------------------------------


class Marked(nn.Module):
    """Experts as transformers marks them, with any code in between."""

    is_transposed, is_concatenated, has_gate, has_bias = False, True, True, False

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 6))
        self.down_proj = nn.Parameter(torch.randn(3, 6, 8))

    def between(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    def forward(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for token, (chosen, scales) in enumerate(zip(experts, weights, strict=True)):
            for expert, scale in zip(chosen, scales, strict=True):
                inner = self.between(self.gate_up_proj[expert] @ hidden[token])
                out[token] += scale * (self.down_proj[expert] @ inner)
        return out


class Softened(Marked):
    def between(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.softplus(gate) * up


class Normed(Marked):
    def between(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.layer_norm(gate, gate.shape[-1:]) * up


class Limited(Marked):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def between(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class Block(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        experts = torch.arange(len(hidden), device=hidden.device)[:, None] % 3
        return self.experts(hidden, experts, torch.ones(experts.shape, device=hidden.device) / 2)


def experts_body(ctx) -> dict[str, torch.Tensor]:
    results = {}
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for kind in (Marked, Softened):
        torch.manual_seed(5)
        block = Block(kind()).requires_grad_(False)
        report = parallelize(block, ctx, plan={"experts": "moe_tp_experts"})
        assert isinstance(block.experts, SplitExperts) == (kind is Marked), report
        results[kind.__name__] = block(x.to(ctx.device)).cpu()
    torch.manual_seed(5)
    block = Block(Normed())
    with pytest.raises(StyleError, match="experts is a Normed whose parts do not add up to the whole"):
        parallelize(block, ctx, plan={"experts": "moe_tp_experts"})
    for style, why in {"grouped_gemm": "gives whole experts to ranks", "ep_dispatch_experts": "as uneven as",
                       "sequence_parallel": "attention takes its shape"}.items():  # fmt: skip
        with pytest.raises(StyleError, match=f"style '{style}' of experts is not supported: .*{why}"):
            parallelize(block, ctx, plan={"experts": style})
    assert type(block.experts) is Normed and not block.experts._forward_hooks
    return results


@two_ranks
def test_experts_are_served_by_what_they_compute(world_size: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for results in run_ranks(world_size, experts_body):
        for kind in (Marked, Softened):
            torch.manual_seed(5)
            expected = Block(kind())(x)
            torch.testing.assert_close(results[kind.__name__], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_activations_that_the_ops_have_are_recognised() -> None:
    kinds = {name: models.build(name).model.layers[-1].mlp.experts for name in models.MIXTURES}
    actual = {name: form_of("experts", module, {}).activation for name, module in kinds.items()}
    assert actual["gpt_oss"].limit == 7.0 and actual["gpt_oss"].shift == 1.0
    assert all(actual[name].kind == "silu" and actual[name].limit is None for name in actual if name != "gpt_oss")


@pytest.mark.parametrize("limit", [0.5, 7.0, 20.0, 1000.0])
@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_a_limit_is_recognised_however_large_it_is(limit: float) -> None:
    assert form_of("experts", Limited(limit), {}).activation.limit == limit
    assert form_of("experts", Marked(), {}).activation.limit is None
