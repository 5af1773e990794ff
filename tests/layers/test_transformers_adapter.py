"""transformers' own tensor-parallel loading with our layers in it: the unsplit model's logits, by fused ops."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from iris.errors import ArgumentError, StyleError
from iris_ops.problem import OPS
from layers import fused_styles
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, agreed, both, run_ranks
from tests.layers import models

pytest.importorskip("transformers")
# transformers wants the number of ranks to divide the heads, of which these models have 4
pytestmark = [
    *both,
    pytest.mark.skipif(not models.transformers_is(5, 16, 1), reason="transformers is older than 5.16.1"),
    pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2], scope="session"),
]


def counted(ctx) -> Counter:
    """Counts, from now on, the calls of each op."""
    calls = Counter()

    def counting(op: str, method):
        def call(*args, **options):
            calls[op] += 1
            return method(*args, **options)

        return call

    for op in OPS:
        setattr(ctx.ops, op, counting(op, getattr(ctx.ops, op)))
    return calls


def load(path: str, ctx) -> nn.Module:
    """By transformers alone. Under torchrun tp_size would be the number of ranks by itself."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, tp_plan="auto", tp_size=ctx.num_ranks).eval()


def loaded_body(ctx, path: str) -> tuple[torch.Tensor, torch.Tensor, Counter]:
    with fused_styles(ctx):
        model = load(path, ctx)
    calls = counted(ctx)
    with pytest.raises(ArgumentError, match="weight requires grad"):
        model(models.prompt().to(ctx.device))
    result, once = models.logits(model, ctx.device), Counter(calls)
    tokens = models.generate(model, ctx.device)
    model.to(torch.bfloat16)  # the layers follow
    assert models.logits(model, ctx.device).dtype == torch.bfloat16
    calls.clear()  # and transformers' styles are its own again, of which older ones refuse a head in uneven parts
    if model.config.vocab_size % ctx.num_ranks == 0 or models.transformers_is(5, 22, 2):
        models.logits(load(path, ctx), ctx.device)
        assert not calls
    return result, tokens, once


@pytest.mark.parametrize("name", ["width130", "tied"])  # biases; a head tied to the embedding, 121 rows
def test_a_model_loaded_by_transformers_runs_by_our_ops(world_size: int, name: str, tmp_path: Path) -> None:
    if world_size not in (2, 4):
        pytest.skip("transformers splits four heads over two ranks or four")
    models.build(name).save_pretrained(tmp_path)  # of the ranks of torchrun, rank 0 alone writes
    _, _, tokens = models.expected(name)
    for result, generated, calls in run_ranks(world_size, loaded_body, str(agreed(tmp_path))):
        models.assert_logits(result, name)
        assert torch.equal(generated.cpu(), tokens)
        assert calls == {"matmul_all_reduce": 4, "matmul_all_gather": 1}, "two layers' o_proj and down_proj; the head"


class OddLinear(nn.Linear):
    """As a quantised one would be: not a Linear whose product we know."""


def refused_body(ctx) -> None:
    from torch.distributed import init_device_mesh
    from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

    mesh = init_device_mesh(ctx.device.type, (ctx.num_ranks,), mesh_dim_names=("tp",))
    before = dict(ALL_PARALLEL_STYLES)
    with fused_styles(ctx):
        with pytest.raises(StyleError, match="OddLinear: style 'rowwise'"):
            ALL_PARALLEL_STYLES["rowwise"].install_forward(OddLinear(4, 4), mesh)
        alone = init_device_mesh(ctx.device.type, (ctx.num_ranks, 1), mesh_dim_names=("dp", "tp"))["tp"]
        with pytest.raises(
            ArgumentError, match=f"ctx is rank . of {ctx.num_ranks}, transformers splits as rank 0 of 1"
        ):
            ALL_PARALLEL_STYLES["rowwise"].install_forward(nn.Linear(4, 4), alone)
    assert dict(ALL_PARALLEL_STYLES) == before


def test_other_ranks_and_other_modules_are_refused(world_size: int) -> None:
    if world_size == 1:
        pytest.skip("one rank is every group of ranks")
    run_ranks(world_size, refused_body)
