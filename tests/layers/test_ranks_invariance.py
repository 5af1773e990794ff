"""With `invariant="ranks"`: layers, and a model's logits, have the same bits on any number of ranks."""

from __future__ import annotations

import iris
from iris.errors import IrisError
from iris_tp import verify_ranks
import layers
from layers.shard import Shard
from layers.weight_storage import FORMS
import pytest
import torch

from tests.harness import UNDER_TORCHRUN, run_ranks
from tests.layers import models

pytestmark = pytest.mark.skipif(UNDER_TORCHRUN, reason="compares numbers of ranks")


def layers_body(ctx: iris.Iris, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the results of column- and row-parallel layers, chained and gathered: the same on all ranks."""
    ctx.invariant = "ranks"
    torch.manual_seed(0)
    inner, outer = (torch.nn.Linear(*sizes).to(dtype) for sizes in ((80, 400), (400, 48)))
    x = torch.randn(5, 80).to(dtype)
    column = layers.ColumnParallelLinear.from_linear(inner, ctx=ctx)
    row = layers.RowParallelLinear.from_linear(outer, ctx=ctx)
    merged = layers.MergedColumnParallelLinear.from_linear([inner, inner], ctx=ctx)
    gathered = layers.ColumnParallelLinear.from_linear(inner, gather_output=True, ctx=ctx)
    whole = layers.RowParallelLinear.from_linear(outer, input_is_parallel=False, ctx=ctx)
    gate, up = merged(x).chunk(2, dim=1)
    heads = layers.shard.split_heads(2, 2, ctx.num_ranks, ctx.cur_rank)  # fewer than ranks: some are idle
    output, attended = torch.nn.Linear(128, 48).to(dtype), torch.randn(5, 128).to(dtype)
    output = layers.RowParallelLinear.from_linear(output, parts=(heads.o_shard(64),), ctx=ctx)
    return {
        "heads": output(attended[:, 64 * heads.q[0] : 64 * heads.q[1]].contiguous()),
        "column, row": row(column(x)),
        "merged, row": row(gate * up),
        "gathered": gathered(x),
        "row of a whole": whole(gathered(x)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_have_the_same_bits_on_any_number_of_ranks(dtype):
    (alone,) = run_ranks(1, layers_body, dtype)
    for world_size in (2, 3, 4):
        for actual in run_ranks(world_size, layers_body, dtype):
            for name, result in actual.items():
                assert torch.equal(result, alone[name]), f"{name} on {world_size} ranks"


def model_body(ctx: iris.Iris, name: str) -> list[torch.Tensor]:
    ctx.invariant = "ranks"
    model = models.build(name)
    layers.parallelize(model, ctx)
    return verify_ranks.logits(model, ctx, batches=(1, 3), steps=2, length=6)


@pytest.mark.parametrize("name", ["leaves", pytest.param("leaves_tied", marks=pytest.mark.slow)])
def test_a_models_logits_have_the_same_bits_on_any_number_of_ranks(name):
    pytest.importorskip("transformers")
    (alone,) = run_ranks(1, model_body, name)
    for world_size in (2, 3):
        for actual in run_ranks(world_size, model_body, name):
            assert len(actual) == len(alone) == 6
            assert all(map(torch.equal, actual, alone)), f"on {world_size} ranks"


def levels_body(ctx: iris.Iris, level: str) -> list:
    ctx.invariant = level
    model = models.build("leaves")
    layers.parallelize(model, ctx)
    return verify_ranks.read(model, ctx, (1,), 1, 5, False)


def test_verify_names_where_bits_differ_first():
    """Of a context that sums in another order on two ranks than on one."""
    pytest.importorskip("transformers")
    (alone,), split = (run_ranks(world_size, levels_body, "batch") for world_size in (1, 2))
    (actual,) = verify_ranks.compared(alone, split, 2)
    assert actual.differing and "o_proj (matmul_all_reduce" in actual.first, verify_ranks.table([actual])


def refusals_body(ctx: iris.Iris) -> list[str]:
    """Check that what cannot have the same bits on any number of ranks raises an error when it is created."""
    ctx.invariant = "ranks"
    own = 64 * (1 + ctx.cur_rank), 64 * (3 - ctx.cur_rank)
    row = layers.RowParallelLinear(200, 16, ctx=ctx)
    mixture = models.build("mixtral")

    def tries():
        yield lambda: layers.RowParallelLinear(128, 16, reduce_results=False, ctx=ctx)
        yield lambda: layers.RowParallelLinear(256, 16, parts=(Shard(256, (own,)),), ctx=ctx)
        yield lambda: layers.RowParallelLinear(256, 16, parts=(Shard(256, (own,), rank_sizes=(100, 156)),), ctx=ctx)
        yield lambda: row.store_as(FORMS["fp8"])
        yield lambda: layers.parallelize(models.build("leaves"), ctx, weights="fp8")
        yield lambda: layers.parallelize(models.build("leaves"), ctx, sequence_parallel=True)
        yield lambda: layers.parallelize(mixture, ctx)
        yield lambda: layers.parallelize(models.build("kv1"), ctx)

    messages = []
    for attempt in tries():
        with pytest.raises(IrisError) as caught:
            attempt()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    return messages


def test_what_goes_by_the_ranks_is_refused():
    pytest.importorskip("transformers")
    messages, theirs = run_ranks(2, refusals_body)
    assert [each.partition(":")[0] for each in messages] == [
        *("ArgumentError", "ArgumentError", "ShapeError", "ArgumentError"),
        *("ArgumentError", "ArgumentError", "StyleError", "ShapeError"),
    ]
    assert all("ranks" in each for each in messages + theirs), messages
    assert "such as 128, 128" in messages[2] and "cuts a leaf" in messages[7]
    assert (
        "model.layers.0.mlp" in messages[6]
        and "rounded on each rank" in messages[6]
        and "invariant='batch'" in messages[6]
    )
