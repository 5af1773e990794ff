"""Experts of mixtures that stay quantised: kept from files, rounded from wider weights, saved, moved and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import layers
from layers.experts import SplitExperts
from layers.hf.parallelize import parallelize
import pytest
from safetensors.torch import load_file, save_file
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, once, run_ranks
from tests.layers import models, written_formats
from tests.layers.test_quantised_models import built, written

transformers = pytest.importorskip("transformers")
pytestmark = both
TWO = WORLDS[1:2] or WORLDS
# Files, model, ranks, and the forms of gates and ups, and of the way back.
KEPT = [
    ("mxfp4", "gpt_oss", 4, "mxfp4 by 32", "mxfp4 by 32"),
    ("ct_mxfp4", "deepseek", 3, "mxfp4 by 32", "mxfp4 by 32"),
    ("ct_int4_32", "experts192", 2, "int4 by 32", "int4 by 32"),
    ("fp8_block", "experts192", 2, "fp8_block by 128", "fp8_block by 32"),
    ("ct_fp8_channel", "experts192", 3, "fp8", "fp8"),
    ("ct_int4_channel", "experts192", 2, "int4", "int4"),
    ("ct_int4_32", "experts192", 4, "int4 by 32", "int4 by 16"),
    ("ct_mxfp4", "experts192", 4, "mxfp4 by 32", "mxfp4 by 16"),
    ("awq", "experts192", 4, "int4_zeros by 32", "int4_zeros by 16"),
    ("ct_nvfp4", "experts384", 2, "nvfp4 by 16", "nvfp4 by 16"),
    ("modelopt_nvfp4", "experts384", 3, "nvfp4 by 16", "nvfp4 by 16"),
    ("ct_int8", "experts192", 3, "int8", "int8"),
    ("ct_int8_128", "experts384", 2, "int8 by 128", "int8 by 64"),
    ("ct_int4_zeros", "experts384", 3, "int4_zeros by 64", "int4_zeros by 64"),
    ("awq", "experts192", 3, "int4_zeros by 32", "int4_zeros by 32"),
    ("gptq_v2", "experts384", 4, "int8_zeros by 64", "int8_zeros by 32"),
]


def of_experts(model: nn.Module) -> list[SplitExperts]:
    return [module for module in model.modules() if isinstance(module, SplitExperts)]


def kept_body(ctx, folder: str) -> tuple[list[tuple[str, ...]], int, str, str, list[int], torch.Tensor]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32, verify=True)
    experts = of_experts(model)
    forms = [tuple(each.form.name for each in one.coded.values()) for one in experts]
    held = sum(each.nbytes for one in experts for coded in one.coded.values() for each in coded.parameters)
    rows = [row.error for row in model.parallel_report.verified if "experts" in row.name]
    assert len(rows) >= 2 and max(rows) <= 1
    logits = models.logits(model, ctx.device).cpu()
    layers.save_pretrained(model, f"{folder}-again", ctx)
    again = layers.from_pretrained(f"{folder}-again", ctx)
    assert all(not one.coded for one in of_experts(again))
    widths = [one._width for one in experts]
    return forms, held, str(model.parallel_report), model.parallel_report.widened, widths, logits


@pytest.mark.parametrize("format, name, world_size, first, second", [
    each for each in KEPT if each[2] in WORLDS or UNDER_TORCHRUN and each[2] > WORLDS[0]  # more have too few groups
])  # fmt: skip
@pytest.mark.some(2, on_gpus=3)
def test_experts_stay_in_the_codes_of_their_files(
    tmp_path: Path, format: str, name: str, world_size: int, first: str, second: str
) -> None:
    folder, exact = written(tmp_path, format, name)
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        exact, dtype=torch.float32, experts_implementation="eager"
    )
    numbers = {key: each for key, each in whole.state_dict().items() if ".experts." in key and "bias" not in key}
    double = models.logits(whole.double())
    own = (models.logits(whole.float()) - double).abs().max()
    world_size = WORLDS[0] if UNDER_TORCHRUN else world_size
    results = run_ranks(world_size, kept_body, str(folder))
    for forms, _, report, line, _, logits in results:
        assert forms and set(forms) == {(first, second)}
        assert f"(experts in {', '.join(dict.fromkeys((first, second)))})" in report
        assert first in line and "kept as stored" in line
        assert (logits - double).abs().max() <= 4 * own
    if world_size == 4 and name == "gpt_oss":
        assert [widths[0] // 32 for *_, widths, _ in results] == [23, 23, 22, 22]
    config, lines = whole.config, 0  # of 128 entries: rows are padded to whole ones
    for widths in (result[4] for result in results):
        hidden, experts = config.hidden_size, next(iter(numbers.values())).shape[0]
        lines += sum(experts * (2 * width * -(-hidden // 128) + hidden * -(-width // 128)) for width in widths)
    bits = {"int4": 4, "mxfp4": 4, "nvfp4": 8, "int4_zeros": 6}
    share = bits.get(first.split()[0], 8) / 8
    held = sum(result[1] for result in results)
    assert held < 2.1 * share * 128 * lines  # rows of scales are padded to those of four lines
    saved = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-again", dtype=torch.float32)
    room = 2**-22 if "nvfp4" in format else 0  # whose scales are rounded products of two factors
    for key, each in numbers.items():
        assert torch.allclose(saved.state_dict()[key], each, rtol=room, atol=0), key


SYMMETRIC = "model.layers.0.mlp.experts.0.gate_proj", "model.layers.0.self_attn.k_proj"


def partly_symmetric(folder: Path, exact: Path) -> None:
    """Store two of the weights in `folder` with zero points that are all 8, as a library may by chance."""
    stored, plain = (load_file(each / "model.safetensors") for each in (folder, exact))
    for name in SYMMETRIC:
        parts, numbers = written_formats.awq(plain[f"{name}.weight"], 32, symmetric=True)
        stored |= {name + end: part.contiguous() for end, part in parts.items()}
        plain[f"{name}.weight"] = numbers.float()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(plain, exact / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("world_size", TWO)
def test_weights_with_and_without_zero_points_are_kept_together(tmp_path: Path, world_size: int) -> None:
    folder, exact = written(tmp_path, "awq", "experts192")
    once(lambda: partly_symmetric(folder, exact))
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        exact, dtype=torch.float32, experts_implementation="eager"
    )
    double = models.logits(whole.double())
    own = (models.logits(whole.float()) - double).abs().max()
    for forms, _, _, line, _, logits in run_ranks(world_size, kept_body, str(folder)):
        assert set(forms) == {("int4_zeros by 32",) * 2}
        assert "several formats" not in line and "another format" not in line
        assert (logits - double).abs().max() <= 4 * own


# --- rounded from wider weights --------------------------------------------------------------------------------------


def rounded_body(ctx, folder: str, weights: str) -> tuple[torch.Tensor, list[int], str, str]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32, weights=weights, verify=True)
    assert all(set(one.coded) == {one._form.first, one._form.second} for one in of_experts(model))
    assert all(row.error <= 1 for row in model.parallel_report.verified)
    logits = models.logits(model, ctx.device).cpu()
    words = layers.Engine(model, ctx, batch_size=2, max_length=16).generate(models.prompt(), models.NEW)
    layers.save_pretrained(model, f"{folder}-{weights}", ctx)
    split = parallelized(ctx, folder, weights)
    for one, other in zip(of_experts(model), of_experts(split), strict=True):
        for key, coded in one.coded.items():
            for left, right in zip(coded.parameters, other.coded[key].parameters, strict=True):
                assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), key
    codes = [each.dtype for one in of_experts(model) for coded in one.coded.values() for each in coded.parameters]
    model.to(torch.bfloat16)
    moved = [each.dtype for one in of_experts(model) for coded in one.coded.values() for each in coded.parameters]
    assert codes == moved and all(coded.dtype == torch.bfloat16 for coded in of_experts(model)[0].coded.values())
    low = models.logits(model, ctx.device).float().cpu()
    assert low.isfinite().all() and (low - logits).norm() < 0.1 * logits.norm()
    return logits, words, str(model.parallel_report), model.parallel_report.widened


def parallelized(ctx: Any, folder: str, weights: str) -> nn.Module:
    """The same from a model in memory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(ctx.device)
    parallelize(model, ctx, weights=weights)
    return model


@pytest.mark.parametrize("world_size", TWO)
@pytest.mark.parametrize(
    "weights, name", [("fp8", "experts192"), ("fp8_block", "gpt_oss"), ("int4", "experts320"), ("mxfp4", "deepseek")]
)
@pytest.mark.some(2, on_gpus=4)
def test_experts_are_rounded_to_a_format(tmp_path: Path, world_size: int, weights: str, name: str) -> None:
    folder = agreed(tmp_path) / "wide"
    once(lambda: built(name).save_pretrained(folder))
    original = built(name).state_dict()
    results = run_ranks(world_size, rounded_body, str(folder), weights)
    saved = transformers.AutoModelForCausalLM.from_pretrained(
        f"{folder}-{weights}", dtype=torch.float32, experts_implementation="eager"
    )
    changed = 0
    for key, each in saved.state_dict().items():
        if ".experts." in key and "bias" not in key:
            changed += 1
            lost = (each - original[key]).norm() / original[key].norm()
            assert 1e-3 < lost < {"fp8": 0.04, "fp8_block": 0.04, "int4": 0.15, "mxfp4": 0.17}[weights], (key, lost)
    assert changed
    words = models.generate(saved)[:, 7:].tolist()
    single = models.logits(saved)
    double = models.logits(saved.double())
    own = (single - double).abs().max()
    for logits, answer, report, _ in results:
        assert (logits - double).abs().max() <= 4 * own
        assert answer == words
        assert "experts in " in report


def widened_body(ctx, folder: str) -> tuple[int, str]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32)
    return sum(len(one.coded) for one in of_experts(model)), model.parallel_report.widened


@pytest.mark.parametrize("world_size", WORLDS[2:3] or WORLDS[:1])
def test_experts_that_no_packing_holds_are_widened_and_named(tmp_path: Path, world_size: int) -> None:
    """On three ranks 320 entries are cut at multiples of 16, inside what a packing holds."""
    folder, _ = written(tmp_path, "fp8_block", "experts320")
    for coded, line in run_ranks(world_size, widened_body, str(folder)):
        if world_size == 3:
            assert coded == 1 and "groups of 128, cut at multiples of" in line
