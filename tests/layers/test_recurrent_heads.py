"""Layers that keep a state for each head, split by heads: prompts and cached steps compared with the unsplit model.

Tiny models of each kind cover each case of the split: groups that ranks share, groups that ranks do not divide, fewer
heads than ranks, and each form of the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from iris.errors import StyleError
import layers
from layers.hf import recurrent_heads
from layers.hf.gated_norm import GatedNorm
from layers.serving.cache import cache_name
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.coverage_of_models import tiny
from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, once, run_ranks
from tests.layers import engine_steps as steps

pytest.importorskip("transformers")
pytestmark = both
worlds = pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2, 3], scope="session")
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")

_OF_FALCON = {"mamba_rms_norm": True, "mamba_n_groups": 1}
# name: (type, its settings)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one group": ("bamba", {"mamba_n_groups": 1}),
    "a group to a head": ("bamba", {"mamba_n_groups": 8}),
    "six heads, three groups": ("nemotron_h", {"mamba_num_heads": 6, "n_groups": 3}),
    "two heads": ("nemotron_h", {"mamba_num_heads": 2, "n_groups": 1}),
    "Mamba-2 alone": ("mamba2", {}),
    "no norm": ("falcon_h1", {"mamba_n_groups": 1}),
    "the gate in front": ("falcon_h1", {**_OF_FALCON, "mamba_norm_before_gate": False}),
    "the gate behind": ("falcon_h1", {**_OF_FALCON, "mamba_norm_before_gate": True, "mamba_n_groups": 4}),
    "with experts": ("granitemoehybrid", {"mamba_n_groups": 1}),
    "two under one name": ("zamba2", {}),
    "three key heads": ("qwen3_next", {"linear_num_key_heads": 3, "linear_num_value_heads": 6}),
    "one key head": ("qwen3_5_text", {"linear_num_key_heads": 1, "linear_num_value_heads": 4}),
    "by channel": ("kimi_linear", {}),
    "five heads by channel": ("kimi_linear", {"linear_num_heads": 5}),
    "two heads by channel": ("bailing_hybrid", {"linear_num_heads": 2}),
    "of its own names": ("olmo_hybrid", {}),
}
WORDS = [[11, 5], [7, 60], [31, 2]]  # of both rows, after the prompt


def build(case: str) -> nn.Module:
    model_type, settings = CASES[case]
    return tiny.build(model_type, **settings)


def judge(results: Sequence[torch.Tensor], whole: Any, exact: Any) -> None:
    """Raises unless ranks' results are as near to `exact`, in float64, as the unsplit model `whole` is, about."""
    single, double = answers(whole), answers(steps.exact(exact))
    allowed = 4 * (single - double).abs().max() + 2e-5 * double.abs().max()
    for rank, result in enumerate(results):
        error = (result - double).abs().max()
        assert error <= allowed, f"rank {rank} is off by {error:.1e} of {double.abs().max():.1e}, not {allowed:.1e}"


@torch.no_grad()
def answers(model: Any, device: torch.device | str = "cpu") -> torch.Tensor:
    """Logits [2, 7 + 3, words]: a prompt, one row of it padded, and three steps over a cache."""
    tokens, mask = steps.prompts(device)
    with steps.exact_convolutions():
        result = model(tokens, attention_mask=mask, use_cache=True, **steps.placed(model, mask.cumsum(-1) - 1))
        logits, name = [result.logits], cache_name(model)
        for words in WORDS:
            mask = F.pad(mask, (0, 1), value=1)
            step, places = torch.tensor(words, device=device)[:, None], mask.sum(-1, keepdim=True) - 1
            options = {name: result[name], **steps.placed(model, places)}
            result = model(step, attention_mask=mask, use_cache=True, **options)
            logits.append(result.logits)
    actual = torch.cat(logits, dim=1).cpu()
    return torch.cat([actual[0], actual[1, 2:]])  # what padding makes is no answer


def split_body(ctx, case: str) -> tuple[torch.Tensor, list[str]]:
    model = build(case)
    layers.parallelize(model, ctx)
    left = [type(each).__name__ for each in model.modules() if recurrent_heads.is_recurrent(each)]
    assert not left, f"{left} are whole"
    return answers(model, ctx.device), [each.op for each in model.modules() if isinstance(each, GatedNorm)]


@worlds
@pytest.mark.parametrize("case", CASES)
@pytest.mark.some(4, on_gpus=6)
def test_prompts_and_steps_are_the_unsplit_models(world_size: int, case: str) -> None:
    results, all_norms = zip(*run_ranks(world_size, split_body, case), strict=True)
    judge(results, build(case), build(case))
    for norms in all_norms:
        if case == "one group":
            assert norms and set(norms) == {"gated RMSNorm, sums of squares over ranks"}
        if case == "a group to a head":
            assert norms and set(norms) == {"gated RMSNorm of a rank's groups"}


def state_body(ctx, case: str) -> tuple[int, int]:
    """Entries of the recurrent state that a rank keeps, and of all."""
    model, whole = build(case), build(case)
    layers.parallelize(model, ctx)
    return _entries(model, ctx.device), _entries(whole, "cpu")


@torch.no_grad()
def _entries(model: Any, device: torch.device | str) -> int:
    cache = model(torch.ones(1, 4, dtype=torch.long, device=device), use_cache=True)[cache_name(model)]
    states = [layer.recurrent_states for layer in cache.layers if getattr(layer, "recurrent_states", None) is not None]
    held = [each for state in states for each in (state.values() if isinstance(state, dict) else [state])]
    return sum(each.numel() for each in held if each is not None)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="counts, which are the same on CPUs")
@pytest.mark.parametrize("case", ["one group", "by channel", "three key heads"])
@pytest.mark.some(1)
def test_ranks_share_the_state(case: str) -> None:
    own, (whole, *_) = zip(*run_ranks(3, state_body, case), strict=True)
    assert sum(own) == whole and max(own) <= whole // 2


# --- in an engine ----------------------------------------------------------------------------------------------------


def engine_body(ctx, case: str) -> list[steps.Batch]:
    return steps.served(ctx, build(case))


@two_ranks
@pytest.mark.parametrize("case", ["three key heads", "no norm", "one group", "by channel", "six heads, three groups"])
@pytest.mark.some(1, on_gpus=5)
def test_an_engines_steps_are_the_unsplit_models(world_size: int, case: str) -> None:
    steps.judge(run_ranks(world_size, engine_body, case), build(case), build(case))


# --- loaded and saved ------------------------------------------------------------------------------------------------


def loaded_body(ctx, folder: str, case: str) -> torch.Tensor:
    model = layers.from_pretrained(folder, ctx)
    model.save_pretrained(f"{folder}/again")
    return answers(model, ctx.device)


@worlds
@pytest.mark.parametrize("case", ["one group", "no norm", "two heads", "three key heads", "by channel"])
@pytest.mark.some(2)
def test_a_checkpoint_is_read_and_written_by_parts(world_size: int, case: str, tmp_path) -> None:
    folder, whole = agreed(tmp_path), build(case)
    once(lambda: whole.save_pretrained(folder))
    judge(run_ranks(world_size, loaded_body, str(folder), case), whole, build(case))
    again, state = type(whole).from_pretrained(folder / "again").state_dict(), whole.state_dict()
    assert again.keys() == state.keys()
    for name, value in state.items():
        assert torch.equal(again[name], value), name


# --- what is not split so --------------------------------------------------------------------------------------------


def refused_body(ctx) -> None:
    model = tiny.build("jamba")
    with pytest.raises(StyleError, match=r"layers.0.mamba is a JambaMambaMixer with .*: 'recurrent_heads' expects"):
        layers.parallelize(model, ctx, plan={"model.layers.*.mamba": "recurrent_heads"})
    model = build("one group")
    net = model.model.layers[0].mamba
    net.norm.forward = lambda x, gate=None: x  # another norm than is known
    with pytest.raises(StyleError, match="layers.0.mamba is a BambaMixer"):
        layers.parallelize(model, ctx, plan={"model.layers.0.mamba": "recurrent_heads"})


@two_ranks
def test_what_has_no_heads_is_refused_by_name(world_size: int) -> None:
    run_ranks(world_size, refused_body)
