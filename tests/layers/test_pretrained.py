"""Loading by slices: the same model as splitting in memory, no byte of another rank's part, and bad checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from iris.errors import ArgumentError, CheckpointError
import layers
from layers.checkpoint import load
from layers.checkpoint.buffers import Staging
from layers.hf.parallelize import parallelize
from layers.hf.report import make_report
from layers.sharded import ShardedLinear
import pytest
from safetensors.torch import load_file, save_file
import torch
from torch import nn

from tests.harness import WORLDS, agreed, both, once, run_ranks
from tests.layers import models

pytestmark = both
every_world = pytest.mark.parametrize("world_size", WORLDS, scope="session")
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS, scope="session")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """`saved(name)`: the folder of that model, in several files."""
    folders: dict[str, Path] = {}

    def save(name: str) -> Path:
        if name not in folders:
            folders[name] = agreed(tmp_path_factory.mktemp(name))
            models.build(name).save_pretrained(folders[name], max_shard_size="20KB")  # of several ranks, rank 0 writes
            agreed(None)
            assert len(list(folders[name].glob("*.safetensors"))) > 1
        return folders[name]

    return save


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
    assert model.parallel_report.bytes == sum(row.bytes for row in make_report(twin, {}, ctx).rows)
    return models.logits(model, ctx.device), models.generate(model, ctx.device)


@pytest.mark.parametrize("world_size, name", models.cases([*models.CONFIGS, "nine_heads", "two_heads", "fused"]))
@pytest.mark.some(6)
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


# --- bad checkpoints -------------------------------------------------------------------------------------------------


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


def asked_body(ctx, folder: str) -> None:
    """What one rank alone asks for, or asks wrongly, is an error on all of them."""
    first = ctx.cur_rank == 0
    for options, words in [
        ({"dtype": None if first else "x"}, "dtype is 'x': expected None, torch.bfloat16"),
        ({"strict": "no" if first else True}, "strict is 'no': expected a bool"),
        (
            {"dtype": torch.float32 if first else torch.bfloat16},
            "dtype is torch.float32 on rank 0 and torch.bfloat16 on",
        ),
        ({"foo": 1} if first else {}, "foo is 1: expected no option but dtype, strict, trust_remote_code, plan, "),
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
    run_ranks(world_size, asked_body, str(saved("plain")))


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
        assert "nowhere' is no folder" in text
    file = folder / "file"
    file.touch()
    for text in run_ranks(world_size, nowhere_body, str(file)):
        assert "file' is no folder, but a file" in text


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
