"""A split model as a graph outside of torch.compile: one export, or one trace, serves all lengths."""

from __future__ import annotations

from contextlib import suppress

from iris.errors import ArgumentError
import layers
import pytest
import torch
from torch import nn

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

pytest.importorskip("transformers")
pytestmark = [*both, pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])]


LENGTHS = (7, 12, 3)
_TORCH = tuple(map(int, torch.__version__.split(".")[:2]))


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, use_cache=False).logits


def prompts(length: int, device) -> torch.Tensor:
    return torch.randint(0, 100, (2, length), generator=torch.Generator().manual_seed(length)).to(device)


def graph_of(way: str, model: nn.Module, device):
    if way == "jit.trace":
        return torch.jit.trace(Logits(model), (prompts(7, device),), check_trace=False)
    lengths = ({1: torch.export.Dim("length", min=2, max=8192)},)  # beyond where calls share their tokens
    options = {"dynamic_shapes": lengths, "strict": way == "strict"}
    return torch.export.export(Logits(model), (prompts(7, device),), **options).module()


def possible(model: nn.Module, ways: list[str], device) -> list[str]:
    """The ways that this torch can go with the unsplit model: 2.11's export guards some views by the length."""
    if _TORCH >= (2, 13):
        return ways
    actual = []
    for way in ways:
        with suppress(RuntimeError, torch._dynamo.exc.UserError):
            graph_of(way, model, device)
            actual.append(way)
    return actual


def body(ctx, name: str, ways: list[str]) -> list[tuple[str, torch.Tensor]]:
    model = models.build(name).to(ctx.device)
    ways = possible(model, ways, ctx.device)
    layers.parallelize(model, ctx, sequence_parallel=8 if name == "kv2" else "auto")
    with torch.no_grad():
        graphs = [graph_of(way, model, ctx.device) for way in ways]
        return [
            (way, graph(prompts(n, ctx.device)).cpu()) for way, graph in zip(ways, graphs, strict=True) for n in LENGTHS
        ]


@pytest.mark.parametrize(
    "name, ways", [("kv2", ["strict", "non-strict", "jit.trace"]), ("fused", ["non-strict", "jit.trace"])]
)
@pytest.mark.some(1, on_gpus=2)
@torch.no_grad()
def test_a_graph_serves_other_lengths_than_it_was_made_with(world_size: int, name: str, ways: list[str]) -> None:
    whole = models.build(name)
    expected = [Logits(whole)(prompts(length, "cpu")) for length in LENGTHS]
    exact = [Logits(whole.double())(prompts(length, "cpu")) for length in LENGTHS]
    for result in run_ranks(world_size, body, name, ways):
        for i, (way, logits) in enumerate(result):
            own = (expected[i % 3] - exact[i % 3]).abs().max()
            assert (logits - exact[i % 3]).abs().max() <= 4 * own, (way, i % 3)


def scattering_body(ctx) -> None:
    layer = layers.RowParallelLinear(16, 8, sequence_parallel=True, ctx=ctx)
    x = torch.randn(4, 16 // ctx.num_ranks, device=ctx.device)
    with pytest.raises(ArgumentError, match="matmul_reduce_scatter is called in torch.jit.trace, .* torch.export"):
        torch.jit.trace(layer, (x,))


def test_a_trace_of_chunks_of_tokens_is_refused(world_size: int) -> None:
    run_ranks(world_size, scattering_body)
