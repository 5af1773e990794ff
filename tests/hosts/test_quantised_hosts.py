"""Quantised weights over several hosts: read from files or rounded while loading, by each mesh, also on uneven shares.

A rank holds its codes and scales, and the tokens are those of the numbers that these stand for.
"""

from __future__ import annotations

from contextlib import contextmanager
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
from tests.layers import models, written_formats
from tests.layers.test_kept_weights import SMALL
from tests.layers.test_quantised_models import MODELS

transformers = pytest.importorskip("transformers")
pytestmark = needs_namespaces()

_ENV = {**SHORT, iris.platform.ENV_REPLAY: "1"}
_SIZES = models.PLAIN | SMALL | {"num_hidden_layers": 2, "intermediate_size": 256, "head_dim": 32}
_NEW = 2


@contextmanager
def _on_hosts(kind: str, world_size: int, inside: int, **options: Any) -> Any:
    """The context of a mesh, and what loads a model by it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = "hosts" if kind == "across" else kind
    mesh = init_device_mesh("cpu", (world_size // inside, inside), mesh_dim_names=(first, "tp"))
    across = mesh["hosts"] if kind == "across" else None
    with iris.iris(1 << 26, group=mesh["tp"], across=across, **options) as ctx:
        yield ctx, {} if kind == "across" else {"mesh": mesh}


def _tokens(model: Any) -> torch.Tensor:
    return model.generate(models.prompt(), max_new_tokens=_NEW, do_sample=False)


def _loaded(
    rank: int, world_size: int, inside: int, kind: str, folder: str, exact: str | None, weights: str | None
) -> tuple[str, list[list[int]]]:
    with _on_hosts(kind, world_size, inside) as (ctx, mesh):
        model = layers.from_pretrained(folder, ctx, dtype=torch.float32, weights=weights, verify=True, **mesh)
        assert all(row.error <= 1 for row in model.parallel_report.verified)
        tokens = _tokens(model)
        engine = layers.Engine(model, ctx, batch_size=2, max_length=16)
        assert engine.generate(models.prompt(), _NEW) == tokens[:, 7:].tolist()
        saved = f"{folder}-{kind}-{world_size}"
        if kind == "across":
            layers.save_pretrained(model, saved, ctx)
        elif kind == "pp":
            with pytest.raises(ArgumentError, match="has the layers of stage"):
                layers.save_pretrained(model, saved, ctx)
        whole = transformers.AutoModelForCausalLM.from_pretrained(
            exact or f"{folder}-{ctx.num_ranks * (world_size // inside if kind == 'across' else 1)}",
            dtype=torch.float32,
            experts_implementation="eager",
        ).eval()
        expected = models.logits(whole)
        assert (models.logits(model) - expected).abs().max() <= 1e-4 * expected.abs().max()
        assert torch.equal(tokens, _tokens(whole))
        return str(model.parallel_report), tokens.tolist()


def _on_one_host(rank: int, world_size: int, folder: str, weights: str) -> None:
    with _on_hosts("dp", world_size, world_size) as (ctx, _):
        model = layers.from_pretrained(folder, ctx, dtype=torch.float32, weights=weights)
        layers.save_pretrained(model, f"{folder}-{world_size}", ctx)


def _check(folder: Path, exact: str | None, weights: str | None, ways: dict[str, list[tuple[int, int]]]) -> None:
    for kind, shapes in ways.items():
        for ranks in shapes:
            ends = run_hosts(ranks, _loaded, ranks[0], kind, str(folder), exact, weights, env=_ENV, timeout=200)
            for end in ends:
                assert end.exitcode == 0, (kind, ranks, end.traceback)


_TWO, _BOTH = [(2, 2)], [(2, 2), (3, 3)]
_ALL = {"across": _BOTH, "pp": _BOTH, "dp": _TWO}
_slow = pytest.mark.slow


@pytest.mark.parametrize(
    "format, ways",
    [
        ("fp8_block", {"across": [(3, 3)], "pp": _TWO}),
        pytest.param("fp8_block", _ALL, marks=_slow),
        pytest.param("gptq", _ALL, marks=_slow),
        pytest.param("awq", _ALL, marks=_slow),
        pytest.param("ct_mxfp4", _ALL, marks=_slow),
        pytest.param("modelopt_nvfp4", _ALL, marks=_slow),
    ],
)
def test_codes_are_kept(tmp_path: Path, format: str, ways: dict[str, list[tuple[int, int]]]) -> None:
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).eval()
    written_formats.write(model, tmp_path / "model", format)
    _check(tmp_path / "model", f"{tmp_path}/model-exact", None, ways)


@pytest.mark.parametrize(
    "format, name, ways",
    [
        ("mxfp4", "gpt_oss", {"across": _TWO}),
        pytest.param("mxfp4", "gpt_oss", _ALL, marks=_slow),
        pytest.param("ct_int4_32", "experts192", _ALL, marks=_slow),
    ],
)
def test_codes_of_experts_are_kept(
    tmp_path: Path, format: str, name: str, ways: dict[str, list[tuple[int, int]]]
) -> None:
    architecture, changes = MODELS[name]
    config = getattr(transformers, f"{architecture}Config")(**models.PLAIN | changes | {"num_hidden_layers": 2})
    torch.manual_seed(13)
    folder, model = tmp_path / "model", transformers.AutoModelForCausalLM.from_config(config).float().eval()
    if format == "mxfp4":
        written_formats.write_gpt_oss(model, folder)
    else:
        written_formats.write(model, folder, format)
    _check(folder, f"{folder}-exact", None, ways)


@pytest.mark.parametrize(
    "weights, ways",
    [
        ("int4", {"across": _TWO, "pp": _TWO}),
        pytest.param("int4", {"dp": _TWO}, marks=_slow),
        pytest.param("mxfp4", {"across": _TWO, "pp": _TWO, "dp": _TWO}, marks=_slow),
        pytest.param("fp8_block", {"across": _TWO}, marks=_slow),
        pytest.param("fp8_all", {"across": _TWO}, marks=_slow),
    ],
)
def test_weights_are_rounded_while_loading(
    tmp_path: Path, weights: str, ways: dict[str, list[tuple[int, int]]]
) -> None:
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).eval().save_pretrained(tmp_path / "model")
    for count in {2 if kind != "across" else 4 for kind in ways}:  # as many ranks round alike on one host
        for end in run_hosts((count,), _on_one_host, str(tmp_path / "model"), weights, env=_ENV):
            assert end.exitcode == 0, end.traceback
    _check(tmp_path / "model", None, weights, ways)


# --- equal bits ------------------------------------------------------------------------------------------------------


def _same_bits(rank: int, world_size: int, inside: int, kind: str, level: str) -> list[bytes]:
    with _on_hosts(kind, world_size, inside, invariant=level) as (ctx, mesh):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES)).eval()
        layers.parallelize(model, ctx, **mesh)
        with torch.no_grad():
            together = model(models.prompt()).logits
            alone = [model(models.prompt()[row : row + 1]).logits for row in range(2)]
        assert torch.equal(together, torch.cat(alone))
        return [each.numpy().tobytes() for each in together]


@pytest.mark.parametrize("level", ["batch", pytest.param("ranks", marks=_slow)])
def test_a_row_has_the_same_bits_in_stages(level: str) -> None:
    results = [
        run_hosts((n, n), _same_bits, n, "pp", level, env=_ENV, timeout=200) for n in ((1, 2), (2,))[level == "batch"]
    ]
    for end in sum(results, []):
        assert end.exitcode == 0, end.traceback
        assert end.result == results[0][0].result
