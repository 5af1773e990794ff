"""`iris-tp calibrate`: measure this machine's rates for the planner, and keep them in the user's cache.

    iris-tp calibrate [--ranks 4]

All GPUs take part, and each case of `rate_cases.py` is measured as in `iris-tp bench`: in CUDA graphs, the median of
repeats, the slowest rank. The table replaces an earlier one only when all is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
import datetime
import importlib.metadata
import os
from pathlib import Path
import tempfile
import time

import iris
from iris import machines, rates
from iris.errors import IrisError, PlatformError
from iris.machines import Machine
import torch
from torch import distributed

from . import launch
from .bench.compare import compare
from .bench.team import KERNEL_SECONDS, Team
from .bench.timing import Budget
from .rate_cases import Case, Collective, Copy, Fused, TorchProduct, cases, derived

_HEAP = 1 << 30
_BUDGET = Budget(measure_ms=40.0, repeats=(5, 15))
_TOGETHER = 6  # cases that are timed in turns: the memory of all of them is held meanwhile


def run(args: argparse.Namespace) -> tuple[int, str]:
    """Measure on all ranks, and write the table; return the exit code, and for a refusal its reason."""
    try:
        ranks = usable_ranks(args.ranks)
        path = rates.check_writable(machines.machine_named(*_gpu(0)).name)
        with tempfile.TemporaryDirectory() as folder:
            launch.run_reporting(measure_and_report, ranks, Path(folder))
            table = rates.parse((Path(folder) / _TABLE).read_text())
        rates.write(table)
    except IrisError as error:
        return 2, str(error)
    except launch.RankError as error:
        return 1, str(error)
    print(f"written: {path}")
    return 0, ""


_TABLE = "table.json"


def usable_ranks(requested: int | None) -> int:
    """Return the number of ranks to measure with, all GPUs by default. Raises `PlatformError` where none is right."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise PlatformError("there is no GPU; expected two or more, whose rates are measured")
    if count == 1:
        raise PlatformError("there is one GPU, so there is no link to measure; expected two or more")
    ranks = requested or count
    if not 2 <= ranks <= count:
        raise PlatformError(f"--ranks is {ranks}; expected 2 to {count}, a GPU each")
    if len({_gpu(index) for index in range(ranks)}) > 1:
        kinds = ", ".join(_gpu(index)[0] for index in range(ranks))
        raise PlatformError(f"the GPUs differ: {kinds}; expected one kind (CUDA_VISIBLE_DEVICES selects)")
    return ranks


def _gpu(index: int) -> tuple[str, int]:
    properties = torch.cuda.get_device_properties(index)
    return properties.name, properties.multi_processor_count


def measure_and_report(folder: Path) -> None:
    """Measure on this rank; the first one writes the table into `folder`, and prints the progress and the result."""
    os.environ[rates.ENV_RATES] = rates.DATA_SHEET  # an earlier table, right or not, has no say
    os.environ.setdefault(iris.platform.ENV_TIMEOUT, str(KERNEL_SECONDS))
    with launch.reporting(folder), iris.iris(_HEAP) as ctx, alone(ctx, _HEAP) as single:
        team = Team(ctx.cur_rank, ctx.num_ranks, ctx.device)
        machine = machines.machine_of(ctx.device)
        measured = cases(machine, team.world)
        us = Stage(team, ctx, single).measure(measured)
        result = derived(machine, measured, us)
        if team.rank == 0:
            print(report(machine, result, measured, us))
            (folder / _TABLE).write_text(rates.text_of(table_of(result, team.world, us)))


def alone(ctx: iris.Iris, heap_size: int) -> iris.Iris:
    """Return a context of this rank alone. Collective: every rank takes part in making every group."""
    groups = [distributed.new_group([rank], backend="gloo") for rank in range(ctx.num_ranks)]
    return iris.iris(heap_size, group=groups[ctx.cur_rank])


class Stage:
    """What the cases are measured with: contexts of all ranks and of this one alone, and a group of two ranks."""

    def __init__(self, team: Team, ctx: iris.Iris, single: iris.Iris) -> None:
        self.team, self.ctx, self.single = team, ctx, single
        pairs = [list(range(first, min(first + 2, team.world))) for first in range(0, team.world, 2)]
        self.pair = [distributed.new_group(pair) for pair in pairs][team.rank // 2]

    def measure(self, measured: list[Case]) -> dict[str, float]:
        """Return the microseconds of each case on the slowest rank.

        Raises `PlatformError` for a case that cannot be measured.
        """
        us: dict[str, float] = {}
        begin = time.monotonic()
        for first in range(0, len(measured), _TOGETHER):
            some = measured[first : first + _TOGETHER]
            calls = {case.name: self.prepare(case) for case in some}
            result = compare(self.team, calls, _once, 1, _BUDGET)
            if result["failed"]:
                name, reason = next(iter(result["failed"].items()))
                raise PlatformError(f"{name} could not be measured: {reason}")
            us |= result["us"]
            for case in some:
                self.team.say(f"[{time.monotonic() - begin:3.0f} s] {case.name}: {us[case.name]:.1f} us")
        return us

    def prepare(self, case: Case) -> Callable[[int], torch.Tensor]:
        """Return the case's call with its tensors."""
        make = {Copy: self._copy, TorchProduct: self._torch_product, Fused: self._fused, Collective: self._collective}
        return make[type(case.call)](case.call)

    def _copy(self, call: Copy) -> Callable[[int], torch.Tensor]:
        source = torch.zeros(call.nbytes, dtype=torch.int8, device=self.ctx.device)
        target = torch.empty_like(source)
        return lambda _: target.copy_(source)

    def _torch_product(self, call: TorchProduct) -> Callable[[int], torch.Tensor]:
        A, W = self._random(call.M, call.K), self._random(call.N, call.K)
        out = torch.empty(call.M, call.N, dtype=A.dtype, device=A.device)
        return lambda _: torch.mm(A, W.t(), out=out)

    def _fused(self, call: Fused) -> Callable[[int], torch.Tensor]:
        problem, w = call.problem, call.problem.world_size
        ctx = self.single if w == 1 else self.ctx
        rows = problem.M // w  # of what is gathered or scattered by rows, where w divides M
        shape_a, shape_out = (problem.M, problem.K), (problem.M, problem.N)
        if problem.op in ("all_gather_matmul", "matmul_all_gather"):
            shape_a = rows, problem.K
        if problem.op == "matmul_reduce_scatter":
            shape_out = rows, problem.N
        A, W = self._random(*shape_a, dtype=problem.dtype), self._random(problem.N, problem.K, dtype=problem.dtype)
        out, op = ctx.empty(shape_out, dtype=problem.dtype), getattr(ctx.ops, problem.op)

        def fused(_: int) -> torch.Tensor:
            op(out, A, W.t(), config=replace(call.config, reasons=(), prediction=None))
            return out

        return fused

    def _collective(self, call: Collective) -> Callable[[int], torch.Tensor]:
        n = call.nbytes // 2
        x, width = self._random(n), call.ranks if call.op == "all_gather" else 1
        out, group = self.ctx.empty(width * n, dtype=x.dtype), self.pair if call.pairs else None
        if call.pairs and self.team.rank // 2 * 2 + 1 == self.team.world:
            return lambda _: out.copy_(x)  # of an odd number of ranks the last has no partner
        op = getattr(self.ctx.ccl, call.op)

        def collective(_: int) -> torch.Tensor:
            op(out, x, group=group, config=call.config)
            return out

        return collective

    def _random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return values as products have them: the power that they take depends on the bits."""
        return torch.randn(shape, dtype=dtype, device=self.ctx.device) * 0.1


def _once(name: str, call: Callable[[int], torch.Tensor]) -> float:
    call(0)
    return 0.0


def table_of(machine: Machine, ranks: int, us: dict[str, float]) -> rates.Table:
    """Return the table of `machine`'s measured rates, with the times from which they were derived."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    return rates.Table(
        name=machine.name,
        num_programs=machine.num_programs,
        ranks=ranks,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        versions={"iris-tp": iris.__version__, **versions},
        rates={name: _short(getattr(machine, name)) for name in rates.DEVICE_RATES},
        collectives={name: _short(getattr(machine.links, name)) for name in rates.COLLECTIVE_RATES},
        measurements={name: round(value, 2) for name, value in us.items()},
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def report(known: Machine, measured: Machine, compared: list[Case], us: dict[str, float]) -> str:
    """Return the measured rates beside the `known` ones, and how far predictions are from what was measured."""
    lines = [f"{'':24}{'measured':>10}{'before':>10}   ({measured.name}; before: {known.source})"]
    for holder, names, text in (
        (lambda m: m, rates.DEVICE_RATES, ""),
        (lambda m: m.links, rates.COLLECTIVE_RATES, "collectives: "),
    ):
        for name in names:
            before = getattr(holder(known), name) or known.tflops
            lines.append(f"{text + name:24}{getattr(holder(measured), name):10.4g}{before:10.4g}")
    checked = [case for case in compared if not case.rate]
    for machine, text in ((known, "before"), (measured, "measured")):
        misses = [abs(case.call.predicted_us(machine) / us[case.name] - 1) for case in checked]
        mean = sum(misses) / len(misses)
        off = f"predictions are off by {mean:.0%}, {max(misses):.0%} at most"
        lines.append(f"{len(checked)} other calls, by the rates {text}: {off}")
    return "\n".join(lines)
