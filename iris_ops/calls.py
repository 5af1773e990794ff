"""A call of an op: its arguments, what is computed once for its shapes, and its launches, the first and repeated.

A model calls its layers with the same shapes over and over, often at the same addresses. What the first call finds out
(`Prepared`: problem, plan and memory, and the steps) serves all calls whose key is the same but for the addresses. A
call whose whole key is known only repeats its launches. What differs between ops of products and of mixtures is in
their `Operation`: how tensors are described, and the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from iris.errors import ArgumentError
from iris.heap import span
from iris.launch import relaunch
from iris.launch.streams import check_async
from iris.machines import machine_of
import torch

from . import steps
from .checks import check_places, warn_of_overflow
from .config import FusedConfig
from .kernels.rmsnorm_epilogue import EPILOGUE_NAMES, WRITTEN
from .named import named
from .planning.operations import BY_NAME
from .planning.plan import check_config, plan, way_for, workspace_size
from .planning.way import Sizes
from .problem import Problem, Request, requested_problem
from .workspace import Workspace

if TYPE_CHECKING:
    from iris.rank import Rank


class Call(NamedTuple):
    """The arguments of a call. `epilogue`: residual, weight, scaled and squares of a norm that follows, or nothing."""

    op: str
    tensors: Any  # Operands, GateUp or Down
    async_op: bool = False
    config: FusedConfig | None = None
    workspace: Workspace | None = None
    k_per_rank: Sequence[int] | None = None
    epilogue: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A problem that was checked and planned: the state that later calls use. `spans`: bytes of the tensors `names`."""

    problem: Problem
    config: FusedConfig
    writes_to_peers: bool
    sizes: Sizes
    names: tuple[str, ...]
    spans: tuple[int, ...]


class Calls:
    """The calls of one context."""

    def __init__(self, ctx: Rank) -> None:
        self.ctx = ctx
        self.workspace: Workspace | None = None  # of calls that are given none
        self.earlier = relaunch.EarlierCalls()

    def run(
        self, op: str, tensors: Any, async_op: bool = False, config: FusedConfig | None = None,
        workspace: Workspace | None = None, k_per_rank: Sequence[int] | None = None,
        epilogue: tuple[torch.Tensor, ...] = (),
    ) -> Workspace:  # fmt: skip
        """Run a call (`Call`): repeat its launches if it is known, else check, plan and launch it."""
        self.ctx.check()
        given, rest = tensors.key
        if type(k_per_rank) is list:
            k_per_rank = tuple(k_per_rank)  # a key is hashed
        own = self.workspace if workspace is None else workspace
        key = relaunch.key_of((*given, *epilogue), (op, config, k_per_rank, rest), own)
        if async_op is False and (used := self.earlier.repeat(key, self.ctx, tensors.out)):
            return used
        return self._first(Call(op, tensors, async_op, config, workspace, k_per_rank, epilogue), key)

    def _first(self, call: Call, key: relaunch.Key | None) -> Workspace:
        """Run a call that `relaunch` cannot repeat: check it, make room, and launch its steps.

        Raises a typed error for wrong arguments.
        """
        ctx, op, tensors, operation = self.ctx, call.op, call.tensors, BY_NAME[call.op]
        with nullcontext() if operation.local else ctx.reporting_refusals(op, None):
            check_async(op, call.async_op)
            prepared = self.earlier.prepared(key, lambda: self.prepare(call))
            self.check_workspace(op, call.workspace)
            addresses = key.addresses if key else (0,) * len(prepared.names)
            check_places(op, prepared.names, addresses, prepared.spans, WRITTEN)
            if ctx.agreement is not None and operation.values:
                named(operation.values)(ctx, call, prepared.problem)
        if ctx.agreement is not None and not operation.local:
            ctx.compare(op, **self.facts(call, prepared))
        workspace, problem, out = self.room(call, prepared), prepared.problem, tensors.out
        if problem.empty:
            return workspace
        place = tuple(each % relaunch.ALIGNMENT for each in addresses)
        program = self.earlier.prepared(
            key, lambda: named(operation.steps)(ctx, problem, prepared.config, call.tensors), place
        )
        staged = None  # peers write `out` on the heap only; elsewhere it is copied from the workspace
        if prepared.writes_to_peers and not ctx.heap.holds(addresses[0], addresses[0] + prepared.spans[0]):
            staged = workspace.results(out.nbytes).view(out.dtype).view(out.shape)
            tensors = tensors._replace(out=staged)

        def run_steps() -> relaunch.Launch | None:
            run = steps.Run(ctx, self.earlier.kernels, workspace, tensors, tensors.out, addresses, call.epilogue)
            return steps.run_all(program, run)

        go = partial(self.earlier.launch, key, workspace, out, staged, run_steps)
        if done := ctx.side.run(go, call.async_op, *call.tensors):
            workspace._done = done
        elif ctx.agreement is not None and not operation.mixes:
            warn_of_overflow(ctx, op, out, tensors.A, tensors.B)
        ctx.check()
        return workspace

    def facts(self, call: Call, prepared: Prepared) -> dict[str, Any]:
        """Return what ranks compare of a call with IRIS_DEBUG=1."""
        operation, other = BY_NAME[call.op], None if call.workspace is self.workspace else call.workspace
        used = f"at {self.ctx.heap.offset(other.sync)} of the heap" if other else "the context's own"
        facts = operation.facts(prepared.problem, prepared.config)
        facts |= {"async_op": call.async_op, "workspace": used}
        if operation.sums and not operation.mixes and call.config is None and call.k_per_rank is None:
            facts["K, for which no k_per_rank is given,"] = prepared.problem.K  # by which each rank has planned
        facts["bias"] = "none" if call.tensors.bias is None else "given"
        if prepared.writes_to_peers:
            facts["out"] = self.ctx.place_of(call.tensors.out)
        return facts

    def prepare(self, call: Call) -> Prepared:
        """Check what does not depend on addresses, and choose the configuration."""
        machine = machine_of(self.ctx.device)
        problem = named(BY_NAME[call.op].described)(self.ctx, call)
        if call.config is not None:
            check_config(call.op, problem, call.config, machine)
        config = call.config or self.plan(problem.by_mean(call.k_per_rank))
        way = way_for(problem, config)
        sizes = workspace_size(problem, config, machine.num_programs, way)
        names = *call.tensors.names, *EPILOGUE_NAMES[: len(call.epilogue)]
        spans = tuple(map(span, (*call.tensors.key[0], *call.epilogue)))
        return Prepared(problem, config, way.writes_to_peers(problem), sizes, names, spans)

    def room(self, call: Call, prepared: Prepared) -> Workspace:
        """Return the call's workspace, with room for it."""
        workspace = call.workspace or self.own_workspace()
        workspace.reserve(*prepared.sizes)
        return workspace

    def own_workspace(self) -> Workspace:
        """Return the workspace of calls that are given none."""
        if self.workspace is None:
            self.workspace = Workspace(self.ctx)
        return self.workspace

    def check_workspace(self, op: str, workspace: object) -> None:
        """Raise `ArgumentError` for a workspace of another context, and for an object that is no workspace."""
        if workspace is not None and (not isinstance(workspace, Workspace) or workspace.ctx is not self.ctx):
            raise ArgumentError(f"{op}: workspace is {workspace!r}; expected one that an op of this context returned")

    def requested(self, op: str, M: int, N: int, K: int, dtype: torch.dtype, **more: Any) -> Problem:
        """Return the problem of a call with these sizes in this context. `more`: other fields of `Request`."""
        return requested_problem(Request(op, M, N, K, self.ctx.num_ranks, dtype, **more), self.ctx.level)

    def plan(self, problem: Problem, explained: bool = False, algorithm: str | None = None) -> FusedConfig:
        """Return the configuration that serves `problem` on this device."""
        return plan(problem, machine_of(self.ctx.device), explained, algorithm)
