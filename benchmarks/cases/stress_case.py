"""Calls of `benchmarks.stress`: an op or a collective on fixed shapes, its inputs and its undisturbed results.

Results are recorded while nothing else runs, twice, from poisoned outputs: compared with the reference, with each other
and between ranks. From then on a call is compared with them bit by bit, on the device. Outputs are poisoned in stream
order before each call, so neither a stale nor an unwritten element passes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
import functools

from iris_tp.bench.inputs import Inputs
from iris_tp.bench.rows import CALLS, Row
from iris_tp.bench.team import Team
import torch
import torch.distributed as dist

from benchmarks.cases import ccl_case

VARIANTS = 3  # inputs of each op; two calls in a row of the same shapes never have the same
PLACES = 2  # of each case in a graph: its calls take turns between them
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


@dataclass(eq=False)
class Case:
    """A call on fixed shapes, and how many calls of it deviated. `run(*inputs[i])` writes `out`."""

    name: str
    team: Team
    run: Callable[..., object]
    out: torch.Tensor
    inputs: list[tuple[torch.Tensor, ...]]
    error: Callable[[int], float]
    """Of `out` after a call on inputs i, 1 being the limit."""
    same_on_all: bool
    """Whether all ranks get the same output."""
    wrong: torch.Tensor = field(init=False)
    recorded: list[torch.Tensor] = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.team.device)
        self.recorded = [self._undisturbed(i) for i in range(len(self.inputs))]

    def _undisturbed(self, i: int) -> torch.Tensor:
        results = []
        for _ in range(2):
            self.team.synchronize()
            self.team.barrier()
            self.poison()
            self.run(*self.inputs[i])
            self.team.synchronize()
            self.team.barrier()
            results.append(bits(self.out).clone())
        error = self.error(i)
        first = results[0].clone()
        if self.same_on_all:
            dist.broadcast(first.view(torch.uint8), src=0)
        differences = (not torch.equal(*results), not torch.equal(first, results[0]))
        # All ranks raise, or none: one alone would leave the others waiting.
        error, runs_differ, ranks_differ = self.team.slowest([error, *map(float, differences)])
        if error > 1:
            raise RuntimeError(f"{self.name}: wrong without any disturbance: {error:.3g} times the allowed error")
        if runs_differ or ranks_differ:
            raise RuntimeError(f"{self.name}: {'two undisturbed calls' if runs_differ else 'ranks'} differ")
        return results[0]

    def poison(self) -> None:
        self.out.fill_(float("nan"))

    def call(self) -> None:
        self.turn += 1
        i = self.turn % len(self.inputs)
        self.compared(self.inputs[i], self.recorded[i])

    def compared(self, inputs: tuple[torch.Tensor, ...], recorded: torch.Tensor) -> None:
        self.poison()
        self.run(*inputs)
        self.wrong += (bits(self.out) != recorded).any()


def of_row(row: Row, team: Team, dtype: torch.dtype, ctx) -> Case:
    inputs = Inputs(row, team, dtype, copies=VARIANTS)
    out = ctx.empty_ragged(*inputs.out_shape, dtype=dtype)  # parts of a reduce-scatter may differ by rank
    op = getattr(ctx.ops, CALLS[row.op])

    def error(i: int) -> float:
        value = inputs.error(out, i)
        inputs._expected.clear()
        return value

    def run(A: torch.Tensor, W: torch.Tensor) -> None:
        op(out, A, W.t())

    each = list(zip(inputs.A, inputs.W, strict=True))
    return Case(str(row), team, run, out, each, error, same_on_all=row.op in ("ar", "ga"))


def of_collective(op: str, nbytes: int, team: Team, dtype: torch.dtype, ctx) -> Case:
    case = ccl_case.Case(op, nbytes, team, dtype)
    out = ctx.empty(*case.out_shape, dtype=dtype)  # of the same size on all ranks
    run = functools.partial(getattr(ctx.ccl, op), out)
    each = [(given,) for given in case.inputs]
    same = op in ("all_reduce", "all_gather")
    return Case(f"{op} {nbytes} bytes", team, run, out, each, functools.partial(case.error, out), same_on_all=same)


class Placed:
    """A case inside a graph: its inputs lie at fixed places, which each replay fills with other data."""

    def __init__(self, case: Case) -> None:
        self.case, self.turn = case, 0
        self.stacks = [torch.stack(list(tensors)) for tensors in self._kinds()]
        self.places = [[torch.empty_like(stack[0]) for stack in self.stacks] for _ in range(PLACES)]

    def _kinds(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield the variants of each argument, and those of the results."""
        yield from zip(*self.case.inputs, strict=True)
        yield tuple(self.case.recorded)

    def refill(self, counter: torch.Tensor) -> None:
        for i, tensors in enumerate(self.places):
            index = (counter + i) % len(self.case.inputs)
            for tensor, stack in zip(tensors, self.stacks, strict=True):
                tensor.copy_(stack.index_select(0, index)[0])

    def call(self) -> None:
        self.turn += 1
        *inputs, recorded = self.places[self.turn % PLACES]
        self.case.compared(tuple(inputs), recorded)


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)
