"""The stream of touched experts: its kernel over torch against float64, when a plan takes it, what it cannot load."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from iris.machines import INTERPRETER, machine_named
from iris_ops import FusedConfig
from iris_ops.activation import Activation, activation_of
from iris_ops.moe.operands import Down, GateUp
from iris_ops.planning.epilogues import NO_EPILOGUE
from iris_ops.planning.experts import Experts
from iris_ops.planning.needs import WeightFormat
from iris_ops.planning.operations import BY_NAME, DOWN_ALL_REDUCE, GATE_UP
from iris_ops.planning.plan import plan, way_for
from iris_ops.planning.sums import BATCH
from iris_ops.planning.ways.mixtures import GROUPED, LAMPORT
from iris_ops.planning.ways.touched import STREAM, STREAM_DOWN
from iris_ops.planning.weights import BY_NAME as FORMATS_BY_NAME
from iris_ops.planning.weights import format_of
from iris_ops.problem import Problem
import pytest
import torch

from tests import gluon_on_cpu
from tests.iris_ops.test_moe_formats import FORMATS, assert_close, drawn
from tests.reference import moe_down, moe_gate_up

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Experts of one rank. `routing`: "random", "one" expert for all, "twice" the same for a token, or "wrong"."""

    tokens: int
    k: int = 2
    experts: int = 6
    hidden: int = 640
    width: int = 160
    routing: str = "random"
    activation: str | Activation = "silu"
    interleaved: bool = False
    gated: bool = True
    bias: bool = True
    programs: int = 3


CASES = {
    "one_token": Case(1, k=3),
    "three": Case(3, interleaved=True, activation="gpt_oss", programs=2),
    "sixteen": Case(16, k=3, experts=9, programs=20),
    "all_by_one": Case(16, k=1, routing="one"),
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


def problem_of(case: Any, form: WeightFormat) -> Problem:
    operation, N = BY_NAME[GATE_UP], case.width * (1 + case.gated)
    return Problem(
        GATE_UP, operation.forms[0], case.tokens, N, case.hidden, 2, BF16, form,
        operation.epilogue if case.gated else NO_EPILOGUE, experts=Experts(case.experts, case.k),
    )  # fmt: skip


class Steps:
    """Takes what would be launched."""

    def __init__(self) -> None:
        self.rank = SimpleNamespace(num_ranks=2, get_device_context=lambda: torch.tensor([0]))
        self.launched: tuple[int, dict] | None = None

    def launch(self, kernel: Any, grid: tuple[int, ...], args: dict, **options: int) -> None:
        self.launched = grid[0], args


@pytest.fixture(scope="module")
def streams() -> tuple[Any, Any]:
    return gluon_on_cpu.streams()


@pytest.fixture
def stream(streams: tuple[Any, Any]) -> Any:
    return streams[0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(20)
def test_numbers(stream: Any, name: str, format: str) -> None:
    case, generator = CASES[name], torch.Generator().manual_seed(len(name) + len(format))
    stored, gates = FORMATS[format], 1 + case.gated
    if stored.group in (16, 32):
        case = replace(case, hidden=544)  # that ends inside a line
    chosen = chosen_of(case, generator)
    valid = chosen.clamp(0, case.experts - 1)
    A = torch.randn(case.tokens, case.hidden, generator=generator).to(BF16)
    bias = torch.randn(case.experts, gates * case.width, generator=generator).to(BF16) if case.bias else None
    codes, scale, numbers = drawn(
        stored, case.experts, gates * case.width, case.hidden, case.hidden**-0.5 / 2, generator
    )  # fmt: skip
    steps, out = Steps(), torch.full((case.tokens * case.k, case.width), torch.nan, dtype=BF16)
    given = GateUp(
        out, A, codes.transpose(1, 2), chosen, bias, activation_of(case.activation), case.interleaved, scale
    )  # fmt: skip
    with mock.patch.object(stream.platform, "num_programs", lambda device: case.programs):
        stream.launch(steps, None, problem_of(case, format_of(codes[0].t(), scale[0])), None, given)
    wrong = gluon_on_cpu.run(stream.moe_stream_gate_up_kernel, *steps.launched)
    assert wrong == (case.routing == "wrong")
    kind = dict(activation=case.activation, interleaved=case.interleaved, gated=case.gated)
    exact, torchs = (
        moe_gate_up(A, numbers.transpose(1, 2).to(dtype), valid, bias, **kind, exact=dtype is not BF16)
        for dtype in (torch.float64, BF16)
    )
    there = (valid == chosen).view(-1)
    assert out[~there].isnan().all()
    assert_close(out[there], exact[there], torchs[there])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.some(20)
def test_numbers_of_the_way_back(streams: tuple[Any, Any], name: str, format: str) -> None:
    """On one rank, whose values go to itself."""
    case, generator = CASES[name], torch.Generator().manual_seed(len(name) + len(format))
    stored, hidden = FORMATS[format], 104  # that ends inside a group of columns
    K = case.hidden if stored.group not in (16, 32) else 544
    chosen, down = chosen_of(case, generator), streams[1]
    valid = chosen.clamp(0, case.experts - 1)
    A = torch.randn(case.tokens * case.k, K, generator=generator).to(BF16)
    bias = torch.randn(case.experts, hidden, generator=generator).to(BF16) if case.bias else None
    shared = torch.randn(case.tokens, hidden, generator=generator).to(BF16) if case.gated else None
    weights = torch.rand(case.tokens, case.k, generator=generator)
    codes, scale, numbers = drawn(stored, case.experts, hidden, K, K**-0.5 / 2, generator)
    operation, form = BY_NAME[DOWN_ALL_REDUCE], format_of(codes[0].t(), scale[0])
    problem = Problem(
        DOWN_ALL_REDUCE, operation.forms[0], case.tokens, hidden, K, 1, BF16, form, operation.epilogue,
        experts=Experts(case.experts, case.k),
    )  # fmt: skip
    steps, out = Steps(), torch.full((case.tokens, hidden), torch.nan, dtype=BF16)
    steps.rank.num_ranks, steps.rank.cur_rank = 1, 0
    room = torch.full((1 << 16,), 0xFF, dtype=torch.uint8)
    workspace = SimpleNamespace(
        exchange=room, exchange_sync=torch.zeros(2, dtype=torch.int32),
        local=lambda name, nbytes: torch.zeros(nbytes, dtype=torch.uint8),
    )  # fmt: skip
    with mock.patch.object(down.platform, "num_programs", lambda device: case.programs):
        down.launch(
            steps, workspace, problem, None, Down(out, A, codes.transpose(1, 2), chosen, weights, bias, shared, scale)
        )  # fmt: skip
    wrong = gluon_on_cpu.run(down.moe_stream_down_kernel, *steps.launched)
    assert wrong == (case.routing == "wrong")
    weights = weights.masked_fill(valid != chosen, 0.0)  # their products are zeros
    exact, torchs = (
        moe_down([A], [numbers.transpose(1, 2).to(dtype)], valid, weights, bias, None if shared is None else [shared],
                 exact=dtype is not BF16)
        for dtype in (torch.float64, BF16)
    )  # fmt: skip
    assert_close(out, exact, torchs)
    assert bool((room == 0xFF).all()), "sentinels are put back"


H200 = machine_named("NVIDIA H200", 132)
SERVED = Problem(
    GATE_UP, BY_NAME[GATE_UP].forms[0], 4, 2880, 2880, 2, BF16, FORMATS_BY_NAME["mxfp4"], BY_NAME[GATE_UP].epilogue,
    experts=Experts(128, 4),
)  # fmt: skip


@pytest.mark.parametrize("form", FORMATS_BY_NAME.values(), ids=list(FORMATS_BY_NAME))
@pytest.mark.parametrize("tokens, columns, top_k", [(1, 1536, 8), (4, 2880, 4), (16, 2880, 4)])
def test_a_plan_takes_it_for_few_tokens(tokens: int, columns: int, top_k: int, form: WeightFormat) -> None:
    problem = replace(SERVED, M=tokens, N=columns, K=2048, weights=form, experts=Experts(128, top_k))
    chosen = plan(problem, H200)
    assert chosen.kernel == STREAM
    assert way_for(problem, chosen).kernel == STREAM
    assert chosen.prediction.total_us < plan(replace(problem, M=17), H200).prediction.total_us


@pytest.mark.parametrize("change, reason", [
    (dict(M=33), "up to 32 tokens"),
    (dict(K=2890), "K a multiple of 32"),
    (dict(dtype=torch.float16), "a Hopper GPU and bf16"),
    (dict(M=16, experts=Experts(128, 10)), "at most 128 pairs"),
    (dict(experts=Experts(2, 2), M=5), "at most 128 pairs"),
    (dict(N=1 << 25), "columns of all experts"),
])  # fmt: skip
def test_a_plan_says_why_it_does_not(change: dict, reason: str) -> None:
    chosen = plan(replace(SERVED, **change), H200)
    assert chosen.kernel != STREAM
    assert any(each.startswith(f"rejected {STREAM}") and reason in each for each in chosen.reasons), chosen.reasons


BACK = Problem(
    DOWN_ALL_REDUCE, BY_NAME[DOWN_ALL_REDUCE].forms[0], 4, 2880, 1440, 2, BF16, FORMATS_BY_NAME["mxfp4"],
    BY_NAME[DOWN_ALL_REDUCE].epilogue, experts=Experts(128, 4),
)  # fmt: skip


@pytest.mark.parametrize("tokens", [1, 4, 16, 32])
def test_a_plan_takes_the_way_back(tokens: int) -> None:
    problem = replace(BACK, M=tokens)
    chosen = plan(problem, H200)
    assert chosen.kernel == way_for(problem, chosen).kernel == STREAM_DOWN


def test_a_plan_leaves_short_experts_to_tiles() -> None:
    """A program would have an item for a single step of each."""
    problem = replace(BACK, N=2048, K=384, weights=FORMATS_BY_NAME["fp8_block"], experts=Experts(128, 8))
    assert plan(problem, H200).kernel == LAMPORT


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("columns", [512, 2880, 7168, 16384, 20480])
def test_ranks_with_other_parts_of_an_expert_exchange_alike(ranks: int, columns: int) -> None:
    """What a rank plans for its own part must send to the same places as its peers' plans."""
    alike = {STREAM_DOWN, LAMPORT}
    for tokens in (1, 2, 5, 16, 32):
        problem = replace(BACK, M=tokens, N=columns, world_size=ranks)
        kernels = {plan(replace(problem, K=K), H200).kernel for K in (0, 32, 352, 1440, 4096, 18432)}
        assert kernels <= alike or len(kernels) == 1, (tokens, kernels)


def test_it_promises_no_equal_bits() -> None:
    problem = BATCH.promise(SERVED)
    chosen = plan(problem, H200)
    assert chosen.kernel == GROUPED and any(f"rejected {STREAM}" in each for each in chosen.reasons)
    config = FusedConfig(16, 128, 128, algorithm="one_shot", kernel=STREAM)
    assert way_for(problem, config).kernel == GROUPED, "a configuration cannot break the promise"


def test_other_machines_do_not_have_it() -> None:
    for name in (INTERPRETER, "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X"):
        assert plan(SERVED, machine_named(name, 100)).kernel == GROUPED


@pytest.mark.parametrize("change, reason", [
    ("none", None),
    ("rows", "rows of A begin between words"),
    ("columns", "rows of A begin between words"),
    ("experts", "do not follow each other"),
    ("codes", "begin between vectors of 16 bytes"),
    ("scales", "begin between vectors of 16 bytes"),
])  # fmt: skip
def test_tensors_that_it_cannot_load_are_named(stream: Any, change: str, reason: str | None) -> None:
    case, stored = Case(3, hidden=512), FORMATS["fp8_block"]
    codes, scale, _ = drawn(stored, case.experts, 320, case.hidden, 0.1, torch.Generator())
    A = torch.zeros(3, case.hidden, dtype=BF16)
    if change == "rows":
        A = torch.zeros(3, case.hidden + 2, dtype=BF16)[:, : case.hidden]
    elif change == "columns":
        A = torch.zeros(case.hidden, 3, dtype=BF16).t()
    elif change == "experts":
        codes, scale = codes[::2], scale[::2]
    elif change == "codes":
        codes = moved(codes)
    elif change == "scales":
        scale = moved(scale)
    given = GateUp(torch.zeros(6, 160, dtype=BF16), A, codes.transpose(1, 2), torch.zeros(3, 2), None, scale=scale)
    with mock.patch.object(stream.platform, "has_warp_specialisation", lambda device: True):
        found = stream.supports(problem_of(case, FORMATS_BY_NAME["fp8_block"]), None, 0, given)
    assert found is None if reason is None else reason in found


def moved(t: torch.Tensor) -> torch.Tensor:
    """Return `t` one element further on in memory than a vector begins."""
    room = t.new_empty(t.numel() + 1)
    return room[1:].view(t.shape).copy_(t)
