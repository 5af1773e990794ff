"""Checkpoints that cannot be loaded: every rank raises the same, and loads a good one afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from iris.errors import ArgumentError, CheckpointError
import layers
from layers.checkpoint import load
import pytest
import torch
from torch import nn

from tests.harness import WORLDS, agreed, both, once, run_ranks
from tests.layers import models
from tests.layers.test_pretrained import logits_body, single_file

pytestmark = both
every_world = pytest.mark.parametrize("world_size", WORLDS, scope="session")
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")


def refused_body(ctx, folder: str, good: str) -> tuple[str, torch.Tensor]:
    allocated = []
    plain = nn.Parameter.__new__

    def watch(cls, data=None, requires_grad=True):
        allocated.extend([] if data is None or data.is_meta else [data])
        return plain(cls, data, requires_grad)

    nn.Parameter.__new__ = staticmethod(watch)
    try:
        with pytest.raises(CheckpointError) as caught:
            layers.from_pretrained(folder, ctx)
    finally:
        nn.Parameter.__new__ = staticmethod(plain)
    assert not allocated, "something was loaded before everything was checked"
    return str(caught.value), logits_body(ctx, good)


def without(*names: str):
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def misshapen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = without("model.norm.weight", "model.layers.1.mlp.up_proj.weight")(tensors)
    key = "model.layers.0.self_attn.k_proj.weight"
    more = {"model.layers.2.mlp.up_proj.weight": torch.zeros(64, 36), "model.norm.count": torch.zeros(36)}
    return {**tensors, **more, key: tensors[key][:-1], "model.embed_tokens.weight": torch.zeros(120, 37)}


@two_ranks
@pytest.mark.parametrize(
    "change, lines",
    [
        (without("model.norm.weight"), ["1 problem(s)", "model.norm.weight is missing, expected [36]"]),
        (
            misshapen,
            [
                "6 problem(s)",
                "model.layers.2.mlp.up_proj.weight has no place in LlamaForCausalLM",
                "model.norm.count has no place in LlamaForCausalLM",
                "model.norm.weight is missing, expected [36]",
                "model.layers.1.mlp.up_proj.weight is missing, expected [64, 36]",
                "model.layers.0.self_attn.k_proj.weight has shape [31, 36], expected [32, 36]",
                "model.embed_tokens.weight has shape [120, 37], expected [120, 36]",
            ],
        ),
    ],
    ids=["missing", "several"],
)  # fmt: skip
def test_every_bad_tensor_is_listed_on_every_rank(world_size: int, saved, tmp_path: Path, change, lines) -> None:
    folder = single_file(saved("plain"), tmp_path, change)
    for text, result in run_ranks(world_size, refused_body, str(folder), str(saved("plain"))):
        assert all(line in text for line in lines), text
        models.assert_logits(result, "plain")


def truncate(folder: Path) -> str:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    return "model.safetensors:"


def lose_file(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return "holds neither model.safetensors nor model.safetensors.index.json"


def lose_part(folder: Path) -> str:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    names = {
        "lm_head.weight": "model-00002-of-00002.safetensors",
        "model.norm.weight": "model-00001-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return "model-00002-of-00002.safetensors"


def spoil_index(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text("[]")
    return "is not an index"


def lose_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return "config.json"


def number_index(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": 3}}))
    return "is not an index"


def configure(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def quantise(folder: Path) -> str:
    configure(folder, quantization_config={"quant_method": "fp8"})
    return "quantised"


def unknown_activation(folder: Path) -> str:
    configure(folder, hidden_act="nope")
    return "the configuration makes no model: KeyError: 'nope'"


def wide(folder: Path) -> str:
    configure(folder, dtype="float64")
    return "the configuration's dtype is torch.float64: pass dtype=torch.float32"


def request_body(ctx, folder: str) -> None:
    """What one rank alone asks for, or asks wrongly, is an error on all of them."""
    first = ctx.cur_rank == 0
    for options, words in [
        ({"dtype": None if first else "x"}, "dtype is 'x': expected None, torch.bfloat16"),
        ({"strict": "no" if first else True}, "strict is 'no': expected a bool"),
        (
            {"dtype": torch.float32 if first else torch.bfloat16},
            "dtype is torch.float32 on rank 0 and torch.bfloat16 on",
        ),
        (
            {"foo": 1} if first else {},
            "foo is 1: expected no option but dtype, strict, trust_remote_code, verify, plan, ",
        ),
        ({"fuse": "no"} if first else {}, "fuse is 'no': expected a bool"),
        ({"plan": 7} if first else {}, "plan is 7: expected 'auto' or a dict"),
        ({"weights": "fp8"} if first else {}, "weights is 'fp8' on rank 0 and None on rank 1: expected the same"),
    ]:
        with pytest.raises(ArgumentError, match=words):
            layers.from_pretrained(folder, ctx, **options)
    if ctx.num_ranks > 1:
        for other in (f"{folder}/..", "org/model", Path(folder, "nowhere")):
            with pytest.raises(
                ArgumentError, match="path_or_id is '.*' on rank 0 and '.*' on rank 1: expected the same"
            ):
                layers.from_pretrained(folder if first else other, ctx)
        with pytest.MonkeyPatch.context() as patch:  # the same text, another folder
            patch.chdir(Path(folder).parent if first else "/")
            with pytest.raises(ArgumentError, match=f"path_or_id is '{folder}' on rank 0 and '{Path(folder).name}' on"):
                layers.from_pretrained(Path(folder).name, ctx)
    for path in ("", "a\0b") if ctx.num_ranks > 1 else ():
        with pytest.raises(ArgumentError, match=r"path_or_id is .*: expected a folder, or a name on the hub"):
            layers.from_pretrained(path if ctx.cur_rank else folder, ctx)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(folder).parent)
        layers.from_pretrained(Path(folder).name, ctx)
    with pytest.raises(ArgumentError, match="foo is 1"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "_folder", None)  # refused before a file is looked for
        layers.from_pretrained(folder, ctx, foo=1)
    layers.from_pretrained(folder, ctx, filter_fn=lambda name, module: True)


@two_ranks
def test_ranks_ask_for_the_same_model(world_size: int, saved) -> None:
    run_ranks(world_size, request_body, str(saved("plain")))


SPOILT = [
    truncate, lose_file, lose_part, spoil_index, number_index, lose_config, quantise, unknown_activation, wide,
]  # fmt: skip


@two_ranks
@pytest.mark.parametrize("spoil", SPOILT)
def test_unreadable_checkpoints(world_size: int, saved, tmp_path: Path, spoil) -> None:
    folder = single_file(saved("plain"), tmp_path)
    expected = once(lambda: spoil(folder))
    for text, result in run_ranks(world_size, refused_body, str(folder), str(saved("plain"))):
        assert expected in text
        models.assert_logits(result, "plain")


def nowhere_body(ctx, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        layers.from_pretrained(folder, ctx)
    return str(caught.value)


@every_world
def test_a_folder_that_is_not_there(world_size: int, tmp_path: Path) -> None:
    folder = agreed(tmp_path)
    for text in run_ranks(world_size, nowhere_body, str(folder / "nowhere")):
        assert "nowhere' is not a folder" in text
    file = folder / "file"
    file.touch()
    for text in run_ranks(world_size, nowhere_body, str(file)):
        assert "file' is a file, not a folder" in text


@pytest.mark.parametrize(
    "error, message",
    [
        ("LocalEntryNotFoundError", r"'some/model' is not a folder, and the Hugging Face hub was not reached.*smollm2"),
        ("RepositoryNotFoundError", r"the Hugging Face hub has no model of that name"),
        ("HFValidationError", r"it cannot be loaded from the Hugging Face hub"),
    ],
)
def test_a_hub_out_of_reach_is_not_a_missing_model(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, errors = pytest.importorskip("huggingface_hub"), pytest.importorskip("huggingface_hub.errors")
    kind = getattr(errors, error)

    def fail(*_: object, **__: object) -> None:
        raise kind.__new__(kind)  # one of them needs a response of the hub

    monkeypatch.setattr(hub, "snapshot_download", fail)
    ctx = SimpleNamespace(cur_rank=0, broadcast=lambda value: value)
    with pytest.raises(CheckpointError, match=message):
        load._folder("some/model", False, ctx)


def one_rank_body(ctx, folder: str) -> None:
    def fail(folder: Path, trust_remote_code: bool) -> None:
        raise OSError("mine alone")

    with pytest.MonkeyPatch.context() as patch:
        if ctx.cur_rank == 1:
            patch.setattr("layers.checkpoint.load.check_contents", fail)
        with pytest.raises(CheckpointError, match=r"2 problem\(s\):\n  rank 0: .*\n  rank 1: mine alone"):
            layers.from_pretrained(folder, ctx)


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_a_problem_of_one_rank_names_it(world_size: int, tmp_path: Path) -> None:
    if world_size > 1:
        run_ranks(world_size, one_rank_body, str(agreed(tmp_path)))
