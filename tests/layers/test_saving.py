"""Checkpoints of split models, which plain transformers reads bit for bit; names of other ones; bytes and memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
import re
from unittest.mock import Mock

from iris.errors import ArgumentError, CheckpointError
import layers
from layers.checkpoint import names
from layers.checkpoint import save as saving
from layers.checkpoint.buffers import Staging
from layers.checkpoint.files import Checkpoint
from layers.hf.parallelize import parallelize
from layers.shard import Shard
import pytest
from safetensors.torch import load_file, save_file
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, agreed, both, once, run_ranks
from tests.layers import models, test_families

transformers = pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")

# Uneven parts, copies of kv heads, idle ranks, ties, fused weights, norms and sinks by head.
PLAIN = ["bias", "tied", "width130", "kv1", "two_heads", "fused"]
BY_HEAD = ["cohere", "granite_swa", "gpt_neox"]
OPTIONS = {"width130": {"sequence_parallel": 4}, "kv1": {"fuse": False}}
DTYPES = {"bias": torch.bfloat16, "kv1": torch.float16}


def whole(name: str) -> nn.Module:
    if name in BY_HEAD:
        return test_families.build(name, test_families.FAMILIES[name])
    return models.build(name).to(DTYPES.get(name, torch.float32))


# --- saved and read back ---------------------------------------------------------------------------------------------


def save_body(ctx, folder: str, names: list[str]) -> None:
    for name in names:
        model = whole(name)
        options = OPTIONS.get(name, {})
        parallelize(model, ctx, **options)
        model.save_pretrained(f"{folder}/{name}", max_shard_size="20KB" if name in PLAIN else "5GB")
        again = layers.from_pretrained(f"{folder}/{name}", ctx, **options)
        state = model.state_dict()
        assert state.keys() == again.state_dict().keys(), name
        for key, value in again.state_dict().items():
            assert value.dtype == state[key].dtype and torch.equal(value, state[key]), f"{name}: {key}"


@pytest.mark.parametrize("world_size", WORLDS[2:3] or WORLDS)
@pytest.mark.parametrize("names", [[*PLAIN[:4], *BY_HEAD[:2]], [*PLAIN[4:], *BY_HEAD[2:]]], ids=" ".join)
@pytest.mark.some(1, on_gpus=2)
def test_plain_transformers_reads_a_saved_model_bit_for_bit(world_size: int, names: list[str], tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    run_ranks(world_size, save_body, str(folder), names)
    for name in names:
        files = sorted(path.name for path in (folder / name).iterdir())
        assert ("model.safetensors.index.json" in files) == (name in PLAIN), files
        assert not [file for file in files if "partial" in file]
        state = transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto").state_dict()
        expected = whole(name).state_dict()
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            assert state[key].dtype == value.dtype and torch.equal(state[key], value), f"{name}: {key}"


def again_body(ctx, folder: str, blocked: str) -> None:
    model = whole("plain")
    parallelize(model, ctx)
    layers.save_pretrained(model, folder, ctx, max_shard_size=20_000)
    layers.save_pretrained(model, folder, ctx)  # what the first left is gone
    layers.from_pretrained(folder, ctx)
    model.save_pretrained(folder, safe_serialization=True, is_main_process=ctx.cur_rank == 0)
    for option in ({"push_to_hub": True}, {"safe_serialization": False}, {"variant": "fp16"}):
        with pytest.raises(ArgumentError, match=f"save_pretrained: {next(iter(option))} is .*: expected max_shard"):
            model.save_pretrained(folder, **option)
    with pytest.raises(ArgumentError, match="max_shard_size is 'much'"):
        model.save_pretrained(folder, max_shard_size="much")
    numbers = (0, -1, None, True, 1.5, b"5GB", [5])
    for size in (
        *numbers,
        "0GB",
        "-1GB",
        "1e400GB",
        "1e-400GB",
        "nanGB",
        "infGB",
        "GB",
        "5",
        "5 5GB",
        "9" * 400 + "GB",
    ):
        with pytest.raises(ArgumentError, match="max_shard_size is .*: expected bytes, at least 1, or a text"):
            model.save_pretrained(folder, max_shard_size=size)
    with pytest.raises(ArgumentError, match="max_shard_size is a int: expected bytes"):
        model.save_pretrained(folder, max_shard_size=-(10**5000))  # of too many digits to be shown
    for place in (None, "", "a\0b", b"folder", 3, ["folder"]):
        with pytest.raises(ArgumentError, match="folder is .*: expected a str or a Path that names one"):
            model.save_pretrained(place)
    if ctx.num_ranks > 1:
        first = ctx.cur_rank == 0
        for arguments, options, words in [
            ((folder,) if first else ("",), {}, "folder is '': expected a str or a Path"),
            ((folder if first else f"{folder}/other",), {}, "folder is '.*' on rank 0 and '.*other' on rank 1"),
            ((folder,), {"max_shard_size": 5 + ctx.cur_rank}, "max_shard_size is 5 on rank 0 and 6 on rank 1"),
            ((folder,), {} if first else {"variant": "fp16"}, "variant is 'fp16': expected max_shard_size only"),
        ]:
            with pytest.raises(ArgumentError, match=words):
                model.save_pretrained(*arguments, **options)
        other = whole("bias") if first else model
        with pytest.raises(ArgumentError, match="model is .* on rank 0 and .* on rank 1: expected the same"):
            layers.save_pretrained(other, folder, ctx)
        with pytest.raises(ArgumentError, match="model is a int: expected a Hugging Face model"):
            layers.save_pretrained(model if first else 3, folder, ctx)
    with pytest.raises(CheckpointError, match=r"cannot be written, 1 problem\(s\):\n  rank 0: "):
        model.save_pretrained(blocked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "write", Mock(side_effect=OSError("no room")))
        with pytest.raises(CheckpointError, match="rank 0: no room"):
            model.save_pretrained(folder)  # what was saved before stays, and nothing else


@two_ranks
def test_saving_again_and_where_no_folder_can_be(world_size: int, tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    blocked = folder / "file"
    blocked.touch()
    run_ranks(world_size, again_body, str(folder / "saved"), str(blocked))
    files = sorted(path.name for path in (folder / "saved").iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors"]
    config = json.loads((folder / "saved" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    assert config["num_attention_heads"] == 4


def fully_sharded_body(ctx, folder: str) -> None:
    model = whole("plain")
    layers.parallelize(model, ctx)
    fully_shard(model, mesh=init_device_mesh(ctx.device.type, (ctx.num_ranks,)))
    with pytest.raises(ArgumentError, match="model has the DTensor .*: expected plain parameters"):
        model.save_pretrained(folder)


@two_ranks
def test_parameters_that_fsdp_has_replaced_are_refused(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, fully_sharded_body, str(tmp_path))
    assert not list(tmp_path.iterdir())


# --- names of other checkpoints --------------------------------------------------------------------------------------

# family: how the names in older or larger models' checkpoints differ
OLD_NAMES = {
    "gpt_neox": (r"^lm_head\.", "embed_out."),
    "qwen3_5_text": (r"^model\.", "model.language_model."),
}


def old_names_body(ctx, folder: str) -> dict[str, torch.Tensor]:
    return {name: test_families.logits(layers.from_pretrained(f"{folder}/{name}", ctx), ctx.device)
            for name in OLD_NAMES}  # fmt: skip


def save_with_old_names(folder: Path) -> None:
    for name, (pattern, replacement) in OLD_NAMES.items():
        model = whole_of_family(name)
        tensors = {re.sub(pattern, replacement, key): value for key, value in model.state_dict().items()}
        assert tensors.keys() != model.state_dict().keys()
        model.config.save_pretrained(folder / name)
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})


@two_ranks
def test_renames_of_transformers_are_honoured(world_size: int, tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    once(lambda: save_with_old_names(folder))
    for results in run_ranks(world_size, old_names_body, str(folder)):
        for name, result in results.items():
            model = whole_of_family(name)
            single, double = test_families.logits(model), test_families.logits(model.double())
            assert (result.cpu() - double).abs().max() <= 4 * (single - double).abs().max(), name


def whole_of_family(name: str) -> nn.Module:
    return test_families.build(name, test_families.FAMILIES[name])


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_gamma_and_beta_are_weight_and_bias(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=10, is_decoder=True
    )
    transformers.logging.set_verbosity_error()
    model = transformers.BertLMHeadModel(config)
    old = {}
    for key, value in model.state_dict().items():
        key = key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        old[key] = value.clone()
    old.pop("cls.predictions.decoder.weight")
    old.pop("cls.predictions.decoder.bias")
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        empty = transformers.BertLMHeadModel(config)
    with Checkpoint(tmp_path, Staging("cpu")) as checkpoint:
        actual, problems = names.find(empty, checkpoint, strict=True)
        assert not problems
        assert actual["bert.embeddings.LayerNorm.weight"] is checkpoint["bert.embeddings.LayerNorm.gamma"]
        for name, stored in actual.items():
            read = torch.empty(stored.shape)
            stored.copy_to(read)
            assert torch.equal(read, model.state_dict()[name]), name


def test_a_weight_that_is_stored_as_integers_is_a_problem(tmp_path: Path) -> None:
    stored = {key: value.contiguous() for key, value in whole("plain").state_dict().items()}
    stored["model.norm.weight"] = stored["model.norm.weight"].long()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with torch.device("meta"):
        empty = whole("plain")
    with Checkpoint(tmp_path, Staging("cpu")) as checkpoint:
        _, problems = names.find(empty, checkpoint, strict=True)
    assert problems == ["model.norm.weight is stored as torch.int64, expected a floating-point dtype"]


# --- parts of a stored tensor ----------------------------------------------------------------------------------------


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
@pytest.mark.parametrize("dim", [0, 1])
def test_each_range_of_a_shard_is_saved_in_its_place(tmp_path: Path, dim: int) -> None:
    """As of a layer that merges outputs and was made by hand."""
    save_file({"x": torch.zeros(8, 8)}, tmp_path / "model.safetensors")
    local = torch.randn(5, 8) if dim == 0 else torch.randn(8, 5)
    held = saving._Held(local, (8, 8), Shard(8, ((1, 3), (4, 7))), dim)
    with Checkpoint(tmp_path, Staging("cpu")) as checkpoint:
        place = checkpoint["x"]
        place.file = os.open(tmp_path / "model.safetensors", os.O_RDWR)
        held.store(place, rank=1)
        os.close(place.file)
    expected = torch.zeros(8, 8).index_copy(dim, torch.tensor([1, 2, 4, 5, 6]), local)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], expected)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
def test_files_are_as_large_as_asked_at_most() -> None:
    """But for a tensor that alone is larger."""
    held = {
        name: saving._Held(torch.empty(size), (size,)) for name, size in zip("abcdef", (3, 2, 9, 2, 2, 1), strict=True)
    }
    assert saving._shards(held, 4 * 5) == [["a", "b"], ["c"], ["d", "e", "f"]]


# --- host memory -----------------------------------------------------------------------------------------------------

LARGE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "vocab_size": 4000, "head_dim": 128}
LARGE |= {"num_attention_heads": 8, "num_key_value_heads": 8}  # a rank without one would hold padding
MIB = 1 << 20


def host_body(ctx, folder: str) -> tuple[int, int, int]:
    """Bytes that this rank holds; the rise of its peak memory while it loads; the bytes that the kernel read for it."""
    layers.from_pretrained(folder, ctx)  # imports and caches

    def counter(file: str, key: str) -> int:
        return int(re.search(rf"^{key}:\s+(\d+)", Path("/proc/self", file).read_text(), re.M)[1])

    Path("/proc/self/clear_refs").write_text("5")  # the peak is what it is now
    before, read = counter("status", "VmRSS"), counter("io", "rchar")
    model = layers.from_pretrained(folder, ctx)
    read = counter("io", "rchar") - read
    return model.parallel_report.bytes, (counter("status", "VmHWM") - before) * 1024, read


@two_ranks
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="no /proc/self/io")
def test_host_memory_and_bytes_read_are_those_of_the_part(world_size: int, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**models.PLAIN, **LARGE})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    whole = {name: torch.full(parameter.shape, 0.5) for name, parameter in model.named_parameters()}
    folder = agreed(tmp_path)

    def save() -> None:
        config.save_pretrained(folder)
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})

    once(save)
    total, largest = sum(each.nbytes for each in whole.values()), max(each.nbytes for each in whole.values())
    for held, rise, read in run_ranks(world_size, host_body, str(folder)):
        assert held <= read <= held + 2 * MIB, "what is beside the weights: headers and the configuration"
        on_host = 0 if ON_GPU else held
        assert rise <= on_host + 2 * largest + 16 * MIB < total
