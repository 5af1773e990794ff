"""Mixtures of experts over the ranks of all hosts: the unsplit models' tokens, and the op against float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import iris
import iris_ops.hierarchical as hierarchical
from iris_ops.planning.hosts import SCATTER, WHOLE
import layers
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.hosts.meshes import SHORT
from tests.hosts.namespaces import needs_namespaces, run_hosts
from tests.layers import models

pytestmark = needs_namespaces()

MIXTURES = ("mixtral", "qwen3_moe", "gpt_oss")


def _mesh(world_size: int, inside: int) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (world_size // inside, inside), mesh_dim_names=("hosts", "tp"))


def _op(rank: int, world_size: int, inside: int, seed: int) -> None:
    mesh = _mesh(world_size, inside)
    draw = torch.Generator().manual_seed(seed)
    with iris.iris(1 << 24, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        for tokens, widths in ((5, (3, 4, 8, 2, 1, 5)), (1, (4, 4, 4, 4, 4, 4)), (14, (8, 8, 0, 8, 8, 8))):
            experts, H, k = 4, 24, 2
            chosen = torch.stack([torch.randperm(experts, generator=draw)[:k] for _ in range(tokens)])
            weights = torch.rand(tokens, k, generator=draw)
            As = [torch.randn(tokens * k, width, generator=draw) for width in widths[:world_size]]
            Bs = [torch.randn(experts, width, H, generator=draw) for width in widths[:world_size]]
            shared = [torch.randn(tokens, H, generator=draw) for _ in range(world_size)]
            bias = torch.randn(experts, H, generator=draw)
            expected = sum(each.double() for each in shared)
            for t in range(tokens):
                for j in range(k):
                    e = int(chosen[t, j])
                    rows = sum(A[t * k + j].double() @ B[e].double() for A, B in zip(As, Bs, strict=True))
                    expected[t] += weights[t, j].double() * (rows + bias[e].double())
            for way in (SCATTER, WHOLE):
                hierarchical.faster_sum = lambda *_, way=way: way
                out = torch.full((tokens, H), torch.nan)
                ctx.ops.moe_down_all_reduce(out, As[rank], Bs[rank], chosen, weights, bias, shared[rank])
                torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
                alike = [torch.empty_like(out) for _ in range(world_size)]
                dist.all_gather(alike, out)
                assert all(torch.equal(out, other) for other in alike)


@pytest.mark.parametrize("inside", [2, 3])
def test_the_sum_over_two_hosts(inside: int) -> None:
    for end in run_hosts((inside, inside), _op, inside, 5 * inside, env=SHORT, timeout=200):
        assert end.exitcode == 0, end.traceback


def _models(rank: int, world_size: int, inside: int, names: tuple[str, ...]) -> None:
    mesh = _mesh(world_size, inside)
    with iris.iris(1 << 26, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        for name in names:
            model, whole = models.build(name), models.build(name)
            layers.parallelize(model, ctx)
            torch.testing.assert_close(models.logits(model), models.logits(whole), rtol=1e-4, atol=1e-5)
            expected = models.generate(whole)
            assert torch.equal(models.generate(model), expected), name
            new = expected[:, models.prompt().shape[1] :].tolist()
            for compile in (False, "eager"):
                engine = layers.Engine(model, ctx, batch_size=2, max_length=32, compile=compile)
                assert engine.generate(models.prompt(), models.NEW) == new, (name, compile)


@pytest.mark.parametrize(
    "inside, names",
    [(2, MIXTURES), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, MIXTURES), (2, ("deepseek_v3",))))],
)
def test_models_over_two_hosts(inside: int, names: tuple[str, ...]) -> None:
    for end in run_hosts((inside, inside), _models, inside, names, env=SHORT, timeout=300):
        assert end.exitcode == 0, end.traceback


def _from_files(rank: int, world_size: int, folder: str, saved: str) -> None:
    mesh = _mesh(world_size, 2)
    with iris.iris(1 << 26, group=mesh["tp"], across=mesh["hosts"]) as ctx:
        model = layers.from_pretrained(folder, ctx)
        assert torch.equal(models.generate(model), models.generate(models.build("qwen3_moe")))
        layers.save_pretrained(model, saved, ctx)
    from transformers import AutoModelForCausalLM

    assert torch.equal(models.generate(AutoModelForCausalLM.from_pretrained(saved)), models.generate(model_of()))


def model_of() -> Any:
    return models.build("qwen3_moe")


def test_read_and_saved(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "model")
    for end in run_hosts((2, 2), _from_files, str(tmp_path / "model"), str(tmp_path / "saved"), env=SHORT):
        assert end.exitcode == 0, end.traceback
