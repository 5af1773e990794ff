"""Calls of the mixture ops: refusals, errors that the device detects, plans, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import iris
from iris.errors import ArgumentError, DtypeError, ExpertError, IrisError, ShapeError
from iris.machines import machine_named
from iris_ops import Activation, FusedConfig
from iris_ops.moe.routing import Routing
from iris_ops.planning import moe_ways
from iris_ops.planning.moe_ways import FEW_PAIRS, need_sorting, tokens_at_once
from iris_ops.planning.operations import DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER, GATE_UP
from iris_ops.planning.plan import WAYS, compare_ways, plan, way_for
from iris_ops.problem import Problem, Request, part_of, requested_problem
import pytest
import torch

from tests.checks import assert_only_launches, poison
from tests.harness import ON_GPU, WORLDS, both, run_ranks
from tests.iris_ops.test_moe import FEW, MANY, Layer, mixture_body, stored
from tests.reference import moe_down, moe_gate_up

pytestmark = both
BF16 = torch.bfloat16
RANKS = WORLDS[min(1, len(WORLDS) - 1)]

REFUSED: list[tuple[dict[str, Any], type[IrisError], str]] = [
    (dict(A=torch.zeros(4, 8)), ShapeError, r"A is \(4, 8\); expected \(5, 8\)"),
    (dict(A=torch.zeros(5, 8).double()), DtypeError, "A has dtype torch.float64"),
    (dict(B=torch.zeros(6, 8)), ShapeError, "B has 2 dimensions"),
    (dict(B=torch.zeros(6, 8, 9)), ShapeError, r"expected B \(E,H,2I\), out \(T\*k,I\)"),
    (dict(experts=torch.zeros(5, 2)), DtypeError, "experts has dtype torch.float32"),
    (dict(experts=torch.zeros(5, dtype=torch.int64)), ShapeError, r"experts is \(5,\); expected \(T,k\)"),
    (dict(experts=torch.zeros(2, 5, dtype=torch.int64).t()), ArgumentError, "experts has strides"),
    (dict(experts=[1]), ArgumentError, "experts is list; expected a torch.Tensor"),
    (dict(out=torch.zeros(10, 3)), ShapeError, "out is"),
    (dict(bias=torch.zeros(6, 4)), ShapeError, r"bias is \(6, 4\); expected \(6, 8\)"),
    (dict(activation="swish"), ArgumentError, "activation is 'swish'; expected an Activation or one of silu"),
    (dict(interleaved=1), ArgumentError, "interleaved is 1"),
    (dict(config=FusedConfig(algorithm="two_shot")), ArgumentError, "config.algorithm is 'two_shot'; expected one of"),
    (dict(config=1), ArgumentError, "config is int"),
    (dict(workspace=3), ArgumentError, "workspace is 3"),
]
REFUSED_DOWN: list[tuple[dict[str, Any], type[IrisError], str]] = [
    (dict(A=torch.zeros(9, 4)), ShapeError, r"A is \(9, 4\); expected \(10, 4\)"),
    (dict(weights=torch.zeros(5, 3)), ShapeError, r"weights is \(5, 3\); expected \(5, 2\)"),
    (dict(weights=torch.zeros(5, 2).half()), DtypeError, "weights has dtype torch.float16 and A has torch.float32"),
    (dict(shared=torch.zeros(5, 4)), ShapeError, r"shared is \(5, 4\); expected \(5, 8\)"),
    (dict(bias=torch.zeros(5, 8)), ShapeError, r"bias is \(5, 8\); expected \(6, 8\)"),
    (dict(out=torch.zeros(4, 8)), ShapeError, r"out is \(4, 8\); expected \(5, 8\)"),
]


def refused_body(ctx: iris.Iris) -> None:
    def moved(value: object) -> object:
        return value.to(ctx.device) if isinstance(value, torch.Tensor) else value

    experts = torch.zeros(5, 2, dtype=torch.int64)
    first = dict(out=torch.zeros(10, 4), A=torch.zeros(5, 8), B=torch.zeros(6, 8, 8), experts=experts)
    second = dict(out=torch.zeros(5, 8), A=torch.zeros(10, 4), B=torch.zeros(6, 4, 8), experts=experts)
    second["weights"] = torch.zeros(5, 2)
    both_ops = ((ctx.ops.moe_gate_up, first, REFUSED), (ctx.ops.moe_down_all_reduce, second, REFUSED_DOWN))
    for op, fine, cases in both_ops:
        for change, error, message in cases:
            given = {name: moved(value) for name, value in (fine | change).items()}
            with pytest.raises(error, match=message):
                op(**given)
    whole = torch.zeros(20, 8, device=ctx.device)
    with pytest.raises(ArgumentError, match="out overlaps A in memory"):
        ctx.ops.moe_gate_up(whole[:10, :4], whole[2:7], first["B"].to(ctx.device), experts.to(ctx.device))
    routing = ctx.ops.moe_route(experts.to(ctx.device), 7)
    with pytest.raises(ArgumentError, match="experts is a Routing among 7; expected 6"):
        ctx.ops.moe_gate_up(*(first[name].to(ctx.device) for name in ("out", "A", "B")), routing)
    for count in (0, 5000, 3.0):
        with pytest.raises(ArgumentError, match="num_experts is"):
            ctx.ops.moe_route(experts.to(ctx.device), count)
    with pytest.raises(ArgumentError, match="top_k is 0"):
        ctx.ops.plan(GATE_UP, 1, 8, 8, BF16, experts=4, top_k=0)


def test_bad_arguments_are_refused_by_name() -> None:
    run_ranks(RANKS, refused_body)
    for change in (dict(kind="swish"), dict(kind="gelu", alpha=2.0), dict(limit=-1.0)):
        with pytest.raises(ArgumentError, match="Activation."):
            Activation(**change)


def wrong_expert_body(ctx: iris.Iris, tokens: int, wrong: int) -> None:
    experts = torch.zeros(tokens, 2, dtype=torch.int64)
    experts[tokens // 2, 1] = wrong
    with iris.iris(64 << 20) as own:
        A, B = torch.zeros(tokens, 8, device=own.device), torch.zeros(6, 8, 8, device=own.device)
        out = torch.zeros(2 * tokens, 4, device=own.device)
        try:
            own.ops.moe_gate_up(out, A, B, experts.to(own.device))
            if ON_GPU:
                torch.cuda.synchronize()
            own.ops.moe_gate_up(out, A, B, experts.to(own.device))
            raise AssertionError("a routing index out of range raised nothing")
        except ExpertError as error:
            assert f"experts has {wrong}; expected indices from 0 below 6" in str(error)


@pytest.mark.parametrize("tokens, wrong", [(3, 6), (3, -1), (FEW_PAIRS, 1 << 40)])
def test_an_expert_out_of_range_is_found_on_the_device(tokens: int, wrong: int) -> None:
    run_ranks(RANKS, wrong_expert_body, tokens, wrong)


def wrong_down_body(ctx: iris.Iris, op: str, tokens: int, algorithm: str | None) -> None:
    """The ops that exchange find it as well, on every rank, and no rank waits for another."""
    experts = torch.zeros(tokens, 2, dtype=torch.int64)
    experts[tokens - 1, 0] = 7
    config = None if algorithm is None else FusedConfig(16, 32, 32, num_warps=4, num_stages=2, algorithm=algorithm)
    with iris.iris(64 << 20) as own:
        A, B = torch.zeros(2 * tokens, 4, device=own.device), torch.zeros(6, 8, 4, device=own.device).transpose(1, 2)
        rows = part_of(tokens, own.num_ranks, own.cur_rank) if op == DOWN_REDUCE_SCATTER else tokens
        out, weights = torch.zeros(rows, 8, device=own.device), torch.ones(tokens, 2, device=own.device)
        with pytest.raises(ExpertError, match="experts has 7; expected indices from 0 below 6"):
            for _ in range(2):
                getattr(own.ops, op)(out, A, B, experts.to(own.device), weights, config=config)
                if ON_GPU:
                    torch.cuda.synchronize()
        with pytest.raises(ExpertError, match="experts has 7"):  # the context is void
            own.ops.moe_route(experts.to(own.device), 8)


@pytest.mark.parametrize("op, tokens, algorithm", [
    (DOWN_ALL_REDUCE, 1, None), (DOWN_ALL_REDUCE, 3, None), (DOWN_ALL_REDUCE, FEW_PAIRS, None),
    (DOWN_ALL_REDUCE, 3, "sequential"), (DOWN_REDUCE_SCATTER, 5, None),
])  # fmt: skip
def test_an_expert_out_of_range_is_found_where_ranks_exchange(op: str, tokens: int, algorithm: str | None) -> None:
    run_ranks(RANKS, wrong_down_body, op, tokens, algorithm)


def in_debug_mode_body(ctx: iris.Iris) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRIS_DEBUG", "1")
        with iris.iris(64 << 20) as own:
            wrong = torch.full((2, 1), 9, device=own.device)
            with pytest.raises(ExpertError, match="moe_route: experts has 9; expected indices from 0 below 6"):
                own.ops.moe_route(wrong, 6)
            own.ops.moe_route(wrong, 10)  # and the context can still be used
            tokens, middle = torch.zeros(2, 8, device=own.device), torch.zeros(2, 4, device=own.device)
            first, second = torch.zeros(6, 8, 8, device=own.device), torch.zeros(6, 4, 8, device=own.device)
            out, weights = torch.full((2, 8), 5.0, device=own.device), torch.ones(2, 1, device=own.device)
            with pytest.raises(ExpertError, match="moe_gate_up: experts has 9; expected indices from 0 below 6"):
                own.ops.moe_gate_up(middle, tokens, first, wrong)
            with pytest.raises(ExpertError, match="moe_down_all_reduce: experts has 9; expected indices from 0 below"):
                own.ops.moe_down_all_reduce(out, middle, second, wrong, weights)
            assert (out == 5).all(), "something was launched"
            own.ops.moe_down_all_reduce(out, middle, second, wrong - 9, weights)
            assert (out == 0).all()


def test_in_debug_mode_the_call_itself_raises() -> None:
    run_ranks(RANKS, in_debug_mode_body)


def sorted_body(ctx: iris.Iris, pairs: int, experts: int) -> None:
    chosen = torch.randint(0, experts, (pairs, 1), generator=torch.Generator().manual_seed(pairs))
    chosen[chosen == experts // 3] = 0  # an expert that nobody has
    routing = ctx.ops.moe_route(chosen.to(ctx.device), experts)
    order = chosen.flatten().argsort(stable=True)
    bounds = torch.searchsorted(chosen.flatten()[order].contiguous(), torch.arange(experts + 1))
    assert torch.equal(routing.rows.cpu().long(), order)
    assert torch.equal(routing.offsets.cpu().long(), bounds)


@pytest.mark.parametrize("pairs, experts", [(1, 1), (129, 7), (700, 200), (5000, 33)])
def test_pairs_are_sorted_as_torch_sorts_them(pairs: int, experts: int) -> None:
    run_ranks(RANKS, sorted_body, pairs, experts)


@torch.no_grad()
def invariant_body(ctx: iris.Iris, dtype: torch.dtype) -> None:
    case = replace(MANY, tokens=90, hidden=300, width=300, dtype=dtype, shared=True)
    with iris.iris(64 << 20, invariant="batch") as own:
        layer, rank = Layer(case, own.num_ranks, own.device), own.cur_rank
        first, second = stored(layer.first[rank], True), stored(layer.second[rank], True)
        whole = None
        for tokens in (case.tokens, 1, 3, 17, 64):
            chosen, weights = layer.chosen[-tokens:].contiguous(), layer.weights[-tokens:]
            middle = layer.A.new_empty(tokens * case.k, second.shape[1])
            out = layer.A.new_empty(tokens, case.hidden)
            own.ops.moe_gate_up(middle, layer.A[-tokens:], first, chosen)
            own.ops.moe_down_all_reduce(out, middle, second, chosen, weights, None, layer.shared[rank][-tokens:])
            whole = (middle, out) if whole is None else whole
            assert torch.equal(middle, whole[0][-len(middle) :]), tokens
            assert torch.equal(out, whole[1][-tokens:]), tokens


def problem_of(op: str, tokens: int, k: int, experts: int, N: int, K: int, **more: Any) -> Problem:
    return requested_problem(Request(op, tokens, N, K, 2, BF16, experts=experts, top_k=k, **more))


def instruction(problem: Problem, config: FusedConfig, name: str) -> object:
    """What multiplies a tile, by its sides; in the interpreter, what is added at once along K."""
    if name == "interpreter":
        return config.block_k
    columns = config.block_n // problem.epilogue.matrices
    if name.startswith("AMD"):
        return min(config.block_m, columns) >= 32
    return (columns if config.block_m < 64 <= columns else config.block_m) >= 64


def configs(problem: Problem, machine) -> list:
    return [each.config for each in compare_ways(WAYS, problem, machine).candidates]


@pytest.mark.parametrize("name", ["NVIDIA H100", "AMD Instinct MI300X", "interpreter"])
@pytest.mark.parametrize("op", [GATE_UP, DOWN_ALL_REDUCE])
def test_plans_of_invariant_calls_take_one_instruction(name: str, op: str) -> None:
    machine, blocks = machine_named(name, 132), {None: set(), "batch": set()}
    for tokens in (1, 2, 9, 40, 130, 1000, 9000):
        for experts, k, N, K in ((128, 8, 384, 2048), (8, 2, 4096, 7168), (32, 4, 1440, 2880)):
            for invariant, seen in blocks.items():
                problem = problem_of(op, tokens, k, experts, N, K, invariant=invariant)
                seen |= {instruction(problem, config, name) for config in configs(problem, machine)}
    assert len(blocks["batch"]) == 1 < len(blocks[None])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_token_has_the_same_bits_among_any_number(dtype: torch.dtype) -> None:
    run_ranks(RANKS, invariant_body, dtype)


def several_launches_body(ctx: iris.Iris) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_ways, "MOST_EXCHANGED", 5 * 2 * ctx.num_ranks * 48 * 2)  # of five tokens
        mixture_body(ctx, replace(FEW, tokens=12, algorithm="overlapped", shared=True))


def test_sums_of_many_tokens_take_several_launches() -> None:
    run_ranks(RANKS, several_launches_body)


def test_plans_name_their_kernels_and_say_why() -> None:
    for way in (way for way in WAYS if way.kernel.startswith("moe.")):
        assert import_module(f"iris_ops.{way.kernel}")
    machine = machine_named("NVIDIA H100", 132)
    few = problem_of(DOWN_ALL_REDUCE, 4, 8, 128, 2048, 384)
    many = problem_of(DOWN_ALL_REDUCE, 4096, 8, 128, 2048, 384)
    assert plan(few, machine).kernel == "moe.lamport_down"
    one, sizes = replace(few, M=1), (DOWN_ALL_REDUCE, 1, 8, 128, 2048, 384)
    assert plan(one, machine).kernel == "moe.lamport_token"
    others = (problem_of(*sizes, form="rows"), "too short"), (problem_of(*sizes, invariant="batch"), "order of sums")
    for other, reason in others:
        chosen = plan(other, machine)
        assert chosen.kernel == "moe.lamport_down"
        assert any(each.startswith("rejected moe.lamport_token") and reason in each for each in chosen.reasons)
        assert way_for(other, chosen).kernel == chosen.kernel
    chosen = plan(many, machine)
    assert chosen.kernel == "moe.lamport_combine" and chosen.prediction is not None
    assert any("rejected moe.lamport_down" in reason for reason in chosen.reasons)
    large = problem_of(DOWN_ALL_REDUCE, 8192, 8, 256, 7168, 1024)
    assert plan(large, machine).kernel == "moe.lamport_combine"
    assert tokens_at_once(large) == (1 << 27) // (2 * 2 * 2 * 7168)
    scattered = problem_of(DOWN_REDUCE_SCATTER, 8192, 8, 256, 7168, 1024)
    assert plan(scattered, machine).kernel == "moe.sequential"
    assert "its exchange would take 224 MiB" in plan(scattered, machine).explain()
    wide = problem_of(DOWN_ALL_REDUCE, 4, 8, 128, 1 << 16, 384)
    assert "than programs run at once" in plan(wide, machine).explain()


def test_which_way_does_not_depend_on_a_ranks_part() -> None:
    """Ranks with shares of different sizes choose different tiles, but exchange in the same way."""
    for name in ("NVIDIA H100", "NVIDIA H200", "AMD Instinct MI300X"):
        machine = machine_named(name, 132)
        for tokens in (1, 3, 16, 40, 64, 100, 128, 200, 1000, 8192):
            for N in (48, 2048, 2880, 7168, 16384):
                ways = {
                    plan(problem_of(DOWN_ALL_REDUCE, tokens, 8, 64, N, K), machine, False).kernel
                    for K in (0, 1, 8, 384, 7168)
                }
                assert len(ways) == 1, (name, tokens, N, ways)


class Calls:
    """Both ops on one layer, and whether what they leave is right."""

    def __init__(self, ctx: iris.Iris, name: str) -> None:
        self.case = case = {"few": FEW, "many": MANY}[name]
        self.ctx, self.layer = ctx, Layer(case, ctx.num_ranks, ctx.device)
        rank = ctx.cur_rank
        self.chosen, self.A = self.layer.chosen.clone(), self.layer.A.clone()
        self.first, self.second = stored(self.layer.first[rank], True), stored(self.layer.second[rank], True)
        self.middle = self.A.new_empty(case.tokens * case.k, self.second.shape[1])
        self.out = self.A.new_empty(case.tokens, case.hidden)

    def route(self) -> torch.Tensor | Routing:
        sorts = need_sorting(self.chosen.numel(), self.case.experts)
        return self.ctx.ops.moe_route(self.chosen, self.case.experts) if sorts else self.chosen

    def run(self, experts: torch.Tensor | Routing) -> None:
        self.ctx.ops.moe_gate_up(self.middle, self.A, self.first, experts)
        self.ctx.ops.moe_down_all_reduce(self.out, self.middle, self.second, experts, self.layer.weights)

    def error(self) -> float:
        middles = [moe_gate_up(self.A, B, self.chosen, exact=False) for B in self.layer.first]
        exact = moe_down(middles, self.layer.second, self.chosen, self.layer.weights)
        return float((self.out.double() - exact).norm() / exact.norm())


@torch.no_grad()
def replayed_body(ctx: iris.Iris, name: str) -> None:
    calls = Calls(ctx, name)
    calls.run(calls.route())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls.run(calls.route())
    for turn in range(20):
        calls.chosen.copy_((calls.layer.chosen + turn) % calls.case.experts)
        poison(calls.out)
        torch.cuda.synchronize()
        ctx.barrier()
        graph.replay()
        assert calls.error() < 0.02, turn
    ctx.check()


@torch.no_grad()
def repeated_body(ctx: iris.Iris, name: str) -> None:
    calls = Calls(ctx, name)
    experts = calls.route()
    calls.run(experts)
    for turn in range(3):
        calls.A.copy_(calls.layer.A * (turn - 1.5))
        poison(calls.out)
        torch.cuda.synchronize()
        ctx.barrier()
        calls.run(experts)
        assert calls.error() < 0.02, turn
    assert_only_launches(ctx, lambda: calls.run(experts))
    ctx.barrier()


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs GPUs")
@pytest.mark.parametrize("name", ["few", "many"])
@pytest.mark.parametrize("body", [replayed_body, repeated_body], ids=lambda f: f.__name__)
def test_calls_made_again_are_right(name: str, body: Callable[..., None]) -> None:
    run_ranks(RANKS, body, name)
