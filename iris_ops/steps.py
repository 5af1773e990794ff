"""The steps of a prepared call: functions of the `Run`. Each launches what it was made for and chooses nothing.

    ready, changed    operands as kernels take them
    Kernel, Several   one launch, or what comes with torch's product
    finished          an epilogue in a separate kernel

A format of weights has its own steps before the product (`WeightFormat.operands`), and a mixture one for all of its
launches. A step adds to `Run.launches` how to repeat it, and None if only the whole call can be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

from iris import platform
from iris.errors import ArgumentError
from iris.launch import relaunch
import torch
import triton

from .config import FusedConfig
from .kernels.rmsnorm_epilogue import EPILOGUE_NAMES
from .named import named
from .operands import Operands
from .planning.epilogues import Epilogue
from .planning.way import Way
from .problem import Problem

if TYPE_CHECKING:
    from iris.rank import Rank


@dataclass
class Run:
    """One call under way. Steps may replace `tensors`. `out`: the result's memory, the caller's or on the heap.

    `scales`: of the operands, as fields of a kernel's `TileEpilogue`.
    """

    rank: Rank
    kernels: dict
    workspace: Any = None  # a Workspace, of calls that have one
    tensors: Any = None  # Operands, or those of a mixture
    out: Any = None
    moving: Sequence[int] = ()
    epilogue: Sequence[torch.Tensor] = ()
    scales: dict[str, torch.Tensor | int | None] = field(default_factory=dict)
    launches: list[relaunch.Launch | None] = field(default_factory=list)

    def launch(
        self, kernel: triton.JITFunction, grid: tuple[int, int, int], args: dict, moving: Any = (),
        follows: int = True, **options: int,
    ) -> None:  # fmt: skip
        """Launch a kernel. `moving`: as of `relaunch.launch`. `follows`: whether it begins by `arch.follow`."""
        if follows:
            options |= platform.pdl_options(self.rank.device)
        self.launches.append(relaunch.launch(self.kernels, self.rank.device, kernel, grid, args, moving, **options))

    def call(self, function: Callable[[], object]) -> None:
        """Call a function that launches something else and returns a true value if it did."""
        function()
        self.launches.append(relaunch.Launch(lambda: bool(function())))


Step = Callable[[Run], None]


def ready(run: Run) -> None:
    """Copy tensors that kernels cannot take where they are."""
    if not run.tensors.is_ready:
        run.launches.append(None)
    run.tensors = run.tensors.ready()


def changed(change: Callable[[Operands], Operands], run: Run) -> None:
    """Replace operands that kernels cannot take as they are."""
    run.launches.append(None)
    run.tensors = change(run.tensors)


@dataclass(frozen=True)
class Kernel:
    """One launch of the way's kernel, on all rows or on piece number `piece` of `pieces`.

    `fused`: whether the kernel computes the epilogue, too, and is given its operands.
    """

    way: Way
    problem: Problem
    config: FusedConfig
    fused: bool = False
    piece: int = 0
    pieces: int = 1

    def __call__(self, run: Run) -> None:
        way, problem, config, tensors = self.way, self.problem, self.config, run.tensors
        if self.pieces > 1:  # alike: where two shots serve, every rank has rows of each
            run.launches.append(None)
            out, A = (each.tensor_split(self.pieces)[self.piece] for each in (tensors.out, tensors.A))
            problem, tensors = replace(problem, M=out.shape[0]), tensors._replace(out=out, A=A)
        function, grid, args = named(way.launcher)(run.rank, run.workspace, problem, config, tensors)
        norm = zip(EPILOGUE_NAMES, run.epilogue if self.fused else (), strict=False)
        if fields := dict(norm) | run.scales:
            args["epilogue"] = args["epilogue"]._replace(**fields)
        options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
        if way.options:
            options |= named(way.options)(grid[0], platform.num_programs(run.rank.device), args)
        try:
            run.launch(function, grid, args, run.moving, way.follows, **options)
        except triton.OutOfResources as error:  # before anything was sent; ranks whose calls are alike all come here
            raise ArgumentError(
                f"{problem.called_op}: config has blocks of {config.block_m} x {config.block_n} x {config.block_k}, "
                f"{config.num_stages} stages and {config.num_warps} warps, which take {error.required} of {error.name} "
                f"for {problem.dtype}; expected at most {error.limit}, what the device has"
            ) from error


@dataclass(frozen=True)
class Several:
    """The launches of a way with torch's product, which become a CUDA graph once the call has been repeated."""

    way: Way
    problem: Problem
    config: FusedConfig

    def __call__(self, run: Run) -> None:
        tensors = Operands._make([relaunch.alias(each) for each in run.tensors])
        again = named(self.way.launcher)(run.workspace, self.problem, self.config, tensors)
        run.call(run.workspace.graphs.of(again))


def all_columns(problem: Problem, tensors: Operands) -> Operands:
    """Return operands by which a product stores all its columns in new memory, from where an epilogue joins them."""
    return tensors._replace(out=tensors.out.new_empty(problem.M, problem.N))


def part_of_nothing(tensors: Operands) -> Operands:
    """Return operands without rows, because all ranks gather a result of a single element by rows (`matching_form`)."""
    return tensors._replace(A=tensors.A[:0], B=tensors.A.t(), bias=None)


def finished(epilogue: Epilogue, run: Run) -> None:
    """Launch an epilogue in a separate kernel."""
    run.launches.append(None)
    named(epilogue.separate)(epilogue, run.out, run.tensors.out, *run.epilogue)


def run_all(steps: Sequence[Step], run: Run) -> relaunch.Launch | None:
    """Run the steps in the current stream. Return all launches as one, or None if they cannot be repeated."""
    for step in steps:
        step(run)
    return reduce(relaunch.in_turn, run.launches) if run.launches else None
