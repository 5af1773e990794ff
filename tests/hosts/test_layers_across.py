"""Layers and models that are split over the ranks of all hosts: the unsplit ones' results, compiled and from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import iris
from iris.errors import ArgumentError
import layers
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.hosts.meshes import SHORT
from tests.hosts.namespaces import needs_namespaces, run_hosts
from tests.layers import models

pytestmark = needs_namespaces()


def _mesh(world_size: int, inside: int) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (world_size // inside, inside), mesh_dim_names=("hosts", "tp"))


def _linear(inputs: int, outputs: int, seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(inputs, outputs).requires_grad_(False)


def _layers(rank: int, world_size: int, inside: int, seed: int) -> None:
    mesh = _mesh(world_size, inside)
    with iris.iris(1 << 24, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        for tokens, inputs, outputs in ((5, 24, 31), (1, 26, 18), (13, 24, 24)):
            seed += 1
            first, second = _linear(inputs, outputs, seed), _linear(outputs, inputs, seed + 50)
            x = torch.randn(tokens, inputs, generator=torch.Generator().manual_seed(seed))
            wide = x.double() @ first.weight.double().t() + first.bias.double()
            column = layers.ColumnParallelLinear.from_linear(first, gather_output=True, ctx=ctx)
            torch.testing.assert_close(column(x).double(), wide, rtol=1e-5, atol=1e-5)
            expected = wide @ second.weight.double().t() + second.bias.double()
            column = layers.ColumnParallelLinear.from_linear(first, ctx=ctx)
            row = layers.RowParallelLinear.from_linear(second, ctx=ctx)
            torch.testing.assert_close(row(column(x)).double(), expected, rtol=1e-5, atol=1e-4)
            rows = -(-tokens // world_size)
            mine = x[rank * rows : (rank + 1) * rows]
            column = layers.ColumnParallelLinear.from_linear(first, sequence_parallel=True, ctx=ctx)
            row = layers.RowParallelLinear.from_linear(second, sequence_parallel=True, ctx=ctx)
            own = expected[rank * rows : (rank + 1) * rows]
            torch.testing.assert_close(row(column(mine, tokens=tokens)).double(), own, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("inside", [2, 3])
def test_layers_over_two_hosts(inside: int) -> None:
    for end in run_hosts((inside, inside), _layers, inside, 7 * inside, env=SHORT, timeout=200):
        assert end.exitcode == 0, end.traceback


def _in_memory(rank: int, world_size: int, inside: int, names: tuple[str, ...]) -> list[Any]:
    mesh, tokens = _mesh(world_size, inside), []
    with iris.iris(1 << 26, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        for name in names:
            model = models.build(name)
            layers.parallelize(model, ctx)
            models.assert_logits(models.logits(model), name)
            expected = models.expected(name)[2]
            assert torch.equal(models.generate(model), expected), name
            new = expected[:, models.prompt().shape[1] :].tolist()
            for compile in (False, "eager"):
                engine = layers.Engine(model, ctx, batch_size=2, max_length=32, compile=compile)
                assert engine.generate(models.prompt(), models.NEW) == new, (name, compile)
            torch.manual_seed(rank)  # rank 0's counts
            tokens.append(models.generate(model, do_sample=True, temperature=1.5).tolist())
            tokens.append(engine.generate(models.prompt(), models.NEW, temperature=1.5))
    return tokens


@pytest.mark.parametrize(
    "inside, names",
    [(2, ("plain", "tied")), pytest.param(3, ("kv2", "vocab257", "qk_norm", "fused"), marks=pytest.mark.slow)],
)
def test_models_over_two_hosts(inside: int, names: tuple[str, ...]) -> None:
    ends = run_hosts((inside, inside), _in_memory, inside, names, env=SHORT, timeout=200)
    for end in ends:
        assert end.exitcode == 0, end.traceback
        assert end.result == ends[0].result


def _from_files(rank: int, world_size: int, folder: str, saved: str) -> None:
    mesh = _mesh(world_size, 2)
    with iris.iris(1 << 26, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        model = layers.from_pretrained(folder, ctx)
        assert torch.equal(models.generate(model), models.expected("plain")[2])
        layers.save_pretrained(model, saved, ctx)
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(saved)
    assert torch.equal(models.generate(again), models.expected("plain")[2])


def test_read_and_saved(tmp_path: Path) -> None:
    models.build("plain").save_pretrained(tmp_path / "model")
    for end in run_hosts((2, 2), _from_files, str(tmp_path / "model"), str(tmp_path / "saved"), env=SHORT):
        assert end.exitcode == 0, end.traceback


def _refused(rank: int, world_size: int) -> dict[str, str]:
    mesh, errors = _mesh(world_size, 2), dict[str, str]()

    def refuse(what: str, kind: type, call: Any) -> None:
        with pytest.raises(kind) as caught:
            call()
        errors[what] = str(caught.value)

    stages = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("pp", "tp"))
    with iris.iris(1 << 26, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        plain = models.build("plain")
        refuse("both", ArgumentError, lambda: layers.parallelize(plain, ctx, mesh=stages))
        refuse("shared", ArgumentError, lambda: layers.parallelize(plain, ctx, sequence_parallel=True))
        mine = models.build("plain") if rank else models.build(models.ONE_LAYER)
        refuse("other", ArgumentError, lambda: layers.parallelize(mine, ctx))
        layers.parallelize(plain, ctx)
        refuse("graphs", ArgumentError, lambda: layers.Engine(plain, ctx, max_length=16, graphs=True))
        refuse("tokens", ArgumentError, lambda: plain.generate(models.prompt() + (rank == 3), max_new_tokens=2))
        assert torch.equal(models.generate(plain), models.expected("plain")[2])  # all of them can go on
    return errors


def test_what_is_refused_is_refused_on_every_rank() -> None:
    ends = run_hosts((2, 2), _refused, env=SHORT)
    for end in ends:
        assert end.exitcode == 0, end.traceback
        assert end.result.keys() == ends[0].result.keys()
    errors = ends[0].result
    assert "expected one of them" in errors["both"] and "expected 'auto' or False" in errors["shared"]
    assert "one of gloo: expected False, or a group of NCCL" in errors["graphs"]
    assert "rank 3" in errors["tokens"]


def _compared(rank: int, world_size: int) -> str:
    mesh = _mesh(world_size, 2)
    with iris.iris(1 << 26, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        model = models.build("plain")
        layers.parallelize(model, ctx)
        models.assert_logits(models.logits(model), "plain")
        with pytest.raises(ArgumentError) as caught:
            model(models.prompt() + (rank == 3))
        models.assert_logits(models.logits(model), "plain")
        return str(caught.value)


def test_debug_mode_compares_the_ranks_of_all_hosts() -> None:
    ends = run_hosts((2, 2), _compared, env={**SHORT, "IRIS_DEBUG": "1"})
    for end in ends:
        assert end.exitcode == 0, end.traceback
        assert "on rank 3" in end.result and end.result == ends[0].result
