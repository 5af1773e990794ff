"""The calls from which `iris-tp calibrate` derives a machine's rates, each with the planner's prediction of its time.

A case is dominated by one rate: a large product by that of the tensor cores, a tiny all-reduce by a hop. Its rate is
the one at which the planner predicts the time that was measured. So a rate means what the planner takes it for,
whatever else a call spends its time on. Cases share the small rates, so all are solved in turns until they agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from iris.ccl import Config
from iris.ccl import plan as collective_plan
from iris.ccl import problem as collectives
from iris.errors import PlatformError
from iris.machines import H200_LINK_GBS, LinkRates, Machine, machine_named
from iris_ops.config import FusedConfig
from iris_ops.planning.plan import plan, predict
from iris_ops.planning.torch_model import expected_us
from iris_ops.problem import (
    ALL_REDUCE,
    GATHER_MATMUL,
    MATMUL_GATHER,
    REDUCE_SCATTER,
    Problem,
    Request,
    requested_problem,
)
import torch

COLLECTIVES = "collectives."
_PRODUCT_US = 600.0  # of the large product: the time at which the model expects neither a cool chip nor a hot one
_SIDE = 8192
_COPIED = 1 << 29
_TINY, _PAIR, _LARGE = 2 << 10, 4 << 20, 32 << 20  # bytes that a rank puts into a collective
_WIDEST = 50.0  # by how much a rate may differ from the data sheet's
_TURNS = 16  # through all cases, until they agree
_HALVINGS = 30


@dataclass(frozen=True)
class Copy:
    """A copy of `nbytes` within this GPU's memory."""

    nbytes: int

    def predicted_us(self, machine: Machine) -> float:
        return 2 * self.nbytes / (machine.hbm_gbs * 1e3) + machine.launch_us


@dataclass(frozen=True)
class TorchProduct:
    """`torch.mm` of M x K by K x N in bf16."""

    M: int
    N: int
    K: int

    def predicted_us(self, machine: Machine) -> float:
        return expected_us(self.M, self.N, self.K, machine)


@dataclass(frozen=True)
class Fused:
    """A fused op by `config`, among `problem.world_size` ranks or, with 1, on this GPU alone."""

    problem: Problem
    config: FusedConfig

    def predicted_us(self, machine: Machine) -> float:
        return predict(self.problem, self.config, machine).total_us


@dataclass(frozen=True)
class Collective:
    """A collective of `nbytes` on each rank. `pairs`: between ranks 0 and 1, 2 and 3, and so on."""

    op: str
    nbytes: int
    config: Config
    world: int
    pairs: bool = False

    @property
    def ranks(self) -> int:
        return 2 if self.pairs else self.world

    def predicted_us(self, machine: Machine) -> float:
        n = self.nbytes // 2
        part = n if self.op == collectives.ALL_GATHER else 0
        dtype = torch.int16 if part else torch.bfloat16
        problem = collectives.Problem(self.op, n, part, 0, dtype, self.ranks)
        return collective_plan.plan(problem, self.config, machine.links).expected_us


Call = Copy | TorchProduct | Fused | Collective


@dataclass(frozen=True)
class Case:
    """A call and the field of `Machine`, or with "collectives." of its `LinkRates`, that its time determines.

    `rate`: "" for a call whose prediction is only compared.
    """

    name: str
    rate: str
    call: Call


def cases(machine: Machine, world: int) -> list[Case]:
    """Return the calls to measure among `world` ranks of `machine`, whose rates need not be right."""
    bf16, fp32 = torch.bfloat16, torch.float32
    depth = _PRODUCT_US * machine.tflops * 1e6 / (2 * _SIDE * _SIDE)
    depth = min(16384, max(512, round(depth / 256) * 256))
    fused = partial(_fused, machine)
    flags, lamport = Config(protocol="flags"), Config(protocol="lamport")
    one_shot = Config(all_reduce_variant="one_shot", protocol="lamport")
    two_shot = Config(all_reduce_variant="two_shot", protocol="lamport")
    by_flags = Config(all_reduce_variant="two_shot", protocol="flags")
    reduced, gathered = collectives.ALL_REDUCE, collectives.ALL_GATHER
    result = [
        Case("copy in memory, 512 MiB", "hbm_gbs", Copy(_COPIED)),
        Case("large product, bf16", "tflops", fused(ALL_REDUCE, _SIDE, _SIDE, depth, 1, bf16)),
        Case("large product of torch, bf16", "library_tflops", TorchProduct(_SIDE, _SIDE, depth)),
        Case("product, float32", "fp32_share", fused(ALL_REDUCE, 2048, 2048, 1024, 1, fp32)),
        Case("tiny product", "launch_us", fused(ALL_REDUCE, 1, 1024, 256, 1, bf16)),
        Case("tiny all-reduce, one shot", "collectives.launch_us", Collective(reduced, _TINY, one_shot, world)),
        Case("tiny all-reduce, two shots", "collectives.hop_us", Collective(reduced, _TINY, two_shot, world)),
        Case("tiny all-reduce by flags", "collectives.signal_us", Collective(reduced, _TINY, by_flags, world)),
        Case("tiny all-gather by flags", "collectives.enter_us", Collective(gathered, _TINY, flags, world)),
        Case("all-gather of 32 MiB", "collectives.link_gbs", Collective(gathered, _LARGE, flags, world)),
        Case("all-reduce of 4 MiB, pairs", "collectives.pair_gbs", Collective(reduced, _PAIR, two_shot, world, True)),
        Case("tiny product and all-reduce", "exchange_us", fused(ALL_REDUCE, 1, 1024, 256, world, bf16)),
    ]
    if world > 2:
        result += [
            Case("all-gather of 1 MiB", "collectives.lamport_gbs", Collective(gathered, 1 << 20, lamport, world)),
            Case("all-reduce of 4 MiB", "collectives.two_hops_gbs", Collective(reduced, _PAIR, two_shot, world)),
        ]
    for nbytes in (256 << 10, 4 << 20):
        result.append(
            Case(f"all-gather of {nbytes >> 10} KiB by flags", "", Collective(gathered, nbytes, flags, world))
        )
    for op in (ALL_REDUCE, REDUCE_SCATTER, GATHER_MATMUL, MATMUL_GATHER):
        for rows in (16, 2048):
            result.append(Case(f"{op} {rows} x 4096 x 2048", "", fused(op, rows, 4096, 2048, world, bf16)))
    return result


def derived(machine: Machine, cases: list[Case], measured_us: Mapping[str, float]) -> Machine:
    """Return `machine` with the rates at which the planner predicts what was measured.

    Raises `PlatformError` for a time that no sensible rate explains.
    """
    machine = replace(machine, collectives=machine.links)
    start = {case.rate: _get(machine, case.rate) for case in cases if case.rate}
    for turn in range(_TURNS):
        for case in cases:
            if case.rate:
                last = turn == _TURNS - 1
                value = _solved(case, machine, measured_us[case.name], start[case.rate], last)
                machine = _with(machine, case.rate, value)
    solved, share = {case.rate for case in cases}, machine.links.link_gbs / start[COLLECTIVES + "link_gbs"]
    for name in ("lamport_gbs", "two_hops_gbs"):  # rates among three ranks and more, which two cannot measure
        if COLLECTIVES + name not in solved:
            machine = _with(machine, COLLECTIVES + name, share * _get(machine, COLLECTIVES + name))
    return replace(
        machine,
        link_gbs=machine.links.link_gbs * H200_LINK_GBS / LinkRates.link_gbs,
        hop_us=machine_named("NVIDIA H200", 132).hop_us * machine.links.signal_us / LinkRates.signal_us,
    )


def _fused(machine: Machine, op: str, M: int, N: int, K: int, world: int, dtype: torch.dtype) -> Fused:
    problem = requested_problem(Request(op, M, N, K, world, dtype))
    return Fused(problem, plan(problem, machine, explained=False))


def _solved(case: Case, machine: Machine, measured_us: float, start: float, last: bool) -> float:
    """Return the value of the case's rate at which its prediction is `measured_us`, or the nearest one.

    `start`: the data sheet's. Raises `PlatformError` in the `last` turn where a prediction is nowhere near.
    """

    def predicted_us(value: float) -> float:
        return case.call.predicted_us(_with(machine, case.rate, value))

    low, high = start / _WIDEST, start * _WIDEST
    at_low, at_high = predicted_us(low), predicted_us(high)
    least, most = min(at_low, at_high), max(at_low, at_high)
    if last and not (measured_us <= most and (measured_us >= least or case.rate.endswith("_us"))):
        raise PlatformError(
            f"{case.name} took {measured_us:.1f} us; expected {least:.1f} to {most:.1f} us, at {_WIDEST:g} times the "
            f"data sheet's {case.rate} or less: see that nothing else uses the GPUs, and calibrate again"
        )
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        if (predicted_us(middle) > measured_us) == (at_high > at_low):
            high = middle
        else:
            low = middle
    return (low * high) ** 0.5


def _get(machine: Machine, rate: str) -> float:
    if rate.startswith(COLLECTIVES):
        return getattr(machine.links, rate.removeprefix(COLLECTIVES))
    return getattr(machine, rate) or machine.tflops  # of torch's products where no other is known


def _with(machine: Machine, rate: str, value: float) -> Machine:
    if rate.startswith(COLLECTIVES):
        changed = replace(machine.links, **{rate.removeprefix(COLLECTIVES): value})
        return replace(machine, collectives=changed)
    return replace(machine, **{rate: value})
