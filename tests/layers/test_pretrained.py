"""Loading by slices: the same model as splitting in memory, and no byte of another rank's part."""

from __future__ import annotations

from pathlib import Path

from iris.errors import CheckpointError
import layers
from layers.checkpoint import load
from layers.checkpoint.buffers import Staging
from layers.hf.parallelize import parallelize
from layers.hf.report import make_report
from layers.sharded import ShardedLinear
import pytest
from safetensors.torch import load_file, save_file
import torch

from tests.coverage_of_models import tiny
from tests.harness import WORLDS, agreed, both, once, run_ranks
from tests.layers import models

pytestmark = both
every_world = pytest.mark.parametrize("world_size", WORLDS, scope="session")
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")


def single_file(source: Path, folder: Path, change=lambda tensors: tensors) -> Path:
    """A copy of a saved model in one file, its tensors as `change` leaves them; the same folder for all ranks."""
    folder = agreed(folder)
    once(lambda: _write_single(source, folder, change))
    return folder


def _write_single(source: Path, folder: Path, change) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path in source.glob("*.safetensors"):
        tensors.update(load_file(path))
    for path in source.glob("*config.json"):
        (folder / path.name).write_text(path.read_text())
    tensors = {name: tensor.clone() for name, tensor in change(tensors).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


# --- the same model --------------------------------------------------------------------------------------------------


def load_body(ctx, folder: str, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    model = layers.from_pretrained(folder, ctx)
    twin = models.build(name)
    parallelize(twin, ctx)
    state, expected = model.state_dict(), twin.state_dict()
    assert list(state) == list(expected)
    for key, value in expected.items():
        assert torch.equal(state[key], value), key
    for key, buffer in twin.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    assert not model.training and all(p.device == ctx.device for p in model.parameters())
    assert model.parallel_report.bytes == sum(row.bytes for row in make_report(twin, {}, ctx, "whole").rows)
    return models.logits(model, ctx.device), models.generate(model, ctx.device)


@pytest.mark.parametrize("world_size, name", models.cases([*models.CONFIGS, "nine_heads", "two_heads", "fused"]))
@pytest.mark.some(3, on_gpus=6)
def test_loaded_by_slices_is_split_in_memory(world_size: int, saved, name: str) -> None:
    for result, tokens in run_ranks(world_size, load_body, str(saved(name)), name):
        models.assert_logits(result, name)
        assert torch.equal(tokens.cpu(), models.expected(name)[2])


class Watched(Staging):
    """Staging that remembers the last one made."""

    last: Staging

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        Watched.last = self


def reads_body(ctx, folder: str) -> tuple[int, int]:
    """(bytes read, bytes held but for padding, which ranks without a head have)."""
    load.Staging = Watched
    try:
        model = layers.from_pretrained(folder, ctx)
    finally:
        load.Staging = Staging
    split = [each for each in model.modules() if isinstance(each, ShardedLinear)]
    padding = sum(sum(part.pad for part in each.parts) * each.weight.shape[1 - each.dim] for each in split)
    return Watched.last.bytes_read, model.parallel_report.bytes - padding * 4


@every_world
@pytest.mark.parametrize("name", ["vocab257", "kv2", "tied"])
def test_each_rank_reads_its_own_bytes_once(world_size: int, saved, name: str) -> None:
    whole = sum(parameter.nbytes for parameter in models.build(name).parameters())
    for read, held in run_ranks(world_size, reads_body, str(saved(name))):
        assert read == held, "of a tied head no byte is held, and none is read"
        assert world_size == 1 or read < whole


def dtype_body(ctx, folder: str) -> set:
    model = layers.from_pretrained(folder, ctx, dtype=torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    return {parameter.dtype for parameter in model.parameters()}


@two_ranks
def test_dtype_of_the_weights(world_size: int, saved) -> None:
    assert run_ranks(world_size, dtype_body, str(saved("plain"))) == [{torch.bfloat16}] * world_size


# --- names in the files ----------------------------------------------------------------------------------------------


def logits_body(ctx, folder: str) -> torch.Tensor:
    return models.logits(layers.from_pretrained(folder, ctx), ctx.device)


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
RENAMED = {
    "without the base model's prefix": ("plain", lambda t: {k.removeprefix("model."): v for k, v in t.items()}),
    "tied, under the head's name": (
        "tied",
        lambda t: {k.replace("model.embed_tokens", "lm_head"): v for k, v in t.items()},
    ),
    "tied, under both names": ("tied", lambda t: {**t, HEAD: t[EMBEDDING]}),
    "something more": ("plain", lambda t: {**t, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
}


@two_ranks
@pytest.mark.parametrize("case", RENAMED)
def test_names_that_files_may_have(world_size: int, saved, tmp_path: Path, case: str) -> None:
    name, change = RENAMED[case]
    folder = single_file(saved(name), tmp_path, change)
    for result in run_ranks(world_size, logits_body, str(folder)):
        models.assert_logits(result, name)


def lenient_body(ctx, folder: str) -> torch.Tensor:
    with pytest.raises(CheckpointError, match="model.norm.count has no place"):
        layers.from_pretrained(folder, ctx)
    return models.logits(layers.from_pretrained(folder, ctx, strict=False), ctx.device)


@two_ranks
def test_what_is_left_over_is_refused_unless_told_otherwise(world_size: int, saved, tmp_path: Path) -> None:
    folder = single_file(saved("plain"), tmp_path, lambda t: {**t, "model.norm.count": torch.zeros(36)})
    for result in run_ranks(world_size, lenient_body, str(folder)):
        models.assert_logits(result, "plain")


def untied_body(ctx, folder: str) -> torch.Tensor:
    model = layers.from_pretrained(folder, ctx)
    return model.lm_head.weight


@every_world
def test_a_stored_head_is_not_replaced_by_the_embedding(world_size: int, saved, tmp_path: Path) -> None:
    head = torch.arange(121.0 * 36).view(121, 36)
    folder = single_file(saved("tied"), tmp_path, lambda t: {**t, HEAD: head})
    rows = torch.cat([rows.cpu() for rows in run_ranks(world_size, untied_body, str(folder))])
    assert torch.equal(rows, head)


def whole_head_body(ctx, folder: str, options: dict, split: bool) -> torch.Tensor:
    options = options | ({"filter_fn": lambda name, _: name != "lm_head"} if not options else {})
    model = layers.from_pretrained(folder, ctx, **options)
    head, embedding = model.lm_head.weight, model.get_input_embeddings().weight
    assert (head is embedding) != split and not any(p.is_meta for p in model.parameters())
    return models.logits(model, ctx.device)


PLAN = {f"model.layers.*.mlp.{child}_proj": style for child, style in
        (("gate", "colwise"), ("up", "colwise"), ("down", "rowwise"))}  # fmt: skip
HEADS = {"filtered": {}, "not in the plan": {"plan": PLAN}, "by rows": {"plan": PLAN | {"lm_head": "rowwise_rep"}}}


@two_ranks
@pytest.mark.parametrize("case", HEADS)
def test_a_tied_head_that_is_not_split_like_the_embedding_is_loaded(world_size: int, saved, case: str) -> None:
    folder, split = str(saved("tied")), case == "by rows"
    for result in run_ranks(world_size, whole_head_body, folder, HEADS[case], split):
        models.assert_logits(result, "tied")


def typed_body(ctx, folder: str, model_type: str) -> None:
    loaded, split = layers.from_pretrained(folder, ctx, dtype=torch.float32), tiny.build(model_type).to(ctx.device)
    parallelize(split, ctx)
    actual, expected = loaded.state_dict(), split.state_dict()
    assert actual.keys() == expected.keys()
    assert not [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]


@two_ranks
@pytest.mark.parametrize("model_type", ["recurrent_gemma", "bert"])
def test_nothing_that_was_loaded_is_initialised_anew_or_left_empty(world_size: int, tmp_path: Path, model_type) -> None:
    """RecurrentGemma's attention initialises its merged linears, and has a buffer to be computed; BERT ties a bias."""
    folder = agreed(tmp_path)
    once(lambda: tiny.build(model_type).save_pretrained(folder))
    run_ranks(world_size, typed_body, str(folder), model_type)
