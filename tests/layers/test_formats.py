"""Quantised checkpoints: each format split over 1 to 8 ranks, and the settings of configurations."""

from __future__ import annotations

from collections.abc import Callable
import json
import math
from pathlib import Path
from typing import Any

from iris.errors import CheckpointError
from layers.checkpoint.buffers import Staging
from layers.checkpoint.files import Checkpoint
from layers.experts import part_of_experts
from layers.formats import bits, weight_format
from layers.formats.coded import coded
from layers.formats.nvfp4 import Nvfp4
from layers.formats.registry import SCHEMES, scheme_of
from layers.formats.scheme import contents
from layers.formats.weight_format import Coding
from layers.shard import even_unit, in_units, plain
import pytest
from safetensors.torch import save_file
import torch

from tests.harness import UNDER_TORCHRUN, both
from tests.layers import written_formats
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
    "int": [(20, 896), (12, 1408), (12, 480)],  # the last ends inside a group of 64 or 128
}


def opened(folder: Path, name: str, weight: torch.Tensor, writer: Any = None) -> tuple[Any, torch.Tensor]:
    """Return the weight of a file in the format `name` as the loader reads it, and its exact numbers."""
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


def broken(name: str, end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
    def write(weight: torch.Tensor) -> written_formats.Written:
        parts, exact = FORMATS[name].write(weight)
        return parts | {end: change(parts[end])}, exact

    return write


BROKEN: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "fp8_block": (".weight_scale_inv", lambda s: s * torch.nan, "has scales that are NaN or infinite"),
    "fp8_block_e8m0": (".scale", lambda s: torch.full(s.shape, 255, dtype=torch.uint8).view(s.dtype), "NaN or infin"),
    "ct_mxfp4": (".weight_scale", lambda s: s | 255, "has scales that are NaN or infinite"),
    "ct_nvfp4": (".weight_global_scale", torch.zeros_like, "has scales that are NaN or infinite"),
    "awq": (".scales", lambda s: s * torch.inf, "has scales that are NaN or infinite"),
    "ct_int4_in_bytes": (".weight", lambda w: w * 2, "has integers of more than 4 bits: expected 4"),
}


@alone
@pytest.mark.parametrize("name", BROKEN)
def test_values_that_mean_no_number_are_refused_by_name(tmp_path: Path, name: str) -> None:
    end, change, message = BROKEN[name]
    source, _ = opened(tmp_path, name, torch.randn(64, 160), broken(name, end, change))
    with pytest.raises(CheckpointError, match=f"{NAME}.weight .*{message}"):
        source.values((0, 64), (0, 160))
    with pytest.raises(CheckpointError, match=message):
        list(coded(source, (slice(0, 64), slice(0, 160)), 16, source.coding.zeros))


MEANINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "e4m3": lambda codes: codes.double(),
    "e2m1": lambda codes: written_formats.E2M1[codes.long()],
    "int4": lambda codes: codes.double() - 8,
    "int8": lambda codes: codes.double() - 128,
}
# What each format's codes are, and the entries of a row that share a scale: "K" for all.
CODINGS: dict[str, tuple[str, int | str]] = {
    **dict.fromkeys(("fp8_block", "fp8_block_bf16", "fp8_block_e8m0", "ct_fp8_block"), ("e4m3", 128)),
    **dict.fromkeys(("fp8_tensor_static", "fbgemm_fp8", "ct_fp8_channel", "ct_fp8_tensor", "modelopt_fp8"),
                    ("e4m3", "K")),
    **dict.fromkeys(("ct_mxfp8", "modelopt_mxfp8"), ("e4m3", 32)),
    "ct_mxfp4": ("e2m1", 32), "ct_int4_32": ("int4", 32), "ct_int4_channel": ("int4", "K"),
    "ct_int4_in_bytes": ("int4", 32),
    "gptq": ("int4", 32), "awq_symmetric": ("int4", 32), "ct_nvfp4": ("e2m1", 16), "modelopt_nvfp4": ("e2m1", 16),
    "ct_int8_128": ("int8", 128), "ct_int8": ("int8", "K"), "ct_int4_zeros": ("int4", 64), "awq": ("int4", 32),
    "gptq_v2": ("int8", 64),
}  # fmt: skip


def coded_numbers(source: Any, rows: tuple[int, int], columns: tuple[int, int], group: int) -> torch.Tensor:
    """The numbers of a part, from its codes and scales by the definitions in this file."""
    out = torch.full((rows[1] - rows[0], columns[1] - columns[0]), torch.nan, dtype=torch.float64)
    for (a, b), (c, d), codes, scales in coded(source, (slice(*rows), slice(*columns)), group, source.coding.zeros):
        assert codes.shape == (b - a, d - c) and scales.shape[:2] == (b - a, -(-(d - c) // group)) and c % 128 == 0
        by_entry = scales.double().repeat_interleave(group, 1)[:, : d - c]
        zeros, by_entry = by_entry.unbind(2)[::-1] if source.coding.zeros else (0, by_entry)
        out[a:b, c:d] = (MEANINGS[source.coding.element](codes) - zeros) * by_entry
    return out


@alone
@pytest.mark.parametrize("name", CODINGS)
def test_codes_and_scales_of_every_cut_are_the_stored_ones(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(weight_format, "_PIECE", 5000)
    rows, columns = sizes_of(name)[0] if "awq" not in name else (16, 704)
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(2)) * torch.logspace(-2, 2, columns)
    source, exact = opened(tmp_path, name, weight)
    element, group = CODINGS[name]
    group = columns if group == "K" else group
    zeros = name in ("ct_int4_zeros", "awq", "gptq_v2")
    assert source.coding == Coding(element, group, source.tensors["scale"].dtype, zeros)
    for world in range(1, 5):
        for rank in range(world):
            cut = in_units(columns, world, rank, 16).ranges[0]
            for own in ((0, rows), plain(rows, world, rank).ranges[0]):
                finer = math.gcd(group, cut[0]) if group < columns else columns
                result = coded_numbers(source, own, cut, finer)
                room = 2**-23 if "nvfp4" in name else 1e-12  # whose scales have two factors
                assert torch.allclose(result, exact[slice(*own), slice(*cut)], rtol=room, atol=0), (world, rank)
    if group < columns:
        with pytest.raises(ValueError, match="the stored groups are of"):
            list(coded(source, (slice(0, 4), slice(group // 2, None)), group))


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
            assert shares[0].rank_sizes == tuple(share.size for share in shares)
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
    "AWQ of transformers": {
        "backend": "auto", "bits": 4, "checkpoint_format": "gemm", "desc_act": False, "format": "gemm",
        "group_size": 128, "quant_method": "awq", "sym": True, "version": None, "zero_point": True,
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
    if model not in ("GPTQ", "AWQ", "AWQ of transformers"):
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
    """Attention in fp8 and the rest in int4, as a mixed-precision configuration defines it."""
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


@alone
@pytest.mark.parametrize("shape", [(3, 2), (3, 2, 1)])
def test_experts_that_are_stored_as_one_have_a_scale_for_gates_and_one_for_ups(tmp_path: Path, shape) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = [written_formats.fp8_tensor(half, "s") for one in torch.randn(3, 192, 160) for half in one.chunk(2)]
    tensors = {
        name: torch.cat([part[0][".weight"] for part in parts]).view(3, 192, 160),
        f"{name}_scale_inv": torch.stack([part[0]["s"] for part in parts]).view(shape),
    }
    exact = torch.cat([part[1] for part in parts]).view(3, 192, 160)
    save_file(tensors, tmp_path / "model.safetensors")
    held = contents(SCHEMES["fp8"]({"weight_block_size": None}), Checkpoint(tmp_path, Staging("cpu")), True)
    assert not held.problems, held.problems
    local = torch.empty(3, 80, 160)
    held.sources[name].copy_to(local, (slice(None), slice(50, 130)))
    assert torch.allclose(local.double(), exact[:, 50:130], rtol=2e-7, atol=0)


@alone
def test_a_linear_of_gates_and_ups_has_blocks_as_any_other(tmp_path: Path) -> None:
    """Phi-3's and GLM's `gate_up_proj.weight`: 704 rows are 6 blocks, as many as 2 x 352 rows would have."""
    weight = torch.randn(704, 160)
    parts, exact = FORMATS["fp8_block"].write(weight)
    name = "model.layers.0.mlp.gate_up_proj"
    save_file({name + end: part for end, part in parts.items()}, tmp_path / "model.safetensors")
    config = FORMATS["fp8_block"].config
    held = contents(SCHEMES["fp8"](config), Checkpoint(tmp_path, Staging("cpu")), True)
    assert not held.problems, held.problems
    source: Any = held.sources[f"{name}.weight"]
    assert torch.allclose(source.values((0, 704), (0, 160), torch.float64), exact, rtol=1e-12, atol=0)


@alone
def test_a_module_has_the_group_that_compressed_tensors_takes(tmp_path: Path) -> None:
    """A name comes before patterns, these in alphabetical order, and classes last."""
    config = written_formats.compressed("mixed-precision", {})
    four, eight = (
        {"format": "pack-quantized", "weights": written_formats._int(4, 32)},
        {"format": "float-quantized", "weights": written_formats._float(8, "group", group_size=32)},
    )
    config["config_groups"] = {
        "a": {"targets": ["Linear"], **eight},
        "b": {"targets": ["re:.*_proj"], **eight},
        "c": {"targets": [r"re:.*\.down_proj", "model.layers.0.mlp.up_proj"], **four},
    }
    weight, tensors, exact = torch.randn(64, 96), {}, {}
    for name, write in (
        ("mlp.up_proj", lambda w: written_formats.packed(w, 4, 32)),
        ("mlp.down_proj", lambda w: written_formats.packed(w, 4, 32)),
        ("mlp.gate_proj", lambda w: written_formats.fp8(w, (1, 32), torch.bfloat16, ".weight_scale")),
        ("mixer.linear", lambda w: written_formats.fp8(w, (1, 32), torch.float32, ".weight_scale")),
    ):
        parts, exact[f"model.layers.0.{name}.weight"] = write(weight)
        tensors |= {f"model.layers.0.{name}{end}": part for end, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    held = contents(SCHEMES["compressed-tensors"](config), Checkpoint(tmp_path, Staging("cpu")), True)
    assert not held.problems, held.problems
    for name, numbers in exact.items():
        source: Any = held.sources[name]
        assert torch.allclose(source.values((0, 64), (0, 96), torch.float64), numbers, rtol=1e-12, atol=0), name


@alone
def test_the_name_of_a_module_without_a_dot_is_no_class(tmp_path: Path) -> None:
    config = written_formats.compressed("mixed-precision", {})
    config["config_groups"] = {
        "head": {"targets": ["lm_head"], "format": "float-quantized", "weights": written_formats._float(8, "channel")},
        "attention": {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8}},
        "others": {"targets": ["Linear"], "format": "pack-quantized", "weights": written_formats._int(4, 32)},
    }
    weight, tensors, exact = torch.randn(64, 96), {}, {}
    for name, write in (
        ("lm_head", lambda w: written_formats.fp8_channel(w, ".weight_scale")),
        ("model.layers.0.mlp.up_proj", lambda w: written_formats.packed(w, 4, 32)),
    ):
        parts, exact[f"{name}.weight"] = write(weight)
        tensors |= {name + end: part for end, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    held = contents(SCHEMES["compressed-tensors"](config | {"ignore": []}), Checkpoint(tmp_path, Staging("cpu")), True)
    assert not held.problems, held.problems
    for name, numbers in exact.items():
        source: Any = held.sources[name]
        assert torch.allclose(source.values((0, 64), (0, 96), torch.float64), numbers, rtol=1e-12, atol=0), name


@alone
@pytest.mark.parametrize("end", ["_scale", "_weight_scale"])
def test_experts_in_fp8_under_names_that_a_method_lacks_are_refused(tmp_path: Path, end: str) -> None:
    name = "model.layers.0.feed_forward.experts.down_proj"
    tensors = {name: torch.ones(2, 64, 32).to(torch.float8_e4m3fn), name + end: torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    for strict in (True, False):
        held = contents(SCHEMES["modelopt"]({"quant_algo": "FP8"}), Checkpoint(tmp_path, Staging("cpu")), strict)
        assert held.problems == [f"the weights are quantised, and modelopt has no scales of these names: {name}"]


OF_THE_CACHE: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"config_groups": {}, "format": "dense", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
    "modelopt": {"quant_algo": None, "kv_cache_quant_algo": "FP8"},
}


@alone
@pytest.mark.parametrize("method", OF_THE_CACHE)
def test_a_checkpoint_may_have_scales_of_its_cache_alone(tmp_path: Path, method: str) -> None:
    tensors = {f"{NAME}.weight": torch.randn(8, 8), "model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    scheme, files = SCHEMES[method](OF_THE_CACHE[method]), Checkpoint(tmp_path, Staging("cpu"))
    (problem,) = contents(scheme, files, True).problems
    assert "scales of a quantised KV cache" in problem and "strict=False loads" in problem
    plain = contents(scheme, files, False)
    assert not plain.problems and list(plain.sources) == [f"{NAME}.weight"]


# --- faults that a test must notice -----------------------------------------------------------------------------------


def shifted(stored: Callable) -> Callable:
    def block_of(span, size, device, step=1):
        return torch.clamp(stored(span, size, device, step) + 1, max=bits.blocks(span, size)[1] - span[0] // size - 1)

    return block_of


FAULTS: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "a scale's index off by one block": ("fp8_block", "layers.formats.bits.block_of", shifted),
    "a kept scale's index off by one block": ("fp8_block", "layers.formats.weight_format.block_of", shifted),
    "a group's index off by one": ("ct_int4_32", "layers.formats.integers.block_of", shifted),
    "nibbles swapped": (
        "ct_mxfp4", "layers.formats.e2m1.nibbles", lambda right: lambda b: right(b.view(torch.uint8) << 4 | b >> 4),
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
    (tmp_path / "coded").mkdir()
    if "kept" not in fault:
        with pytest.raises(AssertionError):
            test_every_cut_has_the_numbers_of_the_whole(tmp_path, name)
    if "kept" in fault or "nibbles" in fault:
        with pytest.raises(AssertionError):
            test_codes_and_scales_of_every_cut_are_the_stored_ones(tmp_path / "coded", monkeypatch, name)


@alone
@pytest.mark.parametrize("name", ["ct_nvfp4", "modelopt_nvfp4"])
def test_a_global_scale_that_is_taken_the_other_way_is_noticed(tmp_path: Path, name: str) -> None:
    source, exact = opened(tmp_path, name, torch.randn(24, 160))
    source.format = Nvfp4(source.shape, not source.format.divides)
    assert not torch.allclose(source.values((0, 24), (0, 160), torch.float64), exact, rtol=0.5, atol=1e-3)
