"""Whole quantised models on 1 to 4 ranks: their answers, the bytes that ranks read, and how loading is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iris.errors import CheckpointError
import layers
from layers.checkpoint.buffers import Staging
from layers.experts import SplitExperts
from layers.weight_storage import Quantised
import pytest
from safetensors.torch import load_file, save_file
import torch
from torch import nn

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, agreed, both, once, run_ranks
from tests.layers import models, written_formats

pytest.importorskip("transformers")
pytestmark = both

_DENSE: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 352,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "num_hidden_layers": 1,
}
_GROUP128 = {**_DENSE, "hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 4, "head_dim": 64}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Llama", _DENSE),
    "groups128": ("Llama", {**_GROUP128, "num_key_value_heads": 2}),
    "experts192": ("Qwen3Moe", {**_EXPERTS, "hidden_size": 160, "moe_intermediate_size": 192}),
    "experts384": ("Qwen3Moe", {**_EXPERTS, "hidden_size": 256, "moe_intermediate_size": 384}),
    "experts320": ("Qwen3Moe", {**_EXPERTS, "hidden_size": 64, "moe_intermediate_size": 320}),
    "deepseek": (
        "DeepseekV3",
        {**models._OF_DEEPSEEK, "hidden_size": 64, "moe_intermediate_size": 96}
        | dict.fromkeys(
            ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 32
        ),
    ),
    "gpt2": ("GPT2", {"hidden_size": 64, "n_inner": 64, "num_hidden_layers": 1}),
    "gpt_oss": (
        "GptOss",
        {**models._EXPERTS, "hidden_size": 64, "intermediate_size": 2880, "num_hidden_layers": 1, "sliding_window": 4},
    ),
}
CASES = [
    ("fp8_block", "experts192", 2), ("fp8_block", "experts320", 3), ("fp8_block_bf16", "dense", 4),
    ("fp8_block_e8m0", "dense", 3), ("fp8_tensor_static", "dense", 2), ("fbgemm_fp8", "dense", 2),
    ("ct_fp8_channel", "experts192", 3), ("ct_fp8_tensor", "dense", 2), ("ct_fp8_block", "dense", 2),
    ("ct_mxfp8", "dense", 2), ("ct_mxfp4", "deepseek", 2), ("ct_nvfp4", "dense", 3), ("ct_int4_32", "deepseek", 2),
    ("ct_int4_zeros", "groups128", 3), ("ct_int4_channel", "dense", 2), ("ct_int8_128", "groups128", 4),
    ("ct_int8", "dense", 2), ("modelopt_fp8", "dense", 2), ("modelopt_nvfp4", "dense", 2), ("awq", "dense", 3),
    ("gptq", "dense", 3), ("awq_symmetric", "dense", 2),
    ("gptq_v2", "groups128", 2), ("gptq_ordered", "dense", 2), ("mxfp4", "gpt_oss", 4),
    ("ct_int4_32", "experts192", 1),
    ("fp8_with_fp4_experts", "deepseek", 3),
]  # fmt: skip


# The packings in which linears keep each format: "fp8" and integers where a row has one scale. Others are widened.
KEPT: dict[str, set[str]] = {
    **dict.fromkeys(("fp8_block", "fp8_block_bf16", "fp8_block_e8m0", "ct_fp8_block"), {"fp8_block", "fp8"}),
    "fp8_with_fp4_experts": {"fp8_block", "fp8", "mxfp4"},
    "mxfp4": {"mxfp4"},
    "ct_mxfp8": {"fp8_block"},
    **dict.fromkeys(("fp8_tensor_static", "fbgemm_fp8", "ct_fp8_channel", "ct_fp8_tensor", "modelopt_fp8"), {"fp8"}),
    "ct_mxfp4": {"mxfp4"},
    **dict.fromkeys(("ct_nvfp4", "modelopt_nvfp4"), {"nvfp4"}),
    **dict.fromkeys(("ct_int8", "ct_int8_128"), {"int8"}),
    **dict.fromkeys(("ct_int4_zeros", "awq"), {"int4_zeros"}), "gptq_v2": {"int8_zeros"},
    "gptq_ordered": {"int4"},
    **dict.fromkeys(("ct_int4_32", "ct_int4_channel", "gptq", "awq_symmetric"), {"int4"}),
}  # fmt: skip


def built(name: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    architecture, changes = MODELS[name]
    config = getattr(transformers, f"{architecture}Config")(**{**models.PLAIN, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(13)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def written(folder: Path, format: str, name: str) -> tuple[Path, Path]:
    """The folders of a quantised model and of its exact numbers, the same for all ranks."""
    folder = agreed(folder) / "quantised"
    if format == "mxfp4":
        once(lambda: written_formats.write_gpt_oss(built(name), folder))
    else:
        once(lambda: written_formats.write(built(name), folder, format))
    return folder, folder.with_name("quantised-exact")


def loaded_body(ctx, folder: str) -> tuple[torch.Tensor, torch.Tensor, list[int], str, dict[str, str]]:
    kept, widened = (
        layers.from_pretrained(folder, ctx, dtype=torch.float32, weights=weights, verify=weights is None)
        for weights in (None, "widened")
    )
    assert not hasattr(kept.config, "quantization_config")
    assert all(row.error <= 1 for row in kept.parallel_report.verified)
    assert " kept as stored" not in widened.parallel_report.widened
    forms = {
        name: module.storage.form.name
        for name, module in kept.named_modules()
        if isinstance(getattr(module, "storage", None), Quantised)
    }
    for name, module in kept.named_modules():
        if isinstance(module, SplitExperts):
            forms |= {f"{name}.{key}": each.form.name for key, each in module.coded.items()}
    sizes = [each.parallel_report.bytes for each in (kept, widened)]
    logits = (models.logits(each, ctx.device).cpu() for each in (kept, widened))
    return *logits, sizes, kept.parallel_report.widened, forms


@pytest.mark.parametrize("format, name, world_size", [case for case in CASES if case[2] in WORLDS or UNDER_TORCHRUN])
@pytest.mark.some(8, on_gpus=14)
def test_a_split_model_is_the_dequantised_one(tmp_path: Path, format: str, name: str, world_size: int) -> None:
    from transformers import AutoModelForCausalLM

    folder, exact = written(tmp_path, format, name)
    whole = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32, experts_implementation="eager").eval()
    single = models.logits(whole)
    double = models.logits(whole.double())
    own = (single - double).abs().max()
    results = run_ranks(WORLDS[0] if UNDER_TORCHRUN else world_size, loaded_body, str(folder))
    for kept, widened, _, line, forms in results:
        assert (kept - double).abs().max() <= 4 * own, (kept - double).abs().max() / own
        # linears: each product of a kept weight is that of the numbers that it stands for
        if not ON_GPU and name in ("dense", "groups128") and "ordered" not in format:  # which adds in another order
            assert torch.equal(kept, widened)
        assert {form.split()[0] for form in forms.values()} <= KEPT.get(format, set()), forms
        assert bool(forms) == (format in KEPT), (forms, line)
        assert ("kept as stored, in " in line) == bool(forms)
        assert "widened to float32 (" in line or bool(forms)
    if name in ("gpt_oss", "groups128", "experts192") and format != "fp8_block":
        for way in (0, 1):
            sizes = [result[2][way] for result in results]
            assert max(sizes) * len(sizes) <= 1.07 * sum(sizes), sizes


def many_ranks_body(ctx, folder: str) -> tuple[torch.Tensor, int]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32, verify=True)
    assert all(row.error <= 1 for row in model.parallel_report.verified)
    return models.logits(model, ctx.device).cpu(), model.parallel_report.bytes


@pytest.mark.slow
@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs eight ranks")
@pytest.mark.parametrize("world_size", [5, 8])
@pytest.mark.parametrize("format", ["fp8_block", "ct_nvfp4", "awq", "gptq_ordered_128"])
@pytest.mark.parametrize("name", ["groups128", "experts192"])
def test_more_ranks_than_groups_have_the_same_logits(tmp_path: Path, format: str, name: str, world_size: int) -> None:
    from transformers import AutoModelForCausalLM

    folder, exact = written(tmp_path, format, name)
    whole = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32, experts_implementation="eager").eval()
    single = models.logits(whole)
    double = models.logits(whole.double())
    own = (single - double).abs().max()
    results = run_ranks(world_size, many_ranks_body, str(folder))
    for logits, _ in results:
        assert (logits - double).abs().max() <= 4 * own
    if name == "experts192":
        sizes = [size for _, size in results]
        assert max(sizes) * len(sizes) <= 1.07 * sum(sizes), sizes


def both_body(ctx, folder: str, exact: str) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 50, (2, 7), generator=torch.Generator().manual_seed(1)).to(ctx.device)
    with torch.no_grad():
        made = [layers.from_pretrained(each, ctx, dtype=torch.float32)(tokens).logits.cpu() for each in (folder, exact)]
    return made[0], made[1]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", written_formats.PUBLISHED_IN_FP8)
def test_types_that_are_published_in_fp8_are_the_dequantised_ones(tmp_path: Path, model_type: str) -> None:
    from tests.coverage_of_models import tiny

    folder = agreed(tmp_path) / "quantised"
    once(lambda: written_formats.write(tiny.build(model_type).float().eval(), folder, "fp8_block_bf16"))
    for made, exact in run_ranks(WORLDS[1] if len(WORLDS) > 1 else WORLDS[0], both_body, str(folder),
                                 str(folder.with_name("quantised-exact"))):  # fmt: skip
        # a kept row's scale multiplies the sum, which rounds in another place: for qwen3_5_moe_text by 6e-6 of 6
        assert (made - exact).abs().max() <= 4e-6 * exact.abs().max()


def plain_body(ctx, folder: str) -> torch.Tensor:
    return models.logits(layers.from_pretrained(folder, ctx, dtype=torch.float32), ctx.device).cpu()


def rewrite(folder: Path, change: Any) -> None:
    """Replaces the tensors in `folder` by those that `change` returns."""
    once(lambda: save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors"))


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_layers_that_only_predict_more_tokens_stay_in_the_files(tmp_path: Path, world_size: int) -> None:
    """DeepSeek publishes layer 61, which its class ignores, with experts one by one as in the layers before."""
    folder, _ = written(tmp_path, "fp8_block", "deepseek")
    expected = run_ranks(world_size, plain_body, str(folder))
    experts = "model.layers.1.mlp.experts."

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        more = {k.replace("layers.1.", "layers.61."): each.clone() for k, each in tensors.items() if experts in k}
        assert more
        return tensors | more

    rewrite(folder, change)
    for logits, before in zip(run_ranks(world_size, plain_body, str(folder)), expected, strict=True):
        assert torch.equal(logits, before)


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_biases_of_zeros_that_the_model_lacks_are_read_past(tmp_path: Path, world_size: int) -> None:
    """AutoGPTQ stored a bias for every layer that it quantised; another number in one is refused."""
    folder, _ = written(tmp_path, "gptq", "dense")
    expected = run_ranks(world_size, plain_body, str(folder))
    bias = "model.layers.0.mlp.up_proj.bias"
    rewrite(folder, lambda tensors: tensors | {bias: torch.zeros(352, dtype=torch.float16)})
    for logits, before in zip(run_ranks(world_size, plain_body, str(folder)), expected, strict=True):
        assert torch.equal(logits, before)
    rewrite(folder, lambda tensors: tensors | {bias: torch.ones(352, dtype=torch.float16)})
    for text in run_ranks(world_size, error_body, str(folder)):
        assert f"{bias} has no place in LlamaForCausalLM" in text


def write_gpt2(folder: Path) -> None:
    """GPT-2 in GPTQ, whose tensors are of [N, K] where the modules of transformers hold [K, N]."""
    exact = folder.with_name("quantised-exact")
    built("gpt2").save_pretrained(exact)
    stored: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(exact / "model.safetensors").items():
        if ".c_" in key and key.endswith("weight"):
            parts, numbers = written_formats.FORMATS["gptq"].write(tensor.t())
            stored |= {key.removesuffix(".weight") + end: part for end, part in parts.items()}
            plain[key] = numbers.t().float().contiguous()
        else:
            stored[key] = plain[key] = tensor
    written_formats.save(folder, exact, stored, plain, written_formats.FORMATS["gptq"].config)


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_a_quantised_weight_is_turned_for_a_module_that_holds_the_transpose(tmp_path: Path, world_size: int) -> None:
    from transformers import AutoModelForCausalLM

    folder = agreed(tmp_path) / "quantised"
    once(lambda: write_gpt2(folder))
    whole = AutoModelForCausalLM.from_pretrained(folder.with_name("quantised-exact"), dtype=torch.float32).eval()
    single = models.logits(whole)
    double = models.logits(whole.double())
    for logits, *_ in run_ranks(world_size, many_ranks_body, str(folder)):
        assert (logits - double).abs().max() <= 4 * (single - double).abs().max()


def error_body(ctx, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        layers.from_pretrained(folder, ctx)
    return str(caught.value)


def kept_body(ctx, folder: str) -> tuple[torch.Tensor, str, dict[str, tuple]]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32, weights="fp8_all", fuse=False, verify=True)
    held = {
        name: (module.weight.cpu().view(torch.uint8), module.weight_scale.cpu(), module.dim, module.parts[0].ranges)
        for name, module in model.named_modules()
        if getattr(module, "weight_scale", None) is not None
    }
    return models.logits(model, ctx.device).cpu(), model.parallel_report.widened, held


@pytest.mark.parametrize("format", ["ct_fp8_channel", "ct_fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_fp8_by_channel_or_tensor_is_kept_as_stored(tmp_path: Path, format: str, world_size: int) -> None:
    from transformers import AutoModelForCausalLM

    folder, exact = written(tmp_path, format, "dense")
    stored = load_file(folder / "model.safetensors")
    whole = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32).eval()
    single = models.logits(whole)
    own = (single - models.logits(whole.double())).abs().max()
    for result, line, held in run_ranks(world_size, kept_body, str(folder)):
        assert len(held) == 7
        assert "widened" not in line
        if format == "fp8_block":  # one layer is cut inside 32 entries
            assert line.startswith("6 weights kept as stored, in fp8_block by 128, fp8_block by 32: ")
            assert line.endswith("; 1 weights rounded again, to fp8")
            continue
        assert line.startswith("7 weights kept as stored, in fp8: ")
        for name, (codes, scale, dim, ranges) in held.items():
            whole_codes = stored[f"{name}.weight"].view(torch.uint8)
            assert torch.equal(codes, torch.cat([whole_codes.narrow(dim, a, b - a) for a, b in ranges], dim)), name
            all_scales = stored[f"{name}.weight_scale"].float().flatten().expand(whole_codes.shape[0])
            expected = torch.cat([all_scales[a:b] for a, b in ranges]) if dim == 0 else all_scales
            assert torch.equal(scale, expected), name
        assert (result - single).abs().max() <= 8 * own, "the numbers are not the stored ones"


def reads_body(ctx, folder: str) -> tuple[int, int]:
    with Watched.of_load():
        model = layers.from_pretrained(folder, ctx, dtype=torch.bfloat16)
    return Watched.last.bytes_read, model.parallel_report.bytes


class Watched(Staging):
    """Staging that remembers the last one made."""

    last: Staging

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        Watched.last = self

    @staticmethod
    def of_load():
        context = pytest.MonkeyPatch.context()

        class Patched:
            def __enter__(self):
                context.__enter__().setattr("layers.checkpoint.load.Staging", Watched)

            def __exit__(self, *error):
                context.__exit__(*error)

        return Patched()


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_a_rank_reads_its_own_bytes(tmp_path: Path, world_size: int) -> None:
    folder, _ = written(tmp_path, "ct_int4_32", "dense")
    stored = {key: each.nbytes for key, each in load_file(folder / "model.safetensors").items()}
    split = sum(size for key, size in stored.items() if "_proj" in key and not key.endswith("weight_shape"))
    # shapes are read by all; five heads are three and two
    most = split * 3 / 5 + sum(stored.values()) - split if world_size == 2 else sum(stored.values())
    for read, _ in run_ranks(world_size, reads_body, str(folder)):
        assert read <= most, (read, most)


# --- checked while loading -------------------------------------------------------------------------------------------


def spoiled_body(ctx, folder: str, spoil: str | None) -> tuple[str, tuple]:
    """Loads and verifies while rank 1 loads one number wrongly; the error's text, or what was compared."""
    from layers.checkpoint import load

    right = load._load

    def wrong(model, name, source, device):
        right(model, name, source, device)
        if name == spoil and ctx.cur_rank == 1:
            flat = model.get_parameter(name) if "_proj" not in name else model.get_submodule(name[:-7]).weight
            flat.data[..., -1:] += 0.25

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(load, "_load", wrong)
        try:
            model = layers.from_pretrained(folder, ctx, dtype=torch.bfloat16, weights="widened", verify=True)
        except CheckpointError as error:
            return str(error), ()
    return "", model.parallel_report.verified


@pytest.mark.skipif(WORLDS == [1], reason="needs two ranks")
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_verify_compares_a_weight_of_each_kind_with_the_files(tmp_path: Path, world_size: int) -> None:
    folder, _ = written(tmp_path, "gptq_ordered", "dense")
    for text, rows in run_ranks(world_size, spoiled_body, str(folder), None):
        names = [row.name for row in rows]
        assert not text and "model.layers.0.mlp.down_proj.weight" in names and "model.norm.weight" in names
        assert all(0 <= row.error <= 1 for row in rows)
        assert {row.stored for row in rows} == {"float32", "gptq int4 by groups of 32, ordered"}
        assert max(row.error for row in rows) > 0.9, "no rounding was seen"
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        for text, _ in run_ranks(world_size, spoiled_body, str(folder), name):
            assert f"rank 1: {name} differs from the files by" in text
