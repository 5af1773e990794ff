"""A model on a mesh of hosts has the unsplit model's logits and tokens; a rank reads its own layers' slices only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from iris.errors import ArgumentError, IrisError, StyleError
import layers
from layers.checkpoint import load
from layers.checkpoint.buffers import Staging
from layers.serving.graphs import Graphs
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.hosts.meshes import SHORT, on_mesh
from tests.hosts.namespaces import needs_namespaces, run_hosts
from tests.layers import models
from tests.layers.test_graphs import Again, Compiled

pytestmark = needs_namespaces()

# Layers of one kind and of two, a tied head, experts; more of these, a table of positions, a factor on embeddings.
_FAMILIES = ("plain", "tied", "gpt_oss")
_MORE_FAMILIES = ("sliding", "transposed", "offset_norm", "qk_norm", "deepseek_v3", "fused", "gathered_qkv", "vocab257")


def _results(ends: list) -> list[Any]:
    for end in ends:
        assert end.exitcode == 0, end.traceback
    return [end.result for end in ends]


def _in_memory(rank: int, world_size: int, first: str, names: tuple[str, ...]) -> None:
    with on_mesh(first, world_size) as (mesh, ctx):
        for name in names:
            model = models.build(name)
            layers.parallelize(model, ctx, mesh=mesh)
            if name in models.MIXTURES:  # which runs in no float64
                torch.testing.assert_close(models.logits(model), models.logits(models.build(name)))
                assert torch.equal(models.generate(model), models.generate(models.build(name)))
                continue
            models.assert_logits(models.logits(model), name)
            assert torch.equal(models.generate(model), models.expected(name)[2]), name
            padded = models.generate(models.build(name), padded=True)
            assert torch.equal(models.generate(model, padded=True), padded), name


@pytest.mark.parametrize("names", [_FAMILIES, pytest.param(_MORE_FAMILIES, marks=pytest.mark.slow)])
def test_families_in_stages(names: tuple[str, ...]) -> None:
    _results(run_hosts((2, 2), _in_memory, "pp", names, env=SHORT, timeout=200))


@pytest.mark.slow
def test_one_stage() -> None:
    _results(run_hosts((2,), _in_memory, "pp", ("plain",), env=SHORT))


@pytest.mark.slow
def test_replicas() -> None:
    _results(run_hosts((2, 2), _in_memory, "dp", ("tied",), env=SHORT))


# --- from files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    _three_layers().save_pretrained(path)
    return path


def _three_layers(tied: bool = False) -> Any:
    import transformers

    changes = {"num_hidden_layers": 3, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    state = torch.get_rng_state()
    torch.manual_seed(5)
    config = transformers.LlamaConfig(**{**models.PLAIN, **changes})
    model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32).eval()
    torch.set_rng_state(state)
    return model


class Watched(Staging):
    """Staging that remembers the last one made."""

    last: Staging

    def __init__(self, device: torch.device | str) -> None:
        super().__init__(device)
        Watched.last = self


def _from_files(rank: int, world_size: int, first: str, folder: str, stages: int) -> list[str]:
    load.Staging = Watched
    with on_mesh(first, world_size, world_size // stages) as (mesh, ctx):
        model = layers.from_pretrained(folder, ctx, mesh=mesh)
        whole = _three_layers()
        prompts = models.prompt()
        expected = models.generate(whole)
        assert torch.equal(models.generate(model), expected)
        new = expected[:, prompts.shape[1] :].tolist()
        engine = layers.Engine(model, ctx, batch_size=2, max_length=32)
        assert engine.generate(prompts, models.NEW) == new
        for compile in (False, "eager"):
            captured = layers.Engine(model, ctx, batch_size=2, max_length=32, compile=compile)
            captured.prompts, captured.steps = (Graphs(2, Compiled if compile else Again) for _ in range(2))
            assert [captured.generate(prompts, models.NEW) for _ in range(3)] == [new] * 3
            assert len(captured.steps) == 1
        uneven = [prompts[0].tolist(), prompts[1, :4].tolist()]
        one = layers.Engine(model, ctx, batch_size=1, max_length=32)
        assert engine.generate(uneven, models.NEW)[0] == one.generate(uneven[:1], models.NEW)[0] == new[0]
        torch.manual_seed(rank)  # of which stage 0's rank 0 counts
        drawn = models.generate(model, do_sample=True, temperature=1.5).tolist()
        sampled = engine.generate(prompts, models.NEW, temperature=1.5)
        everyone = [None] * world_size
        torch.distributed.all_gather_object(everyone, (drawn, sampled))
        if first == "pp":
            assert all(each == everyone[0] for each in everyone)
        own = dict(model.named_parameters())
        assert Watched.last.bytes_read == sum(parameter.nbytes for parameter in own.values())
        assert not any(parameter.is_meta for parameter in own.values())
        return list(own)


def test_stages_hold_their_own_layers(folder: Path) -> None:
    results = _results(run_hosts((2, 2), _from_files, "pp", str(folder), 2, env=SHORT))
    layer = [
        [sum(f".layers.{i}.self_attn.o_proj.weight" in name for name in names) for i in range(3)] for names in results
    ]
    assert layer == [[1, 0, 0]] * 2 + [[1, 1, 0]] * 2  # numbered from 0 in each stage
    assert ["model.embed_tokens.weight" in names for names in results] == [True, True, False, False]
    assert ["lm_head.weight" in names for names in results] == [False, False, True, True]


@pytest.mark.slow
def test_three_stages_of_one_rank(folder: Path) -> None:
    _results(run_hosts((1, 1, 1), _from_files, "pp", str(folder), 3, env=SHORT))


def test_replicas_from_files(folder: Path) -> None:
    _results(run_hosts((2, 2), _from_files, "dp", str(folder), 2, env=SHORT))


# --- what is refused -------------------------------------------------------------------------------------------------


def _refused(rank: int, world_size: int, folder: str) -> dict[str, str]:
    message: dict[str, str] = {}

    def refuse(what: str, kind: type, call: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        message[what] = str(caught.value)

    with on_mesh("pp", world_size) as (mesh, ctx):
        shape = world_size // 2, 2
        order = init_device_mesh("cpu", shape, mesh_dim_names=("tp", "pp"))
        unnamed = init_device_mesh("cpu", shape)
        other = init_device_mesh("cpu", shape, mesh_dim_names=("hosts", "tp"))
        flat = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("pp", "tp"))
        for what, wrong in (("order", order), ("unnamed", unnamed), ("names", other), ("group", flat), ("none", "pp")):
            refuse(what, ArgumentError, lambda wrong=wrong: layers.parallelize(models.build("plain"), ctx, mesh=wrong))
            refuse(f"{what}, read", ArgumentError, lambda wrong=wrong: layers.from_pretrained(folder, ctx, mesh=wrong))
        model = models.build(models.ONE_LAYER)
        before = {name: id(each) for name, each in model.named_parameters()}
        refuse("layers", ArgumentError, lambda: layers.parallelize(model, ctx, mesh=mesh))
        assert {name: id(each) for name, each in model.named_parameters()} == before
        refuse("no model", ArgumentError, lambda: layers.parallelize(torch.nn.Linear(4, 4), ctx, mesh=mesh))
        sharing = dict(sequence_parallel=True, mesh=mesh)
        refuse("sharing", ArgumentError, lambda: layers.parallelize(models.build("plain"), ctx, **sharing))
        # one host only has another model, or none
        mine = models.build("plain") if rank < 2 else models.build(models.ONE_LAYER)
        refuse("one host", ArgumentError, lambda: layers.parallelize(mine, ctx, mesh=mesh))
        other = models.build("tied" if rank < 2 else "plain")
        refuse("other model", ArgumentError, lambda: layers.parallelize(other, ctx, mesh=mesh))
        refuse(
            "options", ArgumentError, lambda: layers.parallelize(models.build("plain"), ctx, fuse=rank < 2, mesh=mesh)
        )
        dtype = torch.float32 if rank < 2 else torch.bfloat16
        refuse("dtype", ArgumentError, lambda: layers.from_pretrained(folder, ctx, dtype=dtype, mesh=mesh))
        split = models.build("plain")
        layers.parallelize(split, ctx, mesh=mesh)
        assert split.config.num_hidden_layers == 1 and models.config_of("plain").num_hidden_layers == 2
        tokens = models.prompt() + (rank // 2)
        refuse("tokens", ArgumentError, lambda: split.generate(tokens, max_new_tokens=2))
        refuse("save", ArgumentError, lambda: split.save_pretrained(folder))
        refuse("save by", ArgumentError, lambda: layers.save_pretrained(split, folder, ctx))
        refuse("hidden", ArgumentError, lambda: split(models.prompt(), output_hidden_states=True))
        refuse("words", ArgumentError, lambda: split(models.prompt() + 1000))
        assert torch.equal(models.generate(split), models.expected("plain")[2])  # all of them can go on
        refuse("style", (StyleError, IrisError), lambda: layers.parallelize(split, ctx, mesh=mesh))
    return message


def test_bad_meshes_raise_on_every_rank(folder: Path) -> None:
    results = _results(run_hosts((2, 2), _refused, str(folder), env=SHORT))
    first = results[0]
    assert "('tp', 'pp'): expected" in first["order"] and 'mesh_dim_names=("pp", "tp")' in first["order"]
    assert "names no dimensions" in first["unnamed"]
    assert "('hosts', 'tp')" in first["names"]
    assert "one group, ctx = iris.iris(group=mesh['tp'])" in first["group"]
    assert "mesh has 2 stages ('pp') and LlamaForCausalLM 1 layers" in first["layers"]
    assert "differs between hosts" in first["tokens"] and "fuse differs between hosts" in first["options"]
    assert "model.config differs between hosts" in first["other model"]
    assert "model.dtype differs between hosts" in first["dtype"]
    for other in results[1:]:
        assert other.keys() == first.keys()
    assert "hostb" in first["one host"] and "hostb" not in results[2]["one host"]
