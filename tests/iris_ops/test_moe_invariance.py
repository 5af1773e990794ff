"""With `invariant="batch"` a token of a mixture has the same bits among any number of others; "ranks" is refused."""

from __future__ import annotations

from dataclasses import replace
import math
import random

import iris
from iris.errors import ArgumentError
from iris_ops.planning.operations import MOE_OPS
from iris_ops.problem import part_of, part_size
import pytest
import torch

from tests.checks import poison
from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.iris_ops.test_moe import Layer, Mixture, stored

pytestmark = both
RANKS = WORLDS[min(1, len(WORLDS) - 1)]
# Up to 64 tokens each number; then those at which plans sort, take higher tiles or other ways.
NUMBERS = (*range(1, 65), 100, 128, 200, *((1000, 3000) if ON_GPU else ()))
FEW = NUMBERS if ON_GPU else (*range(1, 10), 16, 17, 31, 32, 33, 63, 64, 100, 128, 200)
SIZES = dict(hidden=2048, width=1536) if ON_GPU else dict(hidden=72, width=80)
CASE = Mixture(tokens=max(NUMBERS), k=2, experts=6, shared=True, **SIZES)


class Token:
    """One token of a layer: the results of three ops for it among other tokens, which are random or NaN."""

    def __init__(self, ctx: iris.Iris, case: Mixture, rng: random.Random) -> None:
        self.ctx, self.case, self.rng = ctx, case, rng
        self.layer = Layer(case, ctx.num_ranks, ctx.device)
        self.first = stored(self.layer.first[ctx.cur_rank], True)
        self.second = stored(self.layer.second[ctx.cur_rank], True)
        self.actual: dict[str, torch.Tensor] = {}

    def among(self, tokens: int) -> list[str]:
        """Which ops give other bits than the first time. Tokens change places with the first one."""
        ctx, layer, k = self.ctx, self.layer, self.case.k
        place, nan = self.rng.randrange(tokens), self.rng.random() < 0.5
        order = torch.arange(tokens, device=ctx.device)
        order[0], order[place] = place, 0
        A, chosen, weights = layer.A[order].clone(), layer.chosen[order], layer.weights[order].clone()
        shared, others = layer.shared[ctx.cur_rank][order].clone(), torch.arange(tokens, device=ctx.device) != place
        if nan:
            for each in (A, weights, shared):
                each[others] = math.nan
        width, hidden = self.second.shape[1], self.case.hidden
        inner = poison(A.new_empty(tokens * k, width))
        ctx.ops.moe_gate_up(inner, A, self.first, chosen)
        differences = self.compare("moe_gate_up", inner.view(tokens, k, width)[place])
        out = poison(A.new_empty(tokens, hidden))
        ctx.ops.moe_down_all_reduce(out, inner, self.second, chosen, weights, shared=shared)
        differences += self.compare("moe_down_all_reduce", out[place])
        begin = ctx.cur_rank * part_size(tokens, ctx.num_ranks)
        part = poison(A.new_empty(part_of(tokens, ctx.num_ranks, ctx.cur_rank), hidden))
        ctx.ops.moe_down_reduce_scatter(part, inner, self.second, chosen, weights, shared=shared)
        if begin <= place < begin + len(part):  # the owner of the token: the same bits as of the all-reduce
            differences += self.compare("moe_down_all_reduce", part[place - begin])
        return [f"{each}: {tokens} tokens, place {place}, others {'NaN' if nan else 'random'}" for each in differences]

    def compare(self, op: str, row: torch.Tensor) -> list[str]:
        expected = self.actual.setdefault(op, row.clone())
        unlike = int((row.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum())
        return [f"{op} differs in {unlike} bytes"] if unlike or row.isnan().any() else []


@torch.no_grad()
def token_body(ctx: iris.Iris, case: Mixture, level: str | None, numbers: tuple[int, ...], seed: int) -> list[str]:
    with iris.iris(256 << 20 if ON_GPU else 32 << 20, invariant=level) as own:
        token = Token(own, case, random.Random(seed))
        return [difference for tokens in numbers for difference in token.among(tokens)]


# a sum in another order shows in float32, and is mostly rounded away in bfloat16
@pytest.mark.parametrize(
    ("dtype", "numbers"),
    [
        (torch.float32, FEW),
        (torch.bfloat16, NUMBERS if ON_GPU else NUMBERS[::9]),
        *[pytest.param(torch.float32, NUMBERS, marks=pytest.mark.slow)] * (not ON_GPU),
    ],
)
def test_a_token_has_the_same_bits_at_every_number_of_tokens(dtype: torch.dtype, numbers: tuple[int, ...]) -> None:
    seed = random.randrange(1 << 20)
    differences = run_ranks(RANKS, token_body, replace(CASE, dtype=dtype, seed=seed), "batch", numbers, seed)
    assert not any(differences), (seed, [difference for of_rank in differences for difference in of_rank][:4])


def refused_body(ctx: iris.Iris) -> None:
    with iris.iris(32 << 20, invariant="ranks") as own:
        layer, rank = Layer(replace(CASE, tokens=4), own.num_ranks, own.device), own.cur_rank
        first, second = stored(layer.first[rank], True), stored(layer.second[rank], True)
        inner, out = layer.A.new_empty(8, second.shape[1]), layer.A.new_empty(4, CASE.hidden)
        part = out[: part_of(4, own.num_ranks, rank)]
        given = inner, second, layer.chosen, layer.weights
        calls = {
            "moe_gate_up": lambda: own.ops.moe_gate_up(inner, layer.A, first, layer.chosen),
            "moe_down_all_reduce": lambda: own.ops.moe_down_all_reduce(out, *given),
            "moe_down_reduce_scatter": lambda: own.ops.moe_down_reduce_scatter(part, *given),
        }
        assert set(calls) == set(MOE_OPS)
        for op, call in calls.items():
            poison(out), poison(inner)
            with pytest.raises(ArgumentError, match=f"{op}: the context has invariant='ranks', which mixtures"):
                call()
            assert out.isnan().all() and inner.isnan().all()  # before anything was computed


def test_mixtures_on_any_number_of_ranks_are_refused() -> None:
    run_ranks(RANKS, refused_body)
