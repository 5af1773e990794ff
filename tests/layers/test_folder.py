"""What else a folder holds that transformers acts on: done as transformers does it, or refused by name. Its code."""

from __future__ import annotations

import builtins
from collections.abc import Callable
import json
from pathlib import Path
from typing import Any

from iris.errors import ArgumentError, CheckpointError
import layers
import pytest
from safetensors.torch import load_file, save_file
import torch

from tests.harness import WORLDS, agreed, both, once, run_ranks
from tests.layers import models
from tests.layers.test_malformed import configure

transformers = pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")


def write(name: str, **content: Any) -> Callable[[Path], None]:
    def put(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))

    return put


def rename(old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: (folder / old).rename(folder / new) and None


def change(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: configure(folder, **changes)


def adapter_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "config.json").unlink()
    write("adapter_config.json", base_model_name_or_path="some/base", peft_type="LORA")(folder)


def no_model(folder: Path) -> None:
    configure(folder, model_type="custom", auto_map={"AutoConfig": "custom.Config"})
    (folder / "custom.py").write_text("import os\nopen(os.environ['CODE_RAN'], 'w')\n")


SINGLE, ADAPTER = "model.safetensors", "adapter_config.json"
MERGE = r"merge it once with peft, .*merge_and_unload\(\), and save that"
REFUSED = {
    "model and adapter": (write(ADAPTER, peft_type="LORA"), rf"a model and an adapter \({ADAPTER}\).*{MERGE}"),
    "adapter alone": (adapter_only, rf"holds an adapter \({ADAPTER}\) of 'some/base', and no model: {MERGE}"),
    "torch.distributed": (
        lambda folder: (folder / "shard-00000-model-00001-of-00001.safetensors").touch(),
        r"a checkpoint of torch.distributed \(shard-00000-model-00001-of-00001.safetensors\), which is not read",
    ),
    "pickles": (rename(SINGLE, "pytorch_model.bin"), "neither .*: only safetensors are read; pytorch_model.bin: load"),
    "variant": (rename(SINGLE, "model.fp16.safetensors"), r"; model.fp16.safetensors: load with .*\(variant="),
    "GGUF": (rename(SINGLE, "model-q4.gguf"), r"; model-q4.gguf: load with transformers .*gguf_file=\) and save once"),
    **{
        method: (change(quantization_config={"quant_method": method}), f"quantised .quantization_config, '{method}'")
        for method in ("bitsandbytes", "what")
    },
    **{
        method: (change(quantization_config={"quant_method": method}), f"are quantised .{method}., and no stored weig")
        for method in ("gptq", "awq", "fp8", "mxfp4")
    },
    "no groups": (
        change(quantization_config={"quant_method": "compressed-tensors"}),
        "quantization_config of compressed-tensors: config_groups is None: expected groups by name",
    ),
    "quantised text": (
        change(text_config={"quantization_config": {"quant_method": "aqlm"}}),
        "the weights are quantised .*load them with transformers",
    ),
    "compressed": (change(compression_config={"format": "dense"}), "quantised .compression_config"),
    "fusion": (change(fusion_config={"patch_embeddings": True}), "config.json has fusion_config, which names mod"),
    "versions": (change(configuration_files=["config.4.0.0.json"]), "config.json has configuration_files, which nam"),
    "weights outside": (change(transformers_weights="../a.safetensors"), "transformers_weights: '../a.safetensors':"),
    "weights that are pickles": (change(transformers_weights="pytorch_model.bin"), "expected the name of a safe"),
    "weights by a number": (change(transformers_weights=3), "transformers_weights: 3: expected the name of a safe"),
    "kernel": (change(_attn_implementation="kernels-community/flash-attn"), "attn_implementation 'kernels-community/f"),
    "public kernel": (change(attn_implementation="org/repo:function"), "'org/repo:function', code from the hub: pass"),
    "flash": (change(attn_implementation="flash_attention_2"), "'flash_attention_2', code from the hub: pass trust_r"),
    "kernel of experts": (change(experts_implementation="org/repo"), "experts_implementation 'org/repo', code from"),
    "code": (no_model, "contains custom code which must be executed .*trust_remote_code=True"),
    "no model type": (change(model_type=None), "model_type|model type"),
    "generation": (lambda f: (f / "generation_config.json").write_text("{") and None, "generation_config.json: "),
}  # fmt: skip


def refused_body(ctx, root: str) -> None:
    requested: list[tuple] = []  # on stdin; transformers catches what is raised there

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "input", lambda *words: requested.append(words) or "no")
        patch.setenv("CODE_RAN", f"{root}/ran")
        for case, (_, words) in REFUSED.items():
            with pytest.raises(CheckpointError, match=words):
                layers.from_pretrained(f"{root}/{case}", ctx)
    assert not requested and not Path(root, "ran").exists()


@two_ranks
def test_what_transformers_would_act_on_is_refused_by_name(world_size: int, tmp_path: Path) -> None:
    root = agreed(tmp_path)
    if root == tmp_path:  # rank 0's
        for case, (spoil, _) in REFUSED.items():
            models.build("plain").save_pretrained(root / case)
            spoil(root / case)
    agreed(None)
    run_ranks(world_size, refused_body, str(root))


# --- done as transformers does it ------------------------------------------------------------------------------------


def dtype_of_the_files(folder: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(folder / SINGLE).items()}
    save_file(tensors, folder / SINGLE)
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype")
    (folder / "config.json").write_text(json.dumps(config))


def beside_an_index(folder: Path) -> None:
    write("model.safetensors.index.json", weight_map={"a": "nowhere.safetensors"})(folder)


def elsewhere(folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    save_file(tensors, folder / "other.safetensors")
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, folder / SINGLE)
    configure(folder, transformers_weights="other.safetensors")


def generation_in_the_configuration(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    configure(folder, max_length=77, do_sample=True)


def native_code(folder: Path) -> None:
    configure(folder, auto_map={"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"})


SERVED: dict[str, Callable[[Path], None]] = {
    "dtype": dtype_of_the_files,
    "beside an index": beside_an_index,
    "weights elsewhere": elsewhere,
    "generation": generation_in_the_configuration,
    "code of a model that transformers has": native_code,
    "custom generate": lambda folder: write("custom_generate/generate.py")(folder),
    "chat template": lambda folder: (folder / "chat_template.jinja").write_text("{{ messages }}") and None,
    "infinite": change(of_nothing=[0.0, float("inf")]),
    "eager": change(attn_implementation="eager"),
}


def served_body(ctx, root: str) -> dict[str, tuple[torch.Tensor, torch.dtype, dict[str, Any]]]:
    answers = {}
    for case in SERVED:
        model = layers.from_pretrained(f"{root}/{case}", ctx)
        kept = model.generation_config.to_dict()
        kept.pop("disable_compile")
        answers[case] = models.logits(model, ctx.device).float().cpu(), model.dtype, kept
    return answers


@two_ranks
def test_what_transformers_acts_on_is_done_alike(world_size: int, tmp_path: Path) -> None:
    root = agreed(tmp_path)
    if root == tmp_path:  # rank 0's
        for case, prepare in SERVED.items():
            models.build("plain").save_pretrained(root / case)
            prepare(root / case)
    agreed(None)
    for answers in run_ranks(world_size, served_body, str(root)):
        for case, (logits, dtype, kept) in answers.items():
            whole = transformers.AutoModelForCausalLM.from_pretrained(root / case, trust_remote_code=False)
            expected = models.logits(whole, torch.device("cpu")).float()
            error = (logits - expected).abs().max() / expected.abs().max()
            assert dtype == whole.dtype and error < (0.05 if dtype == torch.bfloat16 else 1e-4), case
            other = whole.generation_config.to_dict()
            other.pop("disable_compile")
            assert kept == other, case


# --- code that is allowed --------------------------------------------------------------------------------------------

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig):
    model_type = "custom"
class Model(LlamaForCausalLM):
    config_class = Config
"""


def allowed_body(ctx, folder: str, generate: str) -> torch.Tensor:
    with pytest.raises(ArgumentError, match="trust_remote_code is 1: expected a bool"):
        layers.from_pretrained(folder, ctx, trust_remote_code=1)
    differing = "trust_remote_code is True on rank 0 and False on rank 1: expected the same"
    if ctx.num_ranks > 1:
        with pytest.raises(ArgumentError, match=differing):
            layers.from_pretrained(folder, ctx, trust_remote_code=ctx.cur_rank == 0)
    with pytest.raises(CheckpointError, match="custom_generate/generate.py, which replaces the model's generate"):
        layers.from_pretrained(generate, ctx, trust_remote_code=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", f"{folder}/cache")
        return models.logits(layers.from_pretrained(folder, ctx, trust_remote_code=True), ctx.device)


@two_ranks
def test_code_runs_where_it_is_allowed(world_size: int, tmp_path: Path) -> None:
    root = agreed(tmp_path)
    if root == tmp_path:  # rank 0's
        for name in ("code", "generate"):
            models.build("plain").save_pretrained(root / name)
        auto = {"AutoConfig": "custom.Config", "AutoModelForCausalLM": "custom.Model"}
        configure(root / "code", model_type="custom", auto_map=auto)
        (root / "code" / "custom.py").write_text(CODE)
        SERVED["custom generate"](root / "generate")
    agreed(None)
    for logits in run_ranks(world_size, allowed_body, str(root / "code"), str(root / "generate")):
        models.assert_logits(logits, "plain")


# --- dtypes that transformers keeps ----------------------------------------------------------------------------------


def kept_dtypes(load) -> dict[str, torch.dtype]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.LlamaForCausalLM, "_keep_in_fp32_modules_strict", {"norm", "layers.*.mlp.gate_proj"})
        return {name: parameter.dtype for name, parameter in load().named_parameters()}


def kept_body(ctx, folder: str) -> dict[str, torch.dtype]:
    return kept_dtypes(lambda: layers.from_pretrained(folder, ctx, dtype=torch.bfloat16, fuse=False))


@two_ranks
def test_what_transformers_keeps_in_float32_stays_so(world_size: int, tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    once(lambda: models.build("plain").save_pretrained(folder))
    load = transformers.AutoModelForCausalLM.from_pretrained
    expected = kept_dtypes(lambda: load(folder, dtype=torch.bfloat16))
    assert set(expected.values()) == {torch.bfloat16, torch.float32}
    agreed(None)
    assert run_ranks(world_size, kept_body, str(folder)) == [expected] * world_size
