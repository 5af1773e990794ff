"""The product of sorted pairs by widened codes: its kernel over torch against float64, and when a plan takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from iris.machines import INTERPRETER, machine_named
from iris_ops import FusedConfig
from iris_ops.activation import Activation, activation_of
from iris_ops.moe.operands import GateUp
from iris_ops.moe.routing import Routing
from iris_ops.planning.experts import Experts
from iris_ops.planning.moe_ways import WIDENED_TILES, widened
from iris_ops.planning.needs import PLAIN
from iris_ops.planning.operations import BY_NAME, DOWN_ALL_REDUCE, DOWN_REDUCE_SCATTER, GATE_UP
from iris_ops.planning.plan import plan, way_for, way_named
from iris_ops.planning.sums import BATCH
from iris_ops.planning.ways.mixtures import GROUPED
from iris_ops.planning.ways.widened import WIDENED
from iris_ops.planning.weights import BY_NAME as FORMATS_BY_NAME
from iris_ops.planning.weights import WIDENED as FORMS
from iris_ops.planning.weights import format_of
from iris_ops.problem import Problem
import pytest
import torch

from tests import gluon_on_cpu
from tests.iris_ops.test_moe_formats import FORMATS, assert_close, drawn
from tests.iris_ops.test_touched_stream import BF16, H200, Steps, moved, problem_of
from tests.reference import moe_gate_up

SERVED = [name for name, stored in FORMATS.items() if name not in ("fp8", "fp8_block")]


@dataclass(frozen=True)
class Case:
    """Experts of one rank. `rows`: how many pairs each has, or None for a random choice."""

    tokens: int = 40
    k: int = 2
    experts: int = 5
    hidden: int = 328
    width: int = 88
    rows: tuple[int, ...] | None = None
    activation: str | Activation | None = "silu"
    interleaved: bool = False
    gated: bool = True
    bias: bool = True
    block_m: int = 16
    programs: int = 1


CASES = {
    "some": Case(programs=2),
    "interleaved": Case(interleaved=True, activation="gpt_oss", block_m=32),
    "idle_experts": Case(tokens=70, k=1, rows=(0, 33, 0, 37, 0), block_m=32, bias=False),
    "whole_blocks": Case(tokens=96, k=1, rows=(64, 16, 16), experts=3, width=64),
    "no_gate": Case(tokens=9, gated=False, activation="relu2", width=200, block_m=64),
    "product": Case(tokens=65, k=1, rows=(65,), experts=1, gated=False, activation=None, width=136, block_m=64),
    "shallow": Case(hidden=64, experts=40),
}


def chosen_of(case: Case, generator: torch.Generator) -> torch.Tensor:
    if case.rows is not None:
        every = torch.arange(len(case.rows)).repeat_interleave(torch.tensor(case.rows))
        return every[torch.randperm(len(every), generator=generator)].view(case.tokens, case.k)
    logits = torch.randn(case.tokens, case.experts, generator=generator)
    return logits.topk(case.k, 1).indices


@pytest.fixture(scope="module")
def kernel() -> Any:
    return gluon_on_cpu.widened()


@pytest.mark.parametrize("format", SERVED)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(20)
def test_numbers(kernel: Any, name: str, format: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(len(name) + len(format))
    gates = 1 + case.gated
    chosen = chosen_of(case, generator)
    A = torch.randn(case.tokens, case.hidden, generator=generator).to(BF16)
    bias = torch.randn(case.experts, gates * case.width, generator=generator).to(BF16) if case.bias else None
    codes, scale, numbers = drawn(
        FORMATS[format], case.experts, gates * case.width, case.hidden, case.hidden**-0.5 / 2, generator
    )  # fmt: skip
    counts = torch.bincount(chosen.flatten(), minlength=case.experts)
    offsets = torch.cat((torch.zeros(1), counts.cumsum(0))).int()
    routing = Routing(chosen, chosen.flatten().argsort(stable=True).int(), offsets)
    steps, out = Steps(), torch.full((case.tokens * case.k, case.width), torch.nan, dtype=BF16)
    activation = None if case.activation is None else activation_of(case.activation)
    given = GateUp(out, A, codes.transpose(1, 2), routing, bias, activation, case.interleaved, scale)
    config = FusedConfig(case.block_m, 128, 128, group_m=2, num_warps=4, num_stages=2, algorithm="sequential")
    problem = problem_of(case, format_of(codes[0].t(), scale[0]))
    assert kernel.supports(problem, config, 0, given) is None
    with mock.patch.object(kernel.platform, "num_programs", lambda device: case.programs):
        kernel.launch(steps, None, problem, config, given)
    gluon_on_cpu.run(kernel.moe_widened_matmul_kernel, *steps.launched)
    if activation is None:  # a product of one expert
        exact, torchs = (
            (A.to(dtype) @ numbers[0].t().to(dtype) + bias[0].to(dtype)) for dtype in (torch.float64, BF16)
        )
    else:
        kind = dict(activation=activation, interleaved=case.interleaved, gated=case.gated)
        exact, torchs = (
            moe_gate_up(A, numbers.transpose(1, 2).to(dtype), chosen, bias, **kind, exact=dtype is not BF16)
            for dtype in (torch.float64, BF16)
        )
    assert_close(out, exact, torchs)


PROBLEM = Problem(
    GATE_UP, BY_NAME[GATE_UP].forms[0], 64, 2880, 2880, 2, BF16, FORMATS_BY_NAME["mxfp4"], BY_NAME[GATE_UP].epilogue,
    experts=Experts(128, 4),
)  # fmt: skip
TILES = {tile[:2] for tile in WIDENED_TILES}


def back(op: str, **changes: Any) -> Problem:
    operation = BY_NAME[op]
    return replace(
        PROBLEM, op=op, form=operation.forms[0], N=2880, K=1440, epilogue=operation.epilogue, **changes
    )  # fmt: skip


@pytest.mark.parametrize("tokens, block_m", [(64, 16), (512, 32), (4096, 64)])
def test_a_plan_takes_it_for_many_pairs(tokens: int, block_m: int) -> None:
    for problem in (replace(PROBLEM, M=tokens), back(DOWN_ALL_REDUCE, M=tokens), back(DOWN_REDUCE_SCATTER, M=tokens)):
        chosen = plan(problem, H200)
        assert widened(problem, H200) and (chosen.block_m, chosen.block_n) == (block_m, 128), chosen
        assert chosen.algorithm != "one_shot"


@pytest.mark.parametrize("change", [
    dict(M=32),
    dict(dtype=torch.float16),
    dict(weights=PLAIN),
    dict(weights=FORMATS_BY_NAME["fp8_block"]),
    dict(N=2882),
    dict(sums=BATCH.promise(PROBLEM).sums),
])  # fmt: skip
def test_it_leaves_the_others(change: dict) -> None:
    assert plan(PROBLEM, H200).kernel == WIDENED and plan(replace(PROBLEM, **change), H200).kernel != WIDENED
    assert not widened(replace(PROBLEM, **change), H200)


def test_a_rank_that_cannot_load_its_tensors_runs_the_portable_kernel() -> None:
    config = plan(PROBLEM, H200)
    way = way_for(PROBLEM, config)
    other = way_named(way.fallback_for(PROBLEM))
    assert way.kernel == WIDENED and other.kernel == GROUPED
    assert other.fallback_config(PROBLEM, config, H200).algorithm == "sequential"


def test_other_machines_do_not_have_it() -> None:
    for name in (INTERPRETER, "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X"):
        assert not widened(PROBLEM, machine_named(name, 100))


@pytest.mark.parametrize("weights", FORMS, ids=[each.name for each in FORMS])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_with_other_parts_of_an_expert_exchange_alike(ranks: int, weights: Any) -> None:
    for tokens in (8, 33, 64, 128, 129, 700):
        problem = back(DOWN_ALL_REDUCE, M=tokens, world_size=ranks, weights=weights)
        ways = {plan(replace(problem, K=K), H200).kernel for K in (0, 32, 352, 1440, 4096, 18432)}
        assert len(ways) == 1 or tokens * 4 <= 128, (tokens, ways)


@pytest.mark.parametrize("change, reason", [
    ("none", None),
    ("tile", "no tiles of 16 x 64"),
    ("rows", "rows of A begin between vectors"),
    ("depth", "rows of A begin between vectors"),
    ("experts", "do not follow each other"),
    ("codes", "begin between vectors of 16 bytes"),
    ("nothing", "nothing to multiply"),
])  # fmt: skip
def test_tensors_that_it_cannot_load_are_named(kernel: Any, change: str, reason: str | None) -> None:
    hidden = {"depth": 324, "nothing": 0}.get(change, 320)
    codes, scale, _ = drawn(FORMATS["int4"], 6, 320, hidden, 0.1, torch.Generator())
    A, config = torch.zeros(3, hidden, dtype=BF16), FusedConfig(16, 128, 128, num_warps=4, num_stages=2)
    if change == "rows":
        A = torch.zeros(3, hidden + 4, dtype=BF16)[:, :hidden]
    elif change == "experts":
        codes, scale = codes[::2], scale[::2]
    elif change == "codes":
        codes = moved(codes)
    elif change == "tile":
        config = replace(config, block_n=64)
    problem = problem_of(Case(hidden=hidden), FORMATS_BY_NAME["int4"])
    given = GateUp(torch.zeros(6, 160, dtype=BF16), A, codes.transpose(1, 2), SimpleNamespace(), None, scale=scale)
    found = kernel.supports(problem, config, 0, given)
    assert found is None if reason is None else reason in found
