"""GPTQ weights whose entries are ordered by activation: sorted by group at loading, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from iris.errors import CheckpointError
from iris_ops.planning.sums import FREE
import layers
from layers.formats.order import Order
from layers.linear import ColumnParallelLinear, RowParallelLinear
from layers.ordered_storage import Ordered
from layers.shard import Shard, in_units
from layers.weight_storage import Form, form_of
import pytest
from safetensors.torch import load_file, save_file
import torch

from tests.harness import UNDER_TORCHRUN, WORLDS, both, once, run_ranks
from tests.layers import models, written_formats
from tests.layers.test_formats import opened
from tests.layers.test_quantised_models import written

transformers = pytest.importorskip("transformers")
pytestmark = both
alone = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")
FORMATS = [name for name in written_formats.FORMATS if "ordered" in name]


def rank_of(world: int, rank: int) -> Any:
    """A context as far as an empty layer reads it."""
    return SimpleNamespace(num_ranks=world, cur_rank=rank, device=torch.device("cpu"), level=FREE, check=lambda: None)


def irregular(columns: int, group: int) -> torch.Tensor:
    """The groups of entries of which some have many and some have none."""
    generator = torch.Generator().manual_seed(columns)
    return (torch.rand(columns, generator=generator) ** 2 * (columns // group)).int()


@alone
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("by", ["entries", "nothing"])
def test_every_cut_has_the_numbers_of_the_whole(tmp_path: Path, name: str, by: str) -> None:
    rows, columns = 24, 640
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    source, exact = opened(tmp_path, name, weight)
    if by == "nothing":  # an order that leaves groups of many sizes: the numbers are others
        stored = load_file(tmp_path / "model.safetensors")
        key = next(each for each in stored if each.endswith("g_idx"))
        stored[key] = irregular(columns, source.format.group)
        save_file(stored, tmp_path / "model.safetensors")
        source, _ = opened(
            tmp_path, name, weight, lambda _: ({k.rpartition("down_proj")[2]: v for k, v in stored.items()}, exact)
        )
        exact = source.values((0, rows), (0, columns), torch.float64)
    assert source.coding.order is not None
    for world in range(1, 9):
        for kind, dim in ((ColumnParallelLinear, 0), (RowParallelLinear, 1)):
            total = (rows, columns)[dim]
            shards = [in_units(total, world, rank, 8) for rank in range(world)]
            starts = [0, *torch.tensor(shards[0].rank_sizes).cumsum(0)[:-1].tolist()] if dim else ()
            form = form_of(source.coding, columns, starts)
            if isinstance(form, str):
                assert dim and world > 1 and "ordered by activation, would be padded" in form
                continue
            for rank in range(world):
                layer = kind(columns, rows, False, ctx=rank_of(world, rank), device="meta", parts=(shards[rank],))
                layer.store_as(form)
                assert isinstance(layer.storage, Ordered) and layer.storage.keeps(source)
                layer.load_shard("weight", source)
                own = exact[slice(*shards[rank].ranges[0])] if dim == 0 else exact[:, slice(*shards[rank].ranges[0])]
                numbers = layer.numbers(0, layer.local_shape[0], torch.float64)
                assert torch.allclose(numbers, own, rtol=1e-12, atol=0), (world, dim, rank)
                x = torch.randn(3, own.shape[1], dtype=torch.float64)
                restored = layer.storage.packing.unpack(
                    layer.weight, layer.weight_scale, layer.storage.depth(layer), torch.float64
                )
                product = layer.inputs(x) @ restored.t()
                assert torch.allclose(product, x @ own.t(), rtol=1e-9, atol=1e-12), (world, dim, rank)
                assert layer.storage.depth(layer) <= form.widest


@alone
def test_a_rank_without_columns_adds_nothing() -> None:
    order = Order.of(torch.randperm(256, generator=torch.Generator().manual_seed(1)) // 128)
    form = Form(form_of(_coding(order), 256, (0, 256)).packing, 32, None, order, 256)
    idle = RowParallelLinear(256, 8, False, ctx=rank_of(2, 1), device="meta", parts=(Shard(256, (), 16, (256, 0)),))
    idle.store_as(form)
    idle.load_shard("weight", torch.randn(8, 256))
    assert not idle.numbers(0, 8, torch.float32).any()
    assert not idle.storage.packing.unpack(idle.weight, idle.weight_scale, 32).any()


def _coding(order: Order) -> Any:
    from layers.formats.weight_format import Coding

    return Coding("int4", order.shared, torch.float16, order=order)


@alone
def test_groups_that_would_be_padded_too_far_are_not_sorted() -> None:
    order = Order.of(torch.randperm(4096, generator=torch.Generator().manual_seed(1)) // 32)
    starts = tuple(range(0, 4096, 512))
    reason = form_of(_coding(order), 4096, starts)
    assert isinstance(reason, str) and reason.startswith(
        "512 entries on a rank, ordered by activation, would be padded"
    )
    assert form_of(_coding(order), 4096, ()).group == 32


def model_body(ctx, folder: str) -> tuple[torch.Tensor, list, str]:
    model = layers.from_pretrained(folder, ctx, dtype=torch.float32, verify=True)
    assert all(row.error <= 1 for row in model.parallel_report.verified)
    logits = models.logits(model, ctx.device).cpu()
    words = layers.Engine(model, ctx, batch_size=2, max_length=16).generate(models.prompt(), models.NEW)
    layers.save_pretrained(model, f"{folder}-again", ctx)
    return logits, words, model.parallel_report.widened


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("format", FORMATS[1:])
def test_ordered_models_are_the_dequantised_ones(tmp_path: Path, format: str, world_size: int) -> None:
    folder, exact = written(tmp_path, format, "groups128")
    whole = transformers.AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32).eval()
    words = models.generate(whole)[:, 7:].tolist()
    single = models.logits(whole)
    double = models.logits(whole.double())
    own = (single - double).abs().max()
    for logits, answer, line in run_ranks(world_size, model_body, str(folder)):
        assert (logits - double).abs().max() <= 4 * own
        assert answer == words
        assert ", ordered" in line and "kept as stored" in line and "another" not in line, line
        assert "widened" not in line or "on a rank, ordered by activation, would be padded" in line
    again, plain = (load_file(each / "model.safetensors") for each in (folder.with_name("quantised-again"), exact))
    for key, each in plain.items():
        assert torch.equal(again[key], each), key


def refused_body(ctx, folder: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        layers.from_pretrained(folder, ctx)
    return str(caught.value)


def misnumbered(folder: Path) -> None:
    tensors = {key: each.clone() for key, each in load_file(folder / "model.safetensors").items()}
    tensors["model.layers.0.mlp.up_proj.g_idx"][7] = 99
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
def test_an_index_out_of_range_is_refused(tmp_path: Path, world_size: int) -> None:
    folder, _ = written(tmp_path, "gptq_ordered", "dense")
    once(lambda: misnumbered(folder))
    for text in run_ranks(world_size, refused_body, str(folder)):
        assert "up_proj.weight has g_idx from 0 to 99: expected groups from 0 to 4" in text
