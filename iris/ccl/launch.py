"""Turn a problem and its plan into a kernel launch: areas of the workspace, and the arguments by name.

Each kernel has a `Launcher`, which its ways name.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from ..device.waits import waiter_number
from ..machines import LinkRates
from .accumulate import accumulate_kernel
from .arguments import CollectiveForm, TensorParts, UnitForm
from .flags import LANES, flags_kernel
from .lamport import lamport_kernel
from .plan import Plan, part_of, units_of
from .problem import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Problem, Rows, rows_of
from .ring import ring_kernel
from .view import FLAT, ROWS, TILES
from .workspace import Area, Workspace


@dataclass(frozen=True)
class Room:
    """The memory that a call needs in an area of the workspace."""

    area: str
    flags: int = 0
    nbytes: int = 0
    fill: int = 0


class Launcher:
    """A kernel of collectives: the memory that a call of it needs. Ways name a class of these (`ways.py`)."""

    kernel: triton.JITFunction
    locked = False
    """Whether ranks take turns under a lock."""

    def room(self, problem: Problem, plan: Plan) -> Room:
        """Return the memory that a call needs."""
        raise NotImplementedError

    def staging(self, area: Area, problem: Problem) -> torch.Tensor:
        """Return the staging memory as the kernel takes it."""
        return area.staging.view(_wide(problem))

    def writes_to_peers(self, problem: Problem) -> bool:
        """Return whether the kernel stores into the peers' `out`, which must then lie on the heap."""
        return False


class Lamport(Launcher):
    kernel = lamport_kernel

    def room(self, problem: Problem, plan: Plan) -> Room:
        blocks = (1 if problem.world_size == 2 else problem.world_size) * (2 if _gathers(problem, plan) else 1)
        return Room("lamport", 0, 2 * blocks * _units(problem, plan) * plan.block * _sent_as(problem).itemsize, 255)

    def staging(self, area: Area, problem: Problem) -> torch.Tensor:
        return area.staging.view(_sent_as(problem))


class Flags(Launcher):
    kernel = flags_kernel

    def room(self, problem: Problem, plan: Plan) -> Room:
        table, units = _table(problem), _units(problem, plan)
        if not problem.reduces:
            return Room("copies", table)
        per_program = -(-units // plan.programs)
        chunks = -(-per_program // plan.chunk)
        area, halves = ("sums", 1) if problem.op == ALL_REDUCE else ("parts", 2)
        blocks = halves * problem.world_size
        return Room(area, table + blocks * plan.programs * chunks, blocks * units * plan.block * problem.dtype.itemsize)

    def staging(self, area: Area, problem: Problem) -> torch.Tensor:
        # a collective that only copies has no staging
        return area.staging.view(problem.dtype) if problem.reduces else area.flags

    def writes_to_peers(self, problem: Problem) -> bool:
        return problem.op != REDUCE_SCATTER


class Ring(Launcher):
    kernel = ring_kernel

    def room(self, problem: Problem, plan: Plan) -> Room:
        w, elements = problem.world_size, _units(problem, plan) * plan.block
        return Room("ring", (2 + plan.rings * w) * 2 * LANES.value, w * elements * _wide(problem).itemsize)

    def writes_to_peers(self, problem: Problem) -> bool:
        return True


class Adding(Launcher):
    kernel = accumulate_kernel

    def room(self, problem: Problem, plan: Plan) -> Room:
        units = _units(problem, plan)
        flags = 2 * problem.world_size * LANES.value + units
        return Room("added", flags, 2 * units * plan.block * _wide(problem).itemsize)


class AddingInTurns(Adding):
    locked = True


def arguments(workspace: Workspace, problem: Problem, plan: Plan, out: torch.Tensor, inp: torch.Tensor) -> dict:
    """Return the arguments of the plan's kernel, by name."""
    launcher = plan.launcher
    area = workspace.areas[launcher.room(problem, plan).area]
    staging = launcher.staging(area, problem)
    rows = _rows(problem, out, inp)
    source, target = _parts(problem, plan, out, inp, *rows)
    args = dict(
        inp=source,
        out=target,
        staging=staging,
        flags=area.flags,
        sync=area.sync,
        ctx_ptr=workspace.group.context_tensor,
        units=_units(problem, plan),
        chunk_units=plan.chunk,
        half_elements=staging.numel() // 2,
        half_flags=(area.flags.numel() - _table(problem)) // 2,
        unit_form=_unit_form(problem, plan, *rows),
        form=CollectiveForm(
            SCATTER=problem.op != ALL_GATHER and plan.variant != "one_shot",
            REDUCE=problem.reduces,
            GATHER=_gathers(problem, plan),
        ),
        RINGS=plan.rings,
        LOCKED=launcher.locked,
        WORLD_SIZE=problem.world_size,
        WAITER=waiter_number(problem.op),
    )
    return {name: args[name] for name in launcher.kernel.arg_names}


def options(plan: Plan, machine: LinkRates) -> dict[str, int]:
    """Return Triton's options for the kernel. They limit the registers if programs share a multiprocessor."""
    result = {"num_warps": plan.num_warps}
    if plan.programs > machine.num_programs:
        result["maxnreg"] = 65536 // (32 * plan.num_warps * machine.resident)
    return result


def _table(problem: Problem) -> int:
    """Return the number of flags before the arrival flags: places (of int64), entered and done."""
    return problem.world_size * (1 + 3 * LANES.value)


def _units(problem: Problem, plan: Plan) -> int:
    if plan.interleaved and not problem.cols:
        blocks = -(-problem.n // plan.block)
        return -(-blocks // problem.world_size)
    return units_of(problem, plan.variant, plan.block, plan.tile_n)


def _gathers(problem: Problem, plan: Plan) -> bool:
    return problem.op == ALL_REDUCE and plan.variant != "one_shot"


def _sent_as(problem: Problem) -> torch.dtype:
    """Return the integers that carry Lamport values."""
    size = problem.dtype.itemsize
    if not (problem.reduces and problem.dtype.is_floating_point):
        size *= 2
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]


def _wide(problem: Problem) -> torch.dtype:
    """Return what sums are kept in (`iris.device.exchange.sum_type`)."""
    if problem.dtype.is_floating_point:
        return torch.float32
    return torch.int64 if problem.dtype == torch.int64 else torch.int32


def _rows(problem: Problem, out: torch.Tensor, inp: torch.Tensor) -> tuple[Rows, Rows]:
    """Return how `inp` and `out` lie in memory."""
    op = problem.op
    by_columns = op == ALL_TO_ALL or problem.cols > 0
    return rows_of(op, "inp", inp, by_columns), rows_of(op, "out", out, by_columns)


def _parts(
    problem: Problem, plan: Plan, out: torch.Tensor, inp: torch.Tensor, source: Rows, target: Rows
) -> tuple[TensorParts, TensorParts]:
    """Return how `inp` and `out`, whose rows are `source` and `target`, are divided into parts."""
    op, w, n = problem.op, problem.world_size, problem.n
    if op == ALL_TO_ALL:
        width, part = source.cols // w, problem.part
        source_step, target_step = width * source.stride_col, width * target.stride_col
        return (
            _tensor_parts(inp, source, part, 0, part, cols=width, part_step=source_step),
            _tensor_parts(out, target, part, 0, part, cols=width, part_step=target_step),
        )
    if problem.cols:
        share = _units(problem, plan)
        return _tensor_parts(inp, source, n, share, 0), _tensor_parts(out, target, n, share, 0)
    if op == ALL_GATHER:
        return _tensor_parts(inp, source, n, 0, n), _tensor_parts(out, target, n * w, n, n)
    share, out_n = part_of(problem, plan.variant), n if op == ALL_REDUCE else out.numel()
    return _tensor_parts(inp, source, n, share, share), _tensor_parts(out, target, out_n, share, share)


def _tensor_parts(
    t: torch.Tensor, rows: Rows, n: int, share: int, limit: int, cols: int = 0, part_step: int = 0
) -> TensorParts:
    return TensorParts(t, n, cols or rows.cols, rows.stride_row, rows.stride_col, share, limit, part_step)


def _unit_form(problem: Problem, plan: Plan, source: Rows, target: Rows) -> UnitForm:
    """Return how `inp` and `out`, whose rows are `source` and `target`, are divided into units."""
    layouts = [(TILES if problem.cols else FLAT if rows.flat else ROWS).value for rows in (source, target)]
    return UnitForm(
        BLOCK=plan.block,
        IN_LAYOUT=layouts[0],
        OUT_LAYOUT=layouts[1],
        INTERLEAVED=plan.interleaved,
        ONE_OUT=problem.op == REDUCE_SCATTER and not problem.cols,
        TILE_N=plan.tile_n or 1,
        GROUP_M=plan.group_m,
    )
