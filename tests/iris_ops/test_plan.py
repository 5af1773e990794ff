"""The plan: the same wherever it is made, with its reasons, and what it decides for decode and prefill sizes."""

from __future__ import annotations

from dataclasses import replace

import iris
from iris.ccl import problem as collectives
from iris.errors import ArgumentError
from iris.machines import Machine, machine_named
from iris_ops import FusedConfig, steps
from iris_ops.config import WITH_TORCH
from iris_ops.named import named
from iris_ops.ops import Ops
from iris_ops.planning.candidates import fitting
from iris_ops.planning.needs import PLAIN
from iris_ops.planning.plan import WAYS, check_config, compare_ways, plan, way_for, way_named, workspace_size
from iris_ops.planning.product_model import stream_launches
from iris_ops.planning.weights import BY_FLAG, BY_NAME
from iris_ops.planning.weights.fp8 import FP8_FORMAT
from iris_ops.problem import (
    ALL_REDUCE,
    GATHER_MATMUL,
    MATMUL_GATHER,
    OPS,
    REDUCE_SCATTER,
    Problem,
    Request,
    requested_problem,
)
import pytest
import torch

from tests.harness import WORLDS, both, run_ranks
from tests.iris_ops.calls import Call
from tests.reference import FORMS, Case

pytestmark = both

H200 = machine_named("NVIDIA H200", 132)
INTERPRETER = machine_named("interpreter", 1)
MACHINES = [H200, INTERPRETER, machine_named("AMD Instinct MI300X", 304), machine_named("some other GPU", 66)]
SHAPES = [(1, 8192, 2048), (64, 4096, 1024), (2048, 8192, 7168), (8192, 8192, 2048), (1, 1, 1), (17, 129, 0)]


def problem(op: str, form: str, M: int, N: int, K: int, w: int = 4, dtype: torch.dtype = torch.bfloat16) -> Problem:
    return Problem(op, form, M, N, K, w, dtype)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
@pytest.mark.parametrize("op, form", FORMS)
def test_every_plan_has_reasons_and_a_prediction(op: str, form: str, machine: Machine) -> None:
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            chosen = plan(problem(op, form, *shape, dtype=dtype), machine)
            assert chosen.prediction.total_us >= max(chosen.prediction.gemm_us, chosen.prediction.link_us) > 0
            label = chosen.kernel
            if chosen.algorithm not in WITH_TORCH:
                label += f" {chosen.block_m}x{chosen.block_n}x{chosen.block_k}"
            first, *_, last = chosen.explain().splitlines()
            assert op in first and machine.name in first and f"M={shape[0]} N={shape[1]} K={shape[2]}" in first
            assert any(line.startswith(f"chosen {label}") for line in chosen.reasons)
            assert any(line.startswith(label) and "us" in line for line in chosen.reasons), "its own score"
            assert min(workspace_size(problem(op, form, *shape, dtype=dtype), chosen, 132)) >= 0


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_what_is_empty_has_a_plan_too(machine: Machine) -> None:
    for op, form in FORMS:
        for shape in [(0, 127, 5), (5, 0, 7), (3, 5, 0), (0, 0, 0)]:
            for w in (1, 2, 8):
                assert plan(problem(op, form, *shape, w=w), machine).prediction.total_us >= 0


@pytest.mark.parametrize("few", [False, True], ids=["many rows", "few rows"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_have_as_many_stages_as_shared_memory_has_room_for(itemsize: int, few: bool) -> None:
    """What they take, compiled, is looked at in test_codegen.py."""
    full = {tuple(tile): stages for *tile, stages in fitting(itemsize, H200, few)}
    for name in ("AMD Instinct MI300X", "AMD Instinct MI350X", "some other GPU"):
        machine = machine_named(name, 100)
        stages_of = {tuple(tile): stages for *tile, stages in fitting(itemsize, machine, few)}
        assert stages_of and all(2 <= stages <= full[tile] for tile, stages in stages_of.items())
        for (m, n, k, _), stages in stages_of.items():
            held = stages - name.startswith("AMD")  # one of AMD's is in registers
            assert held * (m + n) * k * itemsize <= machine.shared_bytes
    large = replace(H200, shared_bytes=1 << 30)
    assert fitting(itemsize, large, few) == fitting(itemsize, H200, few), "an H200 has room for all"


@pytest.mark.parametrize("op, form", FORMS)
def test_the_fastest_candidate_is_chosen(op: str, form: str) -> None:
    for shape in SHAPES:
        chosen = plan(problem(op, form, *shape), H200)
        scores = [
            float(line.rsplit("together ", 1)[1].split()[0]) for line in chosen.reasons if " us, together " in line
        ]
        assert len(scores) > 1 and chosen.prediction.total_us == pytest.approx(min(scores), abs=0.1)
        lead = 7.1  # that torch's product must have
        assert all(score <= later + lead for score, later in zip(scores, scores[1:], strict=False)), "sorted"


@pytest.mark.parametrize("op, form", FORMS)
def test_the_best_of_one_algorithm_can_be_asked_for(op: str, form: str) -> None:
    case = problem(op, form, 512, 8192, 2048)
    plans = {name: plan(case, H200, algorithm=name) for name in ("one_shot", "overlapped")}
    if form in ("", "rows"):
        plans["sequential"] = plan(case, H200, algorithm="sequential")
    assert all(chosen.algorithm == name for name, chosen in plans.items())
    best = plan(case, H200)
    assert plan(case, H200, algorithm=best.algorithm) == best
    unfit = "copy_gather" if op != GATHER_MATMUL else "two_shot"
    with pytest.raises(ArgumentError, match=f"{op}: algorithm is '{unfit}'; expected one that serves .*, one_shot"):
        plan(case, H200, algorithm=unfit)


def test_rejections_are_listed_with_their_reasons() -> None:
    chosen = plan(problem(ALL_REDUCE, "", 8192, 8192, 7168), H200)
    rejected = [line for line in chosen.reasons if line.startswith("rejected ")]
    assert any("the exchange of a result this large would not overlap" in line for line in rejected)
    by_columns = plan(problem(GATHER_MATMUL, "k", 4096, 8192, 8192), H200).reasons
    assert "rejected with_torch.copy_gather: copy engines serve all_gather_matmul by rows" in by_columns
    few = plan(problem(ALL_REDUCE, "", 1, 64, 64), H200).reasons
    assert "rejected hopper.lamport_pair: it needs at least 65 rows and exactly two ranks" in few
    assert "rejected with_torch.sequential: few rows: a stream of weights needs no library" in few


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_each_way_is_weighed_or_rejected_by_name(machine: Machine) -> None:
    """And what it brings stands for its own kernel, for which there is a launcher."""
    assert all(callable(named(way.launcher)) and (not way.supports or named(way.supports)) for way in WAYS[:-6])
    for op, form in FORMS:
        for fp8 in (False, op != MATMUL_GATHER):
            case = replace(problem(op, form, 512, 8192, 2048), weights=BY_FLAG[fp8])
            comparison = compare_ways(WAYS, case, machine)
            for each in comparison.candidates:
                assert each.config.kernel == each.way.kernel and way_for(case, each.config) is each.way
            looked_at = {each.way for each in comparison.candidates} | {way for way, _ in comparison.rejected}
            assert looked_at == {way for way in WAYS if op in way.ops}


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_small_all_reduces_take_one_shot_and_large_ones_overlap(world_size: int) -> None:
    for N, K in ((8192, 2048), (4096, 1024), (8192, 7168)):
        assert plan(problem(ALL_REDUCE, "", 1, N, K, world_size), H200).algorithm == "one_shot"
    for M in (4096 if world_size == 2 else 2048, 8192):  # two ranks exchange Lamport values longer
        assert plan(problem(ALL_REDUCE, "", M, 8192, 2048, world_size), H200).algorithm == "overlapped"


def test_warps_are_specialised_where_hopper_pushes_many_rows() -> None:
    """Never in float32 or on other GPUs, and the plan gives the reason."""
    prefix = "hopper."
    for op, form in ((ALL_REDUCE, ""), (REDUCE_SCATTER, "cols"), (MATMUL_GATHER, "rows"), (GATHER_MATMUL, "rows")):
        for machine in (H200, machine_named("NVIDIA H100", 132), replace(MACHINES[-1], architecture="hopper")):
            large = plan(problem(op, form, 8192, 8192, 7168), machine)
            reason = next(line for line in large.reasons if line.startswith("chosen "))
            assert large.warp_specialised and large.num_warps == 8 and prefix in reason
            assert ("programs share the first tiles" in reason) == (large.splits > 1)
        assert not plan(problem(op, form, 16, 8192, 7168), H200).warp_specialised
    for op, form in FORMS:
        shape = problem(op, form, 8192, 8192, 7168)
        chosen = [plan(shape, machine) for machine in MACHINES[1:]] + [plan(replace(shape, dtype=torch.float32), H200)]
        assert not any(each.warp_specialised or prefix in each.kernel for each in chosen)


@pytest.mark.parametrize("op, rows", [(ALL_REDUCE, 4), (MATMUL_GATHER, 3), (GATHER_MATMUL, 3), (REDUCE_SCATTER, 3)])
def test_collectives_have_a_most_that_they_move(op: str, rows: int) -> None:
    """An all-reduce is cut by rows, what others move is not."""
    width = collectives.MAX_ELEMENTS // 3
    sizes = (1 << 11, width) if op == GATHER_MATMUL else (width, 1 << 11)
    form = "" if op == ALL_REDUCE else "rows"
    few, many = (way_named("with_torch.sequential").refuses(problem(op, form, M, *sizes, w=1)) for M in (rows, 4))
    assert few is None
    assert many is None if op == ALL_REDUCE else many.startswith("a collective moves at most")
    wide = collectives.MAX_ELEMENTS + 1
    assert (
        way_named("with_torch.sequential")
        .refuses(problem(ALL_REDUCE, "", 1, wide, 16))
        .endswith(f"in a call, not {wide}")
    )


def test_an_odd_number_of_gates_and_ups_is_refused() -> None:
    with pytest.raises(ArgumentError, match="N is 7 for all_gather_matmul_gated; expected an even number"):
        requested_problem(Request("all_gather_matmul_gated", 2048, 7, 64, 2, torch.bfloat16))


# --- as the ops use it -----------------------------------------------------------------------------------------------


def plan_of(ctx: iris.Iris, *arguments) -> tuple[FusedConfig, tuple[str, ...], int]:
    used = ctx.heap.used if Ops in ctx._components else None
    chosen = ctx.ops.plan(*arguments)
    again = ctx.ops.plan(*arguments)
    assert again == chosen and again.reasons == chosen.reasons
    taken = ctx.heap.used
    ctx.ops.plan(OPS[0], 4096, 4096, 4096, torch.float16)
    assert ctx.heap.used == taken and used in (None, taken)
    return chosen, chosen.reasons, chosen.prediction


@pytest.mark.parametrize("op, form", FORMS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_all_ranks_plan_the_same(world_size: int, op: str, form: str) -> None:
    plans = run_ranks(world_size, plan_of, op, 130, 65, 33, torch.float16, form or None)
    assert all(of_rank == plans[0] for of_rank in plans)


def spy_on_launches(ctx: iris.Iris, case: Case) -> list[FusedConfig]:
    seen, run_all = [], steps.run_all

    def spy(program, run):
        seen.extend(step.config for step in program if isinstance(step, steps.Kernel | steps.Several))
        return run_all(program, run)

    steps.run_all = spy
    try:
        Call(ctx, case).run()
    finally:
        steps.run_all = run_all
    if case.config is None:
        form = case.form or None
        assert seen == [ctx.ops.plan(case.op, case.M, case.N, case.K, case.dtype, form)]
    return seen


@pytest.mark.parametrize("op, form", FORMS)
def test_a_given_configuration_wins(op: str, form: str) -> None:
    world_size = WORLDS[-1]
    given = FusedConfig(32, 16, 64, num_warps=4, num_stages=2, algorithm="one_shot")
    for config in (given, None):
        for seen in run_ranks(world_size, spy_on_launches, Case(op, form, 33, 40, 48, config=config)):
            (launched,) = seen
            assert (replace(launched, kernel="") == given) == (config is not None)


@pytest.mark.parametrize("rows, among, algorithm, specialised", [
    (16, 2, "one_shot", False), (17, 2, "one_shot", False), (128, 8, "two_shot", False), (256, 8, "two_shot", True),
    (512, 2, "one_shot", True), (8192, 2, "overlapped", True), (8192, 8, "overlapped", True),
])  # fmt: skip
def test_fp8_weights_are_served_by_the_kernels_of_sixteen_bits(rows, among, algorithm, specialised) -> None:
    chosen = plan(
        requested_problem(Request(ALL_REDUCE, rows, 8192, 1792, among, torch.bfloat16, weights=FP8_FORMAT)), H200
    )
    assert (chosen.algorithm, chosen.warp_specialised) == (algorithm, specialised)
    # what has no tensor cores for them, or none that were measured, leaves the product to torch
    others = [(H200, torch.float16), (replace(H200, architecture=""), torch.bfloat16)]
    for machine, dtype in others:
        problem = requested_problem(Request(ALL_REDUCE, rows, 8192, 1792, among, dtype, weights=FP8_FORMAT))
        assert plan(problem, machine).algorithm == "sequential"


def test_a_plan_counts_what_converting_costs() -> None:
    """Gathered rows multiply B in int4 that is read and written as bf16 in each call."""
    problem = Problem(GATHER_MATMUL, "rows", 4096, 8192, 4096, 2, torch.bfloat16, BY_NAME["int4"])
    config, plain = plan(problem, H200), plan(replace(problem, weights=PLAIN), H200)
    us = config.prediction.total_us - plain.prediction.total_us
    moved = 8192 * 4096 * (2 + 0.5 + 2 / 32)
    assert config == plain and moved / (H200.hbm_gbs * 1e3) < us < 2 * moved / (H200.hbm_gbs * 1e3)
    assert (
        f"B is converted in each call, {us:.1f} us: all_gather_matmul multiplies no weights in int4" in config.explain()
    )


def test_the_stream_serves_more_rows_where_converting_takes_longer() -> None:
    """Of products without ranks: up to 64 rows in a launch, up to 128 in two."""
    for name in ("fp8_block", "int4", "mxfp4"):
        launches = [stream_launches(BY_NAME[name], rows, 4096, 8192, H200) for rows in (1, 16, 17, 64, 65, 128, 129)]
        assert launches[:4] == [1] * 4 and launches[4] in (0, 2) and launches[6] == 0, (name, launches)
        assert launches[4] == launches[5]
    assert stream_launches(BY_NAME["int4"], 32, 4096 + 8, 8192, H200) == 0  # K is no multiple of the granule


@pytest.mark.parametrize("weights", [None, "fp8", "fp8_block", "int4"])
@pytest.mark.parametrize(
    "M, k_per_rank", [(102, (2112, 0, 2112, 2112)), (9, (2176, 2112, 2112, 2112)), (32, (1312, 1280))]
)
def test_ranks_with_parts_of_their_own_plan_alike(M: int, k_per_rank: tuple[int, ...], weights: str | None) -> None:
    def planned(K: int, given: tuple[int, ...] | None) -> FusedConfig:
        form = PLAIN if weights is None else BY_NAME[weights]
        request = Request(ALL_REDUCE, M, 5120, K, len(k_per_rank), torch.bfloat16, weights=form, k_per_rank=given)
        return plan(requested_problem(request), H200)

    assert len({planned(K, k_per_rank) for K in k_per_rank}) == 1
    alike = (max(k_per_rank),) * len(k_per_rank)
    assert planned(alike[0], alike) == planned(alike[0], None)


@pytest.mark.parametrize("weights", ["int8", "fp8_block/32"])
def test_a_tile_without_room_for_two_steps_of_codes_is_refused(weights: str) -> None:
    problem = Problem(ALL_REDUCE, "", 4096, 8192, 4096, 2, torch.bfloat16, BY_NAME[weights])
    config = FusedConfig(256, 256, 16, num_stages=2, warp_specialised=True)
    message = f"config has blocks of 256 x 256, and shared memory room for 1 of its steps.*B is {BY_NAME[weights].name}"
    with pytest.raises(ArgumentError, match=message):
        check_config(ALL_REDUCE, problem, config, H200)
    check_config(ALL_REDUCE, problem, replace(config, block_m=128), H200)
    check_config(ALL_REDUCE, replace(problem, weights=PLAIN), config, H200)
