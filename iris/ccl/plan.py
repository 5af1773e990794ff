"""Choose how a collective is carried out, by arithmetic on its size, the number of ranks and the machine's rates.

So it is the same on every rank without talking. `plan` takes the fastest of `ways.py` that a `Config` allows, and fills
in what the config leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from ..errors import ArgumentError
from ..machines import LinkRates
from ..named import named_in
from ..planning import Comparison, compare_ways
from .config import Config
from .problem import ALL_REDUCE, REDUCE_SCATTER, Problem
from .ways import WAYS, WHOLE, Collective, allowed, excluded


@dataclass(frozen=True)
class Plan:
    """The kernel to launch and its options. `block`: elements of a unit. `tile_n`, `group_m`: the size of a unit that
    is a tile. `chunk`: units between two signals. `rings`: the number of rings, 0 for other algorithms."""

    variant: str
    protocol: str
    block: int
    programs: int
    num_warps: int
    interleaved: bool
    tile_n: int
    group_m: int
    chunk: int
    rings: int
    expected_us: float
    reasons: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def launcher(self) -> Any:
        """Return the `launch.Launcher` of the kernel."""
        return named_in("iris.ccl", self.way.launcher)()

    @property
    def way(self) -> Collective:
        """Return the way that was chosen."""
        return next(way for way in WAYS if (way.variant, way.protocol) == (self.variant, self.protocol))

    def explain(self) -> str:
        """Return the reasons for this choice, one a line: the ways with their times, and why others cannot serve."""
        return "\n".join(self.reasons)


@lru_cache(maxsize=4096)
def plan(problem: Problem, config: Config, machine: LinkRates, explained: bool = False) -> Plan:
    """Return the fastest plan for `problem` that `config` allows. Raises `ArgumentError` where there is none.

    `explained`: whether with its reasons.
    """
    comparison = compare_ways(allowed(problem, config), problem, machine)
    if not comparison.candidates:
        raise ArgumentError(_refusal(problem, config, machine))
    (way, _, us, _), *_ = comparison.candidates
    variant, protocol = way.variant, way.protocol
    programs = min(config.comm_sms or machine.num_programs, machine.num_programs)
    shared = machine.resident if _shares_multiprocessors(problem, protocol) and not config.comm_sms else 1
    tile_m, tile_n = config.tile
    if problem.cols:
        block = tile_m * tile_n
    else:
        block, tile_n = config.block or _block(problem, variant, protocol, programs, machine), 0
    programs *= shared
    units = units_of(problem, variant, block, tile_n)
    per_lane, unit_bytes = -(-units // programs), block * problem.dtype.itemsize
    least, most = (max(1, nbytes // unit_bytes) for nbytes in _CHUNK_BYTES)
    chunk = min(max(-(-per_lane // _CHUNKS.get(problem.op, 1)), least), most, per_lane)
    work = units * (max(1, problem.world_size - 1) if variant not in WHOLE else 1)
    lanes = units if protocol == "flags" else work
    return Plan(
        variant=variant,
        protocol=protocol,
        block=block,
        programs=max(1, min(programs, lanes)),
        num_warps=_num_warps(block, protocol),
        interleaved=config.all_reduce_distribution == 0 and _has_owners(problem, variant),
        tile_n=tile_n,
        group_m=config.swizzle_size,
        chunk=chunk,
        rings=config.all_reduce_num_rings if variant == "ring" else 0,
        expected_us=us.total_us,
        reasons=_reasons(problem, config, machine, comparison) if explained else (),
    )


def _reasons(problem: Problem, config: Config, machine: LinkRates, comparison: Comparison) -> tuple[str, ...]:
    lines = [f"{problem.text} on {machine.name}", f"rates {machine.source}"]
    lines += [candidate.row(problem) for candidate in comparison.candidates]
    lines += comparison.rejections()
    others = {way: reason for way in WAYS if (reason := excluded(way, problem, config))}
    for candidate in compare_ways(tuple(others), problem, machine).candidates:
        lines.append(candidate.left_out(problem, others[candidate.way]))
    return (*lines, f"chosen {comparison.candidates[0].label(problem)}")


# Into how many chunks a lane cuts its units, so that sums begin while others are pushed, and what it pushes to an owner
# between two signals, from and to: a signal costs about as much time as 8 KiB of the lane's share of the link.
_CHUNKS = {ALL_REDUCE: 2, REDUCE_SCATTER: 8}
_CHUNK_BYTES = 8 << 10, 64 << 10


def _refusal(problem: Problem, config: Config, machine: LinkRates) -> str:
    """Return the message where no variant and protocol that the config leaves can serve the problem."""
    given = {"all_reduce_variant": config.all_reduce_variant, "protocol": config.protocol}
    if problem.op != ALL_REDUCE:
        del given["all_reduce_variant"]
    given_text = " and ".join(f"config.{name} is {value!r}" for name, value in given.items() if value is not None)
    alternatives = compare_ways(allowed(problem, replace(config, protocol=None)), problem, machine).candidates
    protocols = sorted({candidate.way.protocol for candidate in alternatives})
    expected = f"protocol {protocols[0]!r} or None" if protocols else "another all_reduce_variant or None"
    served = f"{problem.dtype} with {problem.world_size} ranks"
    return f"{problem.op}: {given_text}, which cannot serve {served}; expected {expected}"


def _shares_multiprocessors(problem: Problem, protocol: str) -> bool:
    """Return whether two programs share a multiprocessor, so that one sums while the other stores.

    Not in an all-reduce by flags: its sums are stored to everyone, and the links are busy all the time anyway.
    """
    if protocol == "lamport":
        return problem.world_size == 2
    return problem.op == REDUCE_SCATTER and problem.nbytes >= problem.world_size << 22


def _has_owners(problem: Problem, variant: str) -> bool:
    """Return whether we decide which rank owns which part."""
    return (problem.op == ALL_REDUCE and variant not in WHOLE) or problem.cols > 0


def part_of(problem: Problem, variant: str) -> int:
    """Return the elements of the largest part."""
    if problem.part:
        return problem.part
    if variant in WHOLE:
        return problem.n
    return -(-problem.n // (16 * problem.world_size)) * 16  # whole vectors


def units_of(problem: Problem, variant: str, block: int, tile_n: int = 0) -> int:
    """Return the number of units of the largest part."""
    if problem.cols:
        tile_m, rows = block // tile_n, problem.n // problem.cols
        return -(-(-(-rows // tile_m) * -(-problem.cols // tile_n)) // problem.world_size)
    return -(-part_of(problem, variant) // block)


def _block(problem: Problem, variant: str, protocol: str, programs: int, machine: LinkRates) -> int:
    """Return the elements of a block: few elements in small blocks for many programs, many in large ones."""
    itemsize = problem.dtype.itemsize
    if machine.interpreted:
        return 1 << max(4, min(14, (part_of(problem, variant) - 1).bit_length()))
    if protocol == "flags":
        least, most = 4096 // itemsize, 16384 // itemsize
    else:
        least, most = 256, 4096 // itemsize
    # by flags a program takes one unit of every part at a time; by Lamport values one at all
    sharers = 2 if protocol == "flags" else problem.world_size / 2
    block = most
    while block > least and units_of(problem, variant, block) * sharers < programs:
        block //= 2
    return block


def _num_warps(block: int, protocol: str) -> int:
    if protocol == "flags":
        return 8 if block >= 2048 else 4
    return max(1, min(8, block // 256))
