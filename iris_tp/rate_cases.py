"""The calls from which `iris-tp calibrate` derives a machine's rates, and those by which it judges them.

The planner's model was fitted to an H200, so its rates are those that fit the model best, not those that a stopwatch
shows. A case therefore measures how much faster or slower this machine is than an H200 at one thing, and scales the
H200's rates by that. Latencies that no case tells apart are scaled together.

Other calls judge: rates are taken in groups, and each only if the planner then predicts these calls better than before.
So plans by a table are made by a better model of the machine, or there is no table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from typing import Any

from iris.ccl import Config
from iris.ccl import plan as collective_plan
from iris.ccl import problem as collectives
from iris.errors import PlatformError
from iris.machines import Machine, machine_named
from iris_ops.config import FusedConfig
from iris_ops.planning.plan import plan, predict
from iris_ops.planning.torch_model import expected_us
from iris_ops.problem import ALL_REDUCE, OPS, Problem, Request, requested_problem
import torch

COLLECTIVES = "collectives."
H200 = machine_named("NVIDIA H200", 132)
_SIDE, _PRODUCT_US = 8192, 600.0  # of the large product: the time at which a chip is neither cool nor hot
_COPIED = 1 << 30
_TINY, _PAIR, _LARGE = 2 << 10, 4 << 20, 32 << 20  # bytes that a rank puts into a collective
_WIDEST = 100.0  # by how much a machine may differ from an H200
_BETTER = 0.005  # of the time of calls: by how much predictions must improve
_PASSES = 3  # over all groups, for one may be right only with another


@dataclass(frozen=True)
class Copy:
    """A copy of `nbytes` within this GPU's memory."""

    nbytes: int


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
    """A call that measures one thing, and the time that an H200 takes for it."""

    name: str
    call: Call
    h200_us: float


@dataclass(frozen=True)
class Group:
    """Rates that are taken together: fields of `Machine`, or with "collectives." of its `LinkRates`.

    `cases`: their times over an H200's, in the geometric mean, are the factor of the H200's rates.
    """

    name: str
    rates: tuple[str, ...]
    cases: tuple[Case, ...]

    def applied(self, machine: Machine, us: Mapping[str, float]) -> Machine:
        """Return `machine` with this group's rates. Raises `PlatformError` for times that no machine takes."""
        slower = exp(sum(log(us[case.name] / case.h200_us) for case in self.cases) / len(self.cases))
        if not 1 / _WIDEST < slower < _WIDEST:
            names = " and ".join(case.name for case in self.cases)
            raise PlatformError(
                f"{names}: {slower:.3g} times an H200's time; expected at most {_WIDEST:g} times more or less. See that"
                " nothing else uses the GPUs, and calibrate again"
            )
        for rate in self.rates:
            machine = _with(machine, rate, _get(H200, rate) * (slower if rate.endswith("_us") else 1 / slower))
        return machine


@dataclass(frozen=True)
class Study:
    """What is measured: the groups' cases, and calls that only judge, by name."""

    groups: tuple[Group, ...]
    judging: Mapping[str, Call]

    @property
    def calls(self) -> dict[str, Call]:
        cases = {case.name: case.call for group in self.groups for case in group.cases}
        return {**cases, **self.judging}


def study(machine: Machine, world: int) -> Study:
    """Return what to measure among `world` ranks of `machine`, whose rates need not be right."""
    depth = _PRODUCT_US * machine.tflops * 1e6 / (2 * _SIDE * _SIDE)
    depth = min(16384, max(512, round(depth / 256) * 256))
    fused, large = partial(_fused, machine), 2.0 * _SIDE * _SIDE * depth / 1e6
    flags, lamport = Config(protocol="flags"), Config(protocol="lamport")
    one_shot = Config(all_reduce_variant="one_shot", protocol="lamport")
    two_shot = Config(all_reduce_variant="two_shot", protocol="lamport")
    by_flags = Config(all_reduce_variant="two_shot", protocol="flags")
    reduced, gathered = collectives.ALL_REDUCE, collectives.ALL_GATHER

    def collective(name: str, *of: Any) -> Case:
        call = Collective(*of)
        return Case(name, call, call.predicted_us(H200))  # within 3 % on an H200

    tiny = (
        collective("tiny all-reduce, one shot", reduced, _TINY, one_shot, world),
        collective("tiny all-reduce, two shots", reduced, _TINY, two_shot, world),
        collective("tiny all-reduce by flags", reduced, _TINY, by_flags, world),
        collective("tiny all-gather by flags", gathered, _TINY, flags, world),
    )
    pair = collective("all-reduce of 4 MiB, pairs", reduced, _PAIR, two_shot, world, True)
    latencies = (*(f"{COLLECTIVES}{name}_us" for name in ("launch", "hop", "signal", "enter")), "exchange_us", "hop_us")
    links = ("link_gbs", COLLECTIVES + "link_gbs", COLLECTIVES + "lamport_gbs", COLLECTIVES + "two_hops_gbs")
    ours = fused(ALL_REDUCE, _SIDE, _SIDE, depth, 1, torch.bfloat16)
    copied = Case("copy in memory", Copy(_COPIED), 2 * _COPIED / _H200_COPY_GBS / 1e3)
    tiny_product = Case("tiny product", fused(ALL_REDUCE, *_TINY_PRODUCT, 1, torch.bfloat16), _H200_TINY_US)
    large_product = Case("large product", ours, large / _H200_TFLOPS)
    torch_product = Case("large product of torch", TorchProduct(_SIDE, _SIDE, depth), large / _H200_TORCH_TFLOPS)
    fp32_product = Case("product in float32", fused(ALL_REDUCE, *_FP32_PRODUCT, 1, torch.float32), _H200_FP32_US)
    groups = (
        Group("memory", ("hbm_gbs",), (copied,)),
        Group("links", links, (collective("all-gather of 32 MiB", gathered, _LARGE, flags, world),)),
        Group("pairs", (COLLECTIVES + "pair_gbs",), (pair,)),
        Group("latencies", latencies, tiny),
        Group("launches", ("launch_us",), (tiny_product,)),
        Group("products", ("tflops",), (large_product,)),
        Group("torch's products", ("library_tflops",), (torch_product,)),
        Group("float32", ("fp32_tflops",), (fp32_product,)),
    )
    judging: dict[str, Call] = {
        "all-gather of 256 KiB": Collective(gathered, 256 << 10, lamport, world),
        "all-gather of 4 MiB": Collective(gathered, 4 << 20, flags, world),
        "all-reduce of 64 KiB": Collective(reduced, 64 << 10, one_shot, world),
        "all-reduce of 16 MiB": Collective(reduced, 16 << 20, by_flags, world),
        "product of 4 rows": fused(ALL_REDUCE, 4, 8192, 8192, 1, torch.bfloat16),
        "product of 4096 rows": fused(ALL_REDUCE, 4096, 4096, 4096, 1, torch.bfloat16),
        "torch's product of 4096 rows": TorchProduct(4096, 4096, 4096),
        "float32 product of 1024 rows": fused(ALL_REDUCE, 1024, 1024, 512, 1, torch.float32),
    }
    for op in OPS:
        for rows in (16, 512, 4096):
            judging[f"{op} {rows} x 4096 x 2048"] = fused(op, rows, 4096, 2048, world, torch.bfloat16)
    return Study(groups, judging)


# What an H200 does in these cases, torch 2.11, triton 3.6: copied twice a byte, GB/s; bf16 products of 600 us, TFLOP/s;
# microseconds of small products.
_H200_COPY_GBS, _H200_TFLOPS, _H200_TORCH_TFLOPS = 4268.0, 758.0, 768.0
_TINY_PRODUCT, _H200_TINY_US = (1, 1024, 256), 4.0
_FP32_PRODUCT, _H200_FP32_US = (2048, 2048, 1024), 915.0


@dataclass(frozen=True)
class Outcome:
    """The machine to plan by; the groups that were taken; and how far predictions are off, before and after."""

    machine: Machine
    taken: tuple[Group, ...]
    before: float
    after: float


def judged(machine: Machine, measured: Study, us: Mapping[str, float]) -> Outcome:
    """Return `machine` with the groups of rates by which the judging calls are predicted better, one after the other.

    Raises `PlatformError` for times that no machine takes.
    """
    machine = replace(machine, collectives=machine.links)
    before = error = mean_error(machine, measured.judging, us)
    taken: list[Group] = []
    for _ in range(_PASSES):
        for group in (each for each in measured.groups if each not in taken):
            changed = group.applied(machine, us)
            if (less := mean_error(changed, measured.judging, us)) < error - _BETTER:
                machine, error = changed, less
                taken.append(group)
    return Outcome(machine, tuple(taken), before, error)


def mean_error(machine: Machine, calls: Mapping[str, Any], us: Mapping[str, float]) -> float:
    """Return by what share of its time a call's prediction is off, in the mean."""
    return sum(errors(machine, calls, us)) / len(calls)


def errors(machine: Machine, calls: Mapping[str, Any], us: Mapping[str, float]) -> list[float]:
    """Return by what share of its time each call's prediction is off."""
    return [abs(call.predicted_us(machine) / us[name] - 1) for name, call in calls.items()]


def rates_of(machine: Machine, groups: Iterable[Group]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the rates of the `groups` by name, those of the machine and those of its collectives."""
    names = [rate for group in groups for rate in group.rates]
    own = {name: _get(machine, name) for name in names if not name.startswith(COLLECTIVES)}
    shared = {name: _get(machine, name) for name in names if name.startswith(COLLECTIVES)}
    return own, {name.removeprefix(COLLECTIVES): value for name, value in shared.items()}


def _fused(machine: Machine, op: str, M: int, N: int, K: int, world: int, dtype: torch.dtype) -> Fused:
    problem = requested_problem(Request(op, M, N, K, world, dtype))
    return Fused(problem, plan(problem, machine, explained=False))


def _get(machine: Machine, rate: str) -> float:
    if rate.startswith(COLLECTIVES):
        return getattr(machine.links, rate.removeprefix(COLLECTIVES))
    defaults = {"library_tflops": machine.tflops, "fp32_tflops": machine.product_tflops(4)}
    return getattr(machine, rate) or defaults[rate]


def _with(machine: Machine, rate: str, value: float) -> Machine:
    changed: dict[str, Any] = {rate.removeprefix(COLLECTIVES): value}
    if rate.startswith(COLLECTIVES):
        return replace(machine, collectives=replace(machine.links, **changed))
    return replace(machine, **changed)
