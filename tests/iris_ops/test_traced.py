"""The fused ops while they record themselves: the same bits as ever, and spans that account for all that is sent."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from iris import platform
from iris.device.tracing import PRODUCT, PUSH, SIGNAL, SUM
from iris_ops import FusedConfig
from iris_ops.problem import ALL_REDUCE, GATHER_MATMUL, MATMUL_GATHER, Problem
from iris_ops.quantised import scaled_matmul
import numpy as np
import pytest
import torch

from tests.harness import ON_GPU, UNDER_TORCHRUN, WORLDS, both, run_ranks
from tests.iris_ops.calls import check_case
from tests.reference import FORMS, Case

pytestmark = both

CONFIG = FusedConfig(16, 16, 16, group_m=2, num_warps=4, num_stages=2, num_programs=3, comm_programs=2)


def check_traced(ctx, case):
    """Events by kind, and the bytes that all pushes have sent."""
    plain = check_case(ctx, case, runs=1)
    ctx.tracing.enable(1 << 14)
    assert check_case(ctx, case, runs=1) == plain, "a call that records gives other bits"
    events = ctx.tracing.events()
    assert ctx.tracing.dropped == 0
    assert (0 < events["begin"]).all() and (events["begin"] <= events["end"]).all(), "a span was not ended"
    assert ((-1 <= events["target_rank"]) & (events["target_rank"] < ctx.num_ranks)).all()
    ctx.tracing.disable()
    assert check_case(ctx, case, runs=2) == plain
    assert len(ctx.tracing.events()) == len(events)
    pushes = events[events["event"] == PUSH.value]
    receivers = [ctx.num_ranks - 1 if event["target_rank"] < 0 else 1 for event in pushes]
    sent = sum(int(nbytes) * count for nbytes, count in zip(pushes["bytes"], receivers, strict=True))
    return Counter(map(int, events["event"])), sent, len(np.unique(events["thread"]))


@pytest.mark.parametrize("op, form", FORMS)
@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [1, 3])
@pytest.mark.some(3, on_gpus=3)
def test_ops_record_themselves(world_size, op, form):
    # every rank has rows and columns of its own, and as many
    case = Case(op, form, 32 * world_size, 36, 24, torch.float16, config=CONFIG)
    recorded = run_ranks(world_size, check_traced, case)
    for kinds, _, _ in recorded:
        assert kinds[PRODUCT.value] >= 2 * 3 if op != MATMUL_GATHER else kinds[PRODUCT.value]
        if world_size > 1:
            assert kinds[PUSH.value] and kinds[SIGNAL.value]
            assert bool(kinds[SUM.value]) == (op not in (GATHER_MATMUL, MATMUL_GATHER))
    problem = Problem(op, form, case.M, case.N, case.K, world_size, case.dtype)
    assert sum(sent for _, sent, _ in recorded) == world_size * problem.link_bytes


def sources(ctx, case: Case) -> list[int]:
    """Whose rows are multiplied, one rank's after the other's."""
    ctx.tracing.enable(1 << 12)
    check_case(ctx, case, runs=1)
    events = ctx.tracing.events()
    products = np.sort(events[events["event"] == PRODUCT.value], order="begin")
    return list(dict.fromkeys(map(int, products["target_rank"])))


@pytest.mark.skipif(ON_GPU, reason="there several programs multiply at once")
@pytest.mark.parametrize("world_size", [3])
def test_gathered_rows_are_multiplied_in_the_order_in_which_they_arrive(world_size):
    """Ranks push to the next one first, so a rank multiplies its own rows, then the previous rank's, and so on."""
    recorded = run_ranks(world_size, sources, Case(GATHER_MATMUL, "rows", 32 * world_size, 16, 24, config=CONFIG))
    assert recorded == [[(rank - i) % world_size for i in range(world_size)] for rank in range(world_size)]


PUSHED = [(op, form, "overlapped") for op, form in FORMS if op != GATHER_MATMUL] + [
    (ALL_REDUCE, "", "two_shot"),
    (ALL_REDUCE, "", "one_shot"),  # between two ranks as many bytes
]


@pytest.mark.parametrize("op, form, algorithm", PUSHED)
@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
@pytest.mark.some(3, on_gpus=3)
def test_specialised_warps_record_themselves(world_size, op, form, algorithm):
    """Pushes are recorded too; with specialised warps, one thread of each kind records."""
    if algorithm == "one_shot" and world_size != 2:
        pytest.skip("no program warp-specialised serves these")
    config = FusedConfig(64, 64, 64, num_stages=2, num_programs=3, splits=2, warp_specialised=True, algorithm=algorithm)
    case = Case(op, form, 64 * world_size, 64 * world_size, 72, torch.float16, config=config)
    problem = Problem(op, form, case.M, case.N, case.K, world_size, case.dtype)
    recorded = run_ranks(world_size, check_traced, case)
    rounding = 1e-3 if algorithm == "two_shot" else 0  # of a tile's bytes over all ranks
    assert sum(sent for _, sent, _ in recorded) == pytest.approx(world_size * problem.link_bytes, rel=rounding, abs=0)
    specialised = ON_GPU and platform.has_warp_specialisation(torch.device("cuda", torch.cuda.current_device()))
    for kinds, _, threads in recorded:
        assert kinds[PRODUCT.value] and threads == (2 if specialised else 1)
        assert world_size == 1 or kinds[PUSH.value]


@pytest.mark.parametrize("op, form", FORMS)
@pytest.mark.parametrize("world_size", WORLDS if UNDER_TORCHRUN else [2])
@pytest.mark.some(3, on_gpus=3)
def test_ops_of_few_rows_record_themselves(world_size, op, form):
    case = Case(op, form, 2 * world_size, 36, 24, torch.float16, config=replace(CONFIG, algorithm="one_shot"))
    for kinds, sent, _ in run_ranks(world_size, check_traced, case):
        assert kinds[PRODUCT.value] and kinds[PUSH.value]
        assert sent or world_size == 1


def check_untraced(ctx) -> dict[str, int]:
    """Events of calls whose product is a kernel apart, and of a collective."""
    M, N, K, w = 16 * ctx.num_ranks, 32, 16, ctx.num_ranks
    A, part = (torch.ones(rows, K, dtype=torch.bfloat16, device=ctx.device) for rows in (M, M // w))
    W8, scale = scaled_matmul.quantised(torch.ones(N, K, device=ctx.device))
    B = W8.to(A.dtype).t()
    out = ctx.empty(M, N, dtype=A.dtype)
    sequential, engines = (FusedConfig(algorithm=name) for name in ("sequential", "copy_gather"))
    calls = {
        "sequential": lambda: ctx.ops.matmul_all_reduce(out, A, B, config=sequential),
        "copy_gather": lambda: ctx.ops.all_gather_matmul(out, part, B, config=engines),
        "ccl": lambda: ctx.ccl.all_reduce(out, out.clone()),
    }
    if ctx.device.type == "cpu":
        calls["fp8"] = lambda: ctx.ops.matmul_all_reduce(out, A, W8.t(), scale=scale)
    recorded = {}
    for name, call in calls.items():
        ctx.tracing.enable(1 << 8)
        call()
        recorded[name] = len(ctx.tracing.events())
    ctx.tracing.disable()
    return recorded


@pytest.mark.parametrize("world_size", [world for world in WORLDS if world > 1] if UNDER_TORCHRUN else [2])
def test_what_is_said_to_record_nothing_records_nothing(world_size):
    """docs/guides/tracing.md, `Tracing.enable`."""
    for recorded in run_ranks(world_size, check_untraced):
        assert not any(recorded.values()), recorded
