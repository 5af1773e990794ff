"""`iris-tp calibrate`: measure this machine's rates for the planner, and keep them in the user's cache.

    iris-tp calibrate [--ranks 4]

All GPUs take part, and each call of `rate_cases.py` is measured as in `iris-tp bench`: in CUDA graphs, the median of
repeats, the slowest rank. Rates that predict other calls no better than those of the source are not taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
import datetime
import importlib.metadata
import os
from pathlib import Path
import tempfile
import time
from typing import Any

import iris
from iris import machines, rates
from iris.errors import IrisError, PlatformError
from iris.machines import Machine
import torch
from torch import distributed

from . import launch
from .bench.compare import compare
from .bench.team import KERNEL_SECONDS, Team
from .bench.timing import INTERPRETED, Budget
from .rate_cases import (
    COLLECTIVES,
    Call,
    Collective,
    Copy,
    Fused,
    Outcome,
    Study,
    TorchProduct,
    errors,
    judged,
    rates_of,
    study,
)

_HEAP = 1 << 30
# Calls enough that a batch outweighs how far apart its ranks begin.
_BUDGET = Budget(batch_ms=4.0, longest_ms=25.0, measure_ms=40.0, calls=(100, 300), repeats=(5, 9))
_COPIES = 8
_TOGETHER = 6  # cases that are timed in turns: the memory of all of them is held meanwhile


def run(args: argparse.Namespace) -> tuple[int, str]:
    """Measure on all ranks, and write the table if plans are better by it; return the exit code and a refusal's reason.

    Where they are not, a table of an earlier run is deleted.
    """
    try:
        ranks = usable_ranks(args.ranks)
        path = rates.check_writable(machines.machine_named(*_gpu(0)).name)
        with tempfile.TemporaryDirectory() as folder:
            launch.run_reporting(measure_and_report, ranks, Path(folder))
            written = Path(folder) / _TABLE
            table = rates.parse(written.read_text()) if written.exists() else None
        if table is not None:
            rates.write(table)
    except IrisError as error:
        return 2, str(error)
    except launch.RankError as error:
        return 1, str(error)
    if table is not None:
        print(f"written: {path}")
    elif path.is_file():
        path.unlink()
        print(f"the rates of the source predict as well: {path}, of an earlier run, is deleted")
    else:
        print("the rates of the source predict as well: nothing is written")
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
        measured = study(machine, team.world)
        us = Stage(team, ctx, single).measure(measured.calls)
        outcome = judged(machine, measured, us)
        if team.rank == 0:
            print(report(machine, measured, us, outcome))
            if outcome.taken:
                (folder / _TABLE).write_text(rates.text_of(table_of(outcome, team.world, us)))


def alone(ctx: iris.Iris, heap_size: int) -> iris.Iris:
    """Return a context of this rank alone. Collective: every rank takes part in making every group."""
    groups: list[Any] = [distributed.new_group([rank], backend="gloo") for rank in range(ctx.num_ranks)]
    return iris.iris(heap_size, group=groups[ctx.cur_rank])


class Stage:
    """The setting in which cases are measured: contexts of all ranks and of this one alone, and a group of two
    ranks."""

    def __init__(self, team: Team, ctx: iris.Iris, single: iris.Iris) -> None:
        self.team, self.ctx, self.single = team, ctx, single
        pairs = [list(range(first, min(first + 2, team.world))) for first in range(0, team.world, 2)]
        self.pair = [distributed.new_group(pair) for pair in pairs][team.rank // 2]

    def measure(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """Return the microseconds of each call on the slowest rank.

        Raises `PlatformError` for one that cannot be measured.
        """
        us: dict[str, float] = {}
        begin, names = time.monotonic(), list(calls)
        for first in range(0, len(names), _TOGETHER):
            some = {name: calls[name] for name in names[first : first + _TOGETHER]}
            copies = {name: call for name, call in some.items() if isinstance(call, Copy)}
            us |= {name: self.team.slowest([self.copy_us(call.nbytes)])[0] for name, call in copies.items()}
            prepared = {name: self.prepare(call) for name, call in some.items() if not isinstance(call, Copy)}
            result = compare(self.team, prepared, _once, 1, _BUDGET if self.team.cuda else INTERPRETED)
            if result["failed"]:
                name, reason = next(iter(result["failed"].items()))
                raise PlatformError(f"{name} could not be measured: {reason}")
            us |= result["us"]
            for name in some:
                self.team.say(f"[{time.monotonic() - begin:3.0f} s] {name}: {us[name]:.1f} us")
        return us

    def copy_us(self, nbytes: int) -> float:
        """Return the microseconds of a copy in memory, several one after the other; in a graph it would be slower."""
        source = torch.zeros(nbytes, dtype=torch.uint8, device=self.ctx.device)
        target = torch.empty_like(source)
        target.copy_(source)
        if not self.team.cuda:
            begin = time.perf_counter()
            target.copy_(source)
            return 1e6 * (time.perf_counter() - begin)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_COPIES):
            target.copy_(source)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / _COPIES

    def prepare(self, call: TorchProduct | Fused | Collective) -> Callable[[int], torch.Tensor]:
        """Return a function that makes the call, with its tensors."""
        if isinstance(call, TorchProduct):
            return self._torch_product(call)
        return self._fused(call) if isinstance(call, Fused) else self._collective(call)

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


def table_of(outcome: Outcome, ranks: int, us: Mapping[str, float]) -> rates.Table:
    """Return the table of the rates that were taken, with the times from which they were derived."""
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    own, shared = rates_of(outcome.machine, outcome.taken)
    return rates.Table(
        name=outcome.machine.name,
        num_programs=outcome.machine.num_programs,
        ranks=ranks,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        versions={"iris-tp": iris.__version__, **versions},
        rates={name: _short(value) for name, value in own.items()},
        collectives={name: _short(value) for name, value in shared.items()},
        measurements={name: round(value, 2) for name, value in us.items()},
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def report(known: Machine, measured: Study, us: Mapping[str, float], outcome: Outcome) -> str:
    """Return the rates of each group beside those of the source, which groups were taken, and what plans gain."""
    lines = [f"{known.name}; rates of the source: {known.source}"]
    lines += [f"{'rate':26}{'source':>10}{'measured':>10}"]
    for group in measured.groups:
        changed = group.applied(replace(known, collectives=known.links), us)
        verdict = "taken" if group in outcome.taken else "kept: the source's predict as well"
        lines.append(f"{group.name}: {verdict}")
        for place, before, after in zip(
            ("", COLLECTIVES), rates_of(known, [group]), rates_of(changed, [group]), strict=True
        ):
            lines += [f"  {place + name:26}{value:8.4g}{after[name]:10.4g}" for name, value in before.items()]
    for machine, text, mean in ((known, "of the source", outcome.before), (outcome.machine, "taken", outcome.after)):
        worst = max(errors(machine, measured.judging, us))
        lines.append(
            f"{len(measured.judging)} other calls, by the rates {text}: off by {mean:.1%}, {worst:.0%} at most"
        )
    return "\n".join(lines)
