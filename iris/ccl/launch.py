"""Turn a problem and its plan into a kernel launch: areas of the workspace, and the arguments by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..device.waits import waiter_number
from ..machines import LinkRates
from .accumulate import accumulate_kernel
from .flags import LANES, flags_kernel
from .lamport import lamport_kernel
from .plan import Plan, part_of, units_of
from .problem import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Problem, Rows, rows_of
from .ring import ring_kernel
from .view import FLAT, ROWS, TILES
from .workspace import Workspace


@dataclass(frozen=True)
class Room:
    """The memory that a call needs in an area of the workspace."""

    area: str
    flags: int = 0
    nbytes: int = 0
    fill: int = 0


def room(problem: Problem, plan: Plan) -> Room:
    w, units = problem.world_size, _units(problem, plan)
    elements = units * plan.block
    if plan.protocol == "lamport":
        blocks = (1 if w == 2 else w) * (2 if _gathers(problem, plan) else 1)
        return Room("lamport", 0, 2 * blocks * elements * _sent_as(problem).itemsize, 255)
    if plan.variant == "ring":
        return Room("ring", (2 + plan.rings * w) * 2 * LANES.value, w * elements * _wide(problem).itemsize)
    if plan.variant in ("atomic", "spinlock"):
        return Room("added", 2 * w * LANES.value + units, 2 * elements * _wide(problem).itemsize)
    table = _table(problem)
    if not problem.reduces:
        return Room("copies", table)
    per_program = -(-units // plan.programs)
    chunks = -(-per_program // plan.chunk)
    halves = 1 if problem.op == ALL_REDUCE else 2
    area = "sums" if problem.op == ALL_REDUCE else "parts"
    return Room(area, table + halves * w * plan.programs * chunks, halves * w * elements * problem.dtype.itemsize)


def writes_to_peers(problem: Problem, plan: Plan) -> bool:
    """Return whether the kernel stores into the peers' `out`, which must then lie on the heap."""
    return problem.op != REDUCE_SCATTER and plan.protocol == "flags" and plan.variant in ("two_shot", "ring")


def arguments(workspace: Workspace, problem: Problem, plan: Plan, out: torch.Tensor, inp: torch.Tensor) -> dict:
    """Return the arguments of `kernel_of(plan)`, by name."""
    area = workspace.areas[room(problem, plan).area]
    if plan.protocol == "lamport":
        staging = area.staging.view(_sent_as(problem))
    elif plan.variant in ("ring", "atomic", "spinlock"):
        staging = area.staging.view(_wide(problem))
    else:  # a collective that only copies has no staging
        staging = area.staging.view(problem.dtype) if problem.reduces else area.flags
    half = staging.numel() // 2
    args = dict(
        inp=inp,
        out=out,
        staging=staging,
        flags=area.flags,
        sync=area.sync,
        ctx_ptr=workspace.group.context_tensor,
        units=_units(problem, plan),
        chunk_units=plan.chunk,
        half_elements=half,
        half_flags=(area.flags.numel() - _table(problem)) // 2,
        **_cuts(problem, plan, out, inp),
        BLOCK=plan.block,
        INTERLEAVED=plan.interleaved,
        TILE_N=plan.tile_n or 1,
        GROUP_M=plan.group_m,
        RINGS=plan.rings,
        LOCKED=plan.variant == "spinlock",
        SCATTER=problem.op != ALL_GATHER and plan.variant != "one_shot",
        REDUCE=problem.reduces,
        GATHER=_gathers(problem, plan),
        ONE_OUT=problem.op == REDUCE_SCATTER and not problem.cols,
        WORLD_SIZE=problem.world_size,
        WAITER=waiter_number(problem.op),
    )
    return {name: args[name] for name in kernel_of(plan).arg_names}


def options(plan: Plan, machine: LinkRates) -> dict[str, int]:
    """Return how Triton compiles the kernel; with few enough registers where programs share a multiprocessor."""
    result = {"num_warps": plan.num_warps}
    if plan.programs > machine.num_programs:
        result["maxnreg"] = 65536 // (32 * plan.num_warps * machine.resident)
    return result


def kernel_of(plan: Plan) -> triton.JITFunction:
    by_variant = {"ring": ring_kernel, "atomic": accumulate_kernel, "spinlock": accumulate_kernel}
    return by_variant.get(plan.variant) or (lamport_kernel if plan.protocol == "lamport" else flags_kernel)


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


def _cuts(problem: Problem, plan: Plan, out: torch.Tensor, inp: torch.Tensor) -> dict:
    """Return how the two tensors are cut."""
    op, w, n = problem.op, problem.world_size, problem.n
    by_columns = op == ALL_TO_ALL or problem.cols > 0
    source, target = (rows_of(op, name, t, by_columns) for name, t in (("inp", inp), ("out", out)))
    if op == ALL_TO_ALL:
        cut: dict[str, Any] = dict(n=problem.part, share=0, limit=problem.part)
        width = source.cols // w
        return _view("in", source, width, step=width * source.stride_col, **cut) | _view(
            "out", target, width, step=width * target.stride_col, **cut
        )
    if problem.cols:
        cut = dict(n=n, share=_units(problem, plan), limit=0, tiles=True)
        return _view("in", source, **cut) | _view("out", target, **cut)
    share = part_of(problem, plan.variant)
    if op == ALL_GATHER:
        return _view("in", source, n=n, share=0, limit=n) | _view("out", target, n=n * w, share=n, limit=n)
    cut = dict(share=share, limit=share)
    return _view("in", source, n=n, **cut) | _view("out", target, n=n if op == ALL_REDUCE else out.numel(), **cut)


def _view(
    name: str, rows: Rows, cols: int = 0, *, n: int, share: int, limit: int, step: int = 0, tiles: bool = False
) -> dict:
    letter = name[0]
    layout = TILES if tiles else FLAT if rows.flat else ROWS
    return {
        f"{name}_n": n,
        f"{name}_cols": cols or rows.cols,
        f"stride_{letter}m": rows.stride_row,
        f"stride_{letter}n": rows.stride_col,
        f"{name}_share": share,
        f"{name}_limit": limit,
        f"{name}_step": step,
        f"{name.upper()}_LAYOUT": layout.value,
    }
