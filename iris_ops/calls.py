"""A call of a fused op: its arguments, what is computed once for its shapes, and its launches, the first and repeated.

A model calls its layers with the same shapes over and over, often at the same addresses. What the first call finds out
(`Prepared`: problem, plan, steps and memory) serves all calls whose key is the same but for the addresses. A call whose
whole key is known is its launches alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from iris.errors import ArgumentError, IrisError, ShapeError
from iris.heap import span
from iris.launch import relaunch
from iris.launch.streams import check_async
from iris.machines import machine_of
import torch

from . import steps
from .checks import check_bias, check_places, check_tensors, warn_of_overflow
from .config import FusedConfig
from .kernels import rmsnorm_epilogue
from .kernels.rmsnorm_epilogue import EPILOGUE_NAMES, Epilogue
from .launch import steps_of
from .operands import Operands
from .planning.needs import PLAIN
from .planning.plan import check_order, plan, way_for, workspace_size
from .planning.way import Sizes
from .problem import ALL_REDUCE, Problem, Request, describe, requested_problem
from .workspace import Workspace

if TYPE_CHECKING:
    from iris.rank import Rank

NAMES = Operands._fields
# In the order of `Operands`, which a call that is known does not need.
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


class Call(NamedTuple):
    """The arguments of a call. `epilogue`: residual, weight, scaled and squares of a norm that follows."""

    op: str
    tensors: Operands
    epilogue: Epilogue | None = None
    async_op: bool = False
    config: FusedConfig | None = None
    workspace: Workspace | None = None
    k_per_rank: Sequence[int] | None = None


@dataclass(frozen=True)
class Prepared:
    """A problem that was checked and planned: the state that later calls use. `spans`: bytes of each tensor, `NAMES`
    first."""

    problem: Problem
    config: FusedConfig
    writes_to_peers: bool
    sizes: Sizes
    spans: tuple[int, ...]

    def facts(self, call: Call, workspace: int | None, out: int | None) -> dict[str, Any]:
        """Return what ranks compare of a call with IRIS_DEBUG=1.

        `workspace`, `out`: their offsets on the heap; None for the context's own workspace and for an `out` elsewhere.
        """
        problem = self.problem
        facts: dict[str, Any] = {
            "form": problem.form,
            "M": problem.M,
            "dtype": problem.dtype,
            "config": replace(self.config, prediction=None),  # which is each rank's own
            "async_op": call.async_op,
            "bias": "none" if call.tensors.bias is None else "given",
            "workspace": "the context's own" if workspace is None else f"at {workspace} of the heap",
        }
        if problem.tree:
            facts["k_per_rank"] = problem.sums.k_per_rank
        if problem.weights is not PLAIN:
            facts["B"] = problem.weights.name
        shared = problem.operation.shared
        facts[shared] = getattr(problem, shared)
        if self.writes_to_peers:
            facts["out"] = "outside the heap" if out is None else f"at {out} of the heap"
        return facts


class Calls:
    """The calls of one context."""

    def __init__(self, ctx: Rank) -> None:
        self.ctx = ctx
        self.workspace: Workspace | None = None  # of calls that are given none
        self._foreseen: tuple[Problem, FusedConfig] | None = None
        self.earlier = relaunch.Calls()

    def run(
        self, op: str, tensors: Tensors, epilogue: Epilogue | None = None, async_op: bool = False,
        config: FusedConfig | None = None, workspace: Workspace | None = None, k_per_rank: Sequence[int] | None = None,
    ) -> Workspace:  # fmt: skip
        """Run a call (`Call`): by its launches alone if it is known, else from its checks on."""
        ctx = self.ctx
        ctx.check()
        own = self.workspace if workspace is None else workspace
        operands = tensors if epilogue is None else (*tensors, *epilogue)
        key = relaunch.key_of(operands, (op, config, k_per_rank), own)
        if async_op is False and (used := self.earlier.repeat(key, ctx, tensors[0])):
            return used
        return self._first(Call(op, Operands._make(tensors), epilogue, async_op, config, workspace, k_per_rank), key)

    def _first(self, call: Call, key: relaunch.Key | None) -> Workspace:
        """Run a call that `relaunch` cannot repeat."""
        ctx, calls, (out, A, B, bias, scale) = self.ctx, self.earlier, call.tensors
        prepared, addresses = self._checked(call, key)
        problem = prepared.problem
        direct = not prepared.writes_to_peers or ctx.heap.holds(addresses[0], addresses[0] + prepared.spans[0])
        self._compare(call, prepared, direct)
        workspace = call.workspace or self.own_workspace()
        if problem.empty:
            return workspace
        staged = self._room(workspace, prepared, None if direct else out)
        place = tuple(each % relaunch.ALIGNMENT for each in addresses)
        program = calls.prepared(key, lambda: steps_of(ctx, problem, prepared.config, call.tensors), place)
        came_before = key in calls.known and not call.async_op
        repeatable = all(step.repeatable for step in program)

        def go() -> None:
            again, launched = calls.moved(key, direct) if repeatable else None, None
            if again is None or not again():
                tensors = call.tensors if staged is None else call.tensors._replace(out=staged)
                run = steps.Run(
                    ctx, workspace, calls.kernels, tensors, out, staged, addresses, came_before, call.epilogue
                )  # fmt: skip
                launched = steps.run_all(program, run)
                again = launched and launched.again
            elif staged is not None:
                out.copy_(staged)
            if repeatable and (again or not call.async_op):  # which leaves alone what is known of the call
                calls.keep(key, again and (again, staged, workspace), launched, direct)

        if call.async_op and ctx.device.type == "cuda":
            workspace._done = ctx.side.run(go, out, A, B, bias, scale)
        else:
            ctx.side.join()
            go()
            if ctx.agreement is not None:
                warn_of_overflow(ctx, call.op, out, A, B)
        ctx.check()
        return workspace

    def _checked(self, call: Call, key: relaunch.Key | None) -> tuple[Prepared, tuple[int, ...]]:
        """Return what is known of such calls, and the tensors' addresses. Raises a typed error for wrong arguments."""
        op, addresses = call.op, relaunch.addresses_of(key, (*call.tensors, *(call.epilogue or ())))
        try:
            check_async(op, call.async_op)
            prepared = self.earlier.prepared(key, lambda: self.prepare(call))
            if call.workspace is not None:
                self.check_workspace(op, call.workspace)
            if call.epilogue is None:
                check_places(op, NAMES, addresses, prepared.spans)
            else:
                names = (*NAMES, *EPILOGUE_NAMES)
                check_places(op, names, addresses, prepared.spans, rmsnorm_epilogue.WRITTEN)
        except IrisError as error:
            self.ctx.report_refusal(op, None, error)
            raise
        return prepared, addresses

    def _compare(self, call: Call, prepared: Prepared, direct: bool) -> None:
        """Compare the ranks' calls, with IRIS_DEBUG=1."""
        ctx, workspace = self.ctx, call.workspace
        if ctx.agreement is None:
            return
        own = workspace is None or workspace is self.workspace
        there = None if own or workspace is None else ctx.heap.offset(workspace.sync)
        place = ctx.heap.offset(call.tensors.out)
        ctx.compare(call.op, **prepared.facts(call, there, place if direct and not ctx.hands_out(place) else None))

    def _room(self, workspace: Workspace, prepared: Prepared, out: torch.Tensor | None) -> torch.Tensor | None:
        """Reserve room for the call, and on the heap for what peers write in place of `out`, if that is given."""
        self.reserve(workspace, prepared.sizes)
        if out is None:
            return None
        nbytes = prepared.problem.M * prepared.problem.N * prepared.problem.dtype.itemsize
        return workspace.results(nbytes).view(out.dtype).view(out.shape)

    def reserve(self, workspace: Workspace, sizes: Sizes) -> None:
        """Reserve room in a workspace. Known launches are forgotten where it grows."""
        grown = True
        try:
            grown = workspace.reserve(*sizes)
        finally:  # where there was no room for all of it, some has grown all the same
            if grown:
                self.ctx.forget_launches()  # calls go to memory that graphs may use still, but they no longer

    def own_workspace(self) -> Workspace:
        """Return the workspace of calls that are given none."""
        if self.workspace is None:
            self.workspace = Workspace(self.ctx)
        return self.workspace

    def check_workspace(self, op: str, workspace: object) -> None:
        """Raise `ArgumentError` for a workspace of another context, or none at all."""
        if not isinstance(workspace, Workspace) or workspace.ctx is not self.ctx:
            raise ArgumentError(f"{op}: workspace is {workspace!r}; expected one that an op of this context returned")

    def requested(self, op: str, M: int, N: int, K: int, dtype: torch.dtype, **more: Any) -> Problem:
        """Return the problem of such a call in this context. `more`: other fields of `Request`."""
        ctx = self.ctx
        return requested_problem(Request(op, M, N, K, ctx.num_ranks, dtype, **more), ctx.level)

    def plan(self, problem: Problem, explained: bool = False, algorithm: str | None = None) -> FusedConfig:
        """Return the configuration that serves `problem` on this device."""
        return plan(problem, machine_of(self.ctx.device), explained, algorithm)

    def foresee(self, call: Call) -> Prepared:
        """Prepare a call whose output is yet to be made; the call itself then takes the same plan."""
        prepared = self.prepare(call)
        self._foreseen = prepared.problem, prepared.config
        return prepared

    def _planned(self, problem: Problem) -> FusedConfig:
        foreseen, self._foreseen = self._foreseen, None
        return foreseen[1] if foreseen and foreseen[0] == problem else self.plan(problem)

    def prepare(self, call: Call) -> Prepared:
        """Check whatever does not depend on addresses, and choose."""
        ctx, op, config, (out, A, B, bias, scale) = self.ctx, call.op, call.config, call.tensors
        machine = machine_of(ctx.device)
        check_tensors(op, out, A, B, bias, scale, ctx.device)
        if config is not None and not isinstance(config, FusedConfig):
            raise ArgumentError(f"{op}: config is {type(config).__name__}; expected an iris_ops.FusedConfig")
        problem = describe(op, out, A, B, ctx.cur_rank, ctx.num_ranks, scale)
        problem = ctx.level.promise(problem, call.k_per_rank, bias is not None)
        k_per_rank = problem.sums.k_per_rank
        if k_per_rank and k_per_rank[ctx.cur_rank] != problem.K:
            raise ShapeError(
                f"{op}: A is {tuple(A.shape)} on rank {ctx.cur_rank}, whose k_per_rank is {k_per_rank}; expected"
                f" {k_per_rank[ctx.cur_rank]} columns"
            )
        if config is not None:
            _check_config(problem, config)
            check_order(problem, config, machine)
        chosen = config or self._planned(problem)
        way = way_for(problem, chosen)
        check_bias(op, bias, B)
        if call.epilogue is not None:
            rmsnorm_epilogue.check(call.epilogue, out)
        sizes = workspace_size(problem, chosen, machine.num_programs, way)
        spans = tuple(map(span, (*call.tensors, *(call.epilogue or ()))))
        return Prepared(problem, chosen, way.writes_to_peers(problem), sizes, spans)


def _check_config(problem: Problem, config: FusedConfig) -> None:
    """Raise `ArgumentError` for an algorithm that cannot serve the problem."""
    op = problem.op
    if config.algorithm == "two_shot" and op != ALL_REDUCE:
        raise ArgumentError(f"{op}: config.algorithm is 'two_shot', which is for {ALL_REDUCE}; expected 'one_shot'")
    if reason := way_for(problem, config).refuses(problem):
        raise ArgumentError(f"{op}: config.algorithm is {config.algorithm!r}; expected another, for {reason}")
