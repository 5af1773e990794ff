"""The stream of touched experts: its kernels over torch against float64, and when the planner takes it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from iris.machines import machine_named
from iris_ops.moe.activation import Activation, activation_of
from iris_ops.moe.operands import Down, GateUp
from iris_ops.planning.experts import Experts
from iris_ops.planning.needs import WeightFormat
from iris_ops.planning.operations import BY_NAME, DOWN_ALL_REDUCE, GATE_UP
from iris_ops.planning.weights import format_of
from iris_ops.planning.workspace_size import exchange_ld
from iris_ops.problem import Problem
import pytest
import torch

from tests import gluon_on_cpu
from tests.iris_ops.test_moe_formats import FORMATS, assert_close, drawn
from tests.reference import moe_down, moe_gate_up

H200 = machine_named("NVIDIA H200", 132)
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """A layer of two ranks. `routing`: "random", "one" expert for all, or "twice" the same for a token."""

    tokens: int
    k: int = 2
    experts: int = 6
    hidden: int = 640
    width: int = 384
    routing: str = "random"
    activation: str | Activation = "silu"
    interleaved: bool = False
    gated: bool = True
    bias: bool = True
    shared: bool = True
    programs: int = 5


CASES = {
    "one_token": Case(1, k=3),
    "three": Case(3, interleaved=True, activation="gpt_oss", programs=3),
    "sixteen": Case(16, k=3, experts=9, programs=40),
    "all_by_one": Case(16, k=1, routing="one", shared=False),
    "twice": Case(4, k=2, routing="twice", bias=False),
    "no_gate": Case(9, gated=False, activation="relu2", programs=1),
    "out_of_range": Case(2, k=2, routing="wrong"),
}


def chosen_of(case: Case, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(case.tokens, case.experts, generator=generator)
    logits[:, case.experts - 1] = -torch.inf  # nobody chooses the last one
    chosen = logits.topk(case.k, 1).indices
    if case.routing == "one":
        chosen[:] = 2
    elif case.routing == "twice":
        chosen[::2] = 1
    elif case.routing == "wrong":
        chosen[0, 0], chosen[1, 1] = case.experts, -1
    return chosen


def problem_of(op: str, case: Case, N: int, K: int, form: WeightFormat) -> Problem:
    gate = BY_NAME[op].epilogue if case.gated else None
    experts = Experts(case.experts, case.k)
    return Problem(op, BY_NAME[op].forms[0], case.tokens, N, K, 2, BF16, form, gate, experts=experts)


class Steps:
    """Takes what would be launched."""

    def __init__(self, rank: int) -> None:
        self.ctx = SimpleNamespace(num_ranks=2, cur_rank=rank, get_device_context=lambda: torch.tensor([rank]))
        self.launched: tuple[int, dict] | None = None

    def launch(self, kernel: Any, grid: tuple[int, ...], args: dict, **options: int) -> None:
        self.launched = grid[0], args


@pytest.fixture(scope="module")
def stream() -> Any:
    return gluon_on_cpu.kernels()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_numbers(stream: Any, name: str, format: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(len(name) + len(format))
    stored, gates = FORMATS[format], 1 + CASES[name].gated
    if stored.group != 32 and name != "sixteen":  # K that ends inside a line
        case = replace(case, hidden=512)
    elif stored.group == 32:
        case = replace(case, hidden=544, width=352)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(BF16)

    def weight(N: int, K: int) -> tuple[torch.Tensor, ...]:
        return drawn(stored, case.experts, N, K, K**-0.5 / 2, generator)

    chosen = chosen_of(case, generator)
    valid = chosen.clamp(0, case.experts - 1)
    A, pairs, weights = draw(case.tokens, case.hidden), case.tokens * case.k, torch.rand(case.tokens, case.k)
    weights = torch.where(valid == chosen, weights, 0.0)
    first = [weight(gates * case.width, case.hidden) for _ in range(2)]
    second = [weight(case.hidden, case.width) for _ in range(2)]
    first_bias, second_bias = draw(case.experts, gates * case.width), draw(case.experts, case.hidden)
    shared = [draw(case.tokens, case.hidden) for _ in range(2)]
    form = format_of(first[0][0][0].t(), first[0][1][0])
    kind = dict(activation=case.activation, interleaved=case.interleaved, gated=case.gated)
    reference_bias = first_bias if case.bias else None
    middles, codes_of = [], lambda each: each[0].transpose(1, 2)
    with mock.patch.object(stream.platform, "num_programs", lambda device: case.programs):
        for rank in range(2):
            steps, out = Steps(rank), torch.full((pairs, case.width), torch.nan, dtype=BF16)
            problem = problem_of(GATE_UP, case, gates * case.width, case.hidden, form)
            given = GateUp(out, A, codes_of(first[rank]), chosen, reference_bias, activation_of(case.activation),
                           case.interleaved, first[rank][1])  # fmt: skip
            stream.launch_gate_up(steps, None, problem, None, given)
            wrong = gluon_on_cpu.run(stream.moe_stream_gate_up_kernel, [steps.launched])
            assert wrong == [case.routing == "wrong"]
            exact, torchs = (
                moe_gate_up(A, first[rank][2].transpose(1, 2).to(dtype), valid, reference_bias, **kind,
                            exact=dtype is not BF16) for dtype in (torch.float64, BF16)
            )  # fmt: skip
            there = (valid == chosen).view(-1)
            assert out[~there].isnan().all()
            assert_close(out[there], exact[there], torchs[there])
            middles.append(torch.where(there[:, None], out, 0.0))

        ld = exchange_ld(case.hidden)
        staging = [torch.full((2 * 2 * case.tokens * ld,), -1, dtype=torch.int16) for _ in range(2)]
        launches, outs = [], []
        for rank in range(2):
            steps, out = Steps(rank), torch.full((case.tokens, case.hidden), torch.nan, dtype=BF16)
            workspace = SimpleNamespace(exchange=staging[rank].view(torch.uint8), exchange_sync=torch.tensor([4, 0]))
            problem = problem_of(DOWN_ALL_REDUCE, case, case.hidden, case.width, form)
            given = Down(
                out, middles[rank], codes_of(second[rank]), chosen, weights, second_bias if case.bias else None,
                shared[rank] if case.shared else None, second[rank][1],
            )  # fmt: skip
            stream.launch_down(steps, workspace, problem, None, given)
            launches.append(steps.launched), outs.append(out)
        gluon_on_cpu.run(stream.moe_stream_down_kernel, launches, staging)
    exact, torchs = (
        moe_down(middles, [each[2].transpose(1, 2).to(dtype) for each in second], valid, weights,
                 second_bias if case.bias else None, shared if case.shared else None, exact=dtype is not BF16)
        for dtype in (torch.float64, BF16)
    )  # fmt: skip
    assert torch.equal(*outs)
    assert_close(outs[0], exact, torchs)
    assert all((each == -1).all() for each in staging)
