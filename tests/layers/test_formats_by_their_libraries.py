"""Checkpoints of other libraries are read as these dequantise them, and the tests' writers write the same files.

compressed-tensors is no requirement of the tests: where it is not installed, its cases are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from layers.checkpoint.buffers import Staging
from layers.checkpoint.files import Checkpoint
from layers.formats.registry import SCHEMES
from layers.formats.scheme import contents
import pytest
from safetensors.torch import save_file
import torch

from tests.harness import UNDER_TORCHRUN
from tests.layers import written_formats
from tests.layers.test_quantised_models import written
from tests.layers.written_formats import FORMATS

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
NAME = "model.layers.0.mlp.up_proj"


def read(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> torch.Tensor:
    """Return the numbers of the only weight in `tensors`, keyed by name suffix, as the loader reads them."""
    save_file({f"{NAME}.{end}": each.contiguous() for end, each in tensors.items()}, folder / "model.safetensors")
    held = contents(SCHEMES[config["quant_method"]](config), Checkpoint(folder, Staging("cpu")), True)
    assert not held.problems, held.problems
    source: Any = held.sources[f"{NAME}.weight"]
    local = torch.empty(source.shape)
    source.copy_to(local)
    return local


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp8_block", "fp8_block_bf16", "fp8_block_e8m0", "fp8_tensor_static"])
def test_fp8_is_what_transformers_dequantises(name: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, exact = FORMATS[name].write(torch.randn(256, 384))
    scale = next(each for end, each in tensors.items() if "scale" in end and "activation" not in end)
    theirs = Fp8Dequantize(None)._dequantize_one(tensors[".weight"], scale, torch.float32)
    assert torch.equal(theirs, exact.float())


def test_fp4_of_deepseek_is_what_transformers_dequantises(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, exact = written_formats.fp4_of_deepseek(torch.randn(64, 192))
    theirs = Fp8Dequantize(None)._dequantize_one(tensors[".weight"], tensors[".scale"], torch.float32)
    assert torch.equal(theirs, exact.float())
    config = {**FORMATS["fp8_block"].config, "scale_fmt": "ue8m0", "expert_dtype": "fp4"}
    assert torch.equal(read(tmp_path, {end[1:]: each for end, each in tensors.items()}, config), theirs)


def test_blocks_of_gpt_oss_are_what_transformers_dequantises(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    weights = torch.randn(2, 96, 192)  # [experts, K, N]
    written = [written_formats.mxfp4(each.t()) for each in weights]
    blocks = torch.stack([each[0] for each in written]).unflatten(-1, (-1, 16)).contiguous()
    scales = torch.stack([each[1] for each in written])
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(theirs, torch.stack([each[2].t() for each in written]).float())
    name = "model.layers.0.mlp.experts.gate_up_proj"
    save_file({f"{name}_blocks": blocks, f"{name}_scales": scales}, tmp_path / "model.safetensors")
    held = contents(SCHEMES["mxfp4"]({}), Checkpoint(tmp_path, Staging("cpu")), True)
    local = torch.empty(2, 96, 100)
    held.sources[name].copy_to(local, (slice(None), slice(None), slice(30, 130)))
    assert torch.equal(local, theirs[:, :, 30:130])


WHOLE = ["fp8_block", "fp8_block_bf16", "fp8_tensor_static", *[name for name in FORMATS if name.startswith("ct_")]]


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_model_is_what_its_library_dequantises(tmp_path: Path, name: str) -> None:
    """The tests compare split models with `quantised-exact`: its weights are those that transformers loads."""
    import transformers

    if name.startswith("ct_"):
        pytest.importorskip("compressed_tensors")
        dequantized: Any = transformers.CompressedTensorsConfig(run_compressed=False)
    else:
        dequantized = transformers.FineGrainedFP8Config(dequantize=True)
    folder, exact = written(tmp_path, name, "groups128")
    options = dict(dtype=torch.float32, device_map="cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=dequantized, **options)
    expected = transformers.AutoModelForCausalLM.from_pretrained(exact, **options).state_dict()
    numbers = theirs.state_dict()
    assert any(key.endswith("down_proj.weight") for key in expected)
    for key, each in expected.items():  # compressed-tensors multiplies in the dtype of its scales
        room = 2**-7 if name.startswith("ct_") else 0
        assert torch.allclose(numbers[key].float(), each, rtol=room, atol=0), key


# --- compressed-tensors -----------------------------------------------------------------------------------------------

WEIGHTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4 in groups": ("pack-quantized", written_formats._int(4, 32)),
    "int4 with zeros": ("pack-quantized", written_formats._int(4, 64, False)),
    "int4 by channel": ("pack-quantized", written_formats._int(4, None)),
    "int8 in groups": ("pack-quantized", written_formats._int(8, 128)),
    "int8 by channel": ("int-quantized", written_formats._int(8, None)),
    "fp8 by channel": ("float-quantized", written_formats._float(8, "channel")),
    "fp8 by tensor": ("float-quantized", written_formats._float(8, "tensor")),
    "fp8 by block": ("float-quantized", written_formats._float(8, "block", block_structure=[128, 128])),
    "mxfp4": ("mxfp4-pack-quantized", written_formats._float(4, "group", group_size=32)),
    "nvfp4": ("nvfp4-pack-quantized", written_formats._float(4, "tensor_group", group_size=16)),
}


@pytest.mark.parametrize("kind", WEIGHTS)
def test_what_compressed_tensors_writes_is_what_it_dequantises(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format, args = WEIGHTS[kind]
    rows, columns = 192, 384
    weight = torch.randn(rows, columns)
    arguments = QuantizationArgs(**args)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments, format=format)
    block = {
        "channel": (1, columns), "tensor": (rows, columns), "block": (128, 128),
    }.get(args["strategy"], (1, args.get("group_size")))  # fmt: skip
    top = {"int": 2.0 ** (args["num_bits"] - 1) - 1, "float": 448.0 if args["num_bits"] == 8 else 6.0}[args["type"]]
    scale = written_formats.largest(weight, block) / top
    state = {"weight": weight, "weight_scale": scale}
    if "mxfp4" in format:
        state["weight_scale"] = written_formats.power_above(scale)
    if "nvfp4" in format:
        whole = 6 * 448 / weight.abs().max()
        state |= {
            "weight_scale": (scale * whole).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": whole.reshape(1),
        }
    if not args.get("symmetric", True):
        state["weight_zero_point"] = torch.randint(-8, 8, scale.shape, dtype=torch.int8)
    if args["strategy"] == "tensor":
        state["weight_scale"] = scale.reshape(1)
    compressor: Any = BaseCompressor.get_value_from_registry(format)
    stored = compressor.compress(state, scheme)
    theirs = compressor.decompress(stored, scheme)["weight"]
    ours = read(tmp_path, dict(stored), written_formats.compressed(format, args))
    tolerance = 2**-7 if theirs.dtype == torch.bfloat16 else 2**-22
    assert torch.allclose(ours, theirs.float(), rtol=tolerance, atol=0), (ours - theirs).abs().max()


def test_awq_is_what_compressed_tensors_converts(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    tensors, exact = FORMATS["awq"].write(torch.randn(48, 96))
    codes, scale, zero = AutoAWQConverter(group_size=32)._convert_gemm_module(
        tensors[".qweight"], tensors[".scales"], tensors[".qzeros"]
    )
    assert zero is not None
    theirs = (codes.double() - zero.double().repeat_interleave(32, 1)) * scale.double().repeat_interleave(32, 1)
    assert torch.equal(theirs, exact)
    ours = read(tmp_path, {end[1:]: each for end, each in tensors.items()}, FORMATS["awq"].config)
    assert torch.equal(ours, theirs.float())
