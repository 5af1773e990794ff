"""The collectives of `iris.ccl`: every op, variant and protocol, odd shapes, against float64; bits where promised."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import iris
from iris.ccl import Config
from iris.ccl.plan import plan
from iris.ccl.problem import REDUCE_SCATTER, Problem
from iris.errors import ArgumentError
from iris.machines import machine_of
import pytest
import torch

from tests.checks import Guarded, assert_close_to_reference, poison
from tests.harness import UNDER_TORCHRUN, WORLDS, both, run_ranks

pytestmark = both

FLAGS, LAMPORT = Config(protocol="flags"), Config(protocol="lamport")
ONE, TWO = Config(all_reduce_variant="one_shot"), Config(all_reduce_variant="two_shot", protocol="lamport")
OTHERS = [Config(all_reduce_variant=variant) for variant in ("ring", "atomic", "spinlock")]
SMALL = dict(block_size_m=8, block_size_n=8)  # several units a part, also of small tensors


@dataclass(frozen=True)
class Case:
    """One call. `shape`: of a rank's input."""

    op: str
    shape: tuple[int, ...]
    config: Config | None = None
    dtype: torch.dtype = torch.bfloat16
    pad: int = 0
    """Elements between the rows of `inp` and of `out`."""
    on_heap: bool = True
    in_place: bool = False
    tiles: bool = False
    """reduce_scatter: `out` has the shape of `inp`."""
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype} {self.config}"


def inputs(case: Case, world_size: int) -> list[torch.Tensor]:
    """Every rank's input."""
    generator = torch.Generator().manual_seed(case.seed)
    sizes = world_size, *case.shape
    if case.dtype.is_floating_point:
        return list(torch.randn(sizes, generator=generator).to(case.dtype))
    info = torch.iinfo(case.dtype)
    return list(torch.randint(info.min, info.max, sizes, generator=generator, dtype=case.dtype))


def tiles_of(case: Case, world_size: int, rank: int) -> torch.Tensor:
    """Which elements belong to this rank's tiles: tiles in row-major order (swizzle_size=1)."""
    config, (rows, cols) = case.config, case.shape
    m, n = config.tile
    across = -(-cols // n)
    number = (torch.arange(rows) // m)[:, None] * across + torch.arange(cols) // n
    if config.all_reduce_distribution == 0:
        return number % world_size == rank
    share = -(-(-(-rows // m) * across) // world_size)
    if rows == 1:  # as without tiles
        return torch.full(case.shape, rank == 0)
    return number // share == rank


def expected(case: Case, world_size: int, rank: int, exact: bool) -> torch.Tensor:
    """In float64, or summed in fp32 and rounded once; integers wrap."""
    given = inputs(case, world_size)
    if case.op == "all_gather":
        return torch.cat(given)
    if case.op == "all_to_all":
        return torch.cat([t.chunk(world_size, -1)[rank] for t in given], -1)
    wide = (torch.float64 if exact else torch.float32) if case.dtype.is_floating_point else torch.int64
    total = torch.zeros(case.shape, dtype=wide)
    for t in given:
        total += t.to(wide)
    if case.op == "reduce_scatter" and not case.tiles:
        share = -(-case.shape[0] // world_size)
        total = total[rank * share : (rank + 1) * share]
    return total if exact and case.dtype.is_floating_point else total.to(case.dtype)


class Call:
    """The tensors of one rank for a case."""

    def __init__(self, ctx: iris.Iris, case: Case) -> None:
        self.ctx, self.case, self.rank, self.world = ctx, case, ctx.cur_rank, ctx.num_ranks
        self.given = inputs(case, self.world)[self.rank].to(ctx.device)
        largest = list(case.shape)  # every rank takes as much from the heap
        if case.op == "all_gather":
            largest[0] *= self.world
        elif case.op == "reduce_scatter" and not case.tiles:
            largest[0] = -(-largest[0] // self.world)
        ordinary = SimpleNamespace(empty=partial(torch.empty, device=ctx.device), device=ctx.device)
        self.guarded = Guarded(ctx if case.on_heap else ordinary, tuple(largest), case.dtype, row_pad=case.pad)
        rows = expected(replace(case, seed=0), self.world, self.rank, False).shape[0]
        self.out = self.guarded.tensor[:rows]
        self.wide = poison(self.given.new_empty(*case.shape[:-1], case.shape[-1] + case.pad))
        self.inp = self.wide[..., : case.shape[-1]]
        if case.in_place:
            self.inp = self.out if case.op == "all_reduce" else self.out.chunk(self.world)[self.rank]

    def run(self, **options):
        poison(self.guarded.tensor)
        self.inp.copy_(self.given)
        return getattr(self.ctx.ccl, self.case.op)(self.out, self.inp, config=self.case.config, **options)

    def check(self) -> torch.Tensor:
        case = self.case
        self.guarded.check()
        exact, rounded = (expected(case, self.world, self.rank, exact).to(self.ctx.device) for exact in (True, False))
        out = self.out.clone()
        if case.tiles:
            mine = tiles_of(case, self.world, self.rank).to(self.ctx.device)
            assert torch.equal(out[~mine].isnan(), torch.ones_like(out[~mine], dtype=torch.bool)), "others' tiles"
            out, exact, rounded = out[mine], exact[mine], rounded[mine]
        if case.op in ("all_gather", "all_to_all") or not case.dtype.is_floating_point:
            assert torch.equal(out, rounded)
        else:
            assert_close_to_reference(out, exact, rounded)
            in_rank_order = case.config is None or case.config.all_reduce_variant in (None, "one_shot", "two_shot")
            assert not in_rank_order or torch.equal(out, rounded), "not summed in fp32 in rank order"
        return self.out.clone()


def check_cases(ctx: iris.Iris, cases: list[Case]) -> None:
    for case in cases:
        try:
            call = Call(ctx, case)
            workspace = call.run()
            call.check()
            call.run(workspace=workspace)
            call.check()
        except Exception as error:
            raise AssertionError(f"rank {ctx.cur_rank} of {ctx.num_ranks}, {case}: {error!r}") from error


def small(config: Config) -> Config:
    return replace(config, **SMALL)


CASES = [
    # every op by both protocols, and as the plan has it
    *(Case("all_reduce", (9, 37), config) for config in (None, ONE, TWO, FLAGS)),
    *(Case(op, (15, 37), config) for op in ("all_gather", "reduce_scatter") for config in (None, LAMPORT, FLAGS)),
    *(Case("all_to_all", (9, 120), config) for config in (None, LAMPORT, FLAGS)),
    *(Case("all_reduce", (9, 37), config) for config in OTHERS),
    # several units, fewer than a vector, one element, one dimension, three
    *(Case("all_reduce", (700,), small(config)) for config in (ONE, TWO, FLAGS)),
    *(Case("all_reduce", (1,), config) for config in (ONE, TWO, FLAGS)),
    *(Case("all_reduce", (3, 5, 7), replace(small(config), all_reduce_distribution=0)) for config in (TWO, FLAGS)),
    *(Case("all_gather", (1,), config) for config in (LAMPORT, FLAGS)),
    *(Case("reduce_scatter", (5, 2, 3), config) for config in (None, FLAGS)),  # with four ranks, one has no rows
    *(Case("all_to_all", (1, 24), config) for config in (LAMPORT, FLAGS)),
    *(Case("all_reduce", (700,), small(config)) for config in OTHERS),
    Case("all_reduce", (700,), replace(small(OTHERS[0]), all_reduce_num_rings=3, all_reduce_distribution=0)),
    *(Case("all_reduce", (3,), config, dtype) for config in OTHERS for dtype in (torch.int64, torch.float32)),
    # rows that stand apart
    *(Case("all_reduce", (6, 40), small(config), pad=3, in_place=True) for config in OTHERS),
    *(Case("all_reduce", (6, 40), small(config), pad=3) for config in (ONE, TWO, FLAGS)),
    *(Case(op, (6, 24), small(config), pad=8) for op in ("all_gather", "all_to_all") for config in (LAMPORT, FLAGS)),
    *(Case("reduce_scatter", (24, 20), small(config), pad=4) for config in (LAMPORT, FLAGS)),
    # dtypes: sums of floats and integers, any bits where nothing is summed
    *(
        Case("all_reduce", (130,), config, dtype)
        for dtype in (torch.float16, torch.float32, torch.int8, torch.uint8, torch.int16, torch.int32)
        for config in (ONE, FLAGS)
    ),
    Case("all_reduce", (130,), None, torch.int64),
    Case("reduce_scatter", (13, 4), None, torch.int32),
    *(
        Case("all_gather", (33,), config, dtype)
        for dtype in (torch.int8, torch.int16, torch.float32)
        for config in (LAMPORT, FLAGS)
    ),
    *(Case(op, (12, 24), None, torch.int64) for op in ("all_gather", "all_to_all")),
    # out elsewhere; in place
    *(Case("all_reduce", (5, 16), config, on_heap=False) for config in (ONE, FLAGS)),
    *(Case("all_gather", (5, 16), config, on_heap=False) for config in (LAMPORT, FLAGS)),
    *(Case("all_reduce", (300,), small(config), in_place=True) for config in (ONE, TWO, FLAGS)),
    *(Case("all_gather", (30,), config, in_place=True) for config in (LAMPORT, FLAGS)),
    # a reduce-scatter into tiles
    *(
        Case("reduce_scatter", (19, 37), Config(8, 16, swizzle_size=1, all_reduce_distribution=d), tiles=True)
        for d in (0, 1)
    ),
    Case("reduce_scatter", (1, 100), Config(8, 16), tiles=True),
]


@pytest.mark.four
@pytest.mark.parametrize("world_size", WORLDS)
def test_collectives(world_size: int) -> None:
    step = 1 if UNDER_TORCHRUN or world_size == 2 else 2 if world_size == 4 else 3
    run_ranks(world_size, check_cases, CASES[::step])


def check_lanes(ctx: iris.Iris, programs: int) -> None:
    """As if the chip had several multiprocessors: a grid whose programs wait only for their like can be interpreted."""
    ctx.ccl._machine = replace(ctx.ccl._machine, num_programs=programs)
    config = replace(FLAGS, block_size_m=16, block_size_n=64)
    several = [Case("all_reduce", (46000,), config, torch.float32), Case("reduce_scatter", (12, 6000), config)]
    for case in several:
        call = Call(ctx, case)
        plan = ctx.ccl.plan(case.op, call.out, call.inp, case.config)
        assert plan.programs == programs and plan.chunk < plan_units(plan, case, ctx.num_ranks), "too few chunks"
    # four units on three lanes: the last has none
    copies = [Case("all_gather", (3500,), config), Case("all_to_all", (4, 2700), config)]
    if ctx.num_ranks == 2:  # so does Lamport
        lamport = [replace(case, config=replace(config, protocol="lamport")) for case in several + copies]
        plans = [ctx.ccl.plan(case.op, (call := Call(ctx, case)).out, call.inp, case.config) for case in lamport]
        assert all((plan.protocol, plan.programs) == ("lamport", programs) for plan in plans), plans
        several += lamport
    alike = [case for case in CASES if case.config and (ctx.num_ranks == 2 or by_lanes(case.config))]
    check_cases(ctx, [*several, *copies, *alike[::2]])


def by_lanes(config: Config) -> bool:
    return config.protocol == "flags" or config in OTHERS or config.all_reduce_variant == "ring"


def plan_units(plan, case: Case, world_size: int) -> int:
    """Units of a lane."""
    elements = torch.Size(case.shape).numel() // world_size
    return elements // plan.block // plan.programs


@pytest.mark.parametrize("world_size", [2, 3] if not UNDER_TORCHRUN else [])
def test_lanes(world_size: int) -> None:
    run_ranks(world_size, check_lanes, 3)


@pytest.mark.parametrize("n, served", [(4, False), (5, True), (6, True)])
def test_lamport_scatters_sums_only_where_every_rank_has_a_part(n: int, served: bool) -> None:
    """Of three: who waits for no word would run ahead."""
    problem = Problem(REDUCE_SCATTER, n, 2, 0, torch.float32, 3)
    machine = machine_of(torch.device("cpu")).links
    with nullcontext() if served else pytest.raises(ArgumentError, match="expected protocol 'flags'"):
        assert plan(problem, Config(protocol="lamport"), machine).protocol == "lamport"
