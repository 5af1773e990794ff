"""What becomes of a split model in its user's hands: copied, pickled, converted, hooked, trained."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path
import pickle

import iris
from iris.errors import ArgumentError, CheckpointError, ClosedError, StyleError
from iris_ops.planning.weights.fp8 import FP8
import layers
from layers.checkpoint.buffers import Staging
from layers.hf.norms import RMSNorm
from layers.hf.parallelize import parallelize
import pytest
import torch
from torch import nn

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks
from tests.layers import models, test_families

transformers = pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])


def split(ctx, name: str, **options) -> nn.Module:
    model = models.build(name)
    parallelize(model, ctx, **options)
    return model


def test_a_closed_context_splits_nothing(tmp_path: Path) -> None:
    with iris.iris(1 << 20) as ctx:
        pass
    for split_over in (parallelize, lambda model, ctx: layers.from_pretrained(tmp_path, ctx)):
        with pytest.raises(ClosedError, match="this context was closed"):
            split_over(models.build("tied"), ctx)


# --- copies ----------------------------------------------------------------------------------------------------------

COPIED = {"tied": {}, "fused": {}, "kv2": {"sequence_parallel": 4}, "bias": {"weights": "fp8_all"}}


def copied_body(ctx, name: str, options: dict) -> None:
    model = split(ctx, name, **options)
    whole, tokens = models.logits(model, ctx.device), models.generate(model, ctx.device)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    assert not torch.equal(models.logits(model, ctx.device), whole), "the first has weights of its own"
    assert torch.equal(models.logits(twin, ctx.device), whole)
    assert torch.equal(models.generate(twin, ctx.device), tokens)
    assert all(module.ctx is ctx for module in twin.modules() if hasattr(module, "ctx"))


@two_ranks
@pytest.mark.parametrize("name", COPIED)
@pytest.mark.some(1, on_gpus=2)
def test_a_copy_has_weights_of_its_own_and_the_same_context(world_size: int, name: str) -> None:
    run_ranks(world_size, copied_body, name, COPIED[name])


def pickled_body(ctx) -> None:
    model = split(ctx, "plain")
    for value in (ctx, model):
        with pytest.raises(ArgumentError, match=r"cannot be pickled; expected .* state_dict\(\).*save_pretrained"):
            pickle.dumps(value)
    with pytest.raises(ArgumentError, match="cannot be pickled"):
        torch.save(model, io.BytesIO())
    whole, kept = models.logits(model, ctx.device), io.BytesIO()
    torch.save(model.state_dict(), kept)
    kept.seek(0)
    for parameter in model.parameters():
        parameter.zero_()
    model.load_state_dict(torch.load(kept))
    assert torch.equal(models.logits(model, ctx.device), whole)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="self_attn.q_proj.weight is the unsplit model's: expected a state_dict"):
            model.load_state_dict(models.build("plain").state_dict(), strict=strict)


@two_ranks
def test_what_can_be_pickled_is_the_state_dict(world_size: int) -> None:
    run_ranks(world_size, pickled_body)


def other_ranks_body(ctx, path: str) -> None:
    model = split(ctx, "plain")
    whole = models.logits(model, ctx.device)
    if ctx.cur_rank == 0:
        torch.save(model.state_dict(), path)
    ctx.barrier()
    state = torch.load(path)
    assert all(state[key].shape == value.shape for key, value in model.state_dict().items()), "which tell nothing"
    if ctx.cur_rank == 0:
        model.load_state_dict(state)
    else:
        with pytest.raises(RuntimeError, match="down_proj is the part of rank 0 of 2: expected rank 1 of 2's"):
            model.load_state_dict(state)
    assert torch.equal(models.logits(model, ctx.device), whole)
    model.load_state_dict(dict(model.state_dict()))  # which says nothing of ranks


@pytest.mark.skipif(UNDER_TORCHRUN and WORLDS != [2], reason="parts of two ranks are alike")
@two_ranks
def test_another_ranks_state_is_refused(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, other_ranks_body, str(agreed(tmp_path) / "state.pt"))


# --- dtypes ----------------------------------------------------------------------------------------------------------


def converted_body(ctx, weights: str) -> None:
    model, before = (models.build("bias").to(dtype) for dtype in (torch.float32, torch.bfloat16))
    parallelize(model, ctx, weights=weights)
    parallelize(before, ctx, weights=weights)
    rounded = {name: p.clone() for name, p in model.named_parameters() if p.dtype == FP8}
    model.to(torch.bfloat16)
    after = dict(model.named_parameters())
    assert rounded and all(
        torch.equal(value.float(), after[name].float()) and after[name].dtype == FP8 for name, value in rounded.items()
    )
    scales = [value.dtype for name, value in after.items() if name.endswith("weight_scale")]
    assert len(scales) == len(rounded) and set(scales) == {torch.float32}
    ops = [[module.op for module in each.modules() if hasattr(module, "op")] for each in (model, before)]
    assert ops[0] == ops[1], "served as if it had been bfloat16 before"
    one, other = (models.logits(each, ctx.device) for each in (model, before))
    assert one.dtype == torch.bfloat16
    # of fp8 weights, those of float32 ones and of the bfloat16 ones differ by one rounding
    assert (one - other).norm() < 0.05 * other.norm()
    assert models.logits(model.float(), ctx.device).dtype == torch.float32


@two_ranks
@pytest.mark.parametrize("weights", ["fp8", "fp8_all"])
def test_fp8_weights_stay_so_where_a_model_is_converted(world_size: int, weights: str) -> None:
    run_ranks(world_size, converted_body, weights)


# --- hooks -----------------------------------------------------------------------------------------------------------


def hooked_body(ctx) -> None:
    model, seen = models.build("plain"), []
    layer = model.model.layers[0]
    handle = layer.mlp.down_proj.register_forward_hook(lambda *_: seen.append("down_proj"))
    layer.input_layernorm.register_forward_pre_hook(lambda *_: seen.append("norm"))
    with pytest.raises(StyleError, match=r"model.layers.0.mlp.down_proj has a hook or its own forward"):
        parallelize(model, ctx)
    assert type(layer.mlp.down_proj) is nn.Linear
    handle.remove()
    layer.self_attn.q_proj.forward = layer.self_attn.q_proj.forward
    with pytest.raises(StyleError, match=r"model.layers.0.self_attn.q_proj has a hook"):
        parallelize(model, ctx)
    del layer.self_attn.q_proj.forward
    parallelize(model, ctx)
    assert not seen, "nothing was called yet"
    model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: seen.append("down_proj"))
    models.assert_logits(models.logits(model, ctx.device), "plain")
    assert seen == ["norm", "down_proj"]
    assert isinstance(model.model.layers[1].input_layernorm, RMSNorm)


@two_ranks
def test_no_hook_is_lost(world_size: int) -> None:
    run_ranks(world_size, hooked_body)


def shared_body(ctx) -> None:
    model, whole = models.build("plain"), models.build("plain")
    for each in (model, whole):
        first, second = each.model.layers
        second.mlp = first.mlp  # with all that it holds
        second.self_attn.v_proj.weight = first.self_attn.v_proj.weight
    kept, second.self_attn.q_proj = second.self_attn.q_proj, first.self_attn.q_proj
    with pytest.raises(
        StyleError, match=r"self_attn.q_proj is a child of several modules: expected a separate linear for each"
    ):
        parallelize(whole, ctx)
    second.self_attn.q_proj = kept
    parallelize(model, ctx)
    expected = models.logits(whole)
    torch.testing.assert_close(models.logits(model, ctx.device).cpu(), expected, rtol=1e-4, atol=1e-4)


@two_ranks
def test_a_linear_of_two_modules_is_refused_and_a_module_of_two_layers_is_not(world_size: int) -> None:
    run_ranks(world_size, shared_body)


# --- training --------------------------------------------------------------------------------------------------------


def training_body(ctx) -> torch.Tensor:
    model = test_families.build("phi", {"resid_pdrop": 0.5})
    model.train()
    torch.manual_seed(ctx.cur_rank)
    parallelize(model, ctx)
    assert not any(module.training for module in model.modules())
    for each in (model, copy.deepcopy(model)):
        with pytest.raises(ArgumentError, match="mode is True: expected False, a split model is for inference"):
            each.train()
        assert each.eval() is each
    return test_families.logits(model, ctx.device)


@two_ranks
def test_a_split_model_is_in_eval_mode_and_stays_there(world_size: int) -> None:
    model = test_families.build("phi", {"resid_pdrop": 0.5})
    for result in run_ranks(world_size, training_body):  # ranks that drop out what each draws give neither the same ...
        torch.testing.assert_close(result.cpu(), test_families.logits(model), rtol=1e-3, atol=1e-4)  # ... nor this


# --- loading and saving ----------------------------------------------------------------------------------------------


def refused_body(ctx, folder: str) -> None:
    model = split(ctx, "plain")
    model.save_pretrained(folder)
    before = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    ctx.barrier()
    model.generation_config.temperature = 0.5  # without sampling: rank 0, which writes it, is refused by transformers
    with pytest.raises(CheckpointError, match=r"1 problem\(s\):\n  rank 0: GenerationConfig is invalid"):
        model.save_pretrained(folder)
    assert models.generate(model, ctx.device, temperature=None).shape == (2, 7 + models.NEW), "ranks go on together"
    after = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    assert before == after


@two_ranks
def test_what_transformers_refuses_to_save_is_an_error_on_every_rank(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, refused_body, str(agreed(tmp_path)))


def full_body(ctx, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if ctx.cur_rank == 1:
            patch.setattr(Staging, "read", lambda *_: torch.empty(1 << 60))
        with pytest.raises(CheckpointError, match=r"cannot be read, 1 problem\(s\):\n  rank 1: .*memory"):
            layers.from_pretrained(folder, ctx)
    layers.from_pretrained(folder, ctx)


@pytest.mark.skipif(ON_GPU, reason="as a CPU says it")
@two_ranks
def test_memory_that_one_rank_lacks_is_an_error_on_every_rank(world_size: int, tmp_path: Path) -> None:
    models.build("plain").save_pretrained(agreed(tmp_path))
    run_ranks(world_size, full_body, str(agreed(tmp_path)))


def generation_body(ctx, folder: str) -> None:
    split(ctx, "plain").save_pretrained(folder)


@two_ranks
def test_the_generation_config_is_saved_as_it_was(world_size: int, tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    run_ranks(world_size, generation_body, str(folder / "split"))
    models.build("plain").generation_config.save_pretrained(tmp_path)  # each rank its own
    kept, expected = (
        json.loads((path / "generation_config.json").read_text()) for path in (folder / "split", tmp_path)
    )
    assert kept == expected


HYBRID = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "num_hidden_layers": 1}


def buffers_body(ctx, folder: str) -> torch.Tensor:
    return test_families.logits(layers.from_pretrained(folder, ctx, partial=True), ctx.device)


@two_ranks
def test_buffers_that_the_model_fills_in_its_layers_are_computed(world_size: int, tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    model = test_families.build("falcon_h1", {**HYBRID, "ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 2.0]})
    model.save_pretrained(folder)
    for result in run_ranks(world_size, buffers_body, str(folder)):
        torch.testing.assert_close(result.cpu(), test_families.logits(model), rtol=1e-3, atol=1e-4)


# --- arguments -------------------------------------------------------------------------------------------------------


def bad_arguments_body(ctx, folder: str) -> None:
    model = models.build("plain")
    for options, match in [
        ({"filter_fn": 5}, "filter_fn is 5: expected None or a function"),
        ({"sequence_parallel": -3}, "sequence_parallel is -3: expected .auto., a bool or a positive integer"),
        ({"sequence_parallel": "all"}, "sequence_parallel is 'all'"),
        ({"plan": {"lm_head": None}}, "plan is {'lm_head': None}: expected 'auto' or a dict"),
        ({"plan": {7: "colwise"}}, "plan is {7: 'colwise'}: expected"),
    ]:
        with pytest.raises(ArgumentError, match=match):
            parallelize(model, ctx, **options)
    for call in (
        lambda: layers.share_rng("tp"),
        lambda: layers.save_pretrained(model, folder, "tp"),
        lambda: layers.fused_styles("tp").__enter__(),
        lambda: layers.Engine(model, "tp"),
    ):
        with pytest.raises(ArgumentError, match="ctx is a str: expected the context"):
            call()
    with pytest.raises(ArgumentError, match="model is a Linear: expected a Hugging Face model"):
        layers.Engine(nn.Linear(2, 2), ctx)
    parallelize(model, ctx)
    config = transformers.GenerationConfig(max_new_tokens=2, max_time=5.0)
    criteria = transformers.StoppingCriteriaList([transformers.MaxTimeCriteria(5.0)])
    for arguments, options in [((config,), {}), ((), {"stopping_criteria": criteria})]:
        with pytest.raises(ArgumentError, match="max_time is 5"):
            model.generate(models.prompt().to(ctx.device), *arguments, **options)
    for dtype in ("auto", torch.int8, torch.float64, 7):
        with pytest.raises(ArgumentError, match=f"dtype is {dtype!r}: expected None, torch.bfloat16"):
            layers.from_pretrained(folder, ctx, dtype=dtype)
    with pytest.raises(CheckpointError, match=r"is not a folder.*File name too long"):  # where rank 0 alone looks
        layers.from_pretrained("x" * 300, ctx)
    config = transformers.GenerationConfig(max_new_tokens=2)
    assert model.generate(models.prompt().to(ctx.device), config).shape == (2, 9)


@two_ranks
def test_arguments_of_another_kind_are_refused_by_name(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, bad_arguments_body, str(agreed(tmp_path)))
