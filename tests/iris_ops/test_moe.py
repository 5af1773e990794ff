"""The ops of a mixture of experts against plain torch in float64: layouts, activations, ways, bits, bad input."""

from __future__ import annotations

from dataclasses import dataclass, replace
import hashlib

import iris
from iris_ops import FusedConfig
from iris_ops.activation import Activation
from iris_ops.planning.operations import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER
from iris_ops.problem import part_of, part_size
import pytest
import torch

from tests.checks import Guarded, assert_close_to_reference
from tests.harness import WORLDS, both, run_ranks
from tests.reference import moe_down, moe_gate_up

pytestmark = both


@dataclass(frozen=True)
class Mixture:
    """One layer. `width`: the intermediate size of each expert in all, which `torch.chunk` splits over the ranks."""

    tokens: int
    k: int
    experts: int
    hidden: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    activation: str | Activation = "silu"
    interleaved: bool = False
    gated: bool = True
    bias: bool = False
    shared: bool = False
    transposed: bool = True
    scatter: bool = False
    routed: bool = False
    index: torch.dtype = torch.int64
    factors: torch.dtype = torch.float32
    crowded: bool = False
    """All tokens choose among three experts, and one of them twice."""
    algorithm: str | None = None
    """Of both ops, in place of the plan's."""
    seed: int = 0


class Layer:
    """The tensors of all ranks of a `Mixture`, from one seed."""

    def __init__(self, case: Mixture, world_size: int, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(case.seed)

        def draw(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return (scale * torch.randn(*sizes, generator=generator)).to(device, case.dtype)

        self.A = draw(case.tokens, case.hidden, scale=case.hidden**-0.25)
        if case.crowded:
            chosen = torch.randint(0, 3, (case.tokens, case.k), generator=generator) * (case.experts - 1) // 2
        else:
            logits = torch.randn(case.tokens, case.experts, generator=generator)
            logits -= torch.arange(case.experts).float().log1p()
            chosen = logits.topk(case.k, dim=1).indices
        self.chosen = chosen.to(device, case.index)
        weights = torch.rand(case.tokens, case.k, generator=generator)
        self.weights = weights.div(weights.sum(1, keepdim=True)).to(device, case.factors)
        self.first, self.second, self.first_bias, self.shared = [], [], [], []
        for rank in range(world_size):
            part = part_of(case.width, world_size, rank)
            columns = 2 * part if case.gated else part
            self.first.append(draw(case.experts, case.hidden, columns, scale=case.hidden**-0.25))
            self.first_bias.append(draw(case.experts, columns))
            self.second.append(draw(case.experts, part, case.hidden, scale=max(1, part) ** -0.5))
            self.shared.append(draw(case.tokens, case.hidden))
        self.second_bias = draw(case.experts, case.hidden)


def stored(B: torch.Tensor, transposed: bool) -> torch.Tensor:
    return B.transpose(1, 2).contiguous().transpose(1, 2) if transposed else B


def configs_of(case: Mixture) -> tuple[FusedConfig | None, FusedConfig | None]:
    """Return configurations of the case's algorithm, or None for the plan's."""
    if case.algorithm is None:
        return None, None
    config = FusedConfig(16, 32, 32, num_warps=4, num_stages=2, algorithm=case.algorithm)
    return replace(config, algorithm="sequential"), config


@torch.no_grad()
def mixture_body(ctx: iris.Iris, case: Mixture, runs: int = 2) -> str:
    layer, rank, w = Layer(case, ctx.num_ranks, ctx.device), ctx.cur_rank, ctx.num_ranks
    part, pairs = part_of(case.width, w, rank), case.tokens * case.k
    experts = ctx.ops.moe_route(layer.chosen, case.experts) if case.routed else layer.chosen
    first, second = (stored(B[rank], case.transposed) for B in (layer.first, layer.second))
    bias = layer.first_bias[rank] if case.bias else None
    first_config, second_config = configs_of(case)
    middle = Guarded(ctx, (pairs, part_size(case.width, w)), case.dtype)
    rows = middle.tensor[:, :part]
    workspace = ctx.ops.moe_gate_up(
        rows, layer.A, first, experts, bias, case.activation, case.interleaved, first_config
    )  # fmt: skip
    middle.check()
    kind = dict(activation=case.activation, interleaved=case.interleaved, gated=case.gated)
    exact, torchs = (
        moe_gate_up(layer.A, layer.first[rank], layer.chosen, bias, **kind, exact=each) for each in (True, False)
    )
    assert_close_to_reference(rows, exact, torchs)

    middles = [
        moe_gate_up(layer.A, layer.first[r], layer.chosen, layer.first_bias[r] if case.bias else None, **kind,
                    exact=False) for r in range(w)
    ]  # fmt: skip
    op = DOWN_REDUCE_SCATTER if case.scatter else DOWN_ALL_REDUCE
    own = part_of(case.tokens, w, rank) if case.scatter else case.tokens
    out = Guarded(ctx, (part_size(case.tokens, w) if case.scatter else case.tokens, case.hidden), case.dtype)
    bias = layer.second_bias if case.bias else None
    shared = layer.shared[rank] if case.shared else None
    exact, torchs = (
        moe_down(middles, layer.second, layer.chosen, layer.weights, bias, layer.shared if case.shared else None,
                 exact=each) for each in (True, False)
    )  # fmt: skip
    begin = rank * part_size(case.tokens, w) if case.scatter else 0
    exact, torchs = exact[begin : begin + own], torchs[begin : begin + own]
    digests = set()
    for _ in range(runs):
        out.tensor.fill_(float("nan"))
        result = out.tensor[:own]
        getattr(ctx.ops, op)(
            result, middles[rank], second, experts, layer.weights, bias, shared, second_config, workspace
        )  # fmt: skip
        out.check()
        assert_close_to_reference(result, exact, torchs)
        digests.add(hashlib.sha256(result.float().cpu().numpy().tobytes()).hexdigest())
    assert len(digests) == 1, "bits differ between runs"
    return digests.pop()


def check(world_size: int, case: Mixture) -> None:
    digests = run_ranks(world_size, mixture_body, case)
    assert case.scatter or len(set(digests)) == 1, "bits differ between ranks"


FEW = Mixture(tokens=5, k=2, experts=6, hidden=48, width=50)
MANY = Mixture(tokens=70, k=2, experts=5, hidden=40, width=36)
CASES = {
    "few": FEW,
    "one_token": replace(FEW, tokens=1, k=4, dtype=torch.float16, factors=torch.float16),
    "one_token_twice": replace(FEW, tokens=1, k=3, crowded=True, bias=True),
    "one_token_in_rows": replace(FEW, tokens=1, k=4, transposed=False, shared=True),
    "one_token_narrow": replace(FEW, tokens=1, k=6, width=1, bias=True, shared=True, dtype=torch.float32),
    "one_token_wide": replace(FEW, tokens=1, k=2, hidden=300, width=600, activation="gelu_tanh", index=torch.int32),
    "top_1": replace(FEW, k=1, shared=True, gated=False, activation="relu2"),
    "none": replace(FEW, tokens=0),
    "interleaved": replace(FEW, interleaved=True, transposed=False, bias=True, activation="gpt_oss"),
    "scattered": replace(FEW, scatter=True, shared=True, bias=True, index=torch.int32),
    "narrow": replace(FEW, width=1, bias=True, dtype=torch.float32),
    "more_experts": replace(FEW, tokens=2, experts=200, hidden=24, width=8, activation="gelu"),
    "crowded": replace(FEW, tokens=20, k=3, experts=9, crowded=True),
    "few_sums": replace(FEW, algorithm="overlapped", shared=True, bias=True, tokens=7),
    "few_sums_scattered": replace(FEW, algorithm="overlapped", scatter=True),
    "few_in_turn": replace(FEW, algorithm="sequential", bias=True),
    "many_one_hop": replace(MANY, algorithm="one_shot", shared=True, bias=True),
    "many_in_turn": replace(MANY, algorithm="sequential"),
    "most": Mixture(1100, 1, 3, 128, 9, algorithm="overlapped", shared=True),  # in two shots from three ranks on
    "many": replace(MANY, routed=True, bias=True, shared=True),
    "many_scattered": replace(MANY, scatter=True, transposed=False, activation="gelu_tanh"),
    "many_crowded": replace(MANY, crowded=True, dtype=torch.float16, activation=Activation(limit=1.0)),
}


def differing_body(ctx: iris.Iris, case: Mixture) -> str:
    return mixture_body(ctx, replace(case, transposed=ctx.cur_rank == 0))


@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_may_differ_in_how_weights_of_one_token_lie(world_size: int) -> None:
    """Their kernels may differ too, and exchange in the same way."""
    case = CASES["one_token_twice"]
    assert len(set(run_ranks(world_size, differing_body, case))) == 1


# Of three ranks, what `make test` has of them.
OF_THREE = ("few", "scattered", "few_sums_scattered", "narrow")


@pytest.mark.parametrize("world_size, name", [
    pytest.param(w, name, marks=[pytest.mark.slow] * (w == 3 and name not in OF_THREE or name == "most"))
    for w in WORLDS for name in CASES
])  # fmt: skip
def test_mixture_is_right(world_size: int, name: str) -> None:
    check(world_size, CASES[name])
