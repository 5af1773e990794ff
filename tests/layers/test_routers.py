"""Routers of mixtures: which ones `moe_choose` serves, with which results, and which stay as they are."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import iris
from iris_ops.moe.scoring import Scoring
from layers.experts import SplitExperts
from layers.hf import routers
from layers.hf.parallelize import parallelize
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.layers import models

transformers = pytest.importorskip("transformers")
pytestmark = both
two_ranks = pytest.mark.parametrize("world_size", WORLDS[1:2] or WORLDS)
no_ranks = pytest.mark.skipif(UNDER_TORCHRUN, reason="needs no ranks")

RULES = {
    "mixtral": Scoring(epsilon=1e-20),
    "qwen3_moe": Scoring(normalised=False),
    "gpt_oss": Scoring(epsilon=1e-20),
    "deepseek_v3": Scoring("sigmoid", epsilon=1e-20, scale=2.5),
}


def routers_of(model: nn.Module) -> list[Any]:
    blocks = [block for block in model.modules() if isinstance(getattr(block, "experts", None), SplitExperts)]
    return [each for block in blocks for name, each in block.named_children() if name in ("gate", "router")]


def counting(ctx: iris.Iris, calls: list[int]) -> None:
    """Record the number of tokens of each `moe_choose` and -1 for each `moe_route`."""
    choose, route = ctx.ops.moe_choose, ctx.ops.moe_route
    ctx.ops.moe_choose = lambda logits, *args: (calls.append(len(logits)), choose(logits, *args))[1]
    ctx.ops.moe_route = lambda *args: (calls.append(-1), route(*args))[1]


def stop_counting(ctx: iris.Iris) -> None:
    del ctx.ops.moe_choose, ctx.ops.moe_route


def serving(ctx: iris.Iris, name: str) -> None:
    model = models.build(name)
    before = {key: type(module) for key, module in model.named_modules()}
    names = [key for key in model.state_dict() if ".gate." in key or ".router." in key]
    parallelize(model, ctx)
    actual = routers_of(model)
    assert actual and all(each._rule.scoring == RULES[name] for each in actual)
    assert all(isinstance(module, before[key]) for key, module in model.named_modules() if module in actual)
    assert names and set(names) <= model.state_dict().keys()
    calls: list[int] = []
    counting(ctx, calls)
    try:
        result = models.logits(model, ctx.device)  # 14 tokens, 28 pairs of 4 experts: sorted
        assert calls == [14] * len(actual), "each router in one call, and nothing sorts again"
    finally:
        stop_counting(ctx)
    assert torch.allclose(result.cpu(), models.logits(models.build(name)), 1e-4, 1e-5)
    assert all(each._experts[0].choice is None for each in actual), "no choice outlives its forward"
    assert torch.equal(models.generate(model, ctx.device).cpu(), models.generate(models.build(name)))


@two_ranks
@pytest.mark.parametrize("name", models.MIXTURES)
def test_routers_are_served_and_the_model_is_the_unsplit_one(world_size: int, name: str) -> None:
    run_ranks(world_size, serving, name)


def compiling(ctx: iris.Iris, name: str) -> None:
    model = models.build(name)
    parallelize(model, ctx)
    block: Any = next(block for block in model.modules() if isinstance(getattr(block, "experts", None), SplitExperts))
    x = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1)).to(ctx.device)
    with torch.no_grad():
        eager = block(x)
        torch.compiler.reset()
        graphs: list[torch.fx.GraphModule] = []

        def recording(graph: torch.fx.GraphModule, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        again = torch.compile(block, fullgraph=True, backend=recording)(x)
    eager, again = (each[0] if isinstance(each, tuple) else each for each in (eager, again))
    assert torch.equal(eager, again)
    (graph,) = graphs
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("moe_choose" in each for each in called) == 1 and not any("topk" in each for each in called)
    (experts,) = (node for node in graph.graph.nodes if "moe_experts" in str(node.target))
    assert all(isinstance(each, torch.fx.Node) for each in experts.args[-3:-1]), "rows and offsets of the router"


@two_ranks
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_a_block_compiles_to_one_graph_in_which_the_router_sorts(world_size: int, name: str) -> None:
    run_ranks(world_size, compiling, name)


def staying(ctx: iris.Iris) -> None:
    """A hook of the user's, fuse=False, gradients, autocast, and a block that changes the choice."""
    hooked, plain = models.build("mixtral"), models.build("mixtral")
    seen: list[torch.Size] = []
    gate = hooked.model.layers[0].mlp.gate
    gate.register_forward_hook(lambda module, args, out: seen.append(out[1].shape))
    parallelize(hooked, ctx)
    parallelize(plain, ctx, fuse=False)
    assert type(gate).forward is type(plain.model.layers[0].mlp.gate).forward
    for model in (hooked, plain):
        expected = models.logits(models.build("mixtral"))
        assert torch.allclose(models.logits(model, ctx.device).cpu(), expected, 1e-4, 1e-5)
    assert seen == [torch.Size([14, 2])]

    served = models.build("mixtral")
    parallelize(served, ctx)
    mlp: Any = served.model.layers[0].mlp
    calls: list[int] = []
    counting(ctx, calls)
    try:
        x = torch.randn(14, 32, device=ctx.device)
        with torch.enable_grad():
            mlp.gate(x.clone().requires_grad_())
        with torch.autocast(ctx.device.type, torch.bfloat16):
            mlp.gate(x)
        assert calls == [], "the class's own forward"
        with torch.no_grad():
            _, weights, experts = mlp.gate(x)
            changed = experts.flip(0)
            result = mlp.experts(x, changed, weights)
            assert calls == [14, -1], "a choice that the block has changed is sorted anew"
            assert torch.equal(result, mlp.experts(x, changed.clone(), weights))
    finally:
        stop_counting(ctx)


@two_ranks
def test_what_is_no_plain_call_keeps_its_own_code(world_size: int) -> None:
    run_ranks(world_size, staying)


# --- rules, found by trying ------------------------------------------------------------------------------------------


class Router(nn.Module):
    """A router in the manner of transformers, whose parts can be changed."""

    def __init__(self, experts: int = 16, hidden: int = 12, top_k: int = 3, **options: Any) -> None:
        super().__init__()
        self.hidden_dim, self.top_k, self.options = hidden, top_k, options
        self.num_group, self.topk_group, self.routed_scaling_factor = 4, 2, 1.25
        self.weight = nn.Parameter(torch.zeros(experts, hidden))
        self.register_buffer("correction", torch.zeros(experts))

    def forward(self, hidden: torch.Tensor) -> Any:
        options = self.options
        x = hidden.reshape(-1, self.hidden_dim)
        logits = F.linear(x, self.weight)
        scores = logits.float().sigmoid() if options.get("sigmoid") else logits.float().softmax(-1)
        values = scores + self.correction if options.get("correction") else scores
        if options.get("jitter"):
            values = values + torch.rand_like(values) / 10
        if options.get("temperature"):
            scores = (2 * logits.float()).softmax(-1)
        experts = values.topk(self.top_k, -1)[1]
        weights = scores.gather(1, experts)
        if options.get("normalised"):
            weights = weights / weights.sum(-1, keepdim=True)
        if options.get("scaled"):
            weights = weights * self.routed_scaling_factor
        if options.get("dense"):
            return logits, torch.zeros_like(scores).scatter(1, experts, weights), experts
        return (experts, weights, logits) if options.get("turned") else (logits, weights, experts)


@no_ranks
@pytest.mark.parametrize(
    "options, scoring, correction",
    [
        ({}, Scoring(normalised=False), ""),
        (dict(normalised=True), Scoring(epsilon=1e-20), ""),
        (dict(sigmoid=True, correction=True, scaled=True), Scoring("sigmoid", False, scale=1.25), "correction"),
        (dict(turned=True, scaled=True), Scoring(normalised=False, scale=1.25), ""),
        (dict(temperature=True), None, ""),
        (dict(dense=True), None, ""),
        (dict(jitter=True), None, ""),
        (dict(correction=True), None, ""),  # a softmax that is corrected: weights of one order, choices of another
    ],
)
def test_a_rule_is_found_by_trying_or_none(options: dict[str, bool], scoring: Scoring | None, correction: str) -> None:
    rule = routers.rule_of(Router(**options))
    assert (rule and rule.scoring) == scoring
    if rule:
        assert (rule.top_k, rule.correction, rule.bias, rule.wide_weights) == (3, correction, "", True)
        turned = ("experts", "weights", "logits")
        assert rule.order == (turned if options.get("turned") else turned[::-1])


@no_ranks
def test_a_copy_and_a_pickle_of_a_served_router_work() -> None:
    class Experts:
        ctx, choice = None, None

    router = Router()
    rule = routers.rule_of(router)
    assert rule is not None
    served = copy.deepcopy(router)
    routers.fuse(served, rule, Experts())  # type: ignore[arg-type]
    assert type(served) is not Router and isinstance(served, Router) and type(served).__name__ == "Router"
    assert type(copy.deepcopy(served)) is type(served)
    served._experts = ()
    assert type(pickle.loads(pickle.dumps(served))) is type(served)
