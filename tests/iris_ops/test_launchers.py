"""Random problems, empty and odd ones among them, planned for GPUs and prepared up to their launch, on "meta" tensors.

What kernels are given must be in bounds whatever the shapes: their grids, numbers and reserved memory; and the units of
work that they take must be every tile once. The interpreter's plans have one program, so no other test here sees this.
"""

from __future__ import annotations

from dataclasses import replace
import logging
from math import isfinite
import random
from types import SimpleNamespace

import iris
from iris import log, platform
from iris.machines import Machine, machine_named
from iris_ops import FusedConfig, launch
from iris_ops.config import WITH_TORCH
from iris_ops.kernels.hopper import operands
from iris_ops.launch import supports, way_for_tensors
from iris_ops.named import named
from iris_ops.operands import Operands
from iris_ops.planning.plan import plan, way_for, workspace_size
from iris_ops.planning.waves import gemm_tiles
from iris_ops.planning.weights import BY_FLAG
from iris_ops.planning.weights.fp8 import FP8
from iris_ops.problem import ALL_REDUCE, DTYPES, GATHER_MATMUL, MATMUL_GATHER, Problem, describe, part_of
import pytest
import torch

from tests.harness import run_ranks
from tests.reference import FORMS

MACHINES = [
    machine_named("NVIDIA H200", 132),
    machine_named("some other GPU", 66),
    machine_named("AMD Instinct MI300X", 304),
    replace(machine_named("NVIDIA of another name", 114), architecture="hopper"),
]
SIZES = [0, 1, 2, 3, 7, 8, 17, 64, 97, 128, 129, 512, 1000, 2048, 4097, 8192, 28672, 70000]
META = torch.device("meta")


def empty(shape: tuple[int, int], dtype: torch.dtype, transposed: bool = False, pad: int = 0) -> torch.Tensor:
    if transposed:
        return empty(shape[::-1], dtype, pad=pad).t()
    return torch.empty(shape[0], shape[1] + pad, dtype=dtype, device=META)[:, : shape[1]]


def tensors_of(problem: Problem, rank: int, rng: random.Random) -> tuple[torch.Tensor | None, ...]:
    """out, A, B and bias of a rank."""
    p, rows, cols, depth = problem, *(part_of(n, problem.world_size, rank) for n in (problem.M, problem.N, problem.K))
    out, A, B = (p.M, p.N), (p.M, p.K), (p.K, p.N)
    if p.op == GATHER_MATMUL:
        A = (rows, p.K) if p.form == "rows" else (p.M, depth)
    elif p.op == MATMUL_GATHER:
        A, B = ((rows, p.K), B) if p.form == "rows" else (A, (p.K, cols))
    elif p.op != ALL_REDUCE:
        out = (rows, p.N) if p.form == "rows" else (p.M, cols)
    pad, bias = rng.choice([0, 0, 1, 8]), torch.empty(B[1], dtype=p.dtype, device=META)
    given = empty(out, p.dtype, pad=pad), empty(A, p.dtype, pad=pad), empty(B, p.dtype, rng.random() < 0.5, pad)
    return *given, rng.choice([bias, None])


def drawn_config(rng: random.Random) -> FusedConfig:
    m, n, k = (rng.choice([16, 64, 128, 256]) for _ in range(3))
    specialised = rng.random() < 0.4
    return FusedConfig(
        *((rng.choice([64, 128]), 128, 64) if specialised else (m, n, k)),
        group_m=rng.choice([1, 3, 8]),
        num_stages=2,
        num_programs=rng.choice([0, 0, 1, 7, 1000]),
        comm_programs=rng.choice([1, 16, 500]),
        stagger_us=rng.choice([0, 50, 1000]),
        splits=rng.choice([1, 2, 7]),
        warp_specialised=specialised,
        algorithm=rng.choice(["overlapped", "one_shot", "two_shot"]),
    )


def check_arguments(problem: Problem, config: FusedConfig, machine: Machine, rank: int, rng: random.Random) -> None:
    flags, nbytes, exchange = sizes = workspace_size(problem, config, machine.num_programs)
    assert all(type(size) is int and size >= 0 for size in sizes)
    if problem.empty or config.algorithm in WITH_TORCH:
        return
    memory = {name: torch.empty(size, dtype=torch.uint8, device=META) for name, size in
              (("flags", 4 * flags), ("staging", nbytes), ("exchange", exchange))}  # fmt: skip
    memory["flags"] = memory["flags"].view(torch.int32)
    workspace = SimpleNamespace(**memory, sync=None, exchange_sync=None)
    ctx = SimpleNamespace(
        device=META, cur_rank=rank, num_ranks=problem.world_size, get_device_context=lambda: None, recording=False,
        once=lambda make: make(None), log=log.logger,
    )  # fmt: skip
    tensors = tensors_of(problem, rank, rng)
    if (
        problem.weights.rounds_rows
    ):  # what is launched behind a kernel that rounds; else rows are few, or the weight is restored
        eight = empty((problem.M, problem.K), FP8), empty((problem.K, problem.N), FP8, transposed=True)
        tensors = tensors[0], *eight, tensors[3]
        specialised = config.algorithm == "overlapped" or way_for(problem, config).warp_specialised
        restored = specialised and operands.supports(*eight, tensors[0], 1 << 10) is not None
        if restored or problem.M <= problem.weights.streamed_rows:
            return
    describe(problem.op, *tensors[:3], rank, problem.world_size)
    given = Operands(*tensors)
    way, config = way_for_tensors(ctx, problem, config, given)
    launcher = named(way.launcher)
    kernel, (programs, *others), args = launcher(ctx, workspace, problem, config, given)
    assert set(args) == set(kernel.arg_names)
    assert 1 <= programs <= machine.num_programs and others == [1, 1]
    assert all(value >= 0 for value in args.values() if type(value) is int)
    tile = config.block_m * config.block_n
    if "sharers" in args:
        joins = args["joins"]
        assert joins.left.numel() >= args["sharers"] and joins.parts.numel() >= args["sharers"] * tile
        if args["shared_tiles"]:
            check_begins(gemm_tiles(problem, config), args, -(-problem.K // config.depth(problem.itemsize)))
    if "rounded" in args:
        cut = (gemm_tiles(problem, config) - args["rounded"]) * (args["moves"].SPLITS - 1)
        own = problem.world_size * -(-args["gathered"].part_rows // config.block_m) * args["moves"].PIECES
        assert args["parts"].numel() >= cut * tile and flags >= own + cut
    if "lamport" in args:
        w, memory = problem.world_size, args["lamport"]
        exchange = args["form"].EXCHANGE if "form" in args else "all" if "pipeline" in args else "gather"
        more = {"all": 0, "owners": problem.M * memory.ld}.get(exchange, w)
        assert memory.half_elements >= w * args["part_rows"] * memory.ld + more


def check_begins(tiles: int, args: dict, steps: int) -> None:
    """`units.Units.begin` of shared tiles: programs follow each other, none takes more than a tile, all are taken."""
    shared, sharers, skew = args["shared_tiles"], args["sharers"], args["skew"]
    twice = [2 * p * shared * steps - skew * p * (sharers - p) for p in range(sharers + 1)]
    begins = [value // (2 * sharers) for value in twice]
    assert shared <= tiles and max(twice) < 2**31
    assert begins[0] == 0 and begins[-1] == shared * steps
    assert all(0 < end - begin <= steps for begin, end in zip(begins, begins[1:], strict=False))


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_what_kernels_are_given_is_within_bounds(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "num_programs", lambda device: machine.num_programs)
    monkeypatch.setattr(platform, "has_warp_specialisation", lambda device: machine.warp_specialised)
    monkeypatch.setattr(operands, "machine_of", lambda device: machine)
    monkeypatch.setattr(launch, "machine_of", lambda device: machine)
    rng = random.Random(machine.num_programs)
    for _ in range(600):
        op, form = rng.choice(FORMS)
        M, N, K = (rng.choice(SIZES) for _ in range(3))
        problem = Problem(op, form, M, N, K, rng.randint(1, 8), rng.choice(DTYPES))
        if op == ALL_REDUCE and problem.dtype == torch.bfloat16 and N % 16 == K % 16 == 0 and N * K:
            problem = replace(problem, weights=BY_FLAG[rng.random() < 0.7])
        planned, drawn, rank = plan(problem, machine), drawn_config(rng), rng.randrange(problem.world_size)
        times = planned.prediction.gemm_us, planned.prediction.link_us, planned.prediction.total_us
        assert all(isfinite(us) and us >= 0 for us in times), problem
        for config in (planned, drawn):
            if config.algorithm == "two_shot" and op != ALL_REDUCE:
                config = replace(config, algorithm="one_shot")
            try:
                check_arguments(problem, config, machine, rank, rng)
            except Exception as error:
                raise AssertionError(f"{problem}, rank {rank}, {config}") from error


def reason_for(op: str, config: FusedConfig, fp8: bool = False, *, pad: int = 0, **sizes: int) -> str | None:
    """Why the kernel of `config` cannot run on tensors whose rows stand `pad` elements apart; B is a transpose."""
    shape = dict(M=256, N=512, K=256) | sizes
    problem = Problem(op, "", **shape, world_size=2, dtype=torch.bfloat16, weights=BY_FLAG[fp8])
    A, out = empty((problem.M, problem.K), torch.bfloat16, pad=pad), empty((problem.M, problem.N), torch.bfloat16)
    B = empty((problem.K, problem.N), FP8 if fp8 else torch.bfloat16, transposed=True)
    return supports(way_for(problem, config), problem, config, 0, Operands(out, A, B))


def test_a_stand_in_runs_for_the_reason_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reasons that the log repeats: each names what a user can change."""
    pushed = FusedConfig(128, 256, 64, num_stages=3, warp_specialised=True)
    streamed = FusedConfig(16, 64, 128, num_warps=4, algorithm="one_shot")
    assert reason_for(ALL_REDUCE, pushed) == reason_for(ALL_REDUCE, streamed, True, M=8) == "it needs a Hopper GPU"
    monkeypatch.setattr(platform, "has_warp_specialisation", lambda device: True)
    assert reason_for(ALL_REDUCE, pushed) is None and reason_for(ALL_REDUCE, streamed, True, M=8) is None
    assert "between vectors of 16 bytes" in reason_for(ALL_REDUCE, pushed, pad=1)
    assert "between vectors of 16 bytes" in reason_for(ALL_REDUCE, streamed, True, M=8, pad=1)
    assert reason_for(ALL_REDUCE, pushed, K=0) == "there is nothing to multiply"
    brought = replace(pushed, algorithm="copy_gather")
    assert reason_for(GATHER_MATMUL, brought, pad=8) == "rows of A are not contiguous"
    assert reason_for(GATHER_MATMUL, brought, True) == "it multiplies no weights in fp8"


def test_a_stand_in_is_said_once() -> None:
    run_ranks(2, log_once)


def log_once(ctx: iris.Iris) -> None:
    """Without a Hopper GPU the portable kernel runs, and the log explains this in one line."""
    messages: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: messages.append(record.getMessage())
    log.logger.addHandler(listener)
    A, B = torch.randn(64, 32, device=ctx.device), torch.randn(32, 64, device=ctx.device)
    out, config = ctx.zeros(64, 64, dtype=torch.bfloat16), FusedConfig(64, 64, 32, num_stages=2, warp_specialised=True)
    for _ in range(2):
        ctx.ops.matmul_all_reduce(out, A.bfloat16(), B.bfloat16(), config=config)
    log.logger.removeHandler(listener)
    lines = [line for line in messages if "in place of" in line]
    assert len(lines) == 1 and "matmul_reduce runs in place of hopper.matmul_reduce: it needs a Hopper GPU" in lines[0]
