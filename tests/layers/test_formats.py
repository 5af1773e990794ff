"""Quantised checkpoints: each format cut over 1 to 8 ranks, whole models on 1 to 4, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
import json
from pathlib import Path
from typing import Any

from iris.errors import CheckpointError
import layers
from layers.checkpoint.buffers import Staging
from layers.checkpoint.files import Checkpoint
from layers.experts import part_of_experts
from layers.formats import bits, weight_format
from layers.formats.nvfp4 import Nvfp4
from layers.formats.registry import SCHEMES, scheme_of
from layers.formats.scheme import contents
from layers.shard import even_unit, in_units, plain
import pytest
from safetensors.torch import load_file, save_file
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, once, run_ranks
from tests.layers import models, written_formats
from tests.layers.written_formats import FORMATS

pytest.importorskip("transformers")
pytestmark = both
alone = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")

NAME = "model.layers.0.mlp.down_proj"
# Rows and columns with the ratios of block to width that published models have.
SIZES: dict[str, list[tuple[int, int]]] = {
    "fp8": [(192, 320), (320, 192), (136, 1536)],
    "mxfp4": [(24, 2880)],  # gpt-oss: 90 groups
    "fp4": [(24, 2880)],
    "awq": [(16, 231 * 32)],  # Qwen2-72B: 231 groups
    "gptq": [(16, 704)],
    "int": [(20, 896), (12, 1408)],
}


def opened(folder: Path, name: str, weight: torch.Tensor, writer: Any = None) -> tuple[Any, torch.Tensor]:
    """The weight as the loader sees it, from a file in the format `name`, and its exact numbers."""
    parts, exact = (writer or FORMATS[name].write)(weight)
    save_file({NAME + end: part.contiguous() for end, part in parts.items()}, folder / "model.safetensors")
    config = FORMATS[name].config
    held = contents(SCHEMES[config["quant_method"]](config), Checkpoint(folder, Staging("cpu")), True)
    assert not held.problems and list(held.sources) == [f"{NAME}.weight"], (held.problems, list(held.sources))
    return held.sources[f"{NAME}.weight"], exact


def part_of(source: Any, rows: tuple[int, int], columns: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    local = torch.full((rows[1] - rows[0], columns[1] - columns[0]), torch.nan, dtype=dtype)
    source.copy_to(local, (slice(*rows), slice(*columns)))
    return local


def sizes_of(name: str) -> list[tuple[int, int]]:
    return next(sizes for kind, sizes in SIZES.items() if kind in name)


@alone
@pytest.mark.parametrize("name", FORMATS)
def test_every_cut_has_the_numbers_of_the_whole(tmp_path: Path, name: str) -> None:
    for number, (rows, columns) in enumerate(sizes_of(name)):
        folder = tmp_path / str(number)
        folder.mkdir()
        weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(number))
        weight *= torch.logspace(-2, 2, rows)[:, None] * torch.logspace(1, -1, columns)
        source, exact = opened(folder, name, weight)
        assert source.get_shape() == [rows, columns]
        assert torch.allclose(source.values((0, rows), (0, columns), torch.float64), exact, rtol=1e-12, atol=0)
        for world in range(1, 9):
            unit = even_unit(columns, world, source.format.unit)
            for rank in range(world):
                cuts = [plain(columns, world, rank), in_units(columns, world, rank, unit)]
                for own in {cut.ranges[0] for cut in cuts if cut.size}:
                    result = part_of(source, (0, rows), own, torch.float32)
                    assert torch.allclose(result.double(), exact[:, slice(*own)], rtol=2e-7, atol=0), (world, rank)
                own = plain(rows, world, rank).ranges[0]
                if own[0] < own[1]:
                    result = part_of(source, own, (0, columns), torch.bfloat16)
                    rounded = exact[slice(*own)].float().to(torch.bfloat16)
                    tie = 2**-7 if "nvfp4" in name else 0  # of two roundings of its scales to float32
                    assert torch.allclose(result, rounded, rtol=tie, atol=0), (world, rank)


@alone
def test_shares_end_between_groups_and_are_about_even() -> None:
    assert [in_units(2880, 4, rank, 32).size // 32 for rank in range(4)] == [23, 23, 22, 22]
    assert [in_units(231 * 128, 4, rank, 128).size // 128 for rank in range(4)] == [58, 58, 58, 57]
    for total, unit in [(2880, 32), (231 * 128, 128), (768, 128), (1536, 32), (2048, 128), (18432, 128), (320, 16)]:
        for world in range(1, 9):
            chosen = even_unit(total, world, unit)
            shares = [in_units(total, world, rank, chosen) for rank in range(world)]
            assert sum(share.size for share in shares) == total and unit % chosen == 0
            assert max(share.size for share in shares) * world <= 1.07 * total, (total, world, chosen)
            assert shares[0].depths == tuple(share.size for share in shares)
            assert [start for share in shares[1:] for start, _ in share.ranges] == [
                stop for share in shares[:-1] for _, stop in share.ranges
            ]
    for total in (192, 320):
        for world in range(1, 9):
            sizes = [stop - start for start, stop in (part_of_experts(total, world, rank) for rank in range(world))]
            assert sum(sizes) == total and all(size % 8 == 0 for size in sizes)


@alone
def test_a_large_weight_is_widened_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_format, "_PIECE", 5000)
    widened = []
    values = weight_format.QuantisedWeight.values

    def watched(self, rows, columns, dtype=torch.float32):
        widened.append((rows[1] - rows[0]) * (columns[1] - columns[0]))
        return values(self, rows, columns, dtype)

    monkeypatch.setattr(weight_format.QuantisedWeight, "values", watched)
    for name in ("fp8_block", "awq", "gptq_ordered", "ct_int4_32"):
        folder = tmp_path / name
        folder.mkdir()
        source, exact = opened(folder, name, torch.randn(320, 704))
        widened.clear()
        result = part_of(source, (40, 300), (96, 640), torch.float32)
        assert torch.allclose(result.double(), exact[40:300, 96:640], rtol=2e-7, atol=0)
        assert len(widened) > 1 and max(widened) <= 544 * 128


# --- whole models ----------------------------------------------------------------------------------------------------

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
    "experts320": ("Qwen3Moe", {**_EXPERTS, "hidden_size": 64, "moe_intermediate_size": 320}),
    "deepseek": (
        "DeepseekV3",
        {**models._OF_DEEPSEEK, "hidden_size": 64, "moe_intermediate_size": 96}
        | dict.fromkeys(
            ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 32
        ),
    ),
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
    ("gptq", "dense", 3), ("gptq_v2", "groups128", 2), ("gptq_ordered", "dense", 2), ("mxfp4", "gpt_oss", 4),
    ("ct_int4_32", "experts192", 1), ("fp8_with_fp4_experts", "deepseek", 3),
]  # fmt: skip


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


def loaded_body(ctx, folder: str) -> tuple[torch.Tensor, int, str]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    return models.logits(model, ctx.device).cpu(), model.parallel_report.bytes, model.parallel_report.widened


@pytest.mark.parametrize("format, name, world_size", [case for case in CASES if case[2] in WORLDS or UNDER_TORCHRUN])
@pytest.mark.some(14)
def test_a_split_model_is_the_dequantised_one(tmp_path: Path, format: str, name: str, world_size: int) -> None:
    from transformers import AutoModelForCausalLM

    folder, exact = written(tmp_path, format, name)
    whole = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32, experts_implementation="eager").eval()
    single = models.logits(whole)
    double = models.logits(whole.double())
    own = (single - double).abs().max()
    results = run_ranks(WORLDS[0] if UNDER_TORCHRUN else world_size, loaded_body, str(folder))
    for result, _, line in results:
        assert (result - double).abs().max() <= 4 * own, (result - double).abs().max() / own
        assert line.startswith("weights in ") and "widened to float32: " in line
    if name in ("gpt_oss", "groups128", "experts192") and format != "fp8_block":
        sizes = [size for _, size, _ in results]
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
        assert torch.allclose(made, exact, rtol=1e-4, atol=1e-6)


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
        if format == "fp8_block":
            assert "7 weights rounded again, to fp8 by channel" in line
            continue
        assert line.startswith("7 weights kept in fp8 as stored") and "widened" not in line
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
            model = layers.from_pretrained(folder, ctx, dtype=torch.bfloat16, verify=True)
        except CheckpointError as error:
            return str(error), ()
    return "", model.parallel_report.verified


@pytest.mark.skipif(WORLDS == [1], reason="needs two ranks")
@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_verify_compares_a_weight_of_each_kind_with_the_files(tmp_path: Path, world_size: int) -> None:
    folder, _ = written(tmp_path, "awq", "dense")
    for text, rows in run_ranks(world_size, spoiled_body, str(folder), None):
        names = [row.name for row in rows]
        assert not text and "model.layers.0.mlp.down_proj.weight" in names and "model.norm.weight" in names
        assert all(0 <= row.error <= 1 for row in rows)
        assert {row.stored for row in rows} == {"float32", "awq int4 by groups of 32"}
        assert max(row.error for row in rows) > 0.9, "no rounding was seen"
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"):
        for text, _ in run_ranks(world_size, spoiled_body, str(folder), name):
            assert f"rank 1: {name} differs from the files by" in text


# --- what is refused, and found ---------------------------------------------------------------------------------------


def changed(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= settings
        (folder / "config.json").write_text(json.dumps(config))

    return change


def with_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = {key: each.clone() for key, each in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return rewrite


UP = "model.layers.0.mlp.up_proj"
CACHED = with_tensors(lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
REFUSED: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "method": ("fp8_block", changed(quant_method="bitsandbytes"), "quantised .quantization_config, 'bitsandbytes'"),
    "blocks": ("fp8_block", changed(weight_block_size=[128]), "weight_block_size is .128.: expected two positive"),
    "activations": ("fp8_block", changed(activation_scheme="odd"), "activation_scheme is 'odd': expected 'dynamic'"),
    "left out": ("fp8_block", changed(modules_to_not_convert=["up_proj"]), f"{UP}.weight is quantised, and the conf"),
    "no scale": ("fp8_block", with_tensors(lambda t: t.pop(f"{UP}.weight_scale_inv")), f"{UP}.weight has no stored sc"),
    "no weight": (
        "fp8_block",
        with_tensors(lambda t: t.pop(f"{UP}.weight")),
        f"{UP}.weight has no stored weight, only",
    ),
    "scale's shape": (
        "fp8_block",
        with_tensors(lambda t: t.update({f"{UP}.weight_scale_inv": torch.ones(2, 2)})),
        r"up_proj.weight .352, 160. has scales of shape .2, 2.: expected one, one for each row, or one for each",
    ),
    "kv cache": ("fp8_block", CACHED, "scales of a quantised KV cache.*self_attn.k_scale; strict=False loads"),
    "no configuration": (
        "fp8_block",
        lambda folder: (folder / "config.json").write_text(
            json.dumps({k: v for k, v in json.loads((folder / "config.json").read_text()).items() if k[:5] != "quant"})
        ),
        "the weights are quantised, and config.json has no quantization_config",
    ),
    "bits": ("gptq", changed(bits=3), "bits is 3: expected 4 or 8"),
    "marlin": ("gptq", changed(checkpoint_format="marlin"), "checkpoint_format is 'marlin': expected 'gptq'"),
    "dynamic": (
        "gptq",
        changed(dynamic={"+:.*up.*": {"bits": 8}}),
        "dynamic gives '.*up.*' settings of its own",
    ),
    "not quantised": (
        "fp8_block",
        with_tensors(
            lambda t: (
                [t.update({k: t[k].float()}) for k in t if k.endswith("weight")]
                + [t.pop(k) for k in list(t) if k.endswith("scale_inv")]
            )
        ),
        "says that weights are quantised .fp8., and no stored weight is",
    ),
    "group": ("gptq", changed(group_size=64), r"expected .3, 352. and .3, 44., for 4 bits in groups of 64"),
    "gemv": ("awq", changed(version="gemv"), "version is 'gemv': expected 'gemm'"),
    "status": ("ct_int4_32", changed(quantization_status="calibration"), "quantization_status is 'calibration'"),
    "rotation": ("ct_int4_32", changed(transform_config={"config_groups": {"a": 1}}), "transform_config rotates"),
    "sparsity": ("ct_int4_32", changed(sparsity_config={"format": "sparse-24"}), "sparsity_config .* 'sparse-24'"),
    "three bits": (
        "ct_int4_32",
        changed(**written_formats.compressed("pack-quantized", written_formats._int(3, 32))),
        "num_bits is 3: expected 8 or 4",
    ),
    "algorithm": ("modelopt_fp8", changed(quant_algo="INT4_AWQ"), "quant_algo is 'INT4_AWQ': expected one of FP8"),
    "smoothing": (
        "modelopt_nvfp4",
        with_tensors(lambda t: t.update({f"{UP}.pre_quant_scale": torch.ones(160)})),
        "up_proj.weight has a pre_quant_scale",
    ),
    "pattern": ("ct_int4_32", changed(ignore=["re:(["]), "ignore has 're:..', which is no expression"),
}


def refused_body(ctx, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        layers.from_pretrained(folder, ctx)
    return str(caught.value)


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_what_is_not_read_is_refused_by_name_on_every_rank(tmp_path: Path, world_size: int) -> None:
    for number, (format, change, message) in enumerate(REFUSED.values()):
        folder, _ = written(tmp_path / str(number), format, "dense")
        once(lambda folder=folder, change=change: change(folder))
        texts = run_ranks(world_size, refused_body, str(folder))
        with pytest.raises(CheckpointError, match=message):
            raise CheckpointError(texts[0])
        assert len(set(texts)) == 1, texts


def cached_body(ctx, folder: str) -> torch.Tensor:
    return models.logits(layers.from_pretrained(folder, ctx, dtype=torch.float32, strict=False), ctx.device).cpu()


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_without_strict_a_model_loads_without_the_scales_of_its_cache(tmp_path: Path, world_size: int) -> None:
    folder, _ = written(tmp_path, "fp8_block", "dense")
    expected = run_ranks(world_size, loaded_body, str(folder))[0][0]
    once(lambda: CACHED(folder))
    assert torch.equal(run_ranks(world_size, cached_body, str(folder))[0], expected)


# As models have them that are published: options that say how they were made, and change nothing of what is stored.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3 fp8": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"],
    },
    "Llama fp8": {
        "config_groups": {
            "group_0": {
                "input_activations": {"block_structure": None, "dynamic": False, "num_bits": 8, "strategy": "tensor",
                                      "observer": "minmax", "symmetric": True, "type": "float", "group_size": None},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {"block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                            "observer_kwargs": {}, "strategy": "tensor", "symmetric": True, "type": "float"},
            }
        },
        "format": "float-quantized", "global_compression_ratio": 1.23, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "quant_method": "compressed-tensors", "quantization_status": "frozen",
    },
    "Kimi int4": {
        "config_groups": {
            "group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32,
                            "num_bits": 4, "observer": "minmax", "strategy": "group", "symmetric": True, "type": "int"},
            }
        },
        "format": "pack-quantized", "quant_method": "compressed-tensors", "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    },
    "GPTQ": {
        "bits": 4, "damp_percent": 0.01, "desc_act": False, "group_size": 128, "model_file_base_name": "model",
        "model_name_or_path": None, "quant_method": "gptq", "static_groups": False, "sym": True,
        "true_sequential": True,
    },
    "AWQ": {
        "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
        "zero_point": True,
    },
    "gpt-oss": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                                   "lm_head"],
        "quant_method": "mxfp4",
    },
    "ModelOpt": {
        "ignore": ["lm_head", "model.layers.0.self_attn*"], "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.29.0"}, "quant_algo": "NVFP4", "quant_method": "modelopt",
        "config_groups": {"group_0": {"targets": ["Linear"]}},
    },
}  # fmt: skip


@alone
@pytest.mark.parametrize("model", PUBLISHED)
def test_published_configurations_are_understood(tmp_path: Path, model: str) -> None:
    scheme = scheme_of(tmp_path, {"quantization_config": PUBLISHED[model]})
    assert scheme is not None and scheme.method == PUBLISHED[model]["quant_method"]
    assert not scheme.leaves_out("model.layers.0.mlp.experts.3.gate_proj")
    assert not scheme.leaves_out("model.layers.10.mlp.experts.gate_up_proj")
    if model not in ("GPTQ", "AWQ"):
        assert scheme.leaves_out("lm_head")
    if "self_attn" in str(PUBLISHED[model]):
        assert scheme.leaves_out("model.layers.0.self_attn.q_proj")


@alone
def test_modelopt_configures_in_a_file_of_its_own(tmp_path: Path) -> None:
    assert scheme_of(tmp_path, {}) is None
    own = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(own))
    scheme = scheme_of(tmp_path, {})
    assert scheme is not None and scheme.leaves_out("lm_head") and not scheme.leaves_out("model.layers.0.mlp.up_proj")


@alone
def test_groups_of_modules_have_formats_of_their_own(tmp_path: Path) -> None:
    """Attention in fp8, the rest in int4, as a configuration of mixed precision says it."""
    config = written_formats.compressed("mixed-precision", {})
    config["config_groups"] = {
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "format": "float-quantized",
            "weights": written_formats._float(8, "channel"),
        },
        "others": {"targets": ["Linear"], "format": "pack-quantized", "weights": written_formats._int(4, 32)},
    }
    weight, tensors, exact = torch.randn(64, 96), {}, {}
    for name, write in (
        ("model.layers.0.self_attn.q_proj", lambda w: written_formats.fp8_channel(w, ".weight_scale")),
        ("model.layers.0.mlp.up_proj", lambda w: written_formats.packed(w, 4, 32)),
    ):
        parts, exact[f"{name}.weight"] = write(weight)
        tensors |= {name + end: part for end, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    held = contents(SCHEMES["compressed-tensors"](config), Checkpoint(tmp_path, Staging("cpu")), True)
    assert not held.problems
    for name, numbers in exact.items():
        source: Any = held.sources[name]
        assert torch.allclose(source.values((0, 64), (0, 96), torch.float64), numbers, rtol=1e-12, atol=0)


@alone
def test_experts_that_are_stored_as_one_have_blocks_for_gates_and_for_ups(tmp_path: Path) -> None:
    weights = torch.randn(3, 2 * 192, 160)
    parts = [[written_formats.fp8(half, (128, 128), torch.float32, "s") for half in one.chunk(2)] for one in weights]
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {
        f"{name}{end}": torch.stack([torch.cat([half[0][key] for half in part]) for part in parts])
        for end, key in (("", ".weight"), ("_scale_inv", "s"))
    }
    exact = torch.stack([torch.cat([half[1] for half in part]) for part in parts])
    save_file(tensors, tmp_path / "model.safetensors")
    config = FORMATS["fp8_block"].config
    held = contents(SCHEMES["fp8"](config), Checkpoint(tmp_path, Staging("cpu")), True)
    assert not held.problems and list(held.sources) == [name]
    local = torch.empty(3, 80, 160)
    held.sources[name].copy_to(local, (slice(None), slice(250, 330)))
    assert torch.allclose(local.double(), exact[:, 250:330], rtol=2e-7, atol=0)


# --- faults that a test must notice -----------------------------------------------------------------------------------


def shifted(stored: Callable) -> Callable:
    def block_of(span, size, device):
        return torch.clamp(stored(span, size, device) + 1, max=bits.blocks(span, size)[1] - span[0] // size - 1)

    return block_of


FAULTS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "a scale's index off by one block": ("fp8_block", "layers.formats.fp8.block_of", shifted),
    "a group's index off by one": ("ct_int4_32", "layers.formats.integers.block_of", shifted),
    "nibbles swapped": (
        "ct_mxfp4", "layers.formats.mxfp4.nibbles", lambda right: lambda b: right(b.view(torch.uint8) << 4 | b >> 4),
    ),
    "nibbles of integers swapped": (
        "gptq", "layers.formats.bits.nibbles", lambda right: lambda b: right(b << 4 | b >> 4),
    ),
}  # fmt: skip


@alone
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, place, wrong = FAULTS[fault]
    module, attribute = place.rsplit(".", 1)
    import importlib

    monkeypatch.setattr(place, wrong(getattr(importlib.import_module(module), attribute)))
    with pytest.raises(AssertionError):
        test_every_cut_has_the_numbers_of_the_whole(tmp_path, name)


@alone
@pytest.mark.parametrize("name", ["ct_nvfp4", "modelopt_nvfp4"])
def test_a_global_scale_that_is_taken_the_other_way_is_noticed(tmp_path: Path, name: str) -> None:
    source, exact = opened(tmp_path, name, torch.randn(24, 160))
    source.format = Nvfp4(source.shape, not source.format.divides)
    assert not torch.allclose(source.values((0, 24), (0, 160), torch.float64), exact, rtol=0.5, atol=1e-3)
