"""A mixture of experts in code that torch compiles: the same bits as in eager code, one graph, and no gradient."""

from __future__ import annotations

import iris
from iris.errors import ArgumentError
from iris_ops.moe import torch_ops
from iris_ops.problem import part_of
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks
from tests.iris_ops.test_moe import FEW, Layer, stored

pytestmark = both


def compiled_body(ctx: iris.Iris, scatter: bool) -> None:
    layer, rank = Layer(FEW, ctx.num_ranks, ctx.device), ctx.cur_rank
    first, second = stored(layer.first[rank], True), stored(layer.second[rank], True)

    def mixture(A: torch.Tensor) -> torch.Tensor:
        call = torch_ops.MixtureCall(
            A * 2, first, second, layer.chosen, layer.weights, shared=layer.shared[rank], activation="gpt_oss",
            scatter=scatter,
        )  # fmt: skip
        return torch_ops.mixture(ctx, call) + 1

    with torch.no_grad():
        expected = mixture(layer.A)
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
            graphs.append(graph)
            return graph

        result = torch.compile(mixture, fullgraph=True, backend=keep)(layer.A)
        rows = part_of(FEW.tokens, ctx.num_ranks, rank) if scatter else FEW.tokens
        assert result.shape == (rows, FEW.hidden)
        assert torch.equal(result, expected)
        assert len(graphs) == 1 and "moe_experts" in graphs[0].code
        middle = torch.ops.iris_ops.moe_gate_up(
            layer.A * 2, first, layer.chosen, None, torch_ops.as_text("gpt_oss"), False, second.shape[1], ctx.group_name
        )
        parts = torch.ops.iris_ops.moe_down(
            middle, second, layer.chosen, layer.weights, None, layer.shared[rank], scatter, ctx.group_name
        )
        assert torch.equal(parts + 1, expected)
    with pytest.raises(ArgumentError, match="A requires grad"):
        mixture(layer.A.requires_grad_())


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.some(3)
def test_compiled_code_has_the_same_bits(world_size: int, scatter: bool) -> None:
    run_ranks(world_size, compiled_body, scatter)
